"""The checkpoint backends, each a module of this package: they differ in which processes write a checkpoint.

All of them make the same checkpoint: same store, same manifest, same verification. What one has written, any other
restores. To add one, add a file `backends/<name>.py` that defines

    class Backend           with the attribute and the method of `Backend` below, built from a ProcessGroup

and `checkpoint_backend: <name>` selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.state_files import Snapshot, StateEntry
from ci_llm.checkpoints.store import NO_OTHERS, CheckpointStore, OtherWriters, SaveResult
from ci_llm.core.imports import load_plugin
from ci_llm.distributed.side_channel import ProcessGroup


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

    def commit(self, written: Snapshot, others: OtherWriters = NO_OTHERS) -> SaveResult:
        """Commit the files of this process, beside those of `others`, as the checkpoint of this step."""
        forms = {entry.key: entry.form for entry in self.entries}
        return self.store.save(self.step, written.files, forms=forms, info=self.info, keep=self.keep, others=others)


class Backend(Protocol):
    """Prepares saves, each of which then runs in the training thread or in one of its own."""

    #: Whether every process writes; otherwise process 0 does.
    all_write: bool

    def connect(self, *, asynchronous: bool) -> None:
        """Open the connections that saves use, if they are not open. A collective at the first call.

        Args:
            asynchronous: whether saves run in a thread.
        """

    def prepare(self, request: SaveRequest) -> SaveTask | None:
        """The task of this process for a save, once it is connected; None for nothing.

        Raises:
            CheckpointError: the processes cannot save this state together; on every process.
        """


def open_backend(name: str, processes: ProcessGroup) -> Backend:
    """The backend of that name, for the processes of a run.

    Raises:
        BadInput: no module of this package has that name.
    """
    make: Callable[[ProcessGroup], Backend] = load_plugin(__name__, name, "Backend")
    return make(processes)
