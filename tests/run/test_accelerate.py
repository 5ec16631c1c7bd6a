"""Accelerate does the work: what a run calls of it, and what it has prepared when the crowd changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.traced import CALLS, train_traced
from tools.testbed.trials import Cell, Trials

pytestmark = pytest.mark.slow

KEYS = {"max_train_steps": 4, "save_steps": 2, "report_to": "tensorboard", "logging_steps": 1}


def traced(trials: Trials, ranks: int, folder: Path, *asks: Any, **keys: Any) -> list[Any]:
    """What each process told of a run in this folder."""
    trials.complete(Cell(ranks=ranks), folder, trial=train_traced, told={"asks": asks}, **KEYS | keys)
    return [json.loads((folder / f"calls_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_made_of_accelerates_calls(trials: Trials, ranks: int) -> None:
    folder = trials.new_folder()
    traced(trials, ranks, folder, max_train_steps=2)
    for rank, told in enumerate(traced(trials, ranks, folder, max_train_steps=4)):
        wanted = {*CALLS} - {"gather"}  # what reduce does for two processes
        wanted -= {"log", "init_trackers"} if rank else set()  # the main process alone has trackers
        assert {name for name in wanted if not told["calls"].get(name)} == set()
        assert told["model"] == ["Crowd" if ranks == 1 else "DistributedDataParallel"]


def test_a_crowd_that_changes_is_prepared_anew_and_leaves_nothing_behind(trials: Trials) -> None:
    asks = [(1, ["stop", "1"]), (2, ["stop", "0"])]
    for told in traced(trials, 2, trials.new_folder(), *asks, num_agents=3):
        assert told["held"] == [[1, 1, 1]] * 3
        assert told["model"] == ["DistributedDataParallel"]
