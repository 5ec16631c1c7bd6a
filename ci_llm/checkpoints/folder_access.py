"""The folder of a run as a manager gives access to it: what is read, what is moved or deleted, and the lease."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.checkpoint import Checkpoint, decode
from ci_llm.checkpoints.folders import Opened
from ci_llm.checkpoints.gradients import KEY, Gradients
from ci_llm.checkpoints.manifest import Manifest, read_manifest
from ci_llm.checkpoints.orbax_arguments import state_of
from ci_llm.checkpoints.restore import put
from ci_llm.checkpoints.retention import Metrics, RetentionPolicy, metrics_of
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.checkpoints.votes import SaveVote, give_own_parts
from ci_llm.distributed.side_channel import ProcessGroup
from ci_llm.errors import CheckpointError


class FolderAccess(ABC):
    """What a `CheckpointManager` does with its folder apart from saving. Reading waits for a save in flight.

    `latest_step` reads every byte of the newest checkpoint, and `restore` needs the same bytes right after. So the
    manager keeps what it has read and verified until it is restored or something newer is written.
    """

    #: Called with every result, in the thread that saved: a mirror looks at the folder then.
    after_save: Callable[[SaveResult], object] = staticmethod(lambda result: None)

    def __init__(
        self,
        store: CheckpointStore,
        processes: ProcessGroup,
        retention: RetentionPolicy,
        gradients: Gradients,
        *,
        read_only: bool,
    ) -> None:
        self._store, self._processes = store, processes
        self._retention, self._gradients = retention, gradients
        self._save_vote = SaveVote(processes)
        self._read_only, self._closed = read_only, False
        self._opened: Opened | None = None
        self._verified_step: int | None = None
        #: Whether `_newest_step` is the newest in the folder; otherwise the manager has to look.
        self._has_looked = False
        self._newest_step: int | None = None

    @abstractmethod
    def wait_until_finished(self) -> None:
        """Return when no save is in flight."""

    @abstractmethod
    def _note_restored(self) -> None:
        """Called when a state has been read."""

    # Reading

    @property
    def directory(self) -> Path:
        """The folder of the run."""
        return self._store.directory

    def path(self, step: int) -> Path:
        """The folder of a committed step; `final_checkpoint` if only that one holds it.

        Raises:
            CheckpointError: there is no such step.
        """
        return self._store.path(step)

    def latest_step(self, *, at_most: int | None = None) -> int | None:
        """The newest step that verifies, read byte by byte; a damaged one is named and quarantined.

        Its bytes stay in memory until the next `restore`, `save`, `reload` or `close`: `restore` does not read again.

        Args:
            at_most: for going back before this step: `supersede` what is newer then. None: any will do.
        """
        self.wait_until_finished()
        if self._opened is None or not self._store.is_newest(self._opened, at_most):
            self._opened = None  # the old one goes first: never two in memory
            self._opened = self._store.open_newest(heal=self._is_main_process and not self._read_only, at_most=at_most)
        newest = None if self._opened is None else self._opened.manifest.step
        self._has_looked, self._newest_step = True, newest
        return newest

    def read(self, step: int | None = None) -> Checkpoint:
        """One step with its state as nested dicts (tensors on the CPU), its manifest and its folder, verified.

        Args:
            step: None: the newest that verifies.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            CheckpointError: there is no such step, or none at all.
        """
        self.wait_until_finished()
        if step is None and (step := self.latest_step()) is None:
            raise CheckpointError("there is no checkpoint to restore", where=str(self.directory))
        opened, self._opened = self._opened, None
        if opened is None or opened.manifest.step != step:
            opened = self._store.read(step)
        self._verified_step = step
        self._note_restored()
        return decode(opened)

    def restore(
        self, step: int | None = None, into: MutableMapping[str, Any] | None = None, *, args: Any = None
    ) -> MutableMapping[str, Any]:
        """Read one step, verify it, and put it back into the objects that it was saved from.

        Args:
            step: None: the newest that verifies.
            into: objects as they were given to `save`; tensors are filled in place, objects get
                `load_state_dict`, plain values are replaced. Unless all keys, tensors and containers fit, nothing is
                touched; an object checks its own state when its turn comes. Gradients of an unfinished accumulation
                window come back to their optimizers.
            args: Orbax's way to say it (orbax_arguments.py): `StandardRestore(objects)`, or a `Composite` of the
                wanted items.

        Returns:
            `into`, or the state as nested dicts with tensors on the CPU.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            ForeignCheckpoint: it does not fit `into`.
            CheckpointError: there is no such step, or none at all.
        """
        state = self.read(step).state
        objects = into if args is None else state_of(None, args)
        if objects is None:
            return state
        give_own_parts(state, objects, self._processes.process_index)
        waiting = self._gradients.own_part(state.pop(KEY, None), objects, some=isinstance(args, Mapping))
        restored = put(state, into, args)
        self._gradients.put_back(waiting)
        return restored

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; not verified."""
        self.wait_until_finished()
        return self._store.all_steps()

    def best_step(self) -> int | None:
        """The step that `best_fn` puts first; the newest one without it."""
        return self._retention.best_of(self.directory, self.all_steps())

    def metrics(self, step: int) -> Metrics | None:
        """What `step` was saved with as `metrics`. Raises CheckpointError: there is no such step."""
        self.wait_until_finished()
        return metrics_of(self.directory, step)

    def metadata(self, step: int) -> Manifest:
        """The manifest of a step: time, attempt, `info`, files and their sizes; no other byte is read.

        Raises: DamagedCheckpoint, CheckpointError.
        """
        self.wait_until_finished()
        return read_manifest(self.path(step))

    def verify(self, step: int) -> Manifest:
        """Read every byte of a step and return its manifest. Raises DamagedCheckpoint, CheckpointError."""
        self.wait_until_finished()
        return self._store.verify(step)

    # Changing

    def reload(self) -> None:
        """Look at the folder anew at the next call, because somebody else has changed it. On every process."""
        self._forget_newest()

    def adopt(self, opened: Opened) -> None:
        """Commit a checkpoint that was read elsewhere, under its own name and as it is. For process 0.

        Raises:
            CheckpointError: the disk refuses it.
        """
        self._require_open(writing=True)
        self._forget_newest()
        if cause := self._store.adopt(opened, opened.folder.name):
            raise CheckpointError(f"{opened.folder.name} is dropped: {cause}", where=str(self.directory)) from cause

    def supersede(self, after_step: int) -> list[Path]:
        """Going back: move every newer checkpoint to `superseded/`. On every process; process 0 does it.

        Raises:
            OSError: the disk refuses one, which is where it was.
        """
        self._require_open(writing=True)
        verified = self._verified_step
        self._forget_newest()
        if verified == after_step:  # it was read byte by byte, and is the newest now: no save has to look again
            self._has_looked, self._newest_step = True, after_step
        return self._store.supersede(after_step) if self._is_main_process else []

    def set_aside(self, entries: Sequence[Path]) -> Path:
        """Move a whole run, `entries` of this folder, to `overwritten/<n>/`; returns where they are. For process 0.

        Raises:
            OSError: the disk refuses it; everything is where it was.
        """
        self._require_open(writing=True)
        self._forget_newest()
        return self._store.set_aside(entries)

    def delete(self, step: int) -> None:
        """Remove a committed step. On every process; process 0 does it.

        Raises:
            CheckpointError: there is no such step.
        """
        self._require_open(writing=True)
        self._forget_newest()
        if self._is_main_process:
            self._store.delete(step)

    # The lease of the folder

    def acquire_lease(self) -> int:
        """Become the one writer of the folder, before the first `save` does it; the number of this attempt.

        For process 0. What dead attempts left is swept.

        Raises:
            WriterBusy: another process writes here. CheckpointError: the folder cannot be written.
        """
        self._require_open(writing=True)
        return self._store.acquire_lease()

    def holds_lease(self) -> bool:
        """Whether this process is still the one writer: ask before you write anything else into the folder."""
        return self._store.holds_lease()

    @property
    def staging(self) -> Path:
        """A folder for unfinished files of the owner (`durable.write_bytes(staging=...)`); gone after a takeover."""
        return self._store.staging

    def _require_open(self, *, writing: bool = False) -> None:
        if self._closed:
            raise CheckpointError("this manager is closed", where=str(self.directory), hint="make another one")
        if writing and self._read_only:
            raise CheckpointError("this manager is read_only", where=str(self.directory))

    def _forget_newest(self) -> None:
        self.wait_until_finished()
        self._has_looked, self._opened = False, None
        self._save_vote.forget()
        self._retention.forget()

    @property
    def _is_main_process(self) -> bool:
        return self._processes.process_index == 0
