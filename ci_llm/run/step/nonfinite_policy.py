"""The policy for numbers that are not finite: the response to an agent in a step, by pure functions of plain values.

The response to one agent escalates. It is left out of the step, and its learning rate is cut. After `max_in_a_row`
nonfinite steps in a row it is rolled back to its last good snapshot. After as many more in the same episode, the
attempt ends. An agent with rows of its own keeps its rate until it is rolled back, because its rows, which only it has
read, are the more probable cause.

If every agent is nonfinite in a step, the batch is the probable cause: it is skipped for good. After `max_in_a_row`
such steps in a row the weights are the probable cause, and the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ci_llm.core.run_folder import GOOD_AFTER_STEPS, BadBatch

#: The smallest factor to which cuts reduce an agent's learning rate. Below it, an agent that is nonfinite now and then
#: would stop moving.
LEAST_LR_FACTOR: Final = 0.01


@dataclass(frozen=True)
class Bounds:
    """The limits of the responses.

    Attributes:
        lr_divisor: a nonfinite step divides the agent's learning rate by it; 1.5 as in safe_train.py.
        max_in_a_row: one bad batch or two pass, and five are neither.
        good_after: this many finite steps in a row end an episode.
        own_rows: whether each agent has rows of its own in a step.
    """

    lr_divisor: float = 1.5
    max_in_a_row: int = 5
    good_after: int = GOOD_AFTER_STEPS
    own_rows: bool = False


@dataclass(frozen=True)
class AgentRecovery:
    """The recovery state of one agent. An episode lasts from a nonfinite step to `good_after` finite ones in a row.

    Attributes:
        lr_factor: multiplies the agent's scheduled learning rate; nonfinite steps cut it.
        nonfinite_in_a_row: nonfinite steps without a finite one between them, since the last rollback.
        episode_start: steps taken before the first nonfinite step of the episode; None outside of one.
        finite_in_a_row: finite steps since the last nonfinite one of the episode.
        rolled_back: whether the agent was rolled back in this episode.
        rollbacks: rollbacks in the whole run.
    """

    lr_factor: float = 1.0
    nonfinite_in_a_row: int = 0
    episode_start: int | None = None
    finite_in_a_row: int = 0
    rolled_back: bool = False
    rollbacks: int = 0

    def after(self, step: int, nonfinite: bool, bounds: Bounds) -> AgentRecovery:
        """The state after the 0-based `step`. The agent must not be exhausted."""
        if nonfinite:
            return self._after_nonfinite_step(step, bounds)
        if self.episode_start is None:
            return self
        finite = self.finite_in_a_row + 1
        if finite >= bounds.good_after:
            return AgentRecovery(lr_factor=self.lr_factor, rollbacks=self.rollbacks)
        return replace(self, nonfinite_in_a_row=0, finite_in_a_row=finite)

    def _after_nonfinite_step(self, step: int, bounds: Bounds) -> AgentRecovery:
        in_a_row = self.nonfinite_in_a_row + 1
        spared = bounds.own_rows and in_a_row < bounds.max_in_a_row and not self.rolled_back
        worse = replace(
            self,
            lr_factor=self.lr_factor if spared else max(self.lr_factor / bounds.lr_divisor, LEAST_LR_FACTOR),
            nonfinite_in_a_row=in_a_row,
            episode_start=step if self.episode_start is None else self.episode_start,
            finite_in_a_row=0,
        )
        if worse.nonfinite_in_a_row < bounds.max_in_a_row or self.rolled_back:
            return worse
        return replace(worse, nonfinite_in_a_row=0, rolled_back=True, rollbacks=self.rollbacks + 1)

    def is_exhausted(self, bounds: Bounds) -> bool:
        """Whether no response is left inside the run."""
        return self.rolled_back and self.nonfinite_in_a_row >= bounds.max_in_a_row


@dataclass(frozen=True)
class RecoveryState:
    """What a run does differently because of faults. It is part of checkpoints, and never changes the configuration.

    Attributes:
        bad_batches: steps that are skipped without being computed, ascending.
        bad_batches_in_a_row: bad batches since the last other step. A step in which all agents overflow is another
            step: the loss scale is halved, so overflows stop by themselves.
        requested_lr_factor: multiplies the learning rate of every agent; the supervisor asks for it.
        micro_batch_size: the most rows per process and micro-step; None: as configured.
        parts_of_group: in how many parts the completions of a prompt take their passes.
        recompute: whether layers are recomputed in the backward pass, whatever is configured.
        pass_per_agent: whether every agent takes passes of its own, whatever is configured.
    """

    bad_batches: tuple[BadBatch, ...] = ()
    bad_batches_in_a_row: int = 0
    requested_lr_factor: float = 1.0
    micro_batch_size: int | None = None
    parts_of_group: int = 1
    recompute: bool = False
    pass_per_agent: bool = False

    def limit(self, batch_size: int) -> int:
        """Rows per process and micro-step where the configuration asks for `batch_size`."""
        return min(batch_size, self.micro_batch_size or batch_size)

    def is_bad_batch(self, step: int, rows: Callable[[int], Sequence[int]]) -> bool:
        """Whether every agent was nonfinite at this step before, on the same rows.

        Args:
            rows: returns the rows of a step; called only if the step was bad, because it takes time.
        """
        known = [batch.rows for batch in self.bad_batches if batch.step == step]
        return bool(known) and tuple(rows(step)) in known

    def after_other_step(self) -> RecoveryState:
        """The state after a step in which not all agents were nonfinite."""
        return replace(self, bad_batches_in_a_row=0) if self.bad_batches_in_a_row else self

    def after_bad_batch(self, batch: BadBatch) -> RecoveryState:
        """The state after a step in which all agents were nonfinite."""
        return replace(self.with_batches([batch]), bad_batches_in_a_row=self.bad_batches_in_a_row + 1)

    def with_batches(self, batches: Sequence[BadBatch]) -> RecoveryState:
        """The state that skips these batches as well."""
        return replace(self, bad_batches=tuple(sorted({*self.bad_batches, *batches}, key=lambda b: (b.step, b.rows))))

    def without_batches_from(self, step: int) -> RecoveryState:
        """The state that no longer skips the batches of this step and of later ones."""
        return replace(self, bad_batches=tuple(batch for batch in self.bad_batches if batch.step < step))

    def with_requests(self, lr_factor: float, micro_batch_size: int | None) -> RecoveryState:
        """The state with the requests of the supervisor; a request never loosens a limit."""
        sizes = [size for size in (self.micro_batch_size, micro_batch_size) if size is not None]
        return replace(
            self,
            requested_lr_factor=min(self.requested_lr_factor, lr_factor),
            micro_batch_size=min(sizes, default=None),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecoveryState:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        batches = tuple(BadBatch(batch["step"], tuple(batch["rows"])) for batch in values["bad_batches"])
        return cls(**{**values, "bad_batches": batches})
