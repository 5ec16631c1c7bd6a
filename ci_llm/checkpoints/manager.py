"""The manager of checkpoints for any training loop: it saves what is due, and restores it strictly.

A restore compares what can be compared before it touches any object.

    manager = CheckpointManager("runs/mine", save_interval_steps=4)
    start = 0
    if (latest := manager.latest_step()) is not None:
        manager.restore(latest, into=objects)
        start = latest + 1
    for step in range(start, num_steps):
        train_step(objects)
        manager.save(step, objects)
        if manager.reached_preemption(step):
            manager.wait_until_finished()
            sys.exit()

Its methods have the names of Orbax's CheckpointManager (docs/coming_from.md). It knows nothing of agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

from ci_llm.checkpoints.checkpoint import Checkpoint, decode
from ci_llm.checkpoints.due import Due, SavePolicy
from ci_llm.checkpoints.gradients import KEY
from ci_llm.checkpoints.manifest import Manifest, read_manifest, verify_folder
from ci_llm.checkpoints.restoring import give_own_parts, load_into
from ci_llm.checkpoints.saver import EachProcess, Saver
from ci_llm.checkpoints.state_files import State
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, TorchProcessGroup
from ci_llm.errors import CheckpointError
from ci_llm.interrupts import Interrupts, shield_workers


class CheckpointManager:
    """The checkpoints of one training loop.

    Reading needs no lease; the first `save` acquires the lease of the folder. On several processes `save` and
    `reached_preemption` are collectives: every process calls them with the same step, and process 0 writes its own
    `state`, or each process its part. The next call raises the error of a save in the background.

    It logs to loggers below `ci_llm.checkpoints`: warnings about what was not saved, and notes (INFO) about saves.

    Args:
        directory: the folder of the run.
        save_interval_steps: `save` saves at each multiple of it; None for no saves by steps.
        save_interval_seconds: and when this time has passed since the last save; None for no saves by time.
        max_to_keep: the number of newest checkpoints to keep, beside those that `save` is told to keep; None keeps all.
        async_save: copy the state, return, and write it in a thread. One save is in flight at a time. A save in flight
            at the end of the process is finished. False: `save` returns when the checkpoint is durable.
        optimizers: the optimizers of the loop. With `async_save` what they own is copied in the thread as well, and
            each waits for that before its next step; call `wait_until_copied` before you change it in another way.
        checkpoint_backend: "vanilla", process 0 writes its own `state`; "distributed", the tensors of a state that all
            processes hold are dealt out, and each writes its part of the same checkpoint at the same time. What one
            backend wrote, the other restores, on any number of processes.
        accelerator: an `Accelerator`, for the device of its collectives, its count of micro-steps, and the loaders that
            it has prepared: their workers ignore the signals of the run.
        processes: for the votes of several processes; by default `torch.distributed`, if it is initialised.
        interrupts: signal handlers that the caller installs. By default the manager installs its own at the first
            `reached_preemption`, in the main thread, and restores the old ones on close.

    Attributes:
        directory: the folder of the run.
        store: the folder, for who changes it otherwise than by a save, while none is in flight: its lease, its line.
        saver: the way of a save, for a trainer: it also saves without a vote, and makes `final_checkpoint`.
        due: whether a step is to be saved, asked before its state is collected.

    Examples:
        >>> manager = ci_llm.CheckpointManager(folder / "loop", save_interval_steps=2)
        >>> [manager.save(step, {"weights": torch.ones(3) * step}) for step in range(3)]
        [True, False, True]
        >>> manager.wait_until_finished()
        >>> manager.latest_step(), manager.restore(2)["weights"].tolist()
        (2, [2.0, 2.0, 2.0])
        >>> manager.close()
    """

    EachProcess: ClassVar = EachProcess  # for what every process has of its own, in a state
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        directory: Path | str,
        *,
        save_interval_steps: int | None = 1,
        save_interval_seconds: float | None = None,
        max_to_keep: int | None = None,
        async_save: bool = True,
        accelerator: Any = None,
        optimizers: Iterable[Any] = (),
        checkpoint_backend: str = "vanilla",
        processes: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self._interrupts = interrupts or Interrupts()
        self._own_interrupts = interrupts is None
        self._processes = processes or TorchProcessGroup(getattr(accelerator, "device", None))
        shield_workers(*getattr(accelerator, "_dataloaders", ()))
        # Absolute: the loop may change the working folder, also while a save is in flight.
        self.store = CheckpointStore(Path(directory).absolute(), save_total_limit=max_to_keep)
        self.directory = self.store.directory
        self.saver = Saver(self.store, self._processes, checkpoint_backend, accelerator, asynchronous=async_save)
        for optimizer in optimizers:
            self.saver.watch(optimizer)
        policy = SavePolicy(save_interval_steps, save_interval_seconds)
        self.due = Due(policy, self._interrupts, self._processes, self.saver.newest, self.clock)

    # Saving

    def should_save(self, step: int) -> bool:
        """True if this process, asked alone, would save `step`: by the policy, a stop or a request."""
        return self.due.opinion(step).wanted

    def save(
        self,
        step: int,
        state: State,
        *,
        force: bool = False,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
    ) -> bool:
        """Save `state` as `step` if that is due; True if it is saved, or with `async_save` begun.

        A step that is not newer than the newest is never saved. A disk that fails drops the new checkpoint,
        says so, and training continues.

        Args:
            state: dict; its keys name files (see state_files.py). Tensors, plain values, nested containers,
                objects with `state_dict`, bytes for files to be kept verbatim, and `EachProcess` for what every
                process has of its own. Between two steps of an optimizer in it (or of the `optimizers`) the gradients
                that wait are saved as well (gradients.py).
            force: save whatever the policy says; the same on every process. It costs no vote.
            info: plain values for the manifest: epoch, position, metrics.
            keep: steps that are not pruned, beside the `max_to_keep` newest: the best one, for instance.

        Raises:
            CheckpointError: the state holds a value that cannot be saved; the save before failed in its thread; the
                manager is closed, or the folder of the run is gone. An error of one process is an error of all, except
                that a lack of memory for the copy is told to the others by `wait_until_finished` only.
            WriterBusy: another process writes to this folder, or has taken it over.
        """
        self.saver.require_open()
        self.store.free_read_bytes()
        if (force or self.due.is_due(step)) and self.saver.save(step, state, info or {}, keep, self.due):
            return True
        if not self.due.agreed(step).newer:
            self.saver.say_if_saved(step)
        return False

    def reached_preemption(self, step: int) -> bool:
        """True if the run shall stop at `step`: a signal has reached any of its processes. A collective.

        The answer for a step is the one that `save` acted on at that step, so that a loop never stops unsaved.
        """
        if self._own_interrupts and not self._interrupts.installed and not self.saver.closed:
            self._interrupts.install()
        return self.due.agreed(step).stop > 0

    @property
    def last_result(self) -> SaveResult | None:
        """The result of the last save that has ended."""
        return self.saver.last_result

    def watch(self, optimizer: Any) -> None:
        """Add to the `optimizers` one that was made later than the manager."""
        self.saver.watch(optimizer)

    def wait_until_copied(self) -> None:
        """Return when the state given to `save` may be changed by others than its optimizers."""
        self.saver.behind.wait_until_copied()

    def wait_until_finished(self) -> None:
        """Return when nothing is in flight, on any process. Raises the error of a save in its thread."""
        self.saver.behind.wait()

    def close(self) -> None:
        """Finish what is in flight; release the lease and restore the signal handlers. Then it only reads."""
        self.saver.closed = True
        try:
            self.wait_until_finished()
        finally:
            self.saver.shutdown()
            self.store.close()
            if self._own_interrupts:
                self._interrupts.restore()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    def latest_step(self, *, at_most: int | None = None) -> int | None:
        """The newest step that verifies, read byte by byte; a damaged one is named and quarantined.

        Its bytes stay in memory until the next `restore`, `save`, `delete` or `close`: `restore` does not read again.

        Args:
            at_most: for going back before this step: supersede what is newer then. None for the newest of all.
        """
        self.wait_until_finished()
        return self.store.latest_step(quarantine=self._processes.process_index == 0, at_most=at_most)

    def read(self, step: int | None = None) -> Checkpoint:
        """One step with its state as nested dicts (tensors on the CPU), its manifest and its folder, verified.

        Args:
            step: None for the newest that verifies.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            CheckpointError: there is no such step, or none at all.
        """
        self.wait_until_finished()
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError("there is no checkpoint to restore", where=str(self.directory))
        self.due.restart()
        return decode(self.store.read(step))

    def restore(
        self, step: int | None = None, into: MutableMapping[str, Any] | None = None
    ) -> MutableMapping[str, Any]:
        """Read one step, verify it, and put it back into the objects that it was saved from.

        Args:
            step: None for the newest that verifies.
            into: objects as they were given to `save`; tensors are filled in place, objects get
                `load_state_dict`, plain values are replaced. Unless all keys, tensors and containers fit, nothing is
                touched; an object checks its own state when its turn comes. Gradients of an unfinished accumulation
                window come back to their optimizers.

        Returns:
            `into`, or the state as nested dicts with tensors on the CPU.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            ForeignCheckpoint: it does not fit `into`.
            CheckpointError: there is no such step, or none at all.
        """
        state = self.read(step).state
        if into is None:
            return state
        give_own_parts(state, into, self._processes.process_index)
        put_gradients_back = self.saver.gradients.putting_back(state.pop(KEY, None), into)
        load_into(into, state)
        put_gradients_back()
        return into

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; not verified."""
        self.wait_until_finished()
        return self.store.all_steps()

    def metadata(self, step: int) -> Manifest:
        """The manifest of a step: time, attempt, `info`, files and their sizes; no other byte is read.

        Raises: DamagedCheckpoint, CheckpointError.
        """
        self.wait_until_finished()
        return read_manifest(self.store.path(step))

    def verify(self, step: int) -> Manifest:
        """Read every byte of a step and return its manifest. Raises DamagedCheckpoint, CheckpointError."""
        self.wait_until_finished()
        return verify_folder(self.store.path(step))

    # Changing

    def delete(self, step: int) -> None:
        """Remove a committed step. On every process; process 0 does it.

        Raises:
            CheckpointError: there is no such step.
        """
        self.saver.require_open()
        self.wait_until_finished()
        self.store.reload()
        self.due.ask_again()
        if self._processes.process_index == 0:
            self.store.delete(step)
