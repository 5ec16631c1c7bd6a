"""Successive halving as a pure function: which trials train next, whatever their scores are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci_llm.sweep.successive_halving import HalvingPlan, Standings, Trial, describe_boundary

FAILED = math.nan


def plan(trials: int = 16, per_pass: int = 4, rungs: int = 3, keep: float = 0.25, metric: str = "nll") -> HalvingPlan:
    return HalvingPlan.of(64, rungs, trials, per_pass, keep=keep, metric=metric)


def played(standings: Standings, score: Callable[[int, int], float], most: int = 200) -> Standings:
    """Train to the end: `score(trial, rung)` is what comes of a trial."""
    for _ in range(most):
        following = standings.next()
        if following is None:
            return standings
        trials = [*standings.trials]
        trials += [Trial(id, {}) for id in following.trials if id >= len(standings.trials)]
        for place, id in enumerate(following.trials):
            told, number = trials[id], following.number
            assert len(told.scores) == following.rung
            trials[id] = replace(told, scores=(*told.scores, score(id, following.rung)), segment=number, place=place)
        segment = replace(following, is_over=True)
        standings = replace(standings, trials=tuple(trials), segments=(*standings.segments, segment))
    raise AssertionError("it never ends")


def test_sixteen_four_one() -> None:
    assert plan().steps == (4, 16, 64)
    end = played(Standings(plan()), lambda id, rung: float((id * 7) % 16))
    assert [(s.rung, len(s.trials)) for s in end.segments] == [(0, 4)] * 4 + [(1, 4), (2, 1)]
    assert end.best is not None
    assert end.best.scores == (0.0, 0.0, 0.0)
    assert [end.status(trial) for trial in end.trials].count("pruned") == 15
    assert end.status(end.best) == "completed"
    assert sum(trials * steps for trials, steps in plan().segment_steps) == 160  # 2.5 runs of 64 steps
    assert [trial.score for trial in end.leaderboard[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_boundary_of_a_rung_lies_between_trials_that_continue_and_trials_that_leave() -> None:
    end = played(Standings(plan()), lambda id, rung: float((id * 7) % 16))
    pairs = [end.boundary(rung) for rung in range(3)]
    found = [[trial.scores[rung] for trial in pair] if pair else [] for rung, pair in enumerate(pairs)]
    assert found == [[3.0, 4.0], [0.0, 1.0], []], "one trial alone has no boundary"
    two = played(Standings(plan(trials=8, rungs=1, keep=0.5)), lambda id, rung: float(id))
    assert [trial.id for trial in two.boundary(0) or ()] == [0, 1], "the best two at the end, whatever keep says"


def test_rows_tell_trials_apart_or_it_is_said_that_they_do_not() -> None:
    one, two = Trial(1, {}), Trial(2, {})

    def line(rows: int, gap: float) -> str:
        scores = [gap + (0.5 if n % 2 else -0.5) for n in range(rows)]
        return describe_boundary(0, one, two, (scores, [0.0] * rows), "nll")

    ahead = "trial 1 is ahead of trial 2"
    assert (
        line(4, 3)
        == f"rung 1, on 4 rows: {ahead}, but so few rows tell no trials apart: raise eval_samples to 30 or more"
    )
    assert line(100, 1) == f"rung 1, on 100 rows: {ahead} by 1.0000 ± 0.0985 nll (95 %)"
    unsure = f"rung 1, on 100 rows: {ahead} by 0.0500 ± 0.0985 nll (95 %): these rows do not tell them apart"
    assert line(100, 0.05) == f"{unsure}; about 389 rows would"
    assert "rows would" not in line(100, 0)
    with pytest.raises(ValueError, match="zip"):
        describe_boundary(0, one, two, ([1.0], [1.0, 2.0]), "nll")


def test_a_trial_that_fails_at_the_first_rung_is_replaced() -> None:
    end = played(Standings(plan(trials=4)), lambda id, rung: FAILED if id in (1, 2) else float(id))
    assert len(end.trials) == 6
    assert [end.status(end.trials[id]) for id in (1, 2)] == ["failed", "failed"]
    assert [segment.trials for segment in end.segments[:2]] == [(0, 1, 2, 3), (4, 5)]
    assert end.leaderboard[-1].failed


def test_a_trial_that_fails_later_leaves_its_place_to_the_next_best() -> None:
    end = played(Standings(plan(trials=4, rungs=2)), lambda id, rung: FAILED if (id, rung) == (0, 1) else float(id))
    assert [(s.rung, s.trials) for s in end.segments] == [(0, (0, 1, 2, 3)), (1, (0,)), (1, (1,))]
    assert end.best is not None
    assert end.best.id == 1


def test_when_all_of_the_last_rung_fail_the_next_best_makes_up_for_it() -> None:
    end = played(Standings(plan(trials=4, keep=0.5)), lambda id, rung: FAILED if (id, rung) == (0, 2) else float(id))
    assert [(s.rung, s.trials) for s in end.segments] == [
        (0, (0, 1, 2, 3)),
        (1, (0, 1)),
        (2, (0,)),
        (1, (2,)),
        (2, (1,)),
    ]
    assert end.best is not None
    assert (end.best.id, end.status(end.best)) == (1, "completed")


def test_a_space_in_which_everything_fails_has_an_end() -> None:
    end = played(Standings(plan(trials=3)), lambda id, rung: FAILED)
    assert len(end.trials) == 6
    assert end.best is None or end.best.failed


@pytest.mark.parametrize(("total", "steps"), [(64, (4, 16, 64)), (3, (1, 3)), (1, (1,)), (100, (7, 25, 100))])
def test_the_last_steps_of_rungs(total: int, steps: tuple[int, ...]) -> None:
    assert HalvingPlan.of(total, 3, 4, 2, keep=0.25, metric="nll").steps == steps


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(0, (4, 16, 64)), (4, (4, 16, 64)), (5, (5, 16, 64)), (20, (20, 64)), (64, (64,)), (99, (64,))],
)
def test_no_rung_ends_inside_of_the_warm_up(warmup: int, steps: tuple[int, ...]) -> None:
    """Rungs that would are as long as it, and one of them is enough: more trials continue."""
    decided = HalvingPlan.of(64, 3, 16, 4, keep=0.25, metric="nll", warmup=warmup)
    assert decided.steps == steps
    assert [decided.places(rung) for rung in range(len(steps))] == [16, 4, 1][: len(steps)]


def test_no_rung_ends_after_a_step_in_which_nothing_is_learned() -> None:
    assert HalvingPlan.of(12, 3, 4, 2, keep=0.25, metric="nll", warmup=1).steps == (2, 3, 12)
    assert HalvingPlan.of(12, 3, 4, 2, keep=0.25, metric="nll", warmup=0).steps == (1, 3, 12)


@pytest.mark.slow
@given(
    trials=st.integers(1, 20),
    per_pass=st.integers(1, 8),
    rungs=st.integers(1, 4),
    keep=st.floats(0.1, 0.9),
    bad=st.sets(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30),
)
def test_every_sweep_ends_with_the_promised_trials(
    trials: int, per_pass: int, rungs: int, keep: float, bad: set[tuple[int, int]]
) -> None:
    decided = HalvingPlan.of(64, rungs, trials, per_pass, keep=keep, metric="nll")
    end = played(Standings(decided), lambda id, rung: FAILED if (id, rung) in bad else (id * 13) % 17 + rung)
    sound = [trial for trial in end.trials if not trial.failed]
    for rung in range(len(decided.steps)):
        reached = [trial for trial in sound if len(trial.scores) > rung]
        assert len(reached) == min(decided.places(rung), len(sound))
    assert len(end.ranked(0)) >= decided.trials or len(end.trials) == 2 * trials, "failed ones are replaced"
    assert all(len(segment.trials) <= decided.per_pass for segment in end.segments)
    if sound:
        assert end.best == next(trial for trial in end.ranked(len(decided.steps) - 1) if not trial.failed)
    if not bad:
        assert [(len(s.trials), decided.steps[s.rung] - decided.first_step(s.rung)) for s in end.segments] == (
            decided.segment_steps
        )
