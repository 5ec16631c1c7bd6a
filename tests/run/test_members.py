"""The members of a crowd as values: branches and their agent-steps, stops, clones, and requests by files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.config import Config
from ci_llm.config.config import entries_of
from ci_llm.core.run_folder import CROWD_CHANGES
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.errors import CheckpointError, ConfigError, ModelError
from ci_llm.run.crowd_changes import change_crowd
from ci_llm.run.start.agent_settings import crowd_settings, require_distinct_branches, schedule, schedules
from ci_llm.run.step import members as crowd_requests
from ci_llm.run.step.members import (
    FOLDER,
    CrowdChange,
    Members,
    RecordFailure,
    ask,
    config_of,
    decide,
    forget_after,
    is_waiting,
    read_record,
    read_waiting,
    settings_of_clone,
)
from ci_llm.run.step.nonfinite_policy import AgentRecovery, RecoveryState
from ci_llm.run.step.state import Best, TrainState, Validation
from tests.support.log_lines import log_lines

FOUR = Config(num_agents=4)


def members_of(config: Config = FOUR) -> Members:
    return Members.configured(config)


def after(members: Members, *changes: CrowdChange, config: Config = FOUR, step: int = 9) -> tuple[Members, list[int]]:
    return members.with_planned(changes).after(step, config)


# Branches


@pytest.mark.slow
@given(st.integers(2, 12), st.integers(2, 5000), st.floats(0.01, 0.99))
def test_a_run_that_branches_takes_the_agent_steps_of_its_crowd(agents: int, steps: int, share: float) -> None:
    config = Config(num_agents=agents, branch_at=share)
    members = Members.first(config, steps)
    assert members is not None
    total, (branch,) = members.total_steps(config, steps), members.planned
    assert 0 < branch.step < total
    grown, sources = members.after(branch.step, config)
    assert (sources, grown.folders) == ([0] * agents, [f"agent{k}" for k in range(agents)])
    assert grown.agent_steps_at(total) == agents * steps
    assert abs(branch.step / (agents * steps) - share) <= max(1 / steps, 1e-9)
    assert grown.total_steps(config, steps) == total


@pytest.mark.parametrize("keys", [{"branch_at": 0.5}, {"crowd": "auto"}])
def test_one_step_by_epochs_leaves_no_room_for_the_others(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the run has one step"):
        Members.first(Config(num_agents=2, epochs=1, **keys), 1)
    members = Members.first(Config(num_agents=2, epochs=1, **keys), 2)
    assert members is not None
    assert members.waits
    assert members.planned[0].step < members.total_steps(Config(num_agents=2, **keys), 2)


def test_branches_have_the_settings_of_their_entries_and_draw_row_weights() -> None:
    config = Config(
        branch_at=0.5, agents=[{"name": "fast", "learning_rate": 1e-2}, {"row_weights": "uniform", "seed": 7}]
    )
    members = Members.first(config, 10)
    assert members is not None
    assert config_of(config, members).each_agent[0].row_weights == "uniform"
    grown, _ = members.after(10, config)
    fast, plain = config_of(config, grown).each_agent
    assert (fast.learning_rate, fast.row_weights, plain.row_weights) == (1e-2, "bootstrap", "uniform")
    assert len({config.seed, fast.data_seed, plain.data_seed}) == 3
    assert config_of(config, grown).agent_names == ["fast", "agent1"]
    assert [(each.seed, each.index) for each in crowd_settings(config, grown).each()] == [(42, 0), (7, 0)]


def test_branches_that_would_stay_equal_are_refused() -> None:
    uniform = {"row_weights": "uniform", "data_seed": 5}
    with pytest.raises(ModelError, match="some branches would stay equal"):
        require_distinct_branches(Config(branch_at=0.5, agents=[uniform, uniform]))
    require_distinct_branches(Config(branch_at=0.5, agents=[uniform, {}]))
    require_distinct_branches(Config(branch_at=0.5, agents=[uniform, uniform], lora_dropout=0.1))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_agents": 1}, "num_agents is 1"),
        ({"agents": [{"lora_rank": 4}, {}]}, "lora_rank differs between agents"),
        ({"agents": [{"max_train_samples": 4}, {}]}, "max_train_samples differs between agents"),
        ({"max_train_steps": 1}, "one step has no point to branch at"),
    ],
)
def test_settings_that_exclude_branches_are_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(branch_at=0.5, **keys)


def test_branches_with_a_diversity_term_keep_the_common_order() -> None:
    config = Config(num_agents=2, branch_at=0.5, diversity="joint")
    members = Members.first(config, 10)
    assert members is not None
    grown, _ = members.after(10, config)
    assert not config_of(config, grown).has_own_rows


def test_the_schedule_of_a_run_that_branches_spans_its_agent_steps() -> None:
    """The branches take up the rate at which the one agent stopped, and go through the rest of the schedule."""
    config = Config(num_agents=4, branch_at=0.75, num_warmup_steps=2)
    trunk = Members.first(config, 20)
    assert trunk is not None
    (branch,) = trunk.planned
    branches, _ = trunk.after(branch.step, config)
    whole, total = schedule(config, 4 * 20), trunk.total_steps(config, 20)
    (before,), after = schedules(config, trunk, total), schedules(config, branches, total)
    assert [before(step) for step in range(60)] == [whole(step) for step in range(60)]
    for own in after:
        assert [own(step) for step in range(60, total + 1)] == [whole(step) for step in range(60, 81, 4)]


# Stops and clones


def test_numbers_stay_with_their_agents_and_are_never_given_again() -> None:
    changes = (
        CrowdChange(3, "stop", 1),
        CrowdChange(4, "clone", 3, {"learning_rate": 1e-3}),
        CrowdChange(5, "stop", 4),
        CrowdChange(6, "clone", 0),
    )
    found, sources = after(members_of(), *changes)
    assert found.folders == ["agent0", "agent2", "agent3", "agent5"]
    assert sources == [0, 2, 3, 0]
    assert [each.index for each in found.agents] == [0, 2, 3, 0]  # a copy draws as its original
    assert not found.common_start
    one_by_one, last = members_of(), [0, 1, 2, 3]
    for step in (3, 4, 5, 6):
        one_by_one, own = one_by_one.with_planned(changes).after(step, FOUR)
        last = [last[place] for place in own]
    assert (one_by_one.agents, last) == (found.agents, sources)


def test_a_clone_has_the_settings_of_its_original_and_those_it_was_given() -> None:
    config = Config(agents=[{"name": "one", "learning_rate": 1e-2, "weight_decay": 0.1}, {}])
    found, _ = after(members_of(config), CrowdChange(1, "clone", 0, {"learning_rate": 1e-3, "seed": 5}), config=config)
    assert config_of(config, found).agents[2] == {
        "name": "agent2",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "seed": 5,
    }
    assert (found.agents[2].index, found.agents[2].origin) == (0, 0)


def test_agent_steps_count_every_agent() -> None:
    found, _ = after(members_of(), CrowdChange(3, "stop", 1), step=3)
    found, _ = after(found, CrowdChange(5, "stop", 2), step=5)
    assert found.agent_steps_at(10) == 3 * 4 + 2 * 3 + 5 * 2
    assert TrainState(step=10, skipped=(0,) * 4).agent_steps == 40
    assert TrainState(step=10, skipped=(0,) * 2, members=found).agent_steps == 28


def test_a_request_that_cannot_be_met_is_refused_with_the_reason() -> None:
    one, _ = after(members_of(Config(num_agents=2)), CrowdChange(1, "stop", 0), config=Config(num_agents=2))
    assert one.objection(CrowdChange(2, "stop", 1)) == "agent1 is the only agent that trains"
    assert one.objection(CrowdChange(2, "clone", 0)) == "there is no agent0: there are agent1"
    assert one.objection(CrowdChange(2, "clone", 1, {"name": "agent1"})) == "the name agent1 is taken"
    assert one.objection(CrowdChange(2, "clone", 1)) is None
    again = one.with_planned([CrowdChange(2, "clone", 1)])
    assert again.objection(CrowdChange(2, "clone", 1)) == "the same was asked for in the same step"
    assert again.objection(CrowdChange(3, "clone", 1)) is None
    assert again.objection(CrowdChange(1, "stop", 1)) == (
        "an earlier attempt was asked for changes, the last after step 2: ask again then"
    )
    three = members_of()
    assert three.objection(CrowdChange(2, "stop", 1), dropped={0, 2, 3}) == "agent1 is the only agent that trains"
    assert three.objection(CrowdChange(2, "stop", 2), dropped={0, 2, 3}) is None
    assert three.objection(CrowdChange(2, "clone", 2), dropped={2}) == (
        "agent2 was dropped, and its copy would not train either"
    )
    trunk = Members.first(Config(branch_at=0.5), 10)
    assert trunk is not None
    assert trunk.objection(CrowdChange(2, "clone", 0)) == "the crowd is one agent until it branches"


def test_the_state_of_a_run_carries_its_members_through_a_checkpoint() -> None:
    found, sources = after(members_of(), CrowdChange(3, "clone", 0, {"learning_rate": 1e-3}), CrowdChange(3, "stop", 1))
    best = Validation(step=2, crowd=Best(2, 0.5), agents=(Best(2, 0.6),) * 4, without_better=3)
    recovery = RecoveryState(agents=tuple(AgentRecovery(lr_factor=1 / k) for k in (1, 2, 3, 4)))
    state = TrainState(step=9, skipped=(1, 2, 3, 4), recovery=recovery, validation=best).with_members(found, sources)
    assert [each.lr_factor for each in state.recovery.agents] == [1, 1 / 3, 1 / 4, 1]
    assert state.skipped == (1, 3, 4, 1)
    assert state.validation == Validation(step=2)  # the best step is one of the present crowd
    again = replace(state, validation=state.validation.after(9, 0.7, [0.8] * 4))
    assert again.best_note == "; best of this crowd", "it is worse than what was best before the change"
    assert TrainState(step=2, validation=best).best_note == "; best yet"
    assert TrainState(step=3, validation=best).best_note == ""
    known = load_json(dump_json(state.to_dict()))
    assert isinstance(known, dict)
    assert TrainState.from_dict(known) == state
    assert "members" not in TrainState(skipped=(0,)).to_dict()  # as older checkpoints have it


# Requests


def test_a_request_is_decided_once_and_stays_recorded(tmp_path: Path) -> None:
    assert not is_waiting(tmp_path)
    asked = ask(tmp_path, "clone", 2, {"learning_rate": 1e-3})
    assert is_waiting(tmp_path)
    assert read_waiting(tmp_path) == [asked]
    decide(tmp_path, [replace(asked, step=7)])
    assert not is_waiting(tmp_path)
    assert [each.change for each in read_record(tmp_path)] == [CrowdChange(7, "clone", 2, {"learning_rate": 1e-3})]
    (tmp_path / FOLDER / f"{asked.id}.json").write_text('{"verb": "clone", "agent": 2}')  # a kill before it was removed
    assert read_waiting(tmp_path) == []
    decide(tmp_path, [])
    assert not is_waiting(tmp_path)
    assert [each.step for each in read_record(tmp_path)] == [7]
    forget_after(tmp_path, 6)
    assert not (tmp_path / CROWD_CHANGES).exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no request"),
        ("[1]", "no request"),
        ('{"verb": "stop", "agent": true}', "it asks for nothing"),
        ('{"verb": "stop", "agent": 1, "own": {"seed": 1}}', "it asks for nothing"),
        ('{"verb": "clone", "agent": 1, "own": {"batch_size": 1}}', "batch_size cannot differ"),
        ('{"verb": "clone", "agent": 1, "own": {"r": 4}}', "so its lora_rank"),
        ('{"verb": "clone", "agent": 1, "own": {"data_seed": 4}}', "so its data_seed"),
    ],
)
def test_a_file_that_is_not_a_request_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "odd.json").write_text(content)
    (found,) = read_waiting(tmp_path)
    assert found.refused is not None
    assert says in found.refused
    decide(tmp_path, [found])
    assert not is_waiting(tmp_path)


def test_a_full_disk_is_reported_once_and_the_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(
        config=Config(output_dir=str(tmp_path)),
        state=TrainState(step=3),
        processes=SimpleNamespace(on_main=lambda decide: decide()),
        manager=SimpleNamespace(holds_lease=lambda: True),
        nonfinite=SimpleNamespace(dropped=lambda recovery: ()),
        is_finished=False,
        record_failure=RecordFailure(),
    )
    verdict: Any = SimpleNamespace(request=True)
    ask(tmp_path, "stop", 9, {})
    with monkeypatch.context() as full, log_lines() as said:
        for code in (errno.ENOSPC, errno.ENOSPC, errno.EDQUOT):
            full.setattr(crowd_requests, "write_json", refusing(code))
            change_crowd(run, verdict)
    assert [line.rpartition("(")[2] for line in said] == ["No space left on device)", "Disk quota exceeded)"]
    assert is_waiting(tmp_path)
    with log_lines() as said:
        change_crowd(run, verdict)
    assert "there is no agent9" in said[-1]
    assert not is_waiting(tmp_path)


def refusing(code: int) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_request_holds_the_typed_keys_and_a_clone_checks_them_again(tmp_path: Path) -> None:
    asked = ask(tmp_path, "clone", 0, {"name": "x", "num_warmup_steps": None})
    written = json.loads((tmp_path / FOLDER / f"{asked.id}.json").read_text())
    assert written == {"verb": "clone", "agent": 0, "own": {"name": "x", "num_warmup_steps": None}}
    assert [each.refused for each in read_waiting(tmp_path)] == [None]
    with pytest.raises(ConfigError, match="learning_rate is"):
        settings_of_clone(entries_of({"learning_rate": -1.0}, "here"))


def test_a_file_that_is_not_a_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CROWD_CHANGES).write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="no record of changes"):
        read_record(tmp_path)
