"""What follows from numbers that are not finite, as a pure account: agent by agent, step by step, nothing is touched.

The ways back of one agent, in this order: it is left out of the step and its learning rate is cut; sick for
`max_in_a_row` steps in a row, it is set back to its last good snapshot; so often once more in the same trouble, the
attempt ends. A step that makes every agent sick says nothing about one of them: its batch is skipped for good, and
`max_in_a_row` such steps in a row end the attempt, because then the weights are to blame and not the batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

#: A learning rate is cut to this share of the schedule's at most; an agent sick now and then would stand still below.
LEAST_SHARE: Final = 0.01


@dataclass(frozen=True)
class Bounds:
    """How far the ways back go; the configuration's keys, where each has its own line.

    Attributes:
        rate_factor: `nonfinite_lr_factor`, at least 1.
        max_in_a_row: `max_consecutive_nonfinite`.
        good_after: `good_after_steps`: so many finite steps in a row end a trouble.
    """

    rate_factor: float = 1.5
    max_in_a_row: int = 5
    good_after: int = 50


@dataclass(frozen=True)
class Health:
    """How one agent fares.

    Attributes:
        rate_share: what its scheduled learning rate is multiplied by.
        sick_in_a_row: sick steps without a finite one between them, since the last return to a snapshot.
        trouble_since: steps taken before the first sick step of the trouble it is in; None: it is well.
        well_in_a_row: finite steps since it was sick last, as long as it is in trouble.
        set_back: whether it returned to its snapshot in this trouble.
        set_backs: returns in the whole run.
    """

    rate_share: float = 1.0
    sick_in_a_row: int = 0
    trouble_since: int | None = None
    well_in_a_row: int = 0
    set_back: bool = False
    set_backs: int = 0

    def after(self, step: int, sick: bool, bounds: Bounds) -> Health:
        """The account after the 0-based `step`. Not for one who is incurable."""
        if sick:
            return self._after_sick_step(step, bounds)
        if self.trouble_since is None:
            return self
        well = self.well_in_a_row + 1
        if well >= bounds.good_after:
            return Health(rate_share=self.rate_share, set_backs=self.set_backs)
        return replace(self, sick_in_a_row=0, well_in_a_row=well)

    def _after_sick_step(self, step: int, bounds: Bounds) -> Health:
        worse = replace(
            self,
            rate_share=max(self.rate_share / bounds.rate_factor, LEAST_SHARE),
            sick_in_a_row=self.sick_in_a_row + 1,
            trouble_since=step if self.trouble_since is None else self.trouble_since,
            well_in_a_row=0,
        )
        if worse.sick_in_a_row < bounds.max_in_a_row or self.set_back:
            return worse
        return replace(worse, sick_in_a_row=0, set_back=True, set_backs=self.set_backs + 1)

    def is_incurable(self, bounds: Bounds) -> bool:
        """Whether everything that can be done for it inside the run was done."""
        return self.set_back and self.sick_in_a_row >= bounds.max_in_a_row


@dataclass(frozen=True)
class BadBatch:
    """A step whose rows made every agent sick; the rows tell whether it is still the same step."""

    step: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class RecoveryState:
    """What a run does differently because of what happened to it. Recovery state: it is kept in checkpoints, stays
    with the run, and is never a change of the configuration.

    Attributes:
        agents: [K].
        bad_batches: steps that are skipped without a look, ascending.
        bad_in_a_row: bad batches since the last other step. An overflow of all agents is one, and cannot go on for
            ever: each one halves the loss scale.
        rate_factor: the supervisor's; multiplies the learning rate of every agent.
        micro_batch_size: rows per process and micro-step are at most this many; None: as configured.
        recompute: layers are recomputed in the backward pass, whatever is configured.
    """

    agents: tuple[Health, ...] = ()
    bad_batches: tuple[BadBatch, ...] = ()
    bad_in_a_row: int = 0
    rate_factor: float = 1.0
    micro_batch_size: int | None = None
    recompute: bool = False

    def rate(self, agent: int) -> float:
        """What the scheduled learning rate of an agent is multiplied by; exactly 1 in a healthy run."""
        return self.rate_factor * self.agents[agent].rate_share

    def knows(self, step: int, rows: Sequence[int]) -> bool:
        """Whether these rows made every agent sick at this step before."""
        return BadBatch(step, tuple(rows)) in self.bad_batches

    def after(self, step: int, sick: Sequence[int], bounds: Bounds, overflowed: Sequence[int] = ()) -> RecoveryState:
        """The account after a step in which some of the agents, but not all of them, were sick.

        Of those left out because they `overflowed` the step says nothing: their accounts stay.
        """
        agents = tuple(
            health if k in overflowed else health.after(step, k in sick, bounds) for k, health in enumerate(self.agents)
        )
        return self if agents == self.agents and not self.bad_in_a_row else replace(self, agents=agents, bad_in_a_row=0)

    def after_bad_batch(self, batch: BadBatch) -> RecoveryState:
        """The account after a step that made all of them sick; none of them is blamed."""
        return replace(self.with_batches([batch]), bad_in_a_row=self.bad_in_a_row + 1)

    def with_batches(self, batches: Sequence[BadBatch]) -> RecoveryState:
        """The account that knows these bad batches as well."""
        return replace(self, bad_batches=tuple(sorted({*self.bad_batches, *batches}, key=lambda b: (b.step, b.rows))))

    def without_batches_from(self, step: int) -> RecoveryState:
        """The account that has forgotten the bad batches of this step and of later ones."""
        return replace(self, bad_batches=tuple(batch for batch in self.bad_batches if batch.step < step))

    def asked_for(self, rate_factor: float, micro_batch_size: int | None) -> RecoveryState:
        """The account after the supervisor has asked for these; what is in force already is never loosened."""
        sizes = [size for size in (self.micro_batch_size, micro_batch_size) if size is not None]
        return replace(
            self,
            rate_factor=min(self.rate_factor, rate_factor),
            micro_batch_size=min(sizes, default=None),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        batches = [{"step": batch.step, "rows": list(batch.rows)} for batch in self.bad_batches]
        return asdict(self) | {"agents": [asdict(health) for health in self.agents], "bad_batches": batches}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecoveryState:
        """The inverse of `to_dict`."""
        agents = tuple(Health(**health) for health in values["agents"])
        batches = tuple(BadBatch(batch["step"], tuple(batch["rows"])) for batch in values["bad_batches"])
        return cls(**{**values, "agents": agents, "bad_batches": batches})
