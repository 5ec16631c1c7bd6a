"""Who writes a checkpoint: process 0 alone (vanilla), or every process its part (distributed).

Both make the same checkpoint: same store, same manifest, same verification; what one wrote, the other restores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.commit import OtherWriters
from ci_llm.checkpoints.distributed import PartWriter
from ci_llm.checkpoints.state_files import Snapshot, StateEntry
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, SaveResultChannel, has_other_processes
from ci_llm.errors import CheckpointError


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that is to be made.

    Attributes:
        store: of the same folder on every process; only process 0 acquires its lease.
        entries: the state, on each process that writes; empty on the others.
        info: of the manifest.
        keep: steps that pruning spares.
        asynchronous: whether the save runs in a thread.
    """

    store: CheckpointStore
    step: int
    entries: Sequence[StateEntry]
    info: Mapping[str, object]
    keep: Collection[int]
    asynchronous: bool


class Backend(Protocol):
    """Prepares saves, each of which then runs in the training thread or in one of its own."""

    #: Whether every process writes; otherwise process 0 does.
    all_write: bool

    def prepare(self, request: SaveRequest) -> SaveTask | None:
        """What this process has to do; None: nothing. A collective at the first call.

        Raises:
            CheckpointError: the processes cannot save this state together; on every process.
        """
        ...


class Vanilla:
    """Process 0 writes its own state. The others wait for its result, if they do not stand still meanwhile."""

    all_write = False

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._results: SaveResultChannel | None = None

    def prepare(self, request: SaveRequest) -> SaveTask | None:
        if request.asynchronous and has_other_processes():
            self._results = self._results or SaveResultChannel()
        step, results = request.step, self._results
        if self._processes.index == 0:
            return SaveTask(request.entries, lambda take: self._save(request, take), lambda: self._send(step, False))
        return None if results is None else SaveTask((), lambda take: SaveResult(step, results.receive(step)))

    def _save(self, request: SaveRequest, take: Callable[[], Snapshot]) -> SaveResult:
        saved = False
        try:
            copy = take()
            result = request.store.save(
                request.step, copy.files, forms=copy.forms, info=request.info, keep=request.keep
            )
            saved = result.saved
            return result
        finally:
            self._send(request.step, saved)

    def _send(self, step: int, saved: bool) -> None:
        if self._results is not None:
            self._results.send(step, saved)


class Distributed:
    """The tensors of a state that all processes hold are dealt out, and each process writes its part."""

    all_write = True

    def __init__(self, processes: ProcessGroup) -> None:
        del processes  # the writers communicate on a channel of their own
        self._writer: PartWriter | None = None

    def prepare(self, request: SaveRequest) -> SaveTask:
        self._writer = writer = self._writer or PartWriter()
        own_entries = writer.share(request.entries)
        forms = {entry.key: entry.form for entry in request.entries}

        def commit(part: Snapshot, others: OtherWriters) -> SaveResult:
            return request.store.save(
                request.step, part.files, forms=forms, info=request.info, keep=request.keep, others=others
            )

        return SaveTask(
            own_entries, lambda take: writer.save(request.store, request.step, take, commit), writer.give_up
        )


BACKENDS: Mapping[str, Callable[[ProcessGroup], Backend]] = {
    "vanilla": Vanilla,
    "distributed": Distributed,
}


def open_backend(name: str, processes: ProcessGroup) -> Backend:
    """The backend of that name. Raises CheckpointError if there is none."""
    if name not in BACKENDS:
        raise CheckpointError(
            f"there is no checkpoint backend {name!r}",
            where="checkpoint_backend",
            hint=f"one of {', '.join(BACKENDS)}",
        )
    return BACKENDS[name](processes)
