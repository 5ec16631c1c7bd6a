"""The table of names of five systems, asked of the program: each name does what its row says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci_llm import CheckpointManager, orbax
from ci_llm.cluster.starter import without_options
from ci_llm.config import read_config
from ci_llm.config.foreign import REMOVED
from ci_llm.config.problems import find_notices
from ci_llm.errors import ConfigError
from ci_llm.supervisor.options import parse_options
from ci_llm.supervisor.output_scan import Evidence

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8").partition("## Every documented name")[2]
#: What users of these systems write after a name; a switch has nothing.
VALUES = {
    "model_name": "google/gemma-3-4b-it", "num_agents": "4", "use_gradient_checkpointing": "True", "lora_rank": "16",
    "lora_alpha": "32", "lora_dropout": "0.05", "lora_target_modules": "[q_proj,k_proj]",
    "initialize_adapters_rand": "True", "dropconnect_p": "0.05", "lambda_sw": "0.01", "swd_num_projections": "64",
    "epochs": "3", "batch_size": "1", "lr": "3e-5", "gradient_accumulation_steps": "8", "weight_decay": "0.01",
    "adam_beta1": "0.9", "adam_beta2": "0.999", "adam_epsilon": "1e-8", "lr_scheduler_type": "cosine",
    "num_warmup_steps_ratio": "0.03", "max_train_steps": "null", "dataset_name": "gsm8k", "dataset_subset": "main",
    "max_seq_length": "768", "debug_subset_size": "null", "output_dir": "runs", "save_steps": "200",
    "logging_steps": "10", "resume_from_checkpoint": "ci_llm_output/checkpoint_step_100", "num_workers": "4",
    "mixed_precision": "bf16", "use_deepspeed": "true", "deepspeed_config_file": "ds_config_zero2.json",
    "parallel_mode": "parallel", "profile_steps": "5", "log_memory_usage": "true", "seed": "42",
    "eval_batch_size": "2", "max_new_tokens_eval": "384", "dirichlet_alpha_aggregator": "1.0",
    "--dataset": "rows.parquet", "--sequence-length": "2048", "--batch-size": "1", "--learning-rate": "1e-5",
    "--training-steps": "1000", "--distributed": "", "--model-dtype": "bf16", "--checkpoint-dir": "checkpoints/",
    "--checkpoint-frequency": "10", "--resume-from-checkpoint": "latest", "--experiment_name": "one", "--profile": "",
    "--use-torch-distributed-ckpt": "", "--use_torch_distributed_ckpt": "", "--compile": "", "--fused-optimizer": "",
    "--use_flash_attention": "", "--log-loss-to-csv": "", "--timeaware-checkpointing": "", "--profile-nsys": "",
    "--exp_name": "one", "--continue": "", "--llama_id": "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "--qwen_id": "Qwen/Qwen2.5-7B-Instruct", "--samples": "87599", "--epochs": "24", "--batch_size": "64",
    "--save_dir": "runs", "--checkpoint_interval": "300", "--auto_resume": "", "--monitor_gpu": "", "--debug": "",
    "--K": "4", "--latent_len": "32", "--d_z": "256", "--first_token_ce_weight": "0.5", "--warm_anchor_text": "A",
    "--grace_period": "180",
}  # fmt: skip
SUPERVISOR = {
    "--config-path": "configs", "--config-name": "config", "--max-retries": "3", "--min-lr": "1e-10",
    "--min-batch-size": "1", "--train-script": "train.py", "--no-delete-wandb-runs": "",
}  # fmt: skip


def rows() -> list[tuple[list[str], str, str]]:
    """Names, verdict and the third cell of each row."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    return [
        (re.findall(r"`([^`]+)`", there), verdict, here) for there, verdict, here in cells if verdict not in ("", "---")
    ]


def asked() -> list[tuple[str, str]]:
    return [(name, verdict) for names, verdict, _ in rows() for name in names if name in VALUES]


def answer(name: str) -> str:
    """What the trainer makes of a name with the value that its users write."""
    value = VALUES[name]
    words = [name, *([value] if value else [])] if name.startswith("--") else [f"{name}={value}"]
    try:
        read = read_config(None, without_options(words))
    except ConfigError:
        return "refused"
    ignored = any(f"{key} has no effect" in line for key in (name.lstrip("-"),) for line in find_notices(read.config))
    return "no effect" if ignored else "taken"


@pytest.mark.parametrize(("name", "verdict"), asked())
def test_a_name_does_what_its_row_says(name: str, verdict: str) -> None:
    allowed = {
        "works": {"taken"},
        "differs": {"taken", "no effect"},
        "no effect": {"no effect"},
        "refused": {"refused"},
    }
    assert answer(name) in allowed[verdict]


def test_every_documented_name_has_a_row() -> None:
    """The lists above are those of the public pages."""
    told = {name for names, _, _ in rows() for name in names}
    assert not {*VALUES, *SUPERVISOR} - told
    assert not {verdict for _, verdict, _ in rows()} - {"works", "differs", "no effect", "refused", "not"}


def test_the_supervisor_takes_its_options() -> None:
    words = [word for name, value in SUPERVISOR.items() for word in (name, value) if word]
    options = parse_options([*words, "training.learning_rate=1e-3", "model=gnn"])
    assert options.words == ("training.learning_rate=1e-3", "model=gnn")
    assert (options.policy.max_retries, options.policy.min_learning_rate, options.policy.min_batch_size) == (
        3,
        1e-10,
        1,
    )


def test_the_supervisor_hears_the_documented_lines() -> None:
    (losses,) = [names for names, _, _ in rows() if "Loss=nan" in names]
    (memory,) = [names for names, _, _ in rows() if "CUDA out of memory" in names]
    for kind, lines in (("nonfinite", losses), ("out_of_memory", memory)):
        assert len(lines) == 4
        for line in lines:
            evidence = Evidence()
            evidence.note(line)
            assert getattr(evidence, kind) == line


def test_orbax_names_of_the_row_are_there() -> None:
    (methods,) = [names for names, _, _ in rows() if "latest_step" in names]
    assert not [name for name in methods if not callable(getattr(CheckpointManager, name, None))]
    assert callable(orbax.PyTreeCheckpointer)
    assert callable(orbax.CheckpointManager)
    assert orbax.CheckpointManagerOptions(save_interval_steps=4)


# Flag by flag, and the keys that are gone


WHOLE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
REMOVED_KEYS = WHOLE.partition("## Removed keys")[2].partition("\n## ")[0]


def section(title: str) -> str:
    return WHOLE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def same_flags() -> list[tuple[str, str]]:
    """(the words of another trainer, ours) of every cell of the table."""
    lines = [line for line in section("TRL, LLaMA-Factory, Axolotl, Unsloth").splitlines() if line.startswith("| `")]
    pairs = []
    for line in lines:
        here, *theirs = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        value = here.partition("=")[2]
        pairs += [(there if "=" in there else f"{there}={value}", here) for there in theirs if there]
    return pairs


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize(("there", "here"), same_flags())
def test_a_flag_of_another_trainer_sets_the_key_of_its_row(there: str, here: str) -> None:
    read, ours = (read_config(None, [words]).config for words in (there, here))
    assert read.dump() == ours.dump()


@pytest.mark.parametrize(("start", "refused"), [("Needless, and accepted:", False), ("Refused, with what", True)])
def test_the_flags_without_a_counterpart_are_answered_as_the_page_says(start: str, refused: bool) -> None:
    [told] = [part for part in section("TRL, LLaMA-Factory, Axolotl, Unsloth").split("\n\n") if part.startswith(start)]
    words = re.findall(r"`(\w+=[^`]+)`", told)
    assert len(words) > 8
    for word in words:
        if refused:
            with pytest.raises(ConfigError) as refusal:
                read_config(None, [word])
            assert refusal.value.hint
        else:
            assert read_config(None, [word]).config.dump() == read_config(None).config.dump(), word


def test_every_removed_key_is_in_the_table_and_no_other() -> None:
    first_cells = [line.split("|")[1] for line in REMOVED_KEYS.splitlines() if line.startswith("| `")]
    assert {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)} == {*REMOVED}
