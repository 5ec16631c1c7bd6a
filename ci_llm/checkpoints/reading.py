"""Checkpoints of a folder as a loop reads them: which there are, what is in them, and back into its objects."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.args import put, state_of
from ci_llm.checkpoints.folders import folders_of
from ci_llm.checkpoints.gradients import KEY, Gradients
from ci_llm.checkpoints.keeping import Keeping, Metrics, metrics_of
from ci_llm.checkpoints.manifest import Manifest, read_manifest
from ci_llm.checkpoints.state_files import read_snapshot
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.checkpoints.votes import Ballot
from ci_llm.distributed.side_channel import ProcessGroup
from ci_llm.errors import CheckpointError


class Reading:
    """What of a manager only reads. Each method waits for a save in flight."""

    store: CheckpointStore
    _keeping: Keeping
    _gradients: Gradients
    _processes: ProcessGroup
    _ballot: Ballot
    _read_only: bool
    _known_newest: list[int | None]

    def wait_until_finished(self) -> None:
        raise NotImplementedError

    def _has_restored(self) -> None:
        """Called when a state has been read."""

    @property
    def directory(self) -> Path:
        """The folder of the run."""
        return self.store.directory

    def latest_step(self, *, at_most: int | None = None) -> int | None:
        """The newest step that verifies, read byte by byte; a damaged one is named and quarantined.

        Args:
            at_most: for going back before this step: `supersede` what is newer then. None: any will do.
        """
        self.wait_until_finished()
        newest = self.store.latest(heal=self._is_main and not self._read_only, at_most=at_most)
        self._known_newest = [newest]
        return newest

    def reload(self) -> None:
        """Look at the folder anew at the next call, because somebody else has changed it. On every process."""
        self._forget_newest()

    def restore(
        self, step: int | None = None, into: MutableMapping[str, Any] | None = None, *, args: Any = None
    ) -> MutableMapping[str, Any]:
        """Read one step and verify what is read.

        Args:
            step: None: the newest that verifies.
            into: objects as they were given to `save`; tensors are filled in place, objects get
                `load_state_dict`, plain values are replaced. Unless all keys, tensors and containers fit, nothing is
                touched; whether an object fits it finds out itself, when its turn comes. Gradients that an
                accumulation window had when it was saved come back to its optimizers.
            args: Orbax's way to say it (args.py): `StandardRestore(objects)`, or a `Composite` of the wanted items.

        Returns:
            `into`, or the state as nested dicts with tensors on the CPU.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            ForeignCheckpoint: it does not fit `into`.
            CheckpointError: there is no such step, or none at all.
        """
        self.wait_until_finished()
        if step is None and (step := self.latest_step()) is None:
            raise CheckpointError("there is no checkpoint to restore", where=str(self.directory))
        manifest, files = self.store.read(step)
        state = read_snapshot(manifest.forms, files)
        self._has_restored()
        objects = into if args is None else state_of(None, args)
        if objects is None:
            return state
        waiting = self._gradients.own_part(state.pop(KEY, None), objects, some=isinstance(args, Mapping))
        restored = put(state, into, args)
        self._gradients.requeue(waiting)
        return restored

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; not verified."""
        self.wait_until_finished()
        return self.store.all_steps()

    def best_step(self) -> int | None:
        """The step that `best_fn` puts first; the newest one without it."""
        return self._keeping.best_of(self.directory, self.all_steps())

    def metrics(self, step: int) -> Metrics | None:
        """What `step` was saved with as `metrics`. Raises CheckpointError: there is no such step."""
        self.wait_until_finished()
        return metrics_of(self.directory, step)

    def metadata(self, step: int) -> Manifest:
        """The manifest of a step: time, attempt, `info`, files and their sizes; no other byte is read.

        Raises: DamagedCheckpoint, CheckpointError.
        """
        self.wait_until_finished()
        return read_manifest(folders_of(self.directory, step)[0])

    def verify(self, step: int) -> Manifest:
        """Read every byte of a step and return its manifest. Raises DamagedCheckpoint, CheckpointError."""
        self.wait_until_finished()
        return self.store.verify(step)

    def _forget_newest(self) -> None:
        self.wait_until_finished()
        self._known_newest = []
        self._ballot.forget()

    @property
    def _is_main(self) -> bool:
        return self._processes.index == 0
