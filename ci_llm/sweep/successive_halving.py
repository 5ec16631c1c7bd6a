"""Successive halving: which trials of a sweep train next, which are pruned as losers, and their ranking.

Everything is a pure function of plain values (the plan, the trials so far), so that a sweep can be resumed. Rung r ends
at step `steps[r]`. All new trials are scored at the end of the first rung, the best share of them continues to the end
of the next rung, and so on to the last step. The trials that train together from one rung to the next are a segment.

Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from ci_llm.core.measures import LEAST_ROWS, METRICS, paired_interval, place_of_trial

Status = Literal["running", "pruned", "failed", "completed"]


@dataclass(frozen=True)
class Trial:
    """One setting of the keys that have a space.

    Attributes:
        id: 0, 1, ... in the order in which trials begin.
        scores: the score after each rung that it has reached; the last one is NaN if the trial failed.
        segment, place: the number of the segment that trained it last, and the number of its agent there.
    """

    id: int
    settings: Mapping[str, Any]
    scores: tuple[float, ...] = ()
    segment: int | None = None
    place: int = 0

    @property
    def failed(self) -> bool:
        """True if its last score is not a number."""
        return bool(self.scores) and math.isnan(self.scores[-1])

    @property
    def score(self) -> float | None:
        """The score at the last rung that it has reached; None before the first."""
        return self.scores[-1] if self.scores else None


@dataclass(frozen=True)
class Segment:
    """The record of trials that train together from one rung to the next, by their ids: it stays in the standings.

    Attributes:
        number: 1, 2, ... in the order in which segments are trained.
        rung: the rung at whose end the trials are scored.
        trials: the ids of the trials; the first one is agent 0.
        is_over: true if the trials were scored.
    """

    number: int
    rung: int
    trials: tuple[int, ...]
    is_over: bool = False


@dataclass(frozen=True)
class HalvingPlan:
    """The plan that is made at the beginning of a sweep.

    Attributes:
        steps: the last step of every rung, ascending.
        trials: how many trials shall be scored at the first rung.
        per_pass: the most trials of a segment.
        keep: the share of the trials that continues after a rung.
        metric: see `METRICS`.
    """

    steps: tuple[int, ...]
    trials: int
    per_pass: int
    keep: float
    metric: str

    @classmethod
    def of(
        cls, total_steps: int, rungs: int, trials: int, per_pass: int, keep: float, metric: str, warmup: int = 0
    ) -> HalvingPlan:
        """The plan of a sweep whose last trial takes `total_steps`: each rung ends at the share `keep` of the next.

        Args:
            warmup: steps in which learning rates rise. No rung ends among them, because scores tell little there.
        """
        least = min(max(warmup, 2) if warmup else 0, total_steps)  # the rate of the first step of a warm-up is 0
        ends = [max(least, math.ceil(round(total_steps * keep**n, 6))) for n in reversed(range(rungs))]
        return cls(tuple(dict.fromkeys(ends)), trials, min(per_pass, trials), keep, metric)

    def places(self, rung: int) -> int:
        """The number of trials that are scored at the end of a rung."""
        count = self.trials
        for _ in range(rung):
            count = max(1, math.ceil(round(count * self.keep, 6)))
        return count

    def first_step(self, rung: int) -> int:
        """The step from which trials train to the end of this rung."""
        return self.steps[rung - 1] if rung else 0

    @property
    def segment_steps(self) -> list[tuple[int, int]]:
        """(trials, steps) of every segment, if no trial fails."""
        parts = []
        for rung, end in enumerate(self.steps):
            places = self.places(rung)
            sizes = [min(self.per_pass, places - begun) for begun in range(0, places, self.per_pass)]
            parts += [(size, end - self.first_step(rung)) for size in sizes]
        return parts


@dataclass(frozen=True)
class Standings:
    """A plan, and its trials and segments so far."""

    plan: HalvingPlan
    trials: tuple[Trial, ...] = ()
    segments: tuple[Segment, ...] = ()

    def ranked(self, rung: int) -> list[Trial]:
        """The trials with a score at the end of a rung, the best first; with equal scores the older first."""
        scored = [t for t in self.trials if len(t.scores) > rung and not math.isnan(t.scores[rung])]
        sign = -1 if METRICS[self.plan.metric].greater else 1
        return sorted(scored, key=lambda trial: (sign * trial.scores[rung], trial.id))

    def entrants(self, rung: int) -> list[Trial]:
        """The trials that train to the end of a rung above the first.

        The next best trial takes the place of one that fails, at all rungs, so that a trial completes if any can.
        """
        able = [trial for trial in self.ranked(rung - 1) if not trial.failed]
        return able[: self.plan.places(rung)]

    def next(self, *, exhausted: bool = False) -> Segment | None:
        """The next segment, when none is open; None: the sweep is complete. All trials of the first rung are new.

        Args:
            exhausted: true if the spaces have no new settings left.
        """
        plan, number, begun = self.plan, len(self.segments) + 1, len(self.trials)
        missing = plan.trials - len(self.ranked(0))
        # Failed trials are replaced, but not for ever: a space may hold no settings that train.
        room = 2 * plan.trials - begun
        if not exhausted and missing > 0 and room > 0:
            return Segment(number, 0, tuple(range(begun, begun + min(missing, room, plan.per_pass))))
        for rung in range(1, len(plan.steps)):
            waiting = [trial.id for trial in self.entrants(rung) if len(trial.scores) == rung]
            if waiting:
                return Segment(number, rung, tuple(waiting[: plan.per_pass]))
        return None

    def boundary(self, rung: int) -> tuple[Trial, Trial] | None:
        """The last trial that continues after a rung, and the first that does not; at the last rung the two best."""
        ranked = self.ranked(rung)
        is_last = rung + 1 == len(self.plan.steps)
        going_on = 1 if is_last else self.plan.places(rung + 1)
        return (ranked[going_on - 1], ranked[going_on]) if len(ranked) > going_on else None

    @property
    def open_segment(self) -> Segment | None:
        """The segment whose trials are not scored yet, if there is one."""
        return next((segment for segment in self.segments if not segment.is_over), None)

    @property
    def best(self) -> Trial | None:
        """The best trial of the highest rung that any has reached."""
        return next(iter(self.leaderboard), None)

    @property
    def leaderboard(self) -> list[Trial]:
        """All scored trials: higher rungs first, within a rung the best first, and failed trials last."""
        scored = [trial for trial in self.trials if trial.scores]
        return sorted(scored, key=lambda trial: place_of_trial(trial.id, trial.scores, self.plan.metric))

    def status(self, trial: Trial) -> Status:
        """The status of a trial."""
        if trial.failed:
            return "failed"
        rung = len(trial.scores)
        if rung == len(self.plan.steps):
            return "completed"
        if rung == 0:
            return "running"
        current = max((segment.rung for segment in self.segments), default=0)
        if rung > current or trial in self.entrants(rung):  # its rung is the last one that has begun
            return "running"
        return "pruned"


def describe_boundary(rung: int, ahead: Trial, behind: Trial, rows: Sequence[Sequence[float]], metric: str) -> str:
    """A line for people at the end of a rung: whether its rows tell the trials at its boundary apart.

    Args:
        rows: for each of the two trials the score of every row.

    Raises:
        ValueError: the trials were scored on different numbers of rows.
    """
    differences = [one - other for one, other in zip(*rows, strict=True)]
    gap, half = abs(fmean(differences)), paired_interval(differences) or 0.0
    count = len(differences)
    line = f"rung {rung + 1}, on {count} rows: trial {ahead.id} is ahead of trial {behind.id}"
    if count < LEAST_ROWS:
        key = "generation_eval_samples" if metric == "exact_match" else "eval_samples"
        return f"{line}, but so few rows tell no trials apart: raise {key} to {LEAST_ROWS} or more"
    line += f" by {gap:.4f} ± {half:.4f} {metric} (95 %)"
    if gap > half:
        return line
    more = f"; about {math.ceil(count * (half / gap) ** 2)} rows would" if gap else ""
    return f"{line}: these rows do not tell them apart{more}"
