"""The members of a crowd as values: stops, agent-steps, and requests by files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.config import Config
from ci_llm.core.evaluation_file import Best
from ci_llm.core.run_folder import CROWD_CHANGES
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.run import crowd_changes
from ci_llm.run.start.agent_settings import config_of, crowd_settings
from ci_llm.run.step.requests import FOLDER, ask, decide, forget_after, is_waiting, read_record, read_waiting
from ci_llm.run.step.state import MAX_IN_A_ROW, AgentRecovery, AgentState, CrowdChange, TrainState, Validation

FOUR = Config(num_agents=4)


def state_of(config: Config = FOUR) -> TrainState:
    return TrainState.at_start(config.num_agents)


def after(state: TrainState, *changes: CrowdChange, step: int = 9) -> TrainState:
    return replace(state.with_planned(changes), step=step).after_changes()


def test_numbers_stay_with_their_agents() -> None:
    changes = (CrowdChange(3, 1), CrowdChange(5, 2))
    found = after(state_of(), *changes)
    assert found.names == ["agent0", "agent3"]
    one_by_one = state_of()
    for step in (3, 4, 5, 6):
        one_by_one = after(one_by_one, *changes, step=step)
    assert one_by_one.agents == found.agents
    assert one_by_one.after_changes() is one_by_one


def test_an_agent_that_stays_has_its_settings() -> None:
    config = Config(agents=[{}, {"name": "one", "learning_rate": 1e-2}, {"seed": 7}])
    found = after(state_of(config), CrowdChange(1, 0)).numbers
    assert config_of(config, found).agents == (
        {"name": "one", "learning_rate": 1e-2},
        {"name": "agent2", "seed": 7},
    )
    assert [(each.seed, each.index) for each in crowd_settings(config, found).each()] == [(42, 1), (7, 0)]
    assert config_of(config, state_of(config).numbers) is config


def test_agent_steps_count_every_agent() -> None:
    found = after(state_of(), CrowdChange(3, 1), step=3)
    found = after(found, CrowdChange(5, 2), step=5)
    assert replace(found, step=10).agent_steps == 3 * 4 + 2 * 3 + 5 * 2
    assert replace(state_of(), step=10).agent_steps == 40


def test_a_request_that_cannot_be_met_is_refused_with_the_reason() -> None:
    one = after(state_of(Config(num_agents=2)), CrowdChange(1, 0))
    assert one.objection(CrowdChange(2, 1)) == "agent1 is the only agent that trains"
    assert one.objection(CrowdChange(2, 0)) == "there is no agent0: there are agent1"
    three = state_of().with_planned([CrowdChange(2, 0)])
    assert three.objection(CrowdChange(3, 1)) is None
    assert three.objection(CrowdChange(1, 1)) == (
        "agent1 stays: an earlier attempt was asked for changes, the last after step 2: ask again then"
    )
    exhausted = AgentRecovery(rolled_back=True, nonfinite_in_a_row=MAX_IN_A_ROW)
    four = TrainState(tuple(AgentState(k, recovery=AgentRecovery() if k == 1 else exhausted) for k in range(4)))
    assert four.objection(CrowdChange(2, 1)) == "agent1 is the only agent that trains"
    assert four.objection(CrowdChange(2, 2)) is None


def test_the_record_of_an_agent_stays_with_it_through_a_checkpoint() -> None:
    agents = tuple(AgentState(k, k + 1, AgentRecovery(lr_factor=1 / (k + 1)), Best(2, 0.6)) for k in range(4))
    best = Validation(step=2, crowd=Best(2, 0.5), without_better=3)
    state = TrainState(agents, step=2, validation=best)
    assert state.best_note == "; best yet"
    assert replace(state, step=3).best_note == ""
    state = after(state, CrowdChange(3, 1))
    assert [each.recovery.lr_factor for each in state.agents] == [1, 1 / 3, 1 / 4]
    assert [each.skipped for each in state.agents] == [1, 3, 4]
    assert state.validation == Validation(step=2)  # the best step is one of the present crowd
    assert [each.best for each in state.agents] == [None] * 3
    state = state.evaluated(0.7, [0.8] * 3)
    assert state.best_note == "; best of this crowd", "it is worse than what was best before the change"
    assert [each.best for each in state.agents] == [Best(9, 0.8)] * 3
    assert state.evaluated(0.1, [0.1] * 3) is state, "an evaluation counts once"
    known = load_json(dump_json(state.to_dict()))
    assert isinstance(known, dict)
    assert TrainState.from_dict(known) == state
    assert known["history"]["made"] == ({"step": 3, "agent": 1},), "as checkpoints of earlier versions have it"


# Requests


def test_a_request_is_decided_once_and_stays_recorded(tmp_path: Path) -> None:
    assert not is_waiting(tmp_path)
    asked = ask(tmp_path, 2)
    assert is_waiting(tmp_path)
    waiting = read_waiting(tmp_path, 7)
    assert waiting == [CrowdChange(7, 2)]
    decide(tmp_path, waiting)
    assert not is_waiting(tmp_path)
    assert [(each.id, each.step, each.agent) for each in read_record(tmp_path)] == [(asked, 7, 2)]
    (tmp_path / FOLDER / f"{asked}.json").write_text('{"stop": 2}')  # a kill before it was removed
    assert read_waiting(tmp_path, 8) == []
    decide(tmp_path, [])
    assert not is_waiting(tmp_path)
    assert [each.step for each in read_record(tmp_path)] == [7]
    forget_after(tmp_path, 6)
    assert not (tmp_path / CROWD_CHANGES).exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "holds no request"),
        ("[1]", "no request"),
        ('{"stop": true}', "is not the number"),
        ('{"clone": 1}', "no request"),
    ],
)
def test_a_file_that_is_not_a_request_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "odd.json").write_text(content)
    (found,) = read_waiting(tmp_path, 7)
    assert found.refused is not None
    assert says in found.refused
    assert "odd.json" in found.refused
    decide(tmp_path, [found])
    assert not is_waiting(tmp_path)


def test_a_refusal_names_an_agent_only_if_one_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "odd.json").write_text("{")
    ask(tmp_path, 7)
    trainer: Any = SimpleNamespace(state=state_of())
    attempt: Any = SimpleNamespace(config=SimpleNamespace(run_folder=tmp_path), requests_wait=None)
    assert crowd_changes._take_requests(trainer, attempt) == []
    (of_agent,) = [line for line in caplog.messages if "there is no agent7" in line]
    (of_file,) = [line for line in caplog.messages if line != of_agent]
    assert "odd.json" in of_file
    assert "agent0" not in of_file, "nobody has asked for it"
