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

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ci_llm.checkpoints.async_saver import AsyncSaver, SaveTask, finish_at_exit
from ci_llm.checkpoints.backends import SaveRequest, open_backend
from ci_llm.checkpoints.checkpoint import Checkpoint, decode
from ci_llm.checkpoints.contributions import (
    Contribution,
    EachProcess,
    Votes,
    add_up,
    give_own_parts,
    own_parts,
    replace_entries,
)
from ci_llm.checkpoints.gradients import KEY, Gradients
from ci_llm.checkpoints.layout import Opened
from ci_llm.checkpoints.manifest import Manifest, copy_info, read_manifest
from ci_llm.checkpoints.policy import METRICS, BestInterval, Metrics, RetentionPolicy, SavePolicy, metrics_of
from ci_llm.checkpoints.state_files import State, StateEntry, hand_off, snapshot_of, take_snapshot
from ci_llm.checkpoints.store import SURVIVOR_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.distributed import side_channel
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, TorchProcessGroup
from ci_llm.errors import CheckpointError, ForeignCheckpoint
from ci_llm.interrupts import Interrupts, shield_workers

logger = logging.getLogger(__name__)


def load_into(objects: MutableMapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put a state back where it came from, strictly.

    Tensors are copied in place, objects get `load_state_dict`, plain values are replaced in their container.
    Only files kept verbatim may stay unused.

    Raises:
        ForeignCheckpoint: a key, shape or type on one side has no counterpart on the other, and nothing was touched;
            or an object does not take its state, which it may have done in part, and those before it wholly.
    """
    unused = {key for key, value in state.items() if not isinstance(value, bytes)} - objects.keys()
    if unused:
        raise ForeignCheckpoint(
            f"the checkpoint holds {sorted(unused)}, which nothing here takes up",
            hint="restore without `into` to get all of it as plain values",
        )
    taken = {key: state[key] for key in objects if key in state}
    if missing := sorted(objects.keys() - taken.keys()):
        raise ForeignCheckpoint(f"the checkpoint does not hold {missing}")
    for key, target in objects.items():
        _check_fit(target, taken[key], key)
    objects.update({key: _put(target, taken[key], key) for key, target in objects.items()})


def _check_fit(target: object, saved: Any, where: str) -> None:
    """Raise ForeignCheckpoint if `saved` cannot be put into `target`; an object checks its own state later."""
    here = _describe(target)
    fits = not _is_of_other_kind(saved, target)
    items: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(target, Tensor):
        fits = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (target.shape, target.dtype)
    elif isinstance(target, MutableMapping) and _holds_objects(target):
        fits = isinstance(saved, dict) and saved.keys() == target.keys()
        items = ((item, saved[key], f"{where}.{key}") for key, item in target.items())
    elif isinstance(target, Mapping) and _holds_objects(target):
        fits, here = False, f"a {type(target).__name__}, which cannot be filled"
    elif isinstance(target, (list, tuple)) and _holds_objects(target):
        fits = fits and len(saved) == len(target)
        items = ((item, saved[i], f"{where}[{i}]") for i, item in enumerate(target))
    if not fits:
        raise ForeignCheckpoint(f"here is {here}, the checkpoint holds {_describe(saved)}", where=where)
    for item, value, place in items:
        _check_fit(item, value, place)


def _is_of_other_kind(saved: object, target: object) -> bool:
    """True if `target` is a container and `saved` is not of its kind; a checkpoint does not hold the exact type."""
    return any(isinstance(target, kind) and not isinstance(saved, kind) for kind in (Mapping, list, tuple))


def _holds_objects(value: object) -> bool:
    """True if anything in `value` has to be filled in place; otherwise it is plain, and replaced as a whole."""
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_objects, value))
    return isinstance(value, Tensor) or hasattr(value, "load_state_dict")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _put(target: Any, saved: Any, where: str) -> Any:
    """Load `saved` into `target` where that can be done in place; returns what belongs in its container."""
    if hasattr(target, "load_state_dict"):
        try:
            target.load_state_dict(saved)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ForeignCheckpoint(f"{_describe(target)} does not take its state: {error}", where=where) from error
        return target
    if isinstance(target, Tensor):
        with torch.no_grad():
            return target.copy_(saved)
    if not _holds_objects(target):
        return saved
    if isinstance(target, MutableMapping):
        target.update({key: _put(item, saved[key], f"{where}.{key}") for key, item in target.items()})
        return target
    filled = [_put(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(zip(target, saved, strict=True))]
    if isinstance(target, tuple):
        return type(target)(*filled) if hasattr(target, "_fields") else tuple(filled)
    target[:] = filled
    return target


class CheckpointManager:
    """The checkpoints of one training loop.

    Reading needs no lease; the first `save` acquires that of the folder. On several processes `save`,
    `reached_preemption` and `finish` are collectives: every process calls them with the same step, and process 0 writes
    its own `state`, or each process its part. The next call raises the error of a save in the background.

    It logs to loggers below `ci_llm.checkpoints`: warnings about what was not saved, and notes (INFO) about saves.

    Args:
        directory: the folder of the run.
        save_interval_steps: `save` saves at each multiple of it; None for no saves by steps.
        save_interval_seconds: and when so much time has passed since the last; None for no saves by time; "auto":
            the interval that loses the least time, by what saves cost here and how often the run failed (policy.py).
        max_to_keep: numbered checkpoints to keep; None keeps all. A `Retention` also keeps the best, or each n-th step.
        async_save: copy the state, return, and write it in a thread. One save is in flight at a time. A save in flight
            at the end of the process is finished. False: `save` returns when the checkpoint is durable.
        optimizers: the optimizers of the loop. With `async_save` what they own is copied in the thread as well, and
            each waits for that before its next step; call `wait_until_copied` before you change it in another way.
        checkpoint_backend: "vanilla", process 0 writes its own `state`; "distributed", the tensors of a state that all
            processes hold are dealt out, and each writes its part of the same checkpoint at the same time. What one
            backend wrote, the other restores, on any number of processes.
        accelerator: an `Accelerator`, for the device of its collectives, its count of micro-steps, and the loaders that
            it has prepared: their workers ignore the signals of the run.
        processes: for the votes of several processes; those of `torch.distributed` by default, if it is initialised.
        interrupts: signal handlers that the caller installs. By default the manager installs its own at the first
            `reached_preemption`, in the main thread, and restores the old ones on close.

    Examples:
        >>> manager = ci_llm.CheckpointManager(folder / "loop", save_interval_steps=2)
        >>> [manager.save(step, {"weights": torch.ones(3) * step}) for step in range(3)]
        [True, False, True]
        >>> manager.wait_until_finished()
        >>> manager.latest_step(), manager.restore(2)["weights"].tolist()
        (2, [2.0, 2.0, 2.0])
        >>> manager.close()
    """

    #: Called with every result, in the thread that saved: a mirror looks at the folder then.
    after_save: Callable[[SaveResult], object] = staticmethod(lambda result: None)
    EachProcess: ClassVar = EachProcess  # for what every process has of its own, in a state
    Retention: ClassVar = RetentionPolicy  # for `max_to_keep`
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        directory: Path | str,
        *,
        save_interval_steps: int | None = 1,
        save_interval_seconds: float | Literal["auto"] | None = None,
        max_to_keep: int | RetentionPolicy | None = None,
        async_save: bool = True,
        accelerator: Any = None,
        optimizers: Iterable[Any] = (),
        checkpoint_backend: str = "vanilla",
        processes: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self._interval = BestInterval(self.clock) if save_interval_seconds == "auto" else None
        seconds = None if save_interval_seconds == "auto" else save_interval_seconds
        self._policy = SavePolicy(save_interval_steps, seconds)
        self._retention = max_to_keep if isinstance(max_to_keep, RetentionPolicy) else RetentionPolicy(max_to_keep)
        self.last_result: SaveResult | None = None
        self._interrupts, self._own_interrupts = interrupts or Interrupts(), interrupts is None
        self._store = CheckpointStore(
            Path(directory).absolute(),  # the loop may change the working folder, also while a save is in flight
            save_total_limit=self._retention.newest,
        )
        self._processes = processes or TorchProcessGroup(getattr(accelerator, "device", None))
        shield_workers(*getattr(accelerator, "_dataloaders", ()))
        self._backend = open_backend(checkpoint_backend, self._processes)
        optimizers = list(optimizers)
        self._gradients = Gradients(self._processes, optimizers, accelerator)
        self._counted: tuple[int, Votes] | None = None  # the votes of all processes on the present step
        self._closed = False
        self._opened: Opened | None = None  # read and verified: `restore` needs the same bytes right after
        self._verified_step: int | None = None
        #: Whether `_newest_step` is the newest in the folder; otherwise the manager has to look.
        self._has_looked = False
        self._newest_step: int | None = None
        self._channel: SideChannel | None = None
        self._async_saver = AsyncSaver(optimizers) if async_save else None
        if self._async_saver is not None:
            weakref.finalize(self, finish_at_exit, self._async_saver, os.getpid())
        self._tried_at = self.clock()
        self._begun: int | None = None  # the step of the save that was begun last

    # Saving

    def should_save(self, step: int) -> bool:
        """True if this process, asked alone, would save `step`: by the policy, a stop or a request."""
        votes = self._own_opinion(step)
        return bool(votes.newer) and votes.wanted

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Metrics | None = None,
        force: bool = False,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
    ) -> bool:
        """Save `state` as `step` if that is due. Returns whether it is saved; with `async_save`, begun.

        A step that is not newer than the newest is never saved. A disk that fails drops the new checkpoint,
        says so, and training continues.

        Args:
            state: dict; its keys name files (see state_files.py). Tensors, plain values, nested containers,
                objects with `state_dict`, bytes for files to be kept verbatim, and `EachProcess` for what every
                process has of its own. Between two steps of an optimizer in it (or of the `optimizers`) the gradients
                that wait are saved as well (gradients.py).
            metrics: plain values by name, for `best_fn`; they are in the manifest.
            force: save whatever the policy says; the same on every process. It costs no vote.
            info: plain values for the manifest: epoch, position, fingerprints.
            keep: steps that are not pruned, beside the `max_to_keep` newest: the best one, for instance.

        Raises:
            CheckpointError: the state holds a value that cannot be saved; the save before failed in its thread; the
                manager is closed, or the folder of the run is gone. An error of one process is an error of all, except
                that a lack of memory for the copy is told to the others by `wait_until_finished` only.
            WriterBusy: another process writes to this folder, or has taken it over.
        """
        self._require_open()
        self._opened = None
        if not force:
            if self._counted is not None and self._counted[0] == step and not self._counted[1].newer:
                self._counted = None  # the checkpoint for which it was refused may be gone
            votes = self._agree(step)
            if not (votes.newer and votes.wanted):
                self._log_if_saved(step, votes)
                return False
        began = time.perf_counter()
        manifest_info = {**(info or {}), **({} if metrics is None else {METRICS: metrics})}
        contributions, entries, spared = self._exchange(step, state, manifest_info)
        votes = add_up(contributions)
        if force:
            self._counted = step, votes
        if not votes.newer:
            self._log_if_saved(step, votes)
            return False
        self._complete(entries, state, contributions)
        self._interrupts.take_save_request()
        self._tried_at = self.clock()
        manifest_info |= self._failure_history(left=votes.stop > 0)
        return self._write(step, entries, manifest_info, spared.union(keep), waited_s=time.perf_counter() - began)

    def save_last(self, step: int, state: State, *, info: Mapping[str, object], keep: Collection[int] = ()) -> bool:
        """Commit `step` at once and without a collective, as the last of this attempt. Raises as `save` does.

        For process 0 as it ends all others, or a process that has lost a peer: it takes the folder over from the dead.
        """
        self._require_open()
        self.wait_until_finished()
        self._store.acquire_lease(SURVIVOR_TIMEOUT_S)
        snapshot, whole_info = take_snapshot(state), {**copy_info(info), **self._failure_history(left=True)}
        return self._note(self._store.save(step, snapshot.files, forms=snapshot.forms, info=whole_info, keep=keep))

    def reached_preemption(self, step: int) -> bool:
        """True if the run shall stop at `step`: a signal has reached any of its processes. A collective.

        The answer for a step is the one that `save` acted on at that step, so that a loop never stops unsaved.
        """
        if self._own_interrupts and not self._interrupts.installed and not self._closed:
            self._interrupts.install()
        return self._agree(step).stop > 0

    def finish(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> bool:
        """Make `final_checkpoint` of a committed step, the newest by default, and `extra` files. A collective."""
        self._require_open()

        def work() -> bool:
            self.wait_until_finished()
            return self._is_main_process and self._log(self._store.finish(extra, step=step))

        return side_channel.is_true_anywhere(self._processes, work)

    def connect(self) -> None:
        """Open the connections of saves before the first one, which does it otherwise. A collective.

        Processes meet at a store that their launcher keeps, and a launcher may die: no save then needs it.
        """
        self._channel = self._channel or SideChannel()
        self._backend.connect(asynchronous=self._async_saver is not None)

    def watch(self, optimizer: Any) -> None:
        """Add to the `optimizers` one that was made later than the manager."""
        self._gradients.watch(optimizer)
        if self._async_saver is not None:
            self._async_saver.watch(optimizer)

    def wait_until_copied(self) -> None:
        """Return when the state given to `save` may be changed by others than its optimizers."""
        if self._async_saver is not None:
            self._async_saver.wait_until_copied()

    def wait_until_finished(self) -> None:
        """Return when nothing is in flight, on any process. Raises the error of a save in its thread."""
        if self._async_saver is not None:
            self._async_saver.wait()

    def is_saving_in_progress(self) -> bool:
        """True if a save is in flight."""
        return self._async_saver is not None and self._async_saver.busy

    def check_for_errors(self) -> None:
        """Raise the error of a save that has ended in its thread; waits for nothing."""
        if not self.is_saving_in_progress():
            self.wait_until_finished()

    def close(self) -> None:
        """Finish what is in flight; release the lease and restore the signal handlers. Then it only reads."""
        self._closed, self._opened = True, None
        try:
            self.wait_until_finished()
        finally:
            if self._async_saver is not None:
                self._async_saver.close()
            self._gradients.close()
            self._store.close()
            if self._own_interrupts:
                self._interrupts.restore()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            at_most: for going back before this step: `supersede` what is newer then. None for the newest of all.
        """
        self.wait_until_finished()
        if self._opened is None or not self._store.is_newest(self._opened, at_most):
            self._opened = None  # the old one goes first: never two in memory
            self._opened = self._store.open_newest(heal=self._is_main_process, at_most=at_most)
        newest = None if self._opened is None else self._opened.manifest.step
        self._has_looked, self._newest_step = True, newest
        return newest

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
        opened, self._opened = self._opened, None
        if opened is None or opened.manifest.step != step:
            opened = self._store.read(step)
        self._verified_step = step
        self._tried_at = self.clock()
        return decode(opened)

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
        waiting = self._gradients.own_part(state.pop(KEY, None), into)
        load_into(into, state)
        self._gradients.put_back(waiting)
        return into

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; not verified."""
        self.wait_until_finished()
        return self._store.all_steps()

    def best_step(self) -> int | None:
        """The step that `best_fn` puts first; the newest one without it."""
        return self._retention.best_of(self.directory, self.all_steps())

    def metrics(self, step: int) -> Metrics | None:
        """The `metrics` that `step` was saved with. Raises CheckpointError: there is no such step."""
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
        """Look at the folder again at the next call, because somebody else has changed it. On every process."""
        self._forget_newest()

    def adopt(self, opened: Opened) -> None:
        """Commit a checkpoint that was read elsewhere, under its own name and as it is. For process 0.

        Raises:
            CheckpointError: the disk refuses it.
        """
        self._require_open()
        self._forget_newest()
        if cause := self._store.adopt(opened, opened.folder.name):
            raise CheckpointError(f"{opened.folder.name} is dropped: {cause}", where=str(self.directory)) from cause

    def supersede(self, after_step: int) -> list[Path]:
        """Going back: move every newer checkpoint to `superseded/`. On every process; process 0 does it.

        Raises:
            OSError: the disk refuses one, which is where it was.
        """
        self._require_open()
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
        self._require_open()
        self._forget_newest()
        return self._store.set_aside(entries)

    def delete(self, step: int) -> None:
        """Remove a committed step. On every process; process 0 does it.

        Raises:
            CheckpointError: there is no such step.
        """
        self._require_open()
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
        self._require_open()
        return self._store.acquire_lease()

    def holds_lease(self) -> bool:
        """True if this process is still the one writer: ask before you write anything else into the folder."""
        return self._store.holds_lease()

    @property
    def staging(self) -> Path:
        """A folder for unfinished files of the owner (`durable.write_bytes(staging=...)`); gone after a takeover."""
        return self._store.staging

    def _require_open(self) -> None:
        if self._closed:
            raise CheckpointError("this manager is closed", where=str(self.directory), hint="make another one")

    def _forget_newest(self) -> None:
        self.wait_until_finished()
        self._has_looked, self._opened = False, None
        self._counted = None
        self._retention.forget()

    # Between processes

    @property
    def _is_main_process(self) -> bool:
        return self._processes.process_index == 0

    def _agree(self, step: int) -> Votes:
        """The votes of all processes. A collective, unless this step is counted already: all processes know that."""
        if self._counted is None or self._counted[0] != step:
            self._counted = step, Votes(*side_channel.run_collectively(self._processes, lambda: self._own_votes(step)))
        return self._counted[1]

    def _own_votes(self, step: int) -> Votes:
        own = self._own_opinion(step)
        return own if self._is_main_process else own._replace(due=0, newer=0)

    def _own_opinion(self, step: int) -> Votes:
        stop = self._interrupts.stop_reason is not None
        requested = self._interrupts.save_requested
        self.check_for_errors()
        newest, policy = self._newest(), self._policy
        if self._interval is not None:
            policy = replace(policy, every_seconds=self._interval.seconds)
        due = policy.due(step, newest=newest, elapsed_s=self.clock() - self._tried_at)
        return Votes(stop, requested, due, newest is None or step > newest)

    def _exchange(
        self, step: int, state: Any, info: Mapping[str, object]
    ) -> tuple[list[Contribution], list[StateEntry], set[int]]:
        """Get ready to save, then tell the other processes: what has failed on one alone becomes an error of all.

        Returns:
            the contributions of all processes, by index; what this one writes; on process 0 older steps that stay.
        """
        entries, spared = list[StateEntry](), set[int]()

        def contribute() -> bytes:
            votes, own = self._own_votes(step), own_parts(state)
            if self._backend.all_write or votes.newer:
                self._log_if_busy(step)
                self.wait_until_finished()
                entries.extend(hand_off({**state, **own} if own else state))
                metrics = copy_info(info).get(METRICS)  # a copy: the loop may change its own
                if self._is_main_process:
                    self._load_failures()
                    spared.update(self._retention.spared(self.directory, step, metrics))
            return Contribution(votes, self._gradients.are_waiting(state), own).pack()

        self.connect()
        assert self._channel is not None
        return Contribution.unpack_all(self._channel.exchange_result_of(contribute)), entries, spared

    def _complete(self, entries: list[StateEntry], state: Any, contributions: Sequence[Contribution]) -> None:
        """Add to the entries what the other processes have of their own."""
        collected: dict[str, Any] = {
            key: {f"process{index}": each.own[key] for index, each in enumerate(contributions)}
            for key in own_parts(state)
        }
        if any(each.inside_window for each in contributions):
            assert self._channel is not None
            collected[KEY] = self._gradients.of_everyone(state, self._channel)
        if self._backend.all_write or self._is_main_process:
            replace_entries(entries, hand_off(collected))

    def _write(
        self, step: int, entries: list[StateEntry], info: Mapping[str, object], keep: Collection[int], waited_s: float
    ) -> bool:
        task = self._backend.prepare(SaveRequest(self._store, step, entries, copy_info(info), keep))
        saved = True
        if self._async_saver is None:
            saved = self._save_now(task)
        elif task is not None:
            self._async_saver.begin(task, self._note, waited_s=waited_s)
        if saved:
            self._has_looked, self._newest_step, self._begun = True, step, step
            self._counted = self._counted and (step, self._counted[1]._replace(newer=0))
        return saved

    def _save_now(self, task: SaveTask | None) -> bool:
        def work() -> bool:
            return task is not None and self._note(task.save(partial(snapshot_of, task.entries)))

        # Only process 0 knows whether the disk took the checkpoint: telling the others costs one collective more.
        return side_channel.is_true_anywhere(self._processes, work)

    # On process 0

    def _newest(self) -> int | None:
        if self._begun is not None and not self.is_saving_in_progress():
            last, begun, self._begun = self.last_result, self._begun, None
            if last is None or (last.step, last.saved) != (begun, True):
                self._has_looked = False
        if not self._has_looked and self._is_main_process:
            self._store.acquire_lease()
            self._has_looked, self._newest_step = True, self._store.latest()
        # Process 0 decides, and has verified them; on the others this is for `should_save` only.
        return self._newest_step if self._has_looked else max(self._store.all_steps(), default=None)

    def _log_if_saved(self, step: int, votes: Votes) -> None:
        if not votes.newer and self._is_main_process and step == self._newest():
            logger.info("step %d is saved already", step)

    def _log_if_busy(self, step: int) -> None:
        if self._is_main_process and self.is_saving_in_progress():
            warning = "saving step %d waits for the save before it: saves are due faster than they are written"
            logger.warning(warning, step)

    def _load_failures(self) -> None:
        """Look up the failures before this attempt, where the interval follows from them."""
        if self._interval is not None:
            self._interval.load_past(self.directory, self._newest(), self._store.acquire_lease())

    def _failure_history(self, *, left: bool) -> dict[str, Any]:
        """The entry of the manifest about the failures of the run, for the attempts after this one."""
        if self._interval is None or not self._is_main_process:
            return {}
        self._load_failures()
        return self._interval.record(left=left)

    def _note(self, result: SaveResult) -> bool:
        if result.saved and self._interval is not None and self._is_main_process:
            stall_s = result.seconds if self._async_saver is None else self._async_saver.stall_s
            self._interval.measured(stall_s, result.seconds)
        return self._log(result)

    def _log(self, result: SaveResult) -> bool:
        self.last_result = result
        if result.note and self._is_main_process:
            logger.log(logging.WARNING if result.saved or result.cause else logging.INFO, result.note)
        self.after_save(result)
        return result.saved
