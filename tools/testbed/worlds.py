"""A run that is trained in worlds of any size: a toy base in double precision, rows that no number of them divides.

Neither its loss nor its masks know how a step is split, so weights agree up to the order of summation.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.data.order import Plan
from ci_llm.embedded import BASE_FOLDER

AGENTS = 2
GLOBAL_BATCH = 8
SEED = 42
ODD = 21  # rows: every third step of a run finds five
#: The masks of DropConnect do not know how a step is split.
DOUBLE: dict[str, Any] = {
    "model_dtype": "fp64",
    "max_train_samples": ODD,
    "max_train_steps": 30,
    "dropconnect_p": 0.1,
}


def toy_base(folder: Path) -> Path:
    """A random base of two narrow layers that reads what the embedded one reads."""
    torch.manual_seed(0)
    shape = LlamaConfig.from_pretrained(
        BASE_FOLDER, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    for file in BASE_FOLDER.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def arguments(**keys: Any) -> list[str]:
    """The command line of train.py, complete."""
    own = {
        "global_batch_size": GLOBAL_BATCH,
        "batch_size": 2,
        "num_agents": AGENTS,
        "lora_rank": 2,
        "learning_rate": 4e-3,
        "seed": SEED,
        "num_workers": 0,
        "logging_steps": 1,
        "eval_steps": "null",
        "eval_samples": 1,
        "save_steps": "null",
        "save_interval_seconds": "null",
        "report_to": "none",
        "output_dir": "run",
    }
    return [f"{key}={value}" for key, value in (own | keys).items()]


def weights(folder: Path) -> Tensor:
    """All adapters of the final checkpoint, end to end."""
    state = load_checkpoint(folder / "run/final_checkpoint").state
    agents = [state[f"agent{k}/adapter_model"] for k in range(AGENTS)]
    return torch.cat([tensor.flatten() for agent in agents for _, tensor in sorted(agent.items())])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest of all elements."""
    assert one.shape == other.shape
    return float((one - other).abs().max())


def planned(num_rows: int, steps: int) -> list[list[int]]:
    """The rows of every step, in their order."""
    plan = Plan(num_rows, GLOBAL_BATCH, SEED)
    return [plan.rows(step) for step in range(steps)]
