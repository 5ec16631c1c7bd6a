"""Who writes a checkpoint: process 0 alone (vanilla), or every process its part (distributed).

Both make the same checkpoint: same store, same manifest, same verification; what one wrote, the other restores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.commit import Others
from ci_llm.checkpoints.distributed import PartWriter
from ci_llm.checkpoints.state_files import Snapshot, State, hand_off
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, SaveResultChannel, has_other_processes
from ci_llm.errors import CheckpointError


@dataclass(frozen=True)
class Wanted:
    """A checkpoint that is to be made.

    Attributes:
        store: where it goes; of the same folder on every process, and only process 0 claims it.
        describe: makes the info of the manifest.
        keep: steps that pruning spares.
        behind: whether it will be run behind the training.
    """

    store: CheckpointStore
    step: int
    state: State
    describe: Callable[[], Mapping[str, object]]
    keep: Collection[int]
    behind: bool


class Backend(Protocol):
    """Prepares saves, each of which is then run here or behind the training."""

    def prepare(self, wanted: Wanted, be_ready: Callable[[], object]) -> SaveTask | None:
        """Take the state as it is now. Every process calls it.

        Args:
            be_ready: called first; raises what has to end this save.

        Returns:
            None if nothing is to be done on this process.

        Raises:
            CheckpointError: a value that cannot be saved.
        """
        ...

    def follow(self, step: int) -> SaveTask | None:
        """For a process that had nothing to do for a save which others have begun: wait until that is over."""
        ...


class Vanilla:
    """Process 0 writes its own state, and tells the others what became of it."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._results: SaveResultChannel | None = None

    def prepare(self, wanted: Wanted, be_ready: Callable[[], object]) -> SaveTask | None:
        if wanted.behind and has_other_processes():
            self._results = self._results or SaveResultChannel()
        if self._processes.index:
            return None
        be_ready()
        entries, info = hand_off(wanted.state), wanted.describe()

        def save(take: Callable[[], Snapshot]) -> SaveResult:
            saved = False
            try:
                whole = take()
                result = wanted.store.save(wanted.step, whole.files, forms=whole.forms, info=info, keep=wanted.keep)
                saved = result.saved
                return result
            finally:
                if self._results is not None:
                    self._results.send(wanted.step, saved)

        return SaveTask(entries, save)

    def follow(self, step: int) -> SaveTask | None:
        if (results := self._results) is None or self._processes.index == 0:
            return None
        return SaveTask((), lambda take: SaveResult(step, results.receive(step)))


class Distributed:
    """The tensors of a state that all processes hold are dealt out, and each process writes its part."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._crew: PartWriter | None = None

    def prepare(self, wanted: Wanted, be_ready: Callable[[], object]) -> SaveTask:
        """A collective."""
        self._crew = crew = self._crew or PartWriter(self._processes)
        own: dict[str, Any] = {}

        def take_info() -> None:
            be_ready()
            own.update(wanted.describe())

        forms, mine = crew.share(wanted.state, take_info)

        def commit(part: Snapshot, others: Others) -> SaveResult:
            return wanted.store.save(wanted.step, part.files, forms=forms, info=own, keep=wanted.keep, others=others)

        return SaveTask(mine, lambda take: crew.save(wanted.store, wanted.step, take, commit), crew.give_up)

    def follow(self, step: int) -> SaveTask | None:
        return None  # every process has had its part


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
