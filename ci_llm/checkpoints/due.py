"""When a checkpoint is due: the policy of a loop, and the votes of its processes, which all act on the same answer.

The policy is a pure function of step and time: the clock is passed in. The training loop also saves at the end, when it
is asked to stop, and after the best evaluation. A loop asks about every step, so the votes on a step are one small
all-reduce, counted once. `save` and `reached_preemption` act on the same votes: a loop never stops unsaved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ci_llm.distributed.side_channel import ProcessGroup, run_collectively
from ci_llm.errors import CheckpointError
from ci_llm.interrupts import Interrupts


@dataclass(frozen=True)
class SavePolicy:
    """The rule by which saves are due.

    Args:
        every_steps: at each multiple of it; None never.
        every_seconds: seconds since the last try of a save, after which the next one is due; None never.
    """

    every_steps: int | None = 1
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise CheckpointError("save at multiples of 1 or more", where="save_interval_steps")

    def due(self, step: int, *, newest: int | None, elapsed_s: float) -> bool:
        """True if `step` is to be saved.

        Args:
            newest: newest committed step; only later steps are saved.
            elapsed_s: seconds since the last save was tried.
        """
        if newest is not None and step <= newest:
            return False
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        by_time = self.every_seconds is not None and elapsed_s >= self.every_seconds
        return by_steps or by_time


class Votes(NamedTuple):
    """The number of processes that answer yes to each question."""

    stop: int
    save_requested: int
    due: int
    newer: int

    @property
    def wanted(self) -> bool:
        """True if the step is newer than the newest, and any process finds a save due, apart from `force`."""
        return bool(self.newer and (self.due or self.stop or self.save_requested))


@dataclass
class Due:
    """The answer for each step of a loop.

    Args:
        newest: returns the newest step, one in flight included; raises the error of a save that failed in its thread.
        clock: seconds, monotonic.
    """

    policy: SavePolicy
    interrupts: Interrupts
    processes: ProcessGroup
    newest: Callable[[], int | None]
    clock: Callable[[], float]
    _counted: tuple[int, Votes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.restart()

    def opinion(self, step: int) -> Votes:
        """The votes of this process alone."""
        stop = self.interrupts.stop_reason is not None
        newest = self.newest()
        due = self.policy.due(step, newest=newest, elapsed_s=self.clock() - self._tried_at)
        return Votes(stop, self.interrupts.save_requested, due, newest is None or step > newest)

    def vote(self, step: int) -> Votes:
        """The votes of this process, to be added up: process 0 alone decides by the policy and the folder."""
        own = self.opinion(step)
        return own if self.processes.process_index == 0 else own._replace(due=0, newer=0)

    def agreed(self, step: int) -> Votes:
        """The votes of all processes. A collective, unless this step is counted already: all processes know that."""
        if self._counted is None or self._counted[0] != step:
            self._counted = step, Votes(*run_collectively(self.processes, lambda: self.vote(step)))
        return self._counted[1]

    def is_due(self, step: int) -> bool:
        """True if `step` is to be saved. A collective, as above."""
        if self._counted is not None and self._counted[0] == step and not self._counted[1].newer:
            self._counted = None  # the checkpoint for which it was refused may be gone
        return self.agreed(step).wanted

    def begin_save(self, step: int, votes: Votes) -> bool:
        """True if a save of `step` begins now, by votes that came with what the processes contribute to it."""
        self._counted = step, votes
        if votes.newer:
            self.interrupts.take_save_request()
            self.restart()
        return bool(votes.newer)

    def restart(self) -> None:
        """The seconds between two saves count from here."""
        self._tried_at = self.clock()

    def ask_again(self) -> None:
        """Vote again on the same step: the folder has changed, or time has passed. On every process."""
        self._counted = None
