"""What happens in processes of their own: a short run, and an evaluation that is killed in the middle of a line."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from ci_llm.cli.main import main
from ci_llm.core import durable
from ci_llm.evaluation import predictions

TRAINING = {
    "model_name": "embedded",
    "dataset_name": "embedded",
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_samples": 8,
    "max_train_steps": 2,
    "batch_size": 3,
    "eval_samples": 14,
    "generation_eval_samples": 7,
    "max_new_tokens_eval": 12,
    "num_workers": 0,
    "report_to": "none",
    "write_report": "false",
    "output_dir": "run",
}


def train(folder: str, **keys: Any) -> int:
    """`train.py`, for two steps."""
    os.chdir(folder)
    return main(["train", "--config", os.devnull, *(f"{key}={value}" for key, value in (TRAINING | keys).items())])


def evaluate(words: Sequence[str], dies_at_line: int | None = None) -> int:
    """`ci-llm evaluate`; dies by SIGKILL when half of a line, counted from 0, has reached the file."""
    written = 0

    def append_some(path: Any, data: bytes) -> None:
        nonlocal written
        lines = data.splitlines(keepends=True)
        if dies_at_line is not None and written + len(lines) > dies_at_line:
            last = lines[dies_at_line - written]
            durable.append(path, b"".join(lines[: dies_at_line - written]) + last[: len(last) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        durable.append(path, data)
        written += len(lines)

    predictions.append = append_some
    return main(["evaluate", *words])
