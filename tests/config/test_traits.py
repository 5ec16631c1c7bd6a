"""Traits are declared at their key; the tables made of them equal those of earlier releases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_type_hints

import pytest

from ci_llm.config import config, load, own_keys, parsing, sweep
from ci_llm.config.key import Traits
from ci_llm.config.schema import AllKeys, meaning_of
from ci_llm.evaluation import loading
from ci_llm.report import compare
from ci_llm.run.end import result as report
from ci_llm.run.start import resume

ROWS = ("dataset_name", "dataset_subset", "dataset_split", "max_train_samples")
TABLES: list[tuple[Any, Collection[Any]]] = [
    (
        own_keys.OWN_KEYS,
        (
            *("learning_rate", "lr_scheduler_type", "num_warmup_steps", "num_warmup_steps_ratio", "weight_decay"),
            *("max_grad_norm", "lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "agent_layers"),
            *("lora_dropout", "dropconnect_p", "seed", "row_weights"),
            *("beta", "simpo_gamma", "desirable_weight", "undesirable_weight"),
            *(*ROWS, "data_seed"),
        ),
    ),
    (own_keys.SHAPE_KEYS, ("lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "agent_layers")),
    (own_keys.ROWS_KEYS, ROWS),
    (
        {*config.DUMPED_IF_SET},
        {
            *("agents", "row_weights", "data_seed", "schedule_steps", "drop_nonfinite_agents"),
            *("beta", "loss_type", "loss_weights", "label_smoothing", "desirable_weight", "undesirable_weight"),
            *("simpo_gamma", "cpo_alpha", "objective"),
            *("mirror", "mirror_max_mb_per_s", "push_to_hub", "hub_model_id"),
        },
    ),
    ({*load.BEFORE.items()}, {*{"pass_per_agent": False, "held_out": "spread", "long_rows": "truncate"}.items()}),
    (
        tuple(parsing.STRONGER.items()),
        (
            ("max_train_steps", "epochs"),
            ("global_batch_size", "gradient_accumulation_steps"),
            ("num_warmup_steps", "num_warmup_steps_ratio"),
        ),
    ),
    (parsing.RIVALS, (("val_set_size", "eval_dataset_name"), ("val_set_size", "eval_split"))),
    (
        {*sweep._UNFIT},
        {
            *("num_agents", "diversity", "early_stopping_patience", "load_best_model_at_end", "schedule_steps"),
            *("resume_from_checkpoint", "restart_from", "overwrite_output_dir", "mirror"),
            "push_to_hub",
        },
    ),
    (
        {*loading.KEYS},
        {
            *("aggregator", "dirichlet_alpha_aggregator", "max_new_tokens_eval", "max_seq_length", "dataset_subset"),
            *("prompt_column", "answer_column", "text_column", "messages_column", "objective"),
        },
    ),
    (resume.NAMED_AS_WELL, {"model_name", "dataset_name", "eval_split", "epochs", "max_train_steps"}),
    (resume._RECORDED, {"batch_size", "deterministic", "pass_per_agent"}),
    (compare._PLACES, {"output_dir", "experiment_name", "resume_from_checkpoint"}),
    (
        report._ABOUT_OTHER_ROWS,
        (
            *("dataset_weights", "dataset_subset", "dataset_split", "eval_split", "eval_dataset_name"),
            *("prompt_column", "answer_column", "text_column", "messages_column", "max_train_samples"),
        ),
    ),
]


@pytest.mark.parametrize(("computed", "was"), TABLES)
def test_a_table_holds_what_it_held_when_it_was_written_out(computed: Collection[Any], was: Collection[Any]) -> None:
    """Keys may be added; known ones stay, in their order where there is one."""
    assert type(computed)([each for each in computed if each in was]) == was  # type: ignore[call-arg]


def test_a_trait_is_one_that_is_explained_and_own_keys_have_each_a_number() -> None:
    known = {"kind", "keeps_bits", *get_type_hints(Traits)}
    meanings = {key: meaning_of(field) for key, field in AllKeys.model_fields.items()}
    assert {trait for meaning in meanings.values() for trait in meaning} == known
    numbers = sorted(meaning["own"] for meaning in meanings.values() if "own" in meaning)
    assert numbers == [*range(1, len(numbers) + 1)]
    assert all(f"\n        {trait}: " in str(Traits.__doc__) for trait in get_type_hints(Traits))
    assert not [key for key, meaning in meanings.items() if {"shape", "rows"} & {*meaning} and "own" not in meaning]


def test_a_key_that_is_named_by_another_exists() -> None:
    named = {*parsing.STRONGER.values(), *(other for _, other in parsing.RIVALS)}
    assert named <= {*AllKeys.model_fields}
