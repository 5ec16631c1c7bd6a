"""`crowd: auto`: what it decides, what follows, and that a run which is killed around the decision repeats it."""

from __future__ import annotations

import json
import math
import signal
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.config import Config
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.embedded.stories import rows
from ci_llm.errors import CheckpointError, ConfigError
from ci_llm.run.crowd_changes import BY_HEART, TRAINING_NLL, change_of, choice_from_nll
from ci_llm.run.start.agent_settings import schedules
from ci_llm.run.step.members import CrowdChange, Members, config_of
from ci_llm.run.step.state import Choice, TrainState
from tests.support.asked import complete, metrics, train_asked
from tests.support.crowds import bits_in_company
from tests.support.faults import Fault, said, train
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Fate, Trials, account, differences

AUTO: Final = Config(num_agents=4, crowd="auto", learning_rate=8e-3)


# As values


def test_an_agent_that_learns_its_rows_by_heart_is_joined() -> None:
    assert not choice_from_nll(5, 0.09, 0.20).alone
    assert choice_from_nll(5, 0.10, 0.20).alone
    assert choice_from_nll(5, 0.30, 0.20).alone
    assert not choice_from_nll(5, math.nan, 0.20).alone
    assert not choice_from_nll(5, 0.10, math.nan).alone


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(2, 5000))
def test_with_either_decision_the_agents_take_the_steps_of_a_fixed_crowd(agents: int, steps: int) -> None:
    config = AUTO.model_copy(update={"num_agents": agents})
    first = Members.first(config, steps)
    assert first is not None
    (join,) = first.planned
    assert first.total_steps(config, steps) == agents * steps
    alone = first.with_planned([change_of(Choice(join.step - 1, 0.2, 0.2, alone=True))])
    assert [change.verb for change in alone.planned] == ["stay_alone"]
    for members in (alone, alone.after(join.step, config)[0]):
        assert members.folders == ["agent0"]
        assert members.total_steps(config, steps) == members.agent_steps_at(agents * steps) == agents * steps
    assert first.with_planned([change_of(Choice(join.step - 1, 0.1, 0.9, alone=False))]) == first
    joined, sources = first.after(join.step, config)
    assert sources == [0] + [None] * (agents - 1)
    assert joined.agents == Members.configured(config).agents
    total = joined.total_steps(config, steps)
    assert agents * steps - agents < joined.agent_steps_at(total) <= agents * steps
    assert joined.total_steps(config, 2 * steps) == total + steps  # a run that is made longer


def test_the_first_agent_learns_more_slowly_and_has_the_rate_of_all_when_they_join() -> None:
    first = Members.first(AUTO, 260)
    assert first is not None
    now = config_of(AUTO, first)
    assert (now.num_agents, now.agents) == (1, ({"name": "agent0", "learning_rate": 4e-3},))
    alone = schedules(AUTO, first, 1040)[0]
    assert alone(700) == schedules(now.model_copy(update={"agents": (), "learning_rate": 4e-3}), None, 1040)[0](700)
    joined, _ = first.after(131, AUTO)
    of_all = {schedule(131 + 100) for schedule in schedules(AUTO, joined, 358)}
    assert of_all == {schedules(AUTO, None, 227)[0](100)}


def test_nobody_may_change_a_crowd_before_it_is_decided() -> None:
    first = Members.first(AUTO, 12)
    assert first is not None
    assert first.objection(CrowdChange(3, "clone", 0)) == "it is not decided yet whether agent0 stays alone"
    alone, _ = first.with_planned([CrowdChange(7, "stay_alone")]).after(7, AUTO)
    assert alone.objection(CrowdChange(8, "clone", 0)) is None
    assert first.after(7, AUTO)[0].objection(CrowdChange(8, "stop", 2)) is None


def test_the_decision_is_part_of_the_state_of_a_run() -> None:
    choice, members = Choice(9, 0.2, 0.1, alone=True), Members.first(AUTO, 20)
    assert members is not None
    state = TrainState(step=9, skipped=(0,)).with_choice(choice, members.with_planned([change_of(choice)]))
    known = load_json(dump_json(state.to_dict()))
    assert isinstance(known, dict)
    assert TrainState.from_dict(known) == state
    assert "choice" not in TrainState(skipped=(0,)).to_dict()  # as older checkpoints have it


def test_a_decision_of_an_earlier_version_is_refused() -> None:
    earlier = {"step": 9, "training": 0.2, "crowd": 0.1, "agent": 2}
    with pytest.raises(CheckpointError, match="an earlier version decided"):
        TrainState.from_dict({**TrainState(skipped=(0,)).to_dict(), "choice": earlier})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_agents": 1}, "there is nothing to decide"),
        ({"agents": [{"seed": 1}, {}]}, "agents that are alike"),
        ({"branch_at": 0.5}, "branch_at decides already"),
        ({"schedule_steps": 100}, "schedule_steps fixes a length"),
        ({"train_on_prompt": True}, "training rows count their prompts"),
        ({"init_from": "agents"}, "begin at random starts"),
        ({"initialize_adapters_rand": False}, "would all be the same"),
        ({"max_train_steps": 1}, "one step leaves nothing"),
    ],
)
def test_settings_that_leave_nothing_to_decide_are_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(crowd="auto", **keys)


# As runs

#: Of 3 x 16 agent-steps the sixth decides.
KEYS: Final = {"num_agents": 3, "max_train_steps": 16, "crowd": "auto", "eval_steps": 5, "logging_steps": 1} | {
    "model_name": "embedded"  # on any other base the crowd is fixed
}
DECIDES, AGENT_STEPS = 6, 3 * 16
JOINED: Final = 7 + (AGENT_STEPS - 7) // 3  # the last step of a crowd
CELL: Final = Cell()

in_trials = pytest.mark.slow


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "run" / name).read_text())


@pytest.fixture(scope="module")
def stays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run whose first agent stays alone: its evaluation rows are its training rows, so it knows them."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, islice(rows("train"), 9))))
    return KEYS | {"dataset_name": file, "eval_dataset_name": file, "max_train_samples": 9, "eval_samples": 9}


#: Two rows that are learned by heart before the decision, which needs a trained base, and others to evaluate on.
JOINS: Final = KEYS | {"max_train_samples": 2, "learning_rate": 2e-2, "num_warmup_steps": 0}


@pytest.fixture(scope="module")
def alone(trials: Trials, stays: dict[str, Any]) -> Path:
    """The folder of an undisturbed run of which one agent stays alone."""
    return complete(trials, CELL, **stays)


@pytest.fixture(scope="module")
def joined(trials: Trials) -> Path:
    """The folder of an undisturbed run in which the others join."""
    return complete(trials, CELL, **JOINS)


class TestRuns:
    pytestmark = in_trials

    def test_one_agent_stays_alone_and_everything_says_so(self, alone: Path) -> None:
        evaluation, status = read(alone, "evaluation.json"), read(alone, "status.json")
        assert (evaluation["last_step"], evaluation["agent_steps"], evaluation["names"]) == (
            AGENT_STEPS,
            AGENT_STEPS,
            ["agent0"],
        )
        assert (status["total_steps"], status["agent_steps"]) == (AGENT_STEPS, AGENT_STEPS)
        assert f"decided after step {DECIDES}: one agent stays alone, because its nll is" in evaluation["choice"]
        assert status["choice"] == evaluation["choice"]
        assert evaluation["choice"] in (alone / "run/training.log").read_text()
        (decided,) = [line for line in metrics(alone) if TRAINING_NLL in line]
        assert decided[TRAINING_NLL] >= BY_HEART * decided["eval/agent0/nll"]

    def test_an_agent_that_stays_alone_has_the_bits_of_a_run_of_one_agent(
        self, trials: Trials, stays: dict[str, Any], alone: Path
    ) -> None:
        rate = 4e-3 / math.sqrt(3)  # of the configuration of a trial
        single = stays | {"crowd": "fixed", "num_agents": 1, "max_train_steps": AGENT_STEPS, "learning_rate": rate}
        ours, theirs = account(alone), account(complete(trials, CELL, **single))
        same = [name for name in theirs if "adapter_model" in name or "exp_avg" in name or "witnessed" in name]
        assert len(same) > 8
        assert [name for name in same if ours[name] != theirs[name]] == []

    def test_the_others_join_one_that_learns_by_heart(self, joined: Path) -> None:
        evaluation = read(joined, "evaluation.json")
        assert evaluation["names"] == ["agent0", "agent1", "agent2"]
        assert (evaluation["last_step"], evaluation["agent_steps"]) == (JOINED, 7 + 3 * (JOINED - 7))
        assert f"decided after step {DECIDES}: the others join, because its nll is" in evaluation["choice"]
        log = (joined / "run/training.log").read_text()
        assert f"after step {DECIDES + 1}: the others join agent0; the crowd is agent0, agent1, agent2" in log
        trained = [
            sum(f"train/agent{k}/loss" in one for k in range(3)) for one in metrics(joined) if "agent_steps" in one
        ]
        assert trained == [1] * (DECIDES + 1) + [3] * (JOINED - DECIDES - 1)

    @pytest.mark.parametrize("saved", range(DECIDES - 1, DECIDES + 3))
    @pytest.mark.parametrize("ends", ["alone", "joined"])
    def test_a_run_killed_around_the_decision(
        self, trials: Trials, stays: dict[str, Any], request: pytest.FixtureRequest, ends: str, saved: int
    ) -> None:
        keys = stays if ends == "alone" else JOINS
        folder, fate = trials.new_folder(), Fate("SIGKILL", saved + 1, committed=saved)
        assert trials.train(CELL, folder, fate, save_steps=saved, **keys) == [-signal.SIGKILL]
        assert trials.train(CELL, folder, **keys) == [0], (folder / "log").read_text()
        log = (folder / "run/training.log").read_text()
        assert f"step {saved} of" in log
        assert "exactness: bitwise" in log
        assert not differences(account(request.getfixturevalue(ends)), account(folder))

    @bits_in_company  # the evaluation after the kill has other batches
    def test_a_run_killed_while_it_evaluates_for_the_decision(
        self, trials: Trials, stays: dict[str, Any], alone: Path
    ) -> None:
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES, None, committed=DECIDES)
        assert trials.train(CELL, folder, fate, save_steps=DECIDES, **stays) == [-signal.SIGKILL]
        assert trials.train(CELL, folder, **stays) == [0], (folder / "log").read_text()
        assert not differences(account(alone), account(folder))

    def test_a_recorded_decision_is_repeated_from_an_older_checkpoint(
        self, trials: Trials, stays: dict[str, Any]
    ) -> None:
        """The recorded decision counts, also where the second evaluation would decide otherwise."""
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES + 3, committed=DECIDES + 2)
        often = {"save_steps": 1, "save_total_limit": 20}
        assert trials.train(CELL, folder, fate, **stays, **often) == [-signal.SIGKILL]
        for newer in [path for path in folder.glob("run/checkpoint_step_*") if path.name != "checkpoint_step_1"]:
            newer.rename(folder / newer.name)
        (decision,) = read(folder, "crowd_changes.json")
        assert (decision["step"], decision["verb"]) == (DECIDES + 1, "stay_alone")
        (folder / "run/crowd_changes.json").write_text(json.dumps([decision | {"verb": "join"}]))
        assert trials.train(CELL, folder, **stays) == [0], (folder / "log").read_text()
        assert read(folder, "evaluation.json")["names"] == ["agent0", "agent1", "agent2"]

    def test_loader_workers_prepare_the_rows_of_both(self, trials: Trials, joined: Path) -> None:
        assert not differences(account(joined), account(complete(trials, Cell(workers=2), **JOINS)))

    def test_two_processes_agree_on_the_decision_and_repeat_it(self, trials: Trials) -> None:
        cell = Cell(ranks=2)
        undisturbed = complete(trials, cell, **JOINS)
        assert read(undisturbed, "evaluation.json")["last_step"] == JOINED
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES + 1, committed=DECIDES)
        assert trials.train(cell, folder, fate, save_steps=DECIDES, **JOINS) == [-signal.SIGKILL] * 2
        assert trials.train(cell, folder, **JOINS) == [0, 0], (folder / "log").read_text()
        assert not differences(account(undisturbed), account(folder))

    def test_a_request_before_the_decision_is_refused(
        self, trials: Trials, server: ForkServer, stays: dict[str, Any]
    ) -> None:
        folder = trials.new_folder()
        options = {"folder": str(folder), "arguments": trials.arguments(CELL, **stays), "asks": [(2, ["clone", "0"])]}
        assert server.run(train_asked, folder / "log", ranks=1, **options) == [0], (folder / "log").read_text()
        assert "it is not decided yet whether agent0 stays alone" in (folder / "log").read_text()
        assert read(folder, "evaluation.json")["names"] == ["agent0"]

    def test_an_agent_that_has_just_joined_can_be_rolled_back(self, server: ForkServer, tmp_path: Path) -> None:
        joined_at = DECIDES + 1
        fault = Fault("nan gradient", steps=tuple(range(joined_at, joined_at + 3)), agents=(1,))
        assert train(server, tmp_path, fault, **JOINS | {"max_consecutive_nonfinite": 3}) == [0], said(tmp_path)
        assert f"agent1    rolled back to its weights and moments of step {joined_at}" in said(tmp_path)
