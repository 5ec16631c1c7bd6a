"""Work that all processes do in rounds: each round begins with a vote on whether all leave, and is a sign of life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ci_llm.data.order import share
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts


class Heartbeat:
    """Counts signs of life. Written by the main thread, read by any; costs nothing."""

    def __init__(self) -> None:
        self.ticks = 0
        self._rests = 0

    @property
    def is_resting(self) -> bool:
        """True while the limit on silence is suspended."""
        return self._rests > 0

    def tick(self) -> None:
        self.ticks += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the limit within the block: the run waits for a full disk, for instance."""
        self._rests += 1
        try:
            yield
        finally:
            self._rests -= 1
            self.ticks += 1


class StopVote:
    """Asks all processes, between two steps, whether the run shall stop. Each vote is also a sign of life.

    Args:
        interrupts: the requests to stop that this process has received.
    """

    def __init__(self, processes: Processes, interrupts: Interrupts, heartbeat: Heartbeat) -> None:
        self.processes = processes
        self._interrupts, self._heartbeat = interrupts, heartbeat

    def vote(self, *, out_of_memory: bool = False, failed: bool = False) -> Verdict:
        """The verdict of all processes. A collective."""
        self._heartbeat.tick()
        reason = self._interrupts.stop_reason
        return self.processes.agree(Ballot(0, stop=reason, out_of_memory=out_of_memory, failed=failed))

    def reason(self) -> str | None:
        """The reason to stop that any process has received; None if there is none. A collective."""
        return self.vote().stop

    def requested_here(self) -> bool:
        """True if this process was asked to stop; the other processes learn it by the next vote."""
        self._heartbeat.tick()
        return self._interrupts.stop_reason is not None


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch.

    All processes vote in every round, with or without a batch left for them, and once more at the end: a batch may be
    asked for before those in front of it are done, and left half done afterwards. So all leave in the same round.

    Args:
        report: called before every round with the count of numbers that all processes have done.

    Attributes:
        batches: this process's share.
        stop: the reason for which all processes have left; None if they have stayed.
        out_of_memory: all processes have left because a batch did not fit.
        failed: all processes have left because of an error.
    """

    def __init__(
        self, vote: StopVote, count: int, batch_size: int, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._vote, self._here, self._report = vote, dict[str, bool](), report
        self._count, self._per_round = count, batch_size * vote.processes.num_processes
        self.stop: str | None = None
        self.out_of_memory = self.failed = False
        index, num_processes = vote.processes.process_index, vote.processes.num_processes
        own = share(range(count), index, num_processes, batch_size)
        self.batches = self._deal(own)

    def _deal(self, own: list[list[int]]) -> Iterator[list[int]]:
        for number in range(-(-self._count // self._per_round)):
            if self._all_leave():
                return
            self._report(min(number * self._per_round, self._count))
            if number < len(own):  # a process without a batch left still votes
                yield own[number]

    def _all_leave(self) -> bool:
        """Vote; true if one process stops, its memory ran out, or it had an error."""
        verdict = self._vote.vote(**self._here)
        self.stop, self.out_of_memory, self.failed = verdict.stop, verdict.out_of_memory, verdict.failed
        return self._have_left

    @property
    def _have_left(self) -> bool:
        return self.stop is not None or self.out_of_memory or self.failed

    def stop_requested_here(self) -> bool:
        """True if this process was asked to stop, or all are about to leave: it may leave its texts unfinished."""
        return self._have_left or self._vote.requested_here()

    def end(self, *, out_of_memory: bool, failed: bool = False) -> None:
        """Vote in the rounds that are left, without computing their batches, and once more if all have stayed."""
        self._here = {"out_of_memory": out_of_memory, "failed": failed}
        for _ in self.batches:
            pass
        if not self._have_left:
            self._all_leave()
