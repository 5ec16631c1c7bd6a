"""The checkpoint backends: the one of this file, and the modules of this package. They differ in who writes.

All of them make the same checkpoint: same store, same manifest, same verification. What one has written, any other
restores. To add one, add a file `backends/<name>.py` that defines

    class Backend           as the one below, and perhaps derived from it

and `checkpoint_backend: <name>` selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.state_files import StateEntry
from ci_llm.checkpoints.store import NO_OTHERS, CheckpointStore, OtherWriters, SaveResult
from ci_llm.core.imports import load_plugin
from ci_llm.distributed.side_channel import ProcessGroup, SaveResultChannel, num_processes


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that is to be made.

    Attributes:
        store: the store of the same folder on every process; only process 0 acquires its lease.
        entries: the state, on each process that writes; empty on the others.
        info: plain values for the manifest.
        keep: steps that pruning spares.
    """

    store: CheckpointStore
    step: int
    entries: Sequence[StateEntry]
    info: Mapping[str, object]
    keep: Collection[int]

    def commit(self, files: Mapping[str, FileImage], others: OtherWriters = NO_OTHERS) -> SaveResult:
        """Commit the files of this process, beside what `others` write, as the checkpoint of this step."""
        forms = {entry.key: entry.form for entry in self.entries}
        return self.store.save(self.step, files, forms=forms, info=self.info, keep=self.keep, others=others)


class Backend:
    """Prepares saves, each of which then runs in the training thread or in one of its own.

    This one is `vanilla`: process 0 writes its own state. The others wait for its result, if they do not stand still
    meanwhile.
    """

    #: Whether every process writes; otherwise process 0 does.
    all_write = False

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._results: SaveResultChannel | None = None

    def connect(self, *, asynchronous: bool) -> None:
        """Open the connections that saves use, if they are not open. A collective at the first call.

        Args:
            asynchronous: whether saves run in a thread.
        """
        if asynchronous and num_processes() > 1:
            self._results = self._results or SaveResultChannel()

    def task_of(self, request: SaveRequest) -> SaveTask | None:
        """The task of this process for a save, once it is connected; None for nothing.

        Raises:
            CheckpointError: the processes cannot save this state together; on every process.
        """
        step = request.step
        results = self._results
        if self._processes.process_index == 0:
            return SaveTask(request.entries, partial(self._save, request), partial(self._send, step, False))
        return None if results is None else SaveTask((), lambda _: SaveResult(step, results.receive(step)))

    def _save(self, request: SaveRequest, finish_copy: Callable[[], Mapping[str, FileImage]]) -> SaveResult:
        saved = False
        try:
            result = request.commit(finish_copy())
            saved = result.saved
            return result
        finally:
            self._send(request.step, saved)

    def _send(self, step: int, saved: bool) -> None:
        if self._results is not None:
            self._results.send(step, saved)


def open_backend(name: str, processes: ProcessGroup) -> Backend:
    """The backend of that name, for the processes of a run.

    Raises:
        BadInput: it is neither `vanilla` nor a module of this package.
    """
    make: Callable[[ProcessGroup], Backend] = Backend if name == "vanilla" else load_plugin(__name__, name, "Backend")
    return make(processes)
