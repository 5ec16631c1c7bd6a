"""Crowds that change in mid run: branches, agents that are stopped or cloned; killed and resumed, on two processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from ci_llm.crowd.model import Crowd
from tests.support.asked import train_asked
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Fate, Trials, account, differences

# References that trials share.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("changing crowd")]

#: One agent for 6 steps, then 3 of its clones for 2: the agent-steps of 3 agents over 4 steps.
BRANCHING: Final = {"num_agents": 3, "branch_at": 0.5, "max_train_steps": 4, "eval_steps": 3, "logging_steps": 4}
BRANCH_POINT, LAST = 6, 8
CELL: Final = Cell(accumulation=2)


@pytest.fixture(scope="module")
def trials(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(server, tmp_path_factory.mktemp("changing crowd"))


@pytest.fixture(scope="module")
def branched(trials: Trials) -> Path:
    """The folder of an undisturbed run that branches."""
    return complete(trials, CELL, **BRANCHING)


def complete(trials: Trials, cell: Cell, **keys: Any) -> Path:
    folder = trials.new_folder()
    assert trials.train(cell, folder, **keys) == [0] * cell.ranks, (folder / "log").read_text()
    return folder


def asked(
    trials: Trials, server: ForkServer, cell: Cell, *asks: Any, folder: Path | None = None, **options: Any
) -> Path:
    """The folder of a run to which somebody spoke; `options` are keys, and `place`, `call`, `fate`, `codes`."""
    folder = folder or trials.new_folder()
    how = {name: options.pop(name) for name in ("place", "call", "fate") if name in options}
    codes = options.pop("codes", [0] * cell.ranks)
    arguments = cell.arguments(**options)
    found = server.run(
        train_asked, folder / "log", ranks=cell.ranks, folder=str(folder), arguments=arguments, asks=asks, **how
    )
    assert found == codes, (folder / "log").read_text()
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


# Branches


def test_a_run_that_branches_takes_the_agent_steps_of_the_crowd(branched: Path) -> None:
    run = branched / "run"
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert (evaluation["last_step"], evaluation["agent_steps"]) == (LAST, 3 * 4)
    assert json.loads((run / "status.json").read_text())["agent_steps"] == 3 * 4
    trained = {line["step"]: line for line in metrics(branched) if "agent_steps" in line}
    assert [trained[step]["agent_steps"] for step in (4, 8)] == [4, 12]
    assert "train/agent1/loss" not in trained[4]
    assert {"train/agent0/loss", "train/agent1/loss", "train/agent2/loss"} < {*trained[8]}
    log = (run / "training.log").read_text()
    assert f"after step {BRANCH_POINT} of {LAST}, branch agent0" in log
    assert f"after step {BRANCH_POINT}: branch agent0; the crowd is agent0, agent1, agent2" in log


def test_branches_differ_and_their_mean_is_an_agent(branched: Path) -> None:
    crowd = Crowd.from_pretrained(branched / "run")
    rows = [row.detach() for row in crowd.agents.rows]
    assert crowd.num_agents == 3
    assert crowd.common_start
    assert all((rows[i] != rows[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("saved", range(BRANCH_POINT - 2, LAST))
def test_a_branching_run_killed_around_its_branch_point(trials: Trials, branched: Path, saved: int) -> None:
    """It goes on from a checkpoint before, at or after the branch point."""
    folder = trials.new_folder()
    fate = Fate("SIGKILL", saved + 1, 1, committed=saved) if saved + 1 < LAST else Fate("SIGKILL", LAST, None, saved)
    assert trials.train(CELL, folder, fate, save_steps=saved, **BRANCHING) == [-signal.SIGKILL]
    assert trials.train(CELL, folder, **BRANCHING) == [0], (folder / "log").read_text()
    log = (folder / "run/training.log").read_text()
    assert f"step {saved} of {LAST}, verified" in log
    assert "exactness: bitwise" in log
    assert not differences(account(branched), account(folder))
