"""A sweep in a process of its own that is struck at an appointed moment, and all that can be told of one that ended."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ci_llm.sweep.runner  # noqa: F401  the fork server imports all the rooms through this file
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cli.main import main
from ci_llm.run import job
from ci_llm.run.step import nonfinite, state
from examples import sweep_by_hand
from tools.testbed.moments import interfere
from tools.testbed.trials import account

KEYS = {
    "agents_per_pass": 3,
    "rungs": 2,
    "keep": 0.5,
    "max_train_steps": 8,
    "max_train_samples": 9,
    "batch_size": 2,
    "lora_rank": 2,
    "logging_steps": 2,
    "eval_steps": "null",
    "eval_samples": 4,
    "generation_eval_samples": 2,
    "max_new_tokens_eval": 4,
    "save_steps": 1,
    "save_interval_seconds": "null",
    "num_workers": 0,
    "report_to": "none",
    "output_dir": "run",
    "interrupted_exit_code": 75,
}
RATES = "[1e-3,2e-3,4e-3,8e-3]"
LOADING = "ci_llm.run.start.loading.load_base"
LOADED = "loaded"  # a line of each call of a sweep that loads its base; a call that loads it twice fails


def words(**keys: Any) -> list[str]:
    """The command line of a sweep of four trials in three segments, complete."""
    return [f"{key}={value}" for key, value in ({"learning_rate": RATES} | KEYS | keys).items() if value is not None]


def single(**keys: Any) -> list[str]:
    """The command line of a run of one agent with the same data and length."""
    own = ("agents_per_pass", "rungs", "keep")
    return [word for word in words(**keys) if word.partition("=")[0] not in own]


def called(
    folder: str,
    command: str,
    arguments: list[str],
    place: str | None = None,
    call: int = 0,
    sent: str = "SIGKILL",
    environment: Mapping[str, str] | None = None,
    max_in_a_row: int = 5,
) -> int:
    """A trial for the fork server: a command that sends itself a signal just before the `call`-th call of `place`.

    With a smaller `max_in_a_row`, a short trial that stays nonfinite is dropped within its length.
    """
    job.CheckpointManager = partial(CheckpointManager, async_save=False)  # type: ignore[assignment,misc]  # none is lost
    state.MAX_IN_A_ROW = nonfinite.MAX_IN_A_ROW = max_in_a_row  # type: ignore[misc]
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    os.chdir(folder)
    if command == "sweep":
        interfere(LOADING, 1, _note)
        interfere(LOADING, 2, _refuse)
    if place is not None:
        interfere(place, call, lambda: os.kill(os.getpid(), signal.Signals[sent]))
    return main([command, "--config", os.devnull, *arguments])


def _note() -> None:
    with Path(LOADED).open("a") as file:
        file.write(f"process {os.getpid()}\n")


def _refuse() -> None:
    raise AssertionError("a sweep loads its base once")


def by_hand(folder: str, keys: dict[str, Any]) -> int:
    """A trial for the fork server: the example, which leads its sweep itself."""
    torch.set_num_threads(1)
    os.chdir(folder)
    return 0 if sweep_by_hand.search(None, **keys).is_complete else 1


def facts(folder: Path) -> dict[str, Any]:
    """All that can be told of a sweep that ended: its record, what every segment left, the best adapter."""
    sweep = folder / "run"
    told: dict[str, Any] = {"sweep.json": (sweep / "sweep.json").read_text()}
    for segment in sorted((sweep / "segments").iterdir()):
        with tempfile.TemporaryDirectory() as seen:
            Path(seen, "run").symlink_to(segment.resolve())
            told |= {f"segment {segment.name}: {name}": value for name, value in account(Path(seen)).items()}
    for file in sorted((sweep / "best").iterdir()):
        told[f"best/{file.name}"] = file.read_bytes()
    return told


def record(folder: Path) -> dict[str, Any]:
    """sweep.json."""
    content: dict[str, Any] = json.loads((folder / "run/sweep.json").read_text())
    return content
