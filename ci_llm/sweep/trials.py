"""The trials of a sweep, and which of them train next: successive halving as pure functions of plain values.

Rung r ends at step `steps[r]`. All trials that begin are scored there, the best share goes on to the next rung, and so
on to the last step. A segment is a pack of trials that train together from one rung to the next.

Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ci_llm.core.ranking import GREATER_IS_BETTER, place_of_trial

Status = Literal["running", "pruned", "failed", "completed"]


@dataclass(frozen=True)
class Trial:
    """One setting of the keys that have a space.

    Attributes:
        id: 0, 1, ... in the order in which trials begin.
        scores: after each rung that it has reached; NaN is the last one of a trial that failed.
        segment, place: of the segment that it was trained in last, its number, and which agent it was there.
    """

    id: int
    settings: Mapping[str, Any]
    scores: tuple[float, ...] = ()
    segment: int | None = None
    place: int = 0

    @property
    def failed(self) -> bool:
        """Whether it gave no number at its last rung."""
        return bool(self.scores) and math.isnan(self.scores[-1])

    @property
    def score(self) -> float | None:
        """The one at the last rung that it has reached."""
        return self.scores[-1] if self.scores else None


@dataclass(frozen=True)
class Segment:
    """Trials that train together from one rung to the next.

    Attributes:
        number: 1, 2, ... in the order in which segments are trained.
        rung: the one at whose end the trials are scored.
        trials: their ids; the first one is agent 0.
        is_over: whether they were scored.
    """

    number: int
    rung: int
    trials: tuple[int, ...]
    is_over: bool = False


@dataclass(frozen=True)
class HalvingPlan:
    """What is decided at the beginning of a sweep.

    Attributes:
        steps: the last step of every rung, ascending.
        trials: that shall be scored at the first rung.
        per_pass: trials of a segment at most.
        keep: share of the trials that goes on after a rung.
        metric: see `GREATER_IS_BETTER`.
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
            warmup: steps in which learning rates rise. No rung ends before: scores tell little there.
        """
        least = min(max(warmup, 2) if warmup else 0, total_steps)  # the rate of the first step of a warm-up is 0
        ends = [max(least, math.ceil(round(total_steps * keep**n, 6))) for n in reversed(range(rungs))]
        return cls(tuple(dict.fromkeys(ends)), trials, min(per_pass, trials), keep, metric)

    def places(self, rung: int) -> int:
        """How many trials shall be scored at the end of a rung."""
        count = self.trials
        for _ in range(rung):
            count = max(1, math.ceil(round(count * self.keep, 6)))
        return count

    def first_step(self, rung: int) -> int:
        """The step from which trials train to the end of this rung."""
        return self.steps[rung - 1] if rung else 0

    @property
    def agent_steps(self) -> int:
        """Optimizer steps of all trials together, if none fails."""
        return sum(self.places(rung) * (end - self.first_step(rung)) for rung, end in enumerate(self.steps))

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
class Next:
    """What comes next: trials that go on, or `new` trials to begin."""

    rung: int
    going_on: tuple[int, ...] = ()
    new: int = 0


@dataclass(frozen=True)
class Standings:
    """Everything that is known of the trials of a plan; moved by new values, never in place."""

    plan: HalvingPlan
    trials: tuple[Trial, ...] = ()
    segments: tuple[Segment, ...] = field(default=())

    def ranked(self, rung: int) -> list[Trial]:
        """The trials with a score at the end of a rung, the best first; of equal ones the older first."""
        scored = [t for t in self.trials if len(t.scores) > rung and not math.isnan(t.scores[rung])]
        sign = -1 if GREATER_IS_BETTER[self.plan.metric] else 1
        return sorted(scored, key=lambda trial: (sign * trial.scores[rung], trial.id))

    def entrants(self, rung: int) -> list[Trial]:
        """The trials that train to the end of a rung above the first.

        One that fails leaves its places at all rungs to the next best ones, so that a trial completes if any can.
        """
        able = [trial for trial in self.ranked(rung - 1) if not trial.failed]
        return able[: self.plan.places(rung)]

    def next(self, *, exhausted: bool = False) -> Next | None:
        """What follows when no segment is open; None: the sweep is complete.

        Args:
            exhausted: no new trial is left to begin.
        """
        plan = self.plan
        missing = plan.trials - len(self.ranked(0))
        # Failed trials are replaced, but not without an end: a space may hold nothing that trains.
        if not exhausted and missing > 0 and (room := 2 * plan.trials - len(self.trials)) > 0:
            return Next(0, new=min(missing, room, plan.per_pass))
        for rung in range(1, len(plan.steps)):
            if waiting := [trial.id for trial in self.entrants(rung) if len(trial.scores) == rung]:
                return Next(rung, going_on=tuple(waiting[: plan.per_pass]))
        return None

    @property
    def open_segment(self) -> Segment | None:
        """The segment whose trials are not scored yet."""
        return next((segment for segment in self.segments if not segment.is_over), None)

    @property
    def best(self) -> Trial | None:
        """The best trial of the highest rung that any has reached."""
        return next(iter(self.leaderboard), None)

    @property
    def leaderboard(self) -> list[Trial]:
        """All scored trials: those of higher rungs first, within a rung the best first, and failed ones last."""
        scored = [trial for trial in self.trials if trial.scores]
        return sorted(scored, key=lambda trial: place_of_trial(trial.id, trial.scores, self.plan.metric))

    def status(self, trial: Trial) -> Status:
        """Where a trial stands."""
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
