"""Work over all processes, batch by batch, until one of them wants to stop or runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ci_llm.data.order import share
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.run.heartbeat import Heartbeat


class StopVote:
    """Asks all processes between two steps whether the run shall stop. Each vote is also a sign of life.

    Args:
        interrupts: hold the request to stop that this process has received.
    """

    def __init__(self, processes: Processes, interrupts: Interrupts, heartbeat: Heartbeat) -> None:
        self.processes = processes
        self._interrupts, self._heartbeat = interrupts, heartbeat

    def vote(self, *, out_of_memory: bool = False) -> Verdict:
        """What all processes say together. A collective."""
        self._heartbeat.tick()
        ballot = Ballot(num_targets=0, stop=self._interrupts.stop_reason, out_of_memory=out_of_memory)
        return self.processes.agree(ballot)

    def reason(self) -> str | None:
        """Why the run shall stop, whichever process was asked; None if it shall not. A collective."""
        return self.vote().stop

    def requested_here(self) -> bool:
        """Whether this process was asked to stop; the others learn it by the next vote."""
        self._heartbeat.tick()
        return self._interrupts.stop_reason is not None


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch.

    All processes vote in every round, with or without a batch left for them, so that all leave in the same round.

    Args:
        report: called with how many of the numbers are done on all processes, before every round.

    Attributes:
        batches: this process's share.
        stop: the reason for which all have left; None: there is none.
        out_of_memory: whether all have left because a batch did not fit.
    """

    def __init__(
        self, vote: StopVote, count: int, batch_size: int, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._vote, self._failed, self._report = vote, False, report
        self._count, self._per_round = count, batch_size * vote.processes.num_processes
        self.stop: str | None = None
        self.out_of_memory = False
        processes = vote.processes
        # Process 0 has the longest share. One round more than that: a process may have left its last batch half done.
        own, longest = (
            share(range(count), i, processes.num_processes, batch_size) for i in (processes.process_index, 0)
        )
        self.batches = self._deal(own, 1 + len(longest))

    def _deal(self, own: list[list[int]], count: int) -> Iterator[list[int]]:
        for number in range(count):
            verdict = self._vote.vote(out_of_memory=self._failed)
            self.stop, self.out_of_memory = verdict.stop, verdict.out_of_memory
            if self.stop is not None or self.out_of_memory:
                return
            self._report(min(number * self._per_round, self._count))
            yield from own[number : number + 1]  # nothing, if this process has no batch left; it still votes

    def stop_requested_here(self) -> bool:
        """Whether this process was asked to stop, so that it may leave its batch now and vote."""
        return self._vote.requested_here()

    def end(self, *, out_of_memory: bool) -> None:
        """Vote to the end, whether or not this process was dealt all of its batches."""
        self._failed = out_of_memory
        for _ in self.batches:
            pass
