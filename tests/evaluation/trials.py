"""What happens in processes of their own: a short run, and an evaluation that is killed or has too little memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from ci_llm.cli.main import main
from ci_llm.core import durable
from ci_llm.crowd import questions, scoring
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
    "output_dir": "run",
}


def train(folder: str, **keys: Any) -> int:
    """`train.py`, for two steps."""
    os.chdir(folder)
    return main(["train", "--config", os.devnull, *(f"{key}={value}" for key, value in (TRAINING | keys).items())])


def evaluate(words: Sequence[str], dies_at_line: int | None = None, most: int | None = None) -> int:
    """`ci-llm evaluate`; dies by SIGKILL when half of a line, counted from 0, has reached the file.

    Args:
        most: memory is there for so many questions, or for four times as many rows to score.
    """
    written = 0

    def limited(module: ModuleType, name: str, count: Callable[..., float]) -> None:
        original = getattr(module, name)

        def call(*given: Any, **how: Any) -> Any:
            if most is not None and count(*given) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return original(*given, **how)

        setattr(module, name, call)

    limited(questions, "generate_each", lambda _crowd, _asked, _wanted, at_a_time: at_a_time)
    limited(scoring, "_score_batch", lambda _crowd, batch, *_: batch.num_rows / 4)

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
