"""Crowds that change in mid run: agents are stopped; killed and resumed, on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ci_llm.crowd.crowd import Crowd
from tests.support.agent_facts import facts_of
from tests.support.asked import asked, metrics
from tools.testbed.trials import Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

CELL: Final = Cell(accumulation=2)


THREE: Final = {"num_agents": 3, "max_train_steps": 6, "lora_dropout": 0.0, "dropconnect_p": 0.1, "logging_steps": 1}
PLAIN: Final = Cell()
ONE_STOPS: Final = asked((2, ["stop", "1"]))


def own_facts(folder: Path, name: str) -> dict[str, Any]:
    """The facts of one agent, without the rate: a changed crowd logs one rate per agent, others a common one."""
    return {fact: value for fact, value in facts_of(folder, name).items() if "learning_rate" not in fact}


def of_training(folder: Path, name: str) -> dict[str, Any]:
    return {fact: value for fact, value in own_facts(folder, name).items() if "eval" not in fact}


@pytest.fixture(scope="module")
def unchanged(trials: Trials) -> Path:
    return trials.complete(PLAIN, **THREE)


@pytest.fixture(scope="module")
def stopped(trials: Trials) -> Path:
    return trials.complete(PLAIN, **ONE_STOPS, **THREE)


def test_the_others_train_as_if_the_stopped_agent_had_never_been_there(
    trials: Trials, unchanged: Path, stopped: Path
) -> None:
    for name in ("agent0", "agent2"):
        assert not differences(of_training(unchanged, name), of_training(stopped, name))
    final = stopped / "run/final_checkpoint"
    assert sorted(path.name for path in final.glob("agent*")) == ["agent0", "agent2"]
    alone = trials.complete(PLAIN, **THREE | {"num_agents": 1})
    assert not differences(own_facts(alone, "agent0"), own_facts(stopped, "agent0"))


def test_what_a_run_leaves_of_a_stopped_agent(stopped: Path) -> None:
    run = stopped / "run"
    crowd = Crowd.from_pretrained(run)
    assert crowd.names == ["agent0", "agent2"]
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["names"] == ["agent0", "agent2"]
    assert evaluation["agent_steps"] == 2 * 3 + 4 * 2
    assert (run / "final_checkpoint/stopped/agent1/adapter_config.json").is_file()
    lines = [line for line in metrics(stopped) if "agent_steps" in line]
    assert [("train/agent1/loss" in line, line["agent_steps"]) for line in lines] == [
        *((True, 3), (True, 6)),
        *((False, 8), (False, 10), (False, 12), (False, 14)),
    ]


def test_a_run_killed_after_a_stop_stops_the_agent_at_the_same_step_again(trials: Trials, stopped: Path) -> None:
    """It resumes from a checkpoint before the stop; the record in the folder has the step of the stop."""
    folder = trials.ended(PLAIN, Fate("SIGKILL", 3, 0, committed=1), **ONE_STOPS, **THREE, save_steps=1)
    for newer in [path for path in folder.glob("run/checkpoint_step_*") if path.name != "checkpoint_step_1"]:
        newer.rename(folder / newer.name)
    (decision,) = json.loads((folder / "run/crowd_changes.json").read_text())
    request = folder / f"run/requests/{decision['id']}.json"  # as a kill before its removal leaves it
    request.write_text('{"stop": 1}')
    trials.complete(PLAIN, folder, **THREE)
    assert "step 1 of 6, verified" in (folder / "run/training.log").read_text()
    assert not differences(account(stopped), account(folder))
    assert not request.exists()


def test_a_run_killed_after_a_stop_resumes_from_a_checkpoint_after_it(trials: Trials, stopped: Path) -> None:
    folder = trials.ended(PLAIN, Fate("SIGKILL", 4, 0, committed=3), **ONE_STOPS, **THREE, save_steps=3)
    trials.complete(PLAIN, folder, **THREE)
    assert "step 3 of 6, verified" in (folder / "run/training.log").read_text()
    assert not differences(account(stopped), account(folder))


def test_two_processes_stop_at_the_same_step(trials: Trials) -> None:
    cell, asks = Cell(ranks=2), asked((2, ["stop", "0"]), (3, ["stop", "2"]))
    keys = THREE | {"checkpoint_backend": "distributed"}
    undisturbed = trials.complete(cell, **asks, **keys)
    folder = trials.ended(cell, Fate("SIGKILL", 5, 0, committed=3), **asks, **keys, save_steps=3)
    assert not differences(account(undisturbed), account(trials.complete(cell, folder, **keys)))


# Agents with rows of their own

OWN_ROWS: Final = ("{seed: 1, max_train_samples: 9}", "{seed: 2, max_train_samples: 5}", "{seed: 3}")


def own_rows(*entries: str) -> dict[str, Any]:
    return THREE | {"agents": f"[{', '.join(entries)}]", "num_agents": len(entries)}


def test_a_resume_without_the_entry_of_a_stopped_agent_is_refused(trials: Trials) -> None:
    """This ended in an IndexError."""
    keys, fate = own_rows(*OWN_ROWS), Fate("SIGKILL", 4, 0, committed=3)
    folder = trials.ended(CELL, fate, **asked((2, ["stop", "0"])), **keys, save_steps=3)
    fewer = {**keys, **own_rows(*OWN_ROWS[1:])}
    assert trials.train(CELL, folder, **fewer) == [2]
    assert "has other settings: num_agents was 3, is 2" in (folder / "log").read_text()
    assert trials.train(CELL, folder, **fewer, allow_inexact_resume="true") == [2]
    assert "leave the entry of an agent that was stopped where it was" in (folder / "log").read_text()
    trials.complete(CELL, folder, **keys)


def test_remaining_agents_keep_their_own_rows(trials: Trials) -> None:
    """An agent is stopped after loader workers have prepared the rows of all."""
    cell, keys = Cell(accumulation=2, workers=2), own_rows(*OWN_ROWS)
    folder = trials.complete(cell, **ONE_STOPS, **keys)
    without = trials.complete(Cell(accumulation=2), **own_rows(OWN_ROWS[0], OWN_ROWS[2]))
    for name, alone in (("agent0", "agent0"), ("agent2", "agent1")):
        assert not differences(of_training(without, alone), of_training(folder, name))
    killed = trials.ended(cell, Fate("SIGKILL", 5, 0, committed=3), **ONE_STOPS, **keys, save_steps=3)
    assert not differences(account(folder), account(trials.complete(cell, killed, **keys)))
