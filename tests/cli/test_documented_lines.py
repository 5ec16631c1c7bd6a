"""The documented command lines of five other systems, typed as they stand: they work, or one message names the way."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from ci_llm.cli import supervise, train
from ci_llm.config import Config
from ci_llm.errors import ConfigError
from ci_llm.supervisor.external_script import ExternalScript
from tests.support.messages import Messages
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]

ORIGINAL_KEYS = (
    "--model_name embedded --num_agents 4 --lora_rank 8 --lora_alpha 16 --lora_dropout 0.05 --dropconnect_p 0.1"
    " --initialize_adapters_rand --diversity swd --lambda_sw 0.1 --swd_num_projections 50 --epochs 3 --lr 2e-4"
    " --batch_size 4 --weight_decay 0.01 --lr_scheduler_type cosine --num_warmup_steps_ratio 0.1"
    " --gradient_accumulation_steps 8 --dataset_name openai/gsm8k --dataset_subset main --max_seq_length 512"
    " --debug_subset_size 100 --output_dir out --save_steps 500 --logging_steps 10 --num_workers 4"
    " --mixed_precision bf16 --use_gradient_checkpointing --parallel_mode --profile_steps 10 --log_memory_usage"
    " --seed 42 --max_new_tokens_eval 256 --dirichlet_alpha_aggregator 1.0 --resume_from_checkpoint latest"
)
LATENTWIRE_OWN = (
    "--llama_id meta-llama/Llama-3.1-8B --qwen_id Qwen/Qwen2.5-7B --latent_len 8 --d_z 64 --encoder_type byte"
    ' --sequential_models --warm_anchor_text "Answer: " --first_token_ce_weight 0.5'
)
PYRECOVER = (
    "--dataset data.parquet --sequence-length 2048 --batch-size 1 --learning-rate 1e-5 --training-steps 1000"
    " --model-dtype bf16 --checkpoint-dir checkpoints/ --checkpoint-frequency 10 --resume-from-checkpoint latest"
    " --experiment_name default-exp --use-torch-distributed-ckpt --compile --fused-optimizer --timeaware-checkpointing"
)

#: Lines that train, with what they come to.
WORK: list[tuple[str, dict[str, Any]]] = [
    ("accelerate launch --num_processes=4 train.py", {}),
    ("accelerate launch --num_processes=4 train.py --config configs.yaml", {"num_agents": 4}),
    (f"accelerate launch train.py {ORIGINAL_KEYS}", {"lambda_sw": 0.1, "max_train_samples": 100, "epochs": 3}),
    (
        "python train.py --checkpoint_interval 300 --auto_resume --monitor_gpu --debug --save_dir runs/one",
        {"save_interval_seconds": 300.0, "resume_from_checkpoint": "latest", "monitor_gpu": True},
    ),
    ("python train.py --auto_resume --samples 10000 --epochs 10 --K 4 --lr 1e-4", {"max_train_samples": 10000}),
    (
        f"python train.py {PYRECOVER}",
        {
            "dataset_name": "data.parquet",
            "max_seq_length": 2048,
            "max_train_steps": 1000,
            "model_dtype": "bf16",
            "output_dir": "checkpoints/",
            "save_steps": 10,
            "experiment_name": "default-exp",
            "checkpoint_backend": "distributed",
        },
    ),
    (f"python train.py {PYRECOVER} --distributed --log-loss-to-csv", {"max_train_steps": 1000}),
    (
        "python train.py --llama_id meta-llama/Llama-3.1-8B --samples 100",
        {"model_name": "meta-llama/Llama-3.1-8B", "max_train_samples": 100},
    ),
    ("python train.py --resume-from-checkpoint runs/one", {"resume_from_checkpoint": "runs/one"}),
    ("sbatch slurm/train.sbatch --exp_name=my_experiment", {"experiment_name": "my_experiment"}),
    ("sbatch slurm/train.sbatch --distributed --exp_name=distributed_exp", {"experiment_name": "distributed_exp"}),
    (
        "sbatch slurm/train.sbatch --distributed --continue --use_torch_distributed_ckpt",
        {"checkpoint_backend": "distributed"},
    ),
    ("sbatch slurm/train.sbatch --distributed --timeaware-checkpointing", {}),
]

#: Lines that are refused; the one message names every way.
REFUSED = [
    f"python train.py {LATENTWIRE_OWN} --dataset squad --samples 100 --epochs 1",
    "python train.py --checkpoint_interval 600 --grace_period 180 --auto_resume --qwen_id Qwen/Qwen2.5-7B",
    "python train.py --distributed=all",
    "python train.py --use_flash_attention --profile",
    "sbatch slurm/train.sbatch --use_flash_attention --exp_name=a",
    "sbatch slurm/train.sbatch --profile-nsys",
    "python safe_train.py --config-path configs --config-name gsm8k_tiny",
    "python safe_train.py --config-name config",
]

#: Lines of safe_train.py over a script of somebody else, which is handed what it knows.
FOREIGN = [
    "python safe_train.py --train-script fit.py --config-path configs --config-name gsm8k_tiny",
    "python safe_train.py --train-script fit.py --config-path configs --config-name gsm8k_tiny --max-retries 10"
    " --min-lr 1e-6 --min-batch-size 1 --no-delete-wandb-runs training.learning_rate=1e-3",
]


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a line of the documentation names."""
    shutil.copy(ROOT / "configs.yaml", tmp_path)
    for folder in ("configs", "slurm"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for script in ("train.py", "safe_train.py"):
        shutil.copy(ROOT / script, tmp_path)
    (tmp_path / "fit.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def understood(line: str, folder: Path) -> Config:
    """What the line would train, by the way that its words really go; nothing is trained."""
    launcher, *words = shlex.split(line)
    if launcher == "accelerate":
        launched = launch_command_parser().parse_args(words[1:])
        assert launched.training_script == "train.py"
        return train.read_configuration(launched.training_script_args).config
    if launcher == "sbatch":
        return train.read_configuration(words_of_the_job(words, folder)).config
    if words[0] == "safe_train.py":
        supervise._target(supervise.parse_options(words[1:]))
        raise AssertionError("taken")
    return train.read_configuration(words[1:]).config


def words_of_the_job(words: list[str], folder: Path) -> list[str]:
    """The words with which the script of a job calls train.py, a step being printed instead of started."""
    commands = folder / "commands"
    commands.mkdir()
    for name, does in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo"), ("python", "exit 0")):
        (commands / name).write_text(f"#!/bin/sh\n{does}\n")
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(folder), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n"}
    environment = {**os.environ, **job, "PATH": f"{commands}:{os.environ['PATH']}", "CI_LLM_PYTHON": "python"}
    done = subprocess.run(
        ["bash", *words], env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    step = done.stdout.splitlines()
    assert f"{folder}/train.py" in step, done.stderr
    return [word for word in step[step.index(f"{folder}/train.py") + 1 :] if word]


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(("line", "comes_to"), WORK, ids=lambda value: value[:90] if isinstance(value, str) else "")
def test_a_line_works_as_it_stands(line: str, comes_to: dict[str, Any], checkout: Path) -> None:
    config = understood(line, checkout)
    assert {key: getattr(config, key) for key in comes_to} == comes_to


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:90])
def test_a_line_that_cannot_work_is_one_message_with_every_way(line: str, checkout: Path, messages: Messages) -> None:
    with pytest.raises(ConfigError) as refusal:
        understood(line, checkout)
    messages.same(refusal.value)
    assert refusal.value.exit_code == 2
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_with_another_script_is_accepted(line: str) -> None:
    call = supervise.parse_options(shlex.split(line)[2:])
    assert isinstance(supervise._target(call), ExternalScript)


def test_the_diversity_weight_of_the_original_is_not_ignored_silently() -> None:
    [said] = [line for line in train.read_configuration(["lambda_sw=0.5"]).config.notices() if "lambda_sw" in line]
    assert "diversity is none" in said
