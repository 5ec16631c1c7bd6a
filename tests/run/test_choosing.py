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
from ci_llm.errors import ConfigError
from ci_llm.run.choosing import TRAINING_NLL, changes_of, choose
from ci_llm.run.members import CrowdChange, Members, config_of
from ci_llm.run.state import Choice, TrainState
from tests.support.asked import train_asked
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Fate, Trials, account, differences

AUTO: Final = Config(num_agents=4, crowd="auto", learning_rate=8e-3)


# As values


def test_agents_that_know_their_rows_better_than_the_crowd_knows_new_ones_stay_together() -> None:
    agents = {0: 0.4, 4: 0.2, 7: 0.3}
    assert choose(5, 0.10, 0.15, agents).agent is None
    assert choose(5, 0.15, 0.15, agents).agent == 4
    assert choose(5, 0.20, 0.15, agents | {4: math.nan}).agent == 7
    assert choose(5, 0.20, 0.15, {0: math.nan}).agent is None
    assert choose(5, math.nan, 0.15, agents).agent is None


@given(st.integers(2, 12), st.integers(4, 5000))
def test_one_agent_takes_the_steps_of_all(agents: int, steps: int) -> None:
    config = AUTO.model_copy(update={"num_agents": agents})
    (change,) = changes_of(Choice(steps // 4, 0.2, 0.1, agent=1), config)
    before = Members.configured(config).with_planned([change])
    assert before.total_steps(config, steps) == steps
    alone, sources = before.after(change.step, config)
    total = alone.total_steps(config, steps)
    assert (alone.folders, sources) == (["agent1"], [1])
    assert alone.agent_steps_at(total) == agents * steps


def test_one_agent_keeps_its_settings_and_number_and_learns_more_slowly() -> None:
    (change,) = changes_of(Choice(9, 0.2, 0.1, agent=2), AUTO)
    alone, _ = Members.configured(AUTO).with_planned([change]).after(10, AUTO)
    now = config_of(AUTO, alone)
    assert (now.num_agents, now.agents) == (1, ({"name": "agent2", "learning_rate": 4e-3},))
    assert (alone.agents[0].index, alone.agents[0].origin) == (2, 2)
    assert str(change) == "single out agent2 with learning_rate 0.004"


def test_nobody_may_change_a_crowd_that_one_agent_is_about_to_leave() -> None:
    (change,) = changes_of(Choice(9, 0.2, 0.1, agent=2), AUTO)
    planned = Members.configured(AUTO).with_planned([change])
    assert planned.objection(CrowdChange(9, "stop", 2)) == "agent2 goes on alone after step 10"


def test_the_decision_is_part_of_the_state_of_a_run() -> None:
    choice = Choice(9, 0.2, 0.1, agent=2)
    members = Members.configured(AUTO).with_planned(changes_of(choice, AUTO))
    state = TrainState(step=9, skipped=(0,) * 4).with_choice(choice, members)
    known = load_json(dump_json(state.to_dict()))
    assert isinstance(known, dict)
    assert TrainState.from_dict(known).choice == choice
    assert TrainState.from_dict(known).members == members
    kept = TrainState(skipped=(0,) * 4).with_choice(Choice(9, 0.1, 0.2), Members.configured(AUTO))
    assert kept.members is None
    assert "choice" not in TrainState(skipped=(0,)).to_dict()  # as older checkpoints have it


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_agents": 1}, "there is nothing to decide"),
        ({"agents": [{"seed": 1}, {}]}, "agents that are alike"),
        ({"branch_at": 0.5}, "branch_at decides already"),
        ({"schedule_steps": 100}, "schedule_steps fixes a length"),
        ({"train_on_prompt": True}, "training rows count their prompts"),
        ({"max_train_steps": 3}, "fewer than 4 steps"),
    ],
)
def test_what_leaves_nothing_to_decide(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(crowd="auto", **keys)


# As runs

#: The third of 12 steps decides.
KEYS: Final = {"num_agents": 3, "max_train_steps": 12, "crowd": "auto", "eval_steps": 5, "logging_steps": 1}
DECIDES, LAST = 3, 4 + 3 * 8
CELL: Final = Cell()
#: Two rows that are learned by heart before the decision, and others to evaluate on.
BY_HEART: Final = KEYS | {"max_train_samples": 2, "learning_rate": 2e-2, "num_warmup_steps": 0, "max_train_steps": 24}

in_trials = pytest.mark.slow


def complete(trials: Trials, cell: Cell = CELL, **keys: Any) -> Path:
    folder = trials.new_folder()
    assert trials.train(cell, folder, **keys) == [0] * cell.ranks, (folder / "log").read_text()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "run" / name).read_text())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run of which one agent goes on alone: it is evaluated on its training rows.

    There the mean of probabilities is never worse than the agents' mean.
    """
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, islice(rows("train"), 9))))
    same = {"dataset_name": file, "eval_dataset_name": file, "max_train_samples": 9, "eval_samples": 9}
    return KEYS | same


@pytest.fixture(scope="module")
def alone(trials: Trials, keys: dict[str, Any]) -> Path:
    """The folder of an undisturbed run of which one agent goes on alone."""
    return complete(trials, **keys)


class TestRuns:
    pytestmark = in_trials

    def test_one_agent_goes_on_alone_and_everything_says_so(self, alone: Path) -> None:
        evaluation, status = read(alone, "evaluation.json"), read(alone, "status.json")
        assert (evaluation["last_step"], evaluation["agent_steps"]) == (LAST, 3 * 12)
        assert (status["total_steps"], status["agent_steps"]) == (LAST, 3 * 12)
        assert "goes on alone, because the agents' nll on training rows" in evaluation["choice"]
        assert status["choice"] == evaluation["choice"]
        log = (alone / "run/training.log").read_text()
        assert f"decided after step {DECIDES}: " in log
        (survivor,) = evaluation["names"]
        assert f"after step {DECIDES + 1}: single out {survivor} with learning_rate" in log
        lines = [json.loads(line) for line in (alone / "run/metrics.jsonl").read_text().splitlines()]
        decided = next(line for line in lines if TRAINING_NLL in line)
        nll = {name: decided[f"eval/{name}/nll"] for name in ("agent0", "agent1", "agent2")}
        assert survivor == min(nll, key=lambda name: nll[name])
        assert decided[TRAINING_NLL] >= decided["eval/crowd/nll"]
        trained = [sum(f"train/agent{k}/loss" in line for k in range(3)) for line in lines if "agent_steps" in line]
        assert trained == [3] * (DECIDES + 1) + [1] * (LAST - DECIDES - 1)

    @pytest.mark.parametrize("saved", range(DECIDES - 1, DECIDES + 3))
    def test_a_run_killed_around_the_decision(
        self, trials: Trials, keys: dict[str, Any], alone: Path, saved: int
    ) -> None:
        folder, fate = trials.new_folder(), Fate("SIGKILL", saved + 1, committed=saved)
        assert trials.train(CELL, folder, fate, save_steps=saved, **keys) == [-signal.SIGKILL]
        assert trials.train(CELL, folder, **keys) == [0], (folder / "log").read_text()
        log = (folder / "run/training.log").read_text()
        assert f"step {saved} of" in log
        assert "exactness: bitwise" in log
        assert not differences(account(alone), account(folder))

    def test_a_run_killed_while_it_evaluates_for_the_decision(
        self, trials: Trials, keys: dict[str, Any], alone: Path
    ) -> None:
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES, None, committed=DECIDES)
        assert trials.train(CELL, folder, fate, save_steps=DECIDES, **keys) == [-signal.SIGKILL]
        assert trials.train(CELL, folder, **keys) == [0], (folder / "log").read_text()
        assert not differences(account(alone), account(folder))

    def test_what_was_decided_is_done_again_from_an_older_checkpoint(
        self, trials: Trials, keys: dict[str, Any], alone: Path
    ) -> None:
        """Whatever the evaluation says the second time: the record does."""
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES + 3, committed=DECIDES + 2)
        often = {"save_steps": 1, "save_total_limit": 20}
        assert trials.train(CELL, folder, fate, **keys, **often) == [-signal.SIGKILL]
        for newer in [path for path in folder.glob("run/checkpoint_step_*") if path.name != "checkpoint_step_1"]:
            newer.rename(folder / newer.name)
        (decision,) = read(folder, "crowd_changes.json")
        (survivor,) = read(alone, "evaluation.json")["names"]
        assert (decision["step"], f"agent{decision['agent']}") == (DECIDES + 1, survivor)
        other = (decision["agent"] + 1) % 3
        (folder / "run/crowd_changes.json").write_text(json.dumps([decision | {"agent": other}]))
        assert trials.train(CELL, folder, **keys) == [0], (folder / "log").read_text()
        assert read(folder, "evaluation.json")["names"] == [f"agent{other}"]

    def test_loader_workers_prepare_the_rows_of_the_longer_run(
        self, trials: Trials, keys: dict[str, Any], alone: Path
    ) -> None:
        assert not differences(account(alone), account(complete(trials, Cell(workers=2), **keys)))

    def test_two_processes_agree_and_repeat_it(self, trials: Trials, keys: dict[str, Any]) -> None:
        cell = Cell(ranks=2)
        undisturbed = complete(trials, cell, **keys)
        assert read(undisturbed, "evaluation.json")["agent_steps"] == 3 * 12
        folder, fate = trials.new_folder(), Fate("SIGKILL", DECIDES + 1, committed=DECIDES)
        assert trials.train(cell, folder, fate, save_steps=DECIDES, **keys) == [-signal.SIGKILL] * 2
        assert trials.train(cell, folder, **keys) == [0, 0], (folder / "log").read_text()
        assert not differences(account(undisturbed), account(folder))

    def test_a_crowd_that_is_kept_trains_as_one_that_is_fixed(self, trials: Trials) -> None:
        kept = complete(trials, **BY_HEART)
        fixed = complete(trials, **BY_HEART | {"crowd": "fixed"})
        evaluation = read(kept, "evaluation.json")
        assert evaluation["agent_steps"] == 3 * 24
        assert "the crowd is kept, because" in evaluation["choice"]
        ours, theirs = account(kept), account(fixed)
        same = [name for name in theirs if "adapter_model" in name or "exp_avg" in name or "witnessed" in name]
        assert len(same) > 24
        assert [name for name in same if ours[name] != theirs[name]] == []
        folder, fate = trials.new_folder(), Fate("SIGKILL", 9, committed=8)
        assert trials.train(CELL, folder, fate, save_steps=8, **BY_HEART) == [-signal.SIGKILL]
        assert trials.train(CELL, folder, **BY_HEART) == [0], (folder / "log").read_text()
        assert not differences(ours, account(folder))

    def test_a_crowd_that_people_have_changed_is_not_decided_about(self, trials: Trials, server: ForkServer) -> None:
        folder = trials.new_folder()
        arguments = trials.arguments(CELL, **KEYS)
        asks = [(2, ["stop", "1"])]
        options = {"folder": str(folder), "arguments": arguments, "asks": asks}
        assert server.run(train_asked, folder / "log", ranks=1, **options) == [0], (folder / "log").read_text()
        evaluation = read(folder, "evaluation.json")
        assert evaluation["names"] == ["agent0", "agent2"]
        assert "choice" not in evaluation
