"""A suggestion is right, or it is not made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci_llm.config import Config, load_config
from ci_llm.config.foreign import ACCEPTED, ALIASES, TRANSLATIONS, UNSUPPORTED
from ci_llm.config.parsing import hint_for_missing, nearest
from ci_llm.config.schema import FOUND
from ci_llm.errors import ConfigError

KNOWN = [*ACCEPTED, *ALIASES, *TRANSLATIONS]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rte", "learning_rate"),
        ("batchsize", "batch_size"),
        ("numAgents", "num_agents"),
        ("lora_alfa", "lora_alpha"),
        ("max_grad", "max_grad_norm"),
        ("eval_step", "eval_steps"),
        ("val_steps", "eval_steps"),
        ("epoch", "epochs"),
        ("mixed_precison", "mixed_precision"),
        ("resume_from_checkpoints", "resume_from_checkpoint"),
        ("use_deepsped", "use_deepspeed"),
    ],
)
def test_a_slip_is_put_right(typed: str, meant: str) -> None:
    assert nearest(typed, KNOWN) == meant


@pytest.mark.parametrize(
    "typed",
    [
        "eval_batch_size",
        "per_device_eval_batch_size",
        "evalbatchsize",
        "test_batch_size",
        "min_learning_rate",
        "lora_learning_rate",
        "checkpoint",  # is no checkpoint_dir
        "max_steps_per_epoch",
        "learn",
        "num_gpus",
    ],
)
def test_another_word_is_not_taken_for_a_slip(typed: str) -> None:
    assert nearest(typed, KNOWN) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("package.jsonl", "packages.jsonl"),
        ("SmolLM2.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("other.gguf", None),
        ("nothere.jsonl", None),  # is no worse.jsonl, though both end alike
        ("pair.jsonl", "pairs.jsonl"),
        ("packages.csv", None),
        ("missing/packages.jsonl", None),
    ],
)
def test_a_file_that_does_not_exist_is_the_one_of_a_like_name(typed: str, meant: str | None, tmp_path: Path) -> None:
    for name in ("packages.jsonl", "pairs.jsonl", "worse.jsonl", "SmolLM2-135M-Instruct.Q4_1.gguf"):
        (tmp_path / name).touch()
    wanted = f"did you mean {tmp_path / meant}?" if meant else "check the path"
    assert hint_for_missing(tmp_path / typed, "check the path") == wanted


@pytest.mark.fast_cases(41)
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_option_of_another_trainer_is_named_with_the_way_here(name: str) -> None:
    was, way = UNSUPPORTED[name]
    assert name in FOUND or name not in {*Config.model_fields, *ALIASES}
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [f"--{name.replace('_', '-')}=x"])
    value = " with the value 'x'" if name in TRANSLATIONS else ""
    assert refusal.value.what == f"{name.replace('_', '-')} is not a key here{value}; it is {was}"
    assert refusal.value.hint == way
    for key in re.findall(r"\b([a-z_]+)=", way):
        assert key in Config.model_fields or key == "num_processes", f"{key} is not a key"


def test_a_data_set_to_evaluate_on_is_not_trained_on() -> None:
    for name in ("eval_dataset", "test_dataset", "validation_file"):
        config = load_config(None, [f"{name}=test.jsonl"])
        assert (config.dataset_name, config.eval_dataset_name) == ("embedded", "test.jsonl")


@pytest.mark.parametrize("typed", ["diversity=cosine", "lr_scheduler_type=none", "lr_scheduler_type=exponential"])
def test_another_value_is_not_taken_for_a_slip(typed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [typed])
    assert "did you mean" not in str(refusal.value)
    assert " | " in refusal.value.what


def test_a_space_of_values_is_for_a_sweep() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, ["learning_rate=log(1e-4,1e-2)"])
    assert refusal.value.hint == "ci-llm sweep takes such a space of values, and tries some of them"
