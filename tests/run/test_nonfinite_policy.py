"""The account of numbers that are not finite: who is left out, cut, set back, given up; which batches are skipped."""

from __future__ import annotations

from ci_llm.run.nonfinite import Findings
from ci_llm.run.nonfinite_policy import LEAST_LR_FACTOR, AgentRecovery, BadBatch, Bounds, RecoveryState
from ci_llm.run.state import TrainState

BOUNDS = Bounds(rate_factor=2.0, max_in_a_row=3, good_after=4)


def fare(days: str, health: AgentRecovery | None = None, start: int = 0) -> AgentRecovery:
    """The account after steps that are sick (x) or well (.)."""
    health = health or AgentRecovery()
    for step, day in enumerate(days, start):
        health = health.after(step, day == "x", BOUNDS)
    return health


def test_a_healthy_agent_leaves_no_trace() -> None:
    assert fare("." * 100) == AgentRecovery()


def test_each_sick_step_cuts_the_rate_and_a_finite_one_ends_the_count() -> None:
    assert fare("..xx") == AgentRecovery(lr_factor=0.25, nonfinite_in_a_row=2, episode_start=2)
    assert fare("..xx.") == AgentRecovery(lr_factor=0.25, episode_start=2, finite_in_a_row=1)


def test_the_bound_sets_back_once_in_a_trouble() -> None:
    at_bound = fare("xxx")
    assert (at_bound.set_back, at_bound.rollbacks, at_bound.nonfinite_in_a_row) == (True, 1, 0)
    assert not at_bound.is_exhausted(BOUNDS)
    assert not fare("xxxxx").is_exhausted(BOUNDS)
    assert fare("xxxxxx").is_exhausted(BOUNDS)
    assert fare("xxx...xxx").is_exhausted(BOUNDS)
    assert fare("xxx...xxx").episode_start == 0


def test_a_trouble_ends_and_the_next_one_has_its_own_way_back() -> None:
    cured = fare("xxx....")
    assert cured == AgentRecovery(lr_factor=0.125, rollbacks=1)
    again = fare("xxx", cured, start=7)
    assert (again.set_back, again.rollbacks, again.episode_start) == (True, 2, 7)


def test_the_rate_is_never_cut_to_nothing() -> None:
    assert fare("x." * 50).lr_factor == LEAST_LR_FACTOR


def test_only_the_sick_pay() -> None:
    healing = RecoveryState(agents=(AgentRecovery(),) * 3).after(5, [1], BOUNDS)
    assert [healing.rate(k) for k in range(3)] == [1.0, 0.5, 1.0]
    assert [health.nonfinite_in_a_row for health in healing.agents] == [0, 1, 0]


def test_a_step_left_out_for_an_overflow_is_neither_a_sick_nor_a_well_one() -> None:
    before = RecoveryState(agents=(fare("x"), fare("x")))
    after = before.after(1, (), BOUNDS, overflowed=(0,))
    assert after.agents == (fare("x"), fare("x."))


def test_only_an_overflow_halves_the_loss_scale() -> None:
    state = TrainState(skipped=(0, 0), loss_scale=8.0)
    for sick, scale in (((0,), 4.0), ((0, 1), 8.0)):
        findings = Findings(left_out=(0, 1), sick=sick, bad_batch=False, tokens=1)
        moved = state.advance(1, 1, findings.left_out, findings.overflowed)
        assert (moved.loss_scale, moved.skipped) == (scale, (1, 1))


def test_a_state_that_knows_nothing_of_healing_is_that_of_a_healthy_run() -> None:
    older = {key: value for key, value in TrainState(skipped=(0, 0)).to_dict().items() if key != "healing"}
    assert TrainState.from_dict(older).healing == RecoveryState(agents=(AgentRecovery(), AgentRecovery()))


def test_a_bad_batch_blames_nobody_and_is_known_by_its_rows() -> None:
    healing = RecoveryState(agents=(AgentRecovery(),)).after_bad_batch(BadBatch(5, (3, 1)))
    assert healing.agents == (AgentRecovery(),)
    assert healing.bad_batches_in_a_row == 1
    assert healing.knows(5, [3, 1])
    assert not healing.knows(5, [3, 2])
    assert not healing.knows(6, [3, 1])
    assert healing.after(6, [], BOUNDS).bad_batches_in_a_row == 0
    assert healing.after_bad_batch(BadBatch(5, (3, 1))).bad_batches == healing.bad_batches
    assert healing.without_batches_from(5).bad_batches == ()


def test_what_the_supervisor_asks_for_never_loosens() -> None:
    healing = RecoveryState().with_requests(0.5, 8)
    assert (healing.rate_factor, healing.micro_batch_size) == (0.5, 8)
    assert healing.with_requests(1.0, None) == healing
    assert healing.with_requests(0.25, 16) == RecoveryState(rate_factor=0.25, micro_batch_size=8)


def test_the_account_comes_back_from_plain_values() -> None:
    healing = RecoveryState(agents=(AgentRecovery(), fare("xx"))).after_bad_batch(BadBatch(5, (3, 1)))
    assert RecoveryState.from_dict(healing.to_dict()) == healing
