"""The manager of checkpoints for anyone's training loop: when to save, what to copy, how to come back.

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

It speaks Orbax's CheckpointManager (https://orbax.readthedocs.io), whose documented loop runs as it stands.
It knows names and tensors, nothing of agents, and serves any loop.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from ci_llm.checkpoints.async_saver import AsyncSaver
from ci_llm.checkpoints.backends import Wanted, open_backend
from ci_llm.checkpoints.manifest import Manifest
from ci_llm.checkpoints.policy import BestInterval, SavePolicy
from ci_llm.checkpoints.restore import load_into
from ci_llm.checkpoints.state_files import State, read_snapshot, snapshot_of, take_snapshot
from ci_llm.checkpoints.store import WRITER_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.core.typed_json import decode, encode
from ci_llm.distributed.side_channel import ProcessGroup, TorchProcessGroup, has_other_processes, run_collectively
from ci_llm.errors import CheckpointError, CiLlmError
from ci_llm.interrupts import Interrupts

_LOGGER = logging.getLogger(__name__)

#: The others wait in a collective meanwhile, and through two pauses at `finish`; NCCL gives up after ten minutes.
LONGEST_PAUSE_S = 240.0


def _copy_of(info: Mapping[str, object]) -> dict[str, Any]:
    try:
        return {key: decode(encode(value)) for key, value in info.items()}
    except TypeError as error:
        raise CheckpointError(f"the info cannot be saved: {error}") from error


def _finish_at_exit(behind: AsyncSaver, say: Callable[[str], None], pid: int) -> None:
    """Python waits for the thread by itself, but nobody would ask what became of the save."""
    if os.getpid() != pid:
        return  # a forked child, in which there is no such thread
    try:
        behind.wait()
    except CiLlmError as error:
        say(f"the last checkpoint was not saved: {error}")


class _Votes(NamedTuple):
    """What the processes say about one step; a count of processes each."""

    stop: int
    save_requested: int
    due: int
    newer: int


class CheckpointManager:
    """The checkpoints of one training loop.

    Reading needs nothing; the first `save` claims the folder for this process. On several processes `save`,
    `reached_preemption` and `finish` are collectives: every process calls them with the same step, and
    process 0 writes its own `state`, or each process its part. Errors of a save in the background surface at the next
    call.

    Args:
        directory: the folder of the run.
        save_interval_steps: `save` saves at each multiple of it; None never by steps.
        save_interval_seconds: and when so much time has passed since the last; None never by time; "auto" as often
            as loses least by what saves cost here and how often the run has failed (see interval.py).
        max_to_keep: numbered checkpoints to keep; None keeps all.
        async_save: copy the state, return, write it behind. One save is in flight: the next one waits for it, and
            says so. A save in flight at the end of the process is finished. False: `save` returns when it is durable.
        optimizers: those of the loop. With `async_save` what they own is copied behind the training, too, and each
            waits for that before its next step; whoever else changes it calls `wait_until_copied` before.
        checkpoint_backend: "vanilla", process 0 writes its own `state`; "distributed", the tensors of a state that all
            processes hold are dealt out, and each writes its part of the same checkpoint at the same time. What one
            backend wrote, the other restores, on any number of processes.
        accelerator: an `Accelerator`, for the device of its collectives.
        processes: what to speak to other processes with; `torch.distributed` by default, if initialised.
        interrupts: notes of signals that the caller installs. By default the manager installs its own at the
            first `reached_preemption`, in the main thread, and gives the old handlers back on close.
        on_disk_full: "drop" the new checkpoint and go on, or "pause" until there is space; with more than one process
            for 4 minutes at most, then drop.
        writer_timeout: seconds without heartbeat after which another writer counts as dead.
        say: called with one line for people; with `async_save` also from the thread that writes.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        save_interval_steps: int | None = 1,
        save_interval_seconds: float | Literal["auto"] | None = None,
        max_to_keep: int | None = None,
        async_save: bool = True,
        accelerator: Any = None,
        optimizers: Iterable[Any] = (),
        checkpoint_backend: Literal["vanilla", "distributed"] = "vanilla",
        processes: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
        on_disk_full: Literal["drop", "pause"] = "drop",
        writer_timeout: float = WRITER_TIMEOUT_S,
        say: Callable[[str], None] = _LOGGER.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = BestInterval(say, clock) if save_interval_seconds == "auto" else None
        self._policy = SavePolicy(
            save_interval_steps, None if save_interval_seconds == "auto" else save_interval_seconds
        )
        self.last_result: SaveResult | None = None
        self._interrupts, self._own_interrupts = interrupts or Interrupts(), interrupts is None
        self.store = CheckpointStore(
            directory,
            save_total_limit=max_to_keep,
            on_disk_full=on_disk_full,
            writer_timeout=writer_timeout,
            say=say,
            stop_waiting=self._stop_waiting,
            sleep=self._interrupts.wait,
        )
        device = accelerator.device if accelerator is not None else None
        self._processes: ProcessGroup = processes or TorchProcessGroup(device)
        self._backend = open_backend(checkpoint_backend, self._processes)
        self._say, self._clock = say, clock
        self._behind = AsyncSaver(optimizers) if async_save else None
        if self._behind is not None:
            weakref.finalize(self, _finish_at_exit, self._behind, say, os.getpid())
        self._tried_at = clock()
        self._known_newest: list[int | None] = []
        self._begun: int | None = None
        self._votes: tuple[int, _Votes] | None = None

    # Saving

    @property
    def policy(self) -> SavePolicy:
        """When to save, as things are now."""
        if self._interval is None:
            return self._policy
        return replace(self._policy, every_seconds=self._interval.seconds)

    def should_save(self, step: int) -> bool:
        """Whether this process, asked alone, would save `step`: by the policy, a stop or a request."""
        votes = self._own_votes(step)
        return bool(votes.newer and (votes.due or votes.stop or votes.save_requested))

    def save(
        self,
        step: int,
        state: State,
        *,
        force: bool = False,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
    ) -> bool:
        """Save `state` as `step` if that is due. Returns whether it is saved; with `async_save`, begun.

        A step that is not newer than the newest is never saved. A disk that fails drops the new checkpoint,
        says so, and training goes on.

        Args:
            state: dict; its keys name files (see snapshot.py). Tensors, plain values, nested containers,
                objects with `state_dict`, and bytes for files to be kept verbatim.
            force: due whatever the policy says; the same on every process.
            info: plain values for the manifest: epoch, position, fingerprints.
            keep: steps that are not pruned, beside the `max_to_keep` newest: the best one, for instance.

        Raises:
            CheckpointError: the state holds a value that cannot be saved; the save before failed behind.
            WriterBusy: another process writes to this folder, or has taken it over.
        """
        if force:
            self._votes = None  # what was begun at this step may have been dropped behind
        votes = self._agree(step)
        if not votes.newer:
            self._say_if_saved(step)
            return False
        if not (force or votes.due or votes.stop or votes.save_requested):
            return False
        self._interrupts.take_save_request()
        self._tried_at = self._clock()
        [saved] = run_collectively(
            self._processes, lambda: [self._write(step, state, info or {}, frozenset(keep), left=votes.stop > 0)]
        )
        if saved:
            self._votes = step, votes._replace(newer=0)
        return saved > 0

    def save_last(self, step: int, state: State, *, info: Mapping[str, object], keep: Collection[int] = ()) -> bool:
        """Commit `step` plainly and now, as the last of this attempt: for a thread of process 0 that ends them all.

        Raises: as `save` does.
        """
        self.wait_until_finished()
        whole, own = take_snapshot(state), self._own(info, left=True)
        return self._judge(self.store.save(step, whole.files, forms=whole.forms, info=own, keep=keep))

    def reached_preemption(self, step: int) -> bool:
        """Whether the run shall stop at `step`: a signal has reached any of its processes. A collective.

        Says at one step what `save` acted on at the same step, so that a loop never stops unsaved.
        """
        if self._own_interrupts and not self._interrupts.installed:
            self._interrupts.install()
        return self._agree(step).stop > 0

    def finish(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> bool:
        """Make `final_checkpoint` of a committed step, the newest by default, and `extra` files. A collective."""
        [made] = run_collectively(self._processes, lambda: [self._finish(extra or {}, step)])
        return made > 0

    def watch(self, optimizer: Any) -> None:
        """Add to the `optimizers` one that was made later than the manager."""
        if self._behind is not None:
            self._behind.watch(optimizer)

    def wait_until_copied(self) -> None:
        """Return when the state given to `save` may be changed by others than its optimizers."""
        if self._behind is not None:
            self._behind.wait_until_copied()

    def wait_until_finished(self) -> None:
        """Return when nothing is in flight. Raises what a save behind has raised."""
        if self._behind is not None:
            self._behind.wait()

    # Coming back

    def latest_step(self, *, at_most: int | None = None) -> int | None:
        """The newest step that verifies, read byte by byte; a damaged one is named and quarantined.

        Args:
            at_most: for going back before this step: `supersede` what is newer then. None: any will do.
        """
        self.wait_until_finished()
        newest = self.store.latest(heal=self._is_main, at_most=at_most)
        self._known_newest = [newest]
        return newest

    def restore(self, step: int, *, into: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
        """Read one step and verify what is read.

        Args:
            into: objects as they were given to `save`; tensors are filled in place, objects get
                `load_state_dict`, plain values are replaced. Unless all keys, tensors and containers fit, nothing is
                touched; whether an object fits it finds out itself, when its turn comes.

        Returns:
            `into`, or the state as nested dicts with tensors on the CPU.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            ForeignCheckpoint: it does not fit `into`.
            CheckpointError: there is no such step.
        """
        self.wait_until_finished()
        manifest, files = self.store.read(step)
        state = read_snapshot(manifest.forms, files)
        self._tried_at = self._clock()
        if into is None:
            return state
        load_into(into, state)
        return into

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; not verified."""
        self.wait_until_finished()
        return self.store.all_steps()

    def verify(self, step: int) -> Manifest:
        """Read every byte of a step and return its manifest. Raises DamagedCheckpoint, CheckpointError."""
        self.wait_until_finished()
        return self.store.verify(step)

    def supersede(self, after_step: int) -> list[Path]:
        """Going back: move every newer checkpoint to `superseded/`. On every process; process 0 does it."""
        self._forget_newest()
        return self.store.supersede(after_step) if self._is_main else []

    def delete(self, step: int) -> None:
        """Remove a committed step. On every process; process 0 does it.

        Raises:
            CheckpointError: there is no such step.
        """
        self._forget_newest()
        if self._is_main:
            self.store.delete(step)

    # AttemptResult

    def close(self) -> None:
        """Finish what is in flight, give the folder free and the signal handlers back."""
        try:
            self.wait_until_finished()
        finally:
            if self._behind is not None:
                self._behind.close()
            self.store.close()
            if self._own_interrupts:
                self._interrupts.restore()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Between processes

    @property
    def _is_main(self) -> bool:
        return self._processes.index == 0

    def _agree(self, step: int) -> _Votes:
        """The votes of all processes on `step`, the same for whoever asks about that step again."""
        if self._votes is None or self._votes[0] != step:
            self._votes = step, _Votes(*run_collectively(self._processes, lambda: self._own_votes(step)))
        return self._votes[1]

    def _own_votes(self, step: int) -> _Votes:
        stop = self._interrupts.stop_reason is not None
        requested = self._interrupts.save_requested
        if not self._is_busy():
            self.wait_until_finished()
        if not self._is_main:
            return _Votes(stop, requested, 0, 0)
        newest = self._newest()
        due = self.policy.due(step, newest=newest, elapsed_s=self._clock() - self._tried_at)
        return _Votes(stop, requested, due, self.policy.due(step, newest=newest, elapsed_s=0.0, must=True))

    # On process 0

    def _forget_newest(self) -> None:
        self.wait_until_finished()
        self._known_newest, self._votes = [], None

    def _stop_waiting(self, paused_s: float) -> bool:
        return self._interrupts.stop_reason is not None or (paused_s >= LONGEST_PAUSE_S and has_other_processes())

    def _newest(self) -> int | None:
        if self._begun is not None and not self._is_busy():
            last, begun, self._begun = self.last_result, self._begun, None
            if last is None or (last.step, last.saved) != (begun, True):
                self._known_newest = []
        if not self._known_newest:
            self.store.claim()
            self._known_newest = [self.store.latest()]
        return self._known_newest[0]

    def _say_if_saved(self, step: int) -> None:
        if self._is_main and step == self._newest():
            self._say(f"step {step} is saved already")

    def _write(self, step: int, state: State, info: Mapping[str, object], keep: Collection[int], *, left: bool) -> bool:
        self._say_if_busy(step)
        prepare = partial(self._backend.prepare, Wanted(self.store, step, state, partial(self._own, info, left), keep))
        saved = True
        if self._behind is not None:
            self._behind.begin(prepare, self._judge)
        elif (task := prepare(self.wait_until_finished)) is None:
            saved = False
        else:
            saved = self._judge(task.save(partial(snapshot_of, task.entries)))
        if saved and self._is_main:
            self._known_newest, self._begun = [step], step
        return saved

    def _own(self, info: Mapping[str, object], left: bool) -> dict[str, Any]:
        own = _copy_of(info)
        if self._interval is not None and self._is_main:
            own |= self._interval.record(self.store.directory, self._newest(), self.store.claim(), left=left)
        return own

    def _is_busy(self) -> bool:
        return self._behind is not None and self._behind.busy

    def _say_if_busy(self, step: int) -> None:
        if self._is_main and self._is_busy():
            self._say(f"saving step {step} waits for the save before it: saves are due faster than they are written")

    def _finish(self, extra: Mapping[str, bytes], step: int | None) -> bool:
        self.wait_until_finished()
        return self._is_main and self._tell(self.store.finish(extra, step=step))

    def _judge(self, result: SaveResult) -> bool:
        if result.saved and self._interval is not None and self._is_main:
            self._interval.measured(result.seconds if self._behind is None else self._behind.stall_s, result.seconds)
        return self._tell(result)

    def _tell(self, result: SaveResult) -> bool:
        self.last_result = result
        if result.note and self._is_main:
            self._say(result.note)
        return result.saved
