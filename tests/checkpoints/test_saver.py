"""What each process contributes to a save: votes, and its own part of the state."""

from __future__ import annotations

from typing import Any

import pytest

from ci_llm.checkpoints import restoring
from ci_llm.checkpoints.due import Votes
from ci_llm.checkpoints.restoring import give_own_parts
from ci_llm.checkpoints.saver import Contribution, EachProcess
from ci_llm.errors import CheckpointError, ForeignCheckpoint

DUE = Votes(stop=0, save_requested=0, due=1, newer=1)


def test_a_value_that_some_processes_do_not_have_is_refused_with_their_numbers() -> None:
    has, lacks = (Contribution(DUE, False, own).pack() for own in ({"rng": 1, "more": (1, 2)}, {"more": (3, 4)}))
    told = Contribution.unpack_all([has, has])
    assert [(each.votes, each.own) for each in told] == [(DUE, {"rng": 1, "more": (1, 2)})] * 2
    with pytest.raises(CheckpointError, match="process 1, 3 has none") as refused:
        Contribution.unpack_all([has, lacks, has, lacks])
    assert refused.value.where == "rng"


@pytest.mark.parametrize(
    ("saved", "had"),
    [({"process0": 7}, "what 1 had"), ({"process0": 7, "process2": 8}, "what 2 had"), ([7, 8], "a list")],
)
def test_contributions_collected_elsewhere_are_refused(saved: Any, had: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "num_processes", lambda: 2)
    target = {"rng": EachProcess(0), "not saved": EachProcess(0), "plain": 0}
    with pytest.raises(ForeignCheckpoint, match=f"2 processes have .* the checkpoint holds {had}") as refused:
        give_own_parts({"rng": saved, "plain": 5}, target, 1)
    assert refused.value.where == "rng"
    state = {"rng": {"process0": 7, "process1": 8}, "plain": 5}
    give_own_parts(state, target, 1)
    assert state == {"rng": EachProcess(8), "plain": 5}
