"""What follows from numbers that are not finite: who is left out, cut, rolled back; which batches are skipped."""

from __future__ import annotations

import math

import pytest

from ci_llm.core.run_folder import BadBatch
from ci_llm.distributed.ballot import Verdict
from ci_llm.run.step import state
from ci_llm.run.step.nonfinite import findings_of
from ci_llm.run.step.state import AgentRecovery, RecoveryState, TrainState


@pytest.fixture(autouse=True)
def narrow_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LR_DIVISOR", 2.0)
    monkeypatch.setattr(state, "MAX_IN_A_ROW", 3)
    monkeypatch.setattr(state, "GOOD_AFTER_STEPS", 4)


def after(steps: str, agent: AgentRecovery | None = None, start: int = 0) -> AgentRecovery:
    """The state after steps that are nonfinite (x) or finite (.)."""
    agent = agent or AgentRecovery()
    for step, kind in enumerate(steps, start):
        agent = agent.after(step, kind == "x")
    return agent


def test_each_nonfinite_step_cuts_the_rate_and_a_finite_one_ends_the_count() -> None:
    assert after("..xx") == AgentRecovery(lr_factor=0.25, nonfinite_in_a_row=2, episode_start=2)
    assert after("..xx.") == AgentRecovery(lr_factor=0.25, episode_start=2, finite_in_a_row=1)


def test_rows_that_only_one_agent_has_are_skipped_for_it_before_its_rate_is_cut() -> None:
    agent = AgentRecovery()
    for step, kind in enumerate("xx.xx.x...."):
        agent = agent.after(step, kind == "x", own_rows=True)
    assert agent == AgentRecovery(), "as an agent alone, which skips a bad batch"
    for step in range(3):
        agent = agent.after(step, True, own_rows=True)
    assert (agent.rolled_back, agent.lr_factor) == (True, 0.5), "so many in a row are no accident of the rows"
    assert agent.after(3, True, own_rows=True).lr_factor == 0.25


def test_the_bound_rolls_back_once_in_an_episode() -> None:
    at_bound = after("xxx")
    assert (at_bound.rolled_back, at_bound.rollbacks, at_bound.nonfinite_in_a_row) == (True, 1, 0)
    assert not at_bound.is_exhausted
    assert not after("xxxxx").is_exhausted
    assert after("xxxxxx").is_exhausted
    assert after("xxx...xxx").is_exhausted
    assert after("xxx...xxx").episode_start == 0


def test_an_episode_ends_and_the_next_one_has_its_own_rollback() -> None:
    ended = after("xxx....")
    assert ended == AgentRecovery(lr_factor=0.125, rollbacks=1)
    again = after("xxx", ended, start=7)
    assert (again.rolled_back, again.rollbacks, again.episode_start) == (True, 2, 7)


def test_only_an_overflow_halves_the_loss_scale() -> None:
    before = TrainState.at_start(2, loss_scale=8.0)
    for losses, scale in (((math.nan, 1.0), 4.0), ((math.nan, math.nan), 8.0)):
        verdict = Verdict(2, (True, True), (*losses, 1.0, 1.0, 0.0, 1.0), False, None, False)
        findings = findings_of(verdict, before)
        assert findings.left_out == (0, 1)
        moved = before.advance(1, 1, findings.left_out, findings.overflowed)
        assert (moved.loss_scale, [each.skipped for each in moved.agents]) == (scale, [1, 1])


def test_a_bad_batch_is_recognised_by_its_rows() -> None:
    recovery = RecoveryState().after_bad_batch(BadBatch(5, (3, 1)))
    assert recovery.bad_batches_in_a_row == 1
    assert recovery.is_bad_batch(5, lambda _: [3, 1])
    assert not recovery.is_bad_batch(5, lambda _: [3, 2])
    assert not recovery.is_bad_batch(6, lambda _: [3, 1])
    assert recovery.after_bad_batch(BadBatch(5, (3, 1))).bad_batches == recovery.bad_batches
    assert recovery.without_batches_from(5).bad_batches == ()
