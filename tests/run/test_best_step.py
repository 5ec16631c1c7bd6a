"""The best step by validation: the same on all processes and over kills, kept on the disk; the end of patience."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.core.evaluation_file import Best
from ci_llm.core.run_status import read_status
from ci_llm.errors import CheckpointError
from ci_llm.run.evaluation import result_of
from ci_llm.run.step.state import TrainState, Validation
from tests.support.bit_flips import flip
from tests.support.campaign import sampled
from tools.testbed.trials import Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

#: A learning rate that only spoils what the first steps have learned, so that patience ends before the run does.
SPOILT: dict[str, Any] = {
    "model_name": "embedded",
    "learning_rate": 5e-2,
    "eval_steps": 2,
    "early_stopping_patience": 3,
    "load_best_model_at_end": "true",
    "save_steps": 3,
    "save_total_limit": 1,
}
BEST, LAST = 2, 8
CELL = Cell(dropout=0.1)


# Plain values


def after(*values: float, metric: str = "nll") -> TrainState:
    """The state of a run after evaluations with these values of the crowd, one every ten steps."""
    state = TrainState.at_start(2, validation=Validation(metric))
    for number, value in enumerate(values, start=1):
        state = replace(state, step=10 * number).evaluated(value, [value, 1 - value])
    return state


def seen(*values: float, metric: str = "nll") -> Validation:
    return after(*values, metric=metric).validation


def test_the_best_and_the_count_of_evaluations_without_a_better_one() -> None:
    assert seen().best_step is None
    assert seen(0.5, 0.3, 0.4, 0.3).crowd == Best(20, 0.3)  # an equal value is no better one
    assert seen(0.5, 0.3, 0.4, 0.3).without_better == 2
    assert seen(0.5, 0.3, 0.4, metric="exact_match").crowd == Best(10, 0.5)
    assert [each.best for each in after(0.5, 0.3, 0.4).agents] == [Best(20, 0.3), Best(10, 0.5)]
    assert seen(0.5, 0.3).without_better == 0


def test_a_value_that_is_not_a_number_is_never_the_best() -> None:
    assert seen(math.nan, math.nan).crowd is None
    assert seen(math.nan, math.nan).without_better == 2
    assert seen(math.nan, 0.7, math.nan).crowd == Best(20, 0.7)
    assert seen(0.7, math.inf).crowd == Best(10, 0.7)


def test_a_failed_last_save_is_not_mistaken_for_a_failed_save_of_the_best_step() -> None:
    class Failed:
        def wait_until_finished(self) -> None:
            raise CheckpointError("the last step was not written")

    state = after(0.5, 0.3, 0.4)
    config: Any = SimpleNamespace(load_best_model_at_end=True)
    manager: Any = Failed()
    with pytest.raises(CheckpointError, match="the last step was not written"):
        result_of(config, state, manager, processes=config)


# Whole runs


@pytest.fixture(scope="module")
def undisturbed(trials: Trials) -> Path:
    return trials.complete(CELL, **SPOILT)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("run/checkpoint_*"))


def evaluation(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run/evaluation.json").read_text()))


def test_a_run_ends_with_its_patience_and_its_result_is_the_best_step(undisturbed: Path) -> None:
    log = (undisturbed / "log").read_text()
    assert f"early stopping after step {LAST}: best crowd by nll" in log
    assert "no gain in the last 3 evaluation(s)" in log
    assert checkpoints(undisturbed) == [f"checkpoint_step_{BEST}", f"checkpoint_step_{LAST}"]
    assert load_checkpoint(undisturbed / "run/final_checkpoint").manifest.step == BEST
    record, status = evaluation(undisturbed), read_status(undisturbed / "run")
    assert (record["step"], record["last_step"], record["stopped_early"]) == (BEST, LAST, True)
    assert record["best"]["metric"] == "nll"
    assert record["best"]["crowd"] == {"step": BEST, "value": record["nll"]["crowd"]}
    assert len(record["best"]["agents"]) == 2
    assert (status.status, status.step, status.best_step) == ("completed", LAST, BEST)


FATES = [
    Fate("SIGKILL", steps=5, committed=3),  # the best is behind, one evaluation without a better one is counted
    Fate("SIGKILL", steps=2, micro_step=None),  # before the best is known
    Fate("SIGTERM", steps=4, micro_step=None),  # counted by the next attempt
    Fate("SIGKILL", steps=LAST, micro_step=None, committed=6),  # in the evaluation that ends it
]


@pytest.mark.parametrize("fate", sampled(FATES, FATES[::3]), ids=str)
def test_a_run_that_was_killed_finds_the_same_best_step_and_the_same_end(
    trials: Trials, undisturbed: Path, fate: Fate
) -> None:
    folder = trials.complete(CELL, trials.ended(CELL, fate, **SPOILT), **SPOILT)
    assert not differences(account(undisturbed), account(folder))
    assert checkpoints(folder) == checkpoints(undisturbed)


def test_a_resume_counts_an_evaluation_made_after_the_last_save(trials: Trials, undisturbed: Path) -> None:
    """The run is killed after an evaluation that no checkpoint holds yet; metrics.jsonl has its values."""
    keys = SPOILT | {"save_steps": 4}
    folder = trials.ended(CELL, Fate("SIGKILL", steps=4, committed=4), **keys)
    before = (folder / "run/metrics.jsonl").read_text()
    assert '"step": 4, "eval/' in before
    trials.complete(CELL, folder, **keys)
    lines = [line for line in (folder / "run/metrics.jsonl").read_text().splitlines() if '"step": 4, "eval/' in line]
    assert len(lines) == 1
    assert not differences(account(undisturbed), account(folder))


def test_two_processes_agree_on_the_best_step(trials: Trials) -> None:
    folder = trials.complete(replace(CELL, ranks=2), **SPOILT)
    assert evaluation(folder)["stopped_early"]
    assert load_checkpoint(folder / "run/final_checkpoint").manifest.step == evaluation(folder)["best"]["crowd"]["step"]


def test_a_best_step_that_is_damaged_cannot_be_the_result(trials: Trials) -> None:
    folder = trials.ended(CELL, Fate("SIGTERM", steps=4), **SPOILT)
    flip(folder / f"run/checkpoint_step_{BEST}/agent0/adapter_model.safetensors", -1)
    trials.complete(CELL, folder, **SPOILT)
    assert f"the best step, {BEST}, cannot be the result, so the last one is" in (folder / "log").read_text()
    record = evaluation(folder)
    assert (record["step"], record["best"]["crowd"]["step"]) == (LAST, BEST)
