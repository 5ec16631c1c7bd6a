"""Crowds that change in mid run: branches, agents that are stopped or cloned; killed and resumed, on two processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from ci_llm.crowd.crowd import Crowd
from tests.support.agent_facts import facts_of
from tests.support.asked import complete, metrics, train_asked
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

#: One agent for 6 steps, then 3 of its clones for 2: the agent-steps of 3 agents over 4 steps.
BRANCHING: Final = {"num_agents": 3, "branch_at": 0.5, "max_train_steps": 4, "eval_steps": 3, "logging_steps": 4}
BRANCH_POINT, LAST = 6, 8
CELL: Final = Cell(accumulation=2)


@pytest.fixture(scope="module")
def branched(trials: Trials) -> Path:
    """The folder of an undisturbed run that branches."""
    return complete(trials, CELL, **BRANCHING)


def asked(
    trials: Trials, server: ForkServer, cell: Cell, *asks: Any, folder: Path | None = None, **options: Any
) -> Path:
    """The folder of a run to which somebody spoke; `options` are keys, and `place`, `call`, `fate`, `codes`."""
    folder = folder or trials.new_folder()
    how = {name: options.pop(name) for name in ("place", "call", "fate") if name in options}
    codes = options.pop("codes", [0] * cell.ranks)
    arguments = trials.arguments(cell, **options)
    found = server.run(
        train_asked, folder / "log", ranks=cell.ranks, folder=str(folder), arguments=arguments, asks=asks, **how
    )
    assert found == codes, (folder / "log").read_text()
    return folder


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


def test_branches_differ_and_have_a_common_start(branched: Path) -> None:
    crowd = Crowd.from_pretrained(branched / "run")
    rows = [row.detach() for row in crowd.agents.rows]
    assert crowd.num_agents == 3
    assert crowd.common_start
    assert all((rows[i] != rows[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


def test_branches_take_the_rows_in_orders_of_their_own(branched: Path) -> None:
    seen = [json.loads(line)["rows"] for line in (branched / "process0.jsonl").read_text().splitlines()]
    of_branches = [row for micro_batch in seen[BRANCH_POINT] for row in micro_batch]
    assert len(of_branches) == 3 * CELL.accumulation * 2
    assert len({*of_branches}) > CELL.accumulation * 2


def test_a_branch_has_the_bits_that_it_has_among_fewer(trials: Trials) -> None:
    """Two branches take as many agent-steps as two agents over 5 steps: 6 before the branch point, and then twice 2.

    At a constant rate: a schedule spans the agent-steps, which are others.
    """
    branching = {**BRANCHING, "lr_scheduler_type": "constant"}
    branched = complete(trials, CELL, **branching)
    fewer = complete(trials, CELL, **branching | {"num_agents": 2, "branch_at": 0.6, "max_train_steps": 5})
    assert json.loads((fewer / "run/evaluation.json").read_text())["last_step"] == LAST
    for name in ("agent0", "agent1"):
        own = own_facts(fewer, name)
        assert not differences(own, own_facts(branched, name))
        for part in ("lora_B", "exp_avg_sq", f"train/loss at {LAST}", f"train/grad_norm at {LAST}", "eval/nll"):
            assert any(part in fact for fact in own), part


@pytest.mark.parametrize("saved", range(BRANCH_POINT - 2, LAST))
def test_a_branching_run_killed_around_its_branch_point(trials: Trials, branched: Path, saved: int) -> None:
    """It resumes from a checkpoint before, at or after the branch point."""
    folder = trials.new_folder()
    fate = Fate("SIGKILL", saved + 1, 1, committed=saved) if saved + 1 < LAST else Fate("SIGKILL", LAST, None, saved)
    assert trials.train(CELL, folder, fate, save_steps=saved, **BRANCHING) == [-signal.SIGKILL]
    assert trials.train(CELL, folder, **BRANCHING) == [0], (folder / "log").read_text()
    log = (folder / "run/training.log").read_text()
    assert f"step {saved} of {LAST}, verified" in log
    assert "exactness: bitwise" in log
    assert not differences(account(branched), account(folder))


def test_branches_under_ivon_keep_its_moments(trials: Trials) -> None:
    cell = Cell(accumulation=2, optimizer="ivon")
    folder = trials.new_folder()
    fate = Fate("SIGKILL", BRANCH_POINT + 1, 1, committed=BRANCH_POINT)
    assert trials.train(cell, folder, fate, save_steps=BRANCH_POINT, **BRANCHING) == [-signal.SIGKILL]
    assert trials.train(cell, folder, **BRANCHING) == [0], (folder / "log").read_text()
    assert not differences(account(complete(trials, cell, **BRANCHING)), account(folder))


def test_a_branching_run_killed_while_it_saves_the_branches(trials: Trials, server: ForkServer, branched: Path) -> None:
    folder = asked(
        *(trials, server, CELL),
        **BRANCHING,
        save_steps=BRANCH_POINT // 2,
        place="ci_llm.checkpoints.store.commit",
        call=2,
        codes=[-signal.SIGKILL],
    )
    assert not (folder / f"run/checkpoint_step_{BRANCH_POINT}").exists()
    assert trials.train(CELL, folder, **BRANCHING) == [0], (folder / "log").read_text()
    assert f"step {BRANCH_POINT // 2} of {LAST}, verified" in (folder / "run/training.log").read_text()
    assert not differences(account(branched), account(folder))


def test_loader_workers_prepare_the_rows_of_the_branches(trials: Trials, branched: Path) -> None:
    folder = complete(trials, Cell(accumulation=2, workers=2), **BRANCHING)
    assert not differences(account(branched), account(folder))


def test_two_processes_branch_and_are_killed_around_it(trials: Trials) -> None:
    cell = Cell(ranks=2)
    undisturbed = account(complete(trials, cell, **BRANCHING))
    for saved in (BRANCH_POINT - 1, BRANCH_POINT):
        folder, fate = trials.new_folder(), Fate("SIGKILL", saved + 1, 0, committed=saved)
        assert trials.train(cell, folder, fate, save_steps=saved, **BRANCHING) == [-signal.SIGKILL] * 2
        assert trials.train(cell, folder, **BRANCHING) == [0, 0], (folder / "log").read_text()
        assert not differences(undisturbed, account(folder))


def test_a_run_with_more_steps_keeps_its_branch_point(trials: Trials) -> None:
    """The branch point is part of the checkpoint: 3 agents over 6 steps have 18 agent-steps, of which 6 are taken."""
    folder = trials.new_folder()
    fate = Fate("SIGTERM", BRANCH_POINT - 3)
    assert trials.train(CELL, folder, fate, **BRANCHING) == [0]
    assert trials.train(CELL, folder, **BRANCHING | {"max_train_steps": 6}) == [0], (folder / "log").read_text()
    log = (folder / "run/training.log").read_text()
    assert f"after step {BRANCH_POINT}: branch agent0" in log
    evaluation = json.loads((folder / "run/evaluation.json").read_text())
    assert (evaluation["last_step"], evaluation["agent_steps"]) == (BRANCH_POINT + 4, 3 * 6)


# Agents that are stopped or cloned

THREE: Final = {"num_agents": 3, "max_train_steps": 6, "lora_dropout": 0.0, "dropconnect_p": 0.1, "logging_steps": 1}
PLAIN: Final = Cell()


def own_facts(folder: Path, name: str) -> dict[str, Any]:
    """The facts of one agent, without the rate: a changed crowd logs one rate per agent, others a common one."""
    return {fact: value for fact, value in facts_of(folder, name).items() if "learning_rate" not in fact}


def of_training(folder: Path, name: str) -> dict[str, Any]:
    return {fact: value for fact, value in own_facts(folder, name).items() if "eval" not in fact}


@pytest.fixture(scope="module")
def unchanged(trials: Trials) -> Path:
    return complete(trials, PLAIN, **THREE)


@pytest.fixture(scope="module")
def stopped(trials: Trials, server: ForkServer) -> Path:
    return asked(trials, server, PLAIN, (2, ["stop", "1"]), **THREE)


def test_the_others_train_as_if_the_stopped_agent_had_never_been_there(
    trials: Trials, unchanged: Path, stopped: Path
) -> None:
    for name in ("agent0", "agent2"):
        assert not differences(of_training(unchanged, name), of_training(stopped, name))
    final = stopped / "run/final_checkpoint"
    assert sorted(path.name for path in final.glob("agent*")) == ["agent0", "agent2"]
    alone = complete(trials, PLAIN, **THREE | {"num_agents": 1})
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


def test_a_run_killed_after_a_stop_stops_the_agent_at_the_same_step_again(
    trials: Trials, server: ForkServer, stopped: Path
) -> None:
    """It resumes from a checkpoint before the stop; the record in the folder has the step of the stop."""
    fate = vars(Fate("SIGKILL", 3, 0, committed=1))
    folder = asked(
        *(trials, server, PLAIN, (2, ["stop", "1"])), **THREE, save_steps=1, fate=fate, codes=[-signal.SIGKILL]
    )
    for newer in [path for path in folder.glob("run/checkpoint_step_*") if path.name != "checkpoint_step_1"]:
        newer.rename(folder / newer.name)
    (decision,) = json.loads((folder / "run/crowd_changes.json").read_text())
    request = folder / f"run/requests/{decision['id']}.json"  # as a kill before its removal leaves it
    request.write_text('{"verb": "stop", "agent": 1}')
    assert trials.train(PLAIN, folder, **THREE) == [0], (folder / "log").read_text()
    assert "step 1 of 6, verified" in (folder / "run/training.log").read_text()
    assert not differences(account(stopped), account(folder))
    assert not request.exists()


def test_a_run_killed_after_a_stop_resumes_from_a_checkpoint_after_it(
    trials: Trials, server: ForkServer, stopped: Path
) -> None:
    fate = vars(Fate("SIGKILL", 4, 0, committed=3))
    folder = asked(
        *(trials, server, PLAIN, (2, ["stop", "1"])), **THREE, save_steps=3, fate=fate, codes=[-signal.SIGKILL]
    )
    assert trials.train(PLAIN, folder, **THREE) == [0], (folder / "log").read_text()
    assert "step 3 of 6, verified" in (folder / "run/training.log").read_text()
    assert not differences(account(stopped), account(folder))


def test_a_clone_stays_equal_unless_it_has_other_settings(trials: Trials, server: ForkServer, unchanged: Path) -> None:
    asks = (2, ["clone", "2"]), (4, ["clone", "0", "learning_rate=1e-3", "seed=7", "name=slow"])
    folder = asked(trials, server, PLAIN, *asks, **THREE)
    final = account(folder)
    for part in ("exp_avg", "exp_avg_sq", "lora_B"):
        pairs = [(fact, fact.replace("agent2", "agent3")) for fact in final if "agent2/" in fact and part in fact]
        assert pairs
        assert all(final[one] == final[other] for one, other in pairs)
    rates = metrics(folder)[-2]
    assert rates["train/agent4/learning_rate"] < rates["train/agent0/learning_rate"]
    assert json.loads((folder / "run/evaluation.json").read_text())["names"][-2:] == ["agent3", "slow"]
    for name in ("agent0", "agent1", "agent2"):
        assert not differences(of_training(unchanged, name), of_training(folder, name))


def test_two_processes_stop_and_clone_at_the_same_step(trials: Trials, server: ForkServer) -> None:
    cell = Cell(ranks=2)
    asks = (2, ["stop", "0"]), (3, ["clone", "2", "seed=3"])
    keys = THREE | {"checkpoint_backend": "distributed"}
    undisturbed = asked(trials, server, cell, *asks, **keys)
    fate = vars(Fate("SIGKILL", 5, 0, committed=3))
    folder = asked(trials, server, cell, *asks, **keys, save_steps=3, fate=fate, codes=[-signal.SIGKILL] * 2)
    assert trials.train(cell, folder, **keys) == [0, 0], (folder / "log").read_text()
    assert not differences(account(undisturbed), account(folder))


def test_a_request_that_cannot_be_met_is_refused_and_the_run_continues(
    trials: Trials, server: ForkServer, unchanged: Path
) -> None:
    asks = (2, ["stop", "9"]), (3, ["clone", "8"])
    folder = asked(trials, server, PLAIN, *asks, **THREE)
    log = (folder / "run/training.log").read_text()
    assert "the request to stop agent9: there is no agent9: there are agent0, agent1, agent2" in log
    record = json.loads((folder / "run/crowd_changes.json").read_text())
    assert [each["refused"] is not None for each in record] == [True, True]
    assert not [*(folder / "run/requests").iterdir()]
    assert not differences(account(unchanged), account(folder))


# Agents with rows of their own

OWN_ROWS: Final = ("{seed: 1, data_seed: 5}", "{seed: 2, max_train_samples: 5}", "{seed: 3}")


def own_rows(*entries: str) -> dict[str, Any]:
    return THREE | {"agents": f"[{', '.join(entries)}]", "num_agents": len(entries)}


def test_a_resume_without_the_entry_of_a_stopped_agent_is_refused(trials: Trials, server: ForkServer) -> None:
    """This ended in an IndexError."""
    keys, fate = own_rows(*OWN_ROWS), vars(Fate("SIGKILL", 4, 0, committed=3))
    folder = asked(trials, server, CELL, (2, ["stop", "0"]), **keys, save_steps=3, fate=fate, codes=[-signal.SIGKILL])
    fewer = {**keys, **own_rows(*OWN_ROWS[1:])}
    assert trials.train(CELL, folder, **fewer) == [2]
    assert "has other settings: num_agents was 3, is 2" in (folder / "log").read_text()
    assert trials.train(CELL, folder, **fewer, allow_inexact_resume="true") == [2]
    assert "leave the entry of an agent that was stopped where it was" in (folder / "log").read_text()
    assert trials.train(CELL, folder, **keys) == [0], (folder / "log").read_text()


def test_clones_and_remaining_agents_keep_their_own_rows(trials: Trials, server: ForkServer) -> None:
    """An agent is stopped after loader workers have prepared the rows of all, another one is cloned."""
    cell, keys = Cell(accumulation=2, workers=2), own_rows(*OWN_ROWS)
    asks = (2, ["stop", "1"]), (4, ["clone", "0"])
    folder = asked(trials, server, cell, *asks, **keys)
    without = complete(trials, Cell(accumulation=2), **own_rows(OWN_ROWS[0], OWN_ROWS[2]))
    for name, alone in (("agent0", "agent0"), ("agent2", "agent1")):
        assert not differences(of_training(without, alone), of_training(folder, name))
    final = account(folder)
    copies = [(fact, fact.replace("agent0", "agent3")) for fact in final if "agent0/" in fact and "lora_B" in fact]
    assert copies
    assert all(final[one] == final[other] for one, other in copies)
    fate = vars(Fate("SIGKILL", 5, 0, committed=3))
    killed = asked(trials, server, cell, *asks, **keys, save_steps=3, fate=fate, codes=[-signal.SIGKILL])
    assert trials.train(cell, killed, **keys) == [0], (killed / "log").read_text()
    assert not differences(account(folder), account(killed))
