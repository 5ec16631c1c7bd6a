"""Runs that learn by rewards, killed in a reward function and in a save: own rows and supervisor included."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.run.test_own_rows import keys, write
from tests.support.campaign import sampled_cases
from tests.support.supervised import supervise_forks
from tools.testbed.events import wait_until_committed
from tools.testbed.trials import STEPS, Cell, Trials, account, differences

pytestmark = pytest.mark.slow

#: Epochs of 5 steps, the last of which has one row. A step of 4 rows calls the function 8 times, that of one row twice,
#: and the evaluation after steps 4, 8 and 12 calls it for two agents and the crowd 24 times.
CELL: Final = Cell(accumulation=2)
DRAWN: Final[dict[str, Any]] = {
    "objective": "grpo",
    "rewards": "tests.run.test_rewarded_runs:mortal,regex:[0-4]",
    "num_generations": 3,
    "max_completion_length": 6,
    "temperature": 3.0,
    "max_new_tokens_eval": 4,
    "eval_samples": 4,
}
ENTRIES: Final = ("{name: near, seed: 1}", "{name: far, seed: 2, beta: 0.1, temperature: 4.0}")
#: What kills: the number of a call, or the name that a file is about to get; and the step from which the run resumes.
#: Saved is every second step, by a thread: a call that kills is one before the next save begins.
IN_FIRST, IN_SECOND = (28, 2), (64, 4)
SAVE_IN_FIRST, SAVE_IN_SECOND = ("checkpoint_step_4", 2), ("checkpoint_step_8", 6)
FATES: Final[list[tuple[int | str, int]]] = [
    IN_FIRST, IN_SECOND, SAVE_IN_FIRST, SAVE_IN_SECOND,
    (18, 2), (31, 2), (58, 4), (70, 6), (79, 6), (110, 8), (120, 10),
    *((f"checkpoint_step_{step}", step - 2) for step in (6, 10)),
]  # fmt: skip

CALLS: Final = {"count": 0}


def mortal(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The shorter, the better; its process dies as the file `fate` in its folder says."""
    CALLS["count"] += 1
    fate: dict[str, Any] = json.loads(Path("fate").read_text()) if Path("fate").exists() else {"death": 0}
    if isinstance(fate["death"], str) and CALLS["count"] == 1:
        sys.addaudithook(lambda event, given: _end_before(event, given, fate["death"]))
    if CALLS["count"] == fate["death"]:
        wait_until_committed(Path("run"), fate["saved"])
        os.kill(os.getpid(), signal.SIGKILL)
    return [1 - len(ids) / 6 for ids in completion_ids]


def _end_before(event: str, given: tuple[Any, ...], name: str) -> None:
    if event == "os.rename" and Path(os.fsdecode(given[1])).name == name:
        os.kill(os.getpid(), signal.SIGKILL)


def started(trials: Trials, fate: tuple[int | str, int] | None = None, **more: Any) -> Path:
    """The folder of a run that was killed, or of one that has ended."""
    folder = trials.new_folder()
    if fate:
        (folder / "fate").write_text(json.dumps({"death": fate[0], "saved": fate[1]}))
    codes = trials.train(CELL, folder, **own(more))
    assert codes == [-signal.SIGKILL if fate else 0], (folder / "log").read_text()
    return folder


def own(more: Mapping[str, Any]) -> dict[str, Any]:
    return {**keys(*ENTRIES), **DRAWN, "save_steps": 2, **more}


def resumed(trials: Trials, folder: Path, saved: int, **more: Any) -> dict[str, Any]:
    """What can be told about the run that `folder` goes on with."""
    (folder / "fate").unlink()
    trials.complete(CELL, folder, **own(more))
    log = (folder / "run/training.log").read_text()
    assert f"step {saved} of {STEPS}, verified" in log, log
    assert "exactness: bitwise" in log, log
    return account(folder)


@pytest.fixture(scope="module")
def undisturbed(trials: Trials) -> dict[str, Any]:
    """What can be told about a run that nothing disturbed."""
    found = account(started(trials))
    norms = [x for name, lines in found.items() if "metrics" in name for line in lines for x in _norms(line)]
    assert len(norms) > 6
    assert min(norms) > 1e-4, "it learns nothing"
    return found


def _norms(line: Mapping[str, Any]) -> list[float]:
    return [value for name, value in line.items() if name.endswith("/grad_norm")]


@pytest.mark.parametrize(("death", "saved"), sampled_cases(FATES, FATES[1:3]))
def test_killed_in_a_reward_or_in_a_save_in_any_epoch(
    trials: Trials, undisturbed: dict[str, Any], death: int | str, saved: int
) -> None:
    assert not differences(undisturbed, resumed(trials, started(trials, (death, saved)), saved))


@pytest.mark.campaign
def test_agents_with_rows_of_their_own(trials: Trials, tmp_path: Path) -> None:
    data = [write(tmp_path / name, 100 * n, 5 + 6 * n, range(4)) for n, name in enumerate(("few", "many"), 1)]
    entries = [f"{entry[:-1]}, dataset_name: {each}}}" for entry, each in zip(ENTRIES, data, strict=True)]
    more = {**keys(*entries), "max_train_samples": "null"}
    wanted = account(started(trials, **more))
    assert not differences(wanted, resumed(trials, started(trials, (27, 2), **more), 2, **more))


def test_the_supervisor_begins_again_by_itself(trials: Trials, undisturbed: dict[str, Any]) -> None:
    folder, codes = trials.new_folder(), list[int]()
    (folder / "fate").write_text(json.dumps({"death": IN_SECOND[0], "saved": IN_SECOND[1]}))

    def train(_: Mapping[str, str]) -> list[int]:
        codes.extend(trials.train(CELL, folder, **own({})))
        (folder / "fate").unlink(missing_ok=True)
        return codes[-1:]

    words = trials.arguments(CELL, **own({"output_dir": folder / "run"}))
    assert supervise_forks(words, folder / "safe_train.log", train) == 0, (folder / "log").read_text()
    assert codes == [-signal.SIGKILL, 0]
    assert not differences(undisturbed, account(folder))
