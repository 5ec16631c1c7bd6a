"""The manager of checkpoints for any training loop: when to save, what to copy, and how to restore it.

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

Its methods have the names of Orbax's CheckpointManager (docs/coming_from/orbax.md). It knows nothing of agents.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from ci_llm.checkpoints.async_saver import AsyncSaver, SaveTask, finish_at_exit
from ci_llm.checkpoints.backends import SaveRequest, open_backend
from ci_llm.checkpoints.folder_access import FolderAccess
from ci_llm.checkpoints.gradients import KEY, Gradients
from ci_llm.checkpoints.interval import BestInterval
from ci_llm.checkpoints.manifest import copy_info
from ci_llm.checkpoints.orbax_arguments import Rules, state_of
from ci_llm.checkpoints.policy import SavePolicy
from ci_llm.checkpoints.retention import METRICS, Metrics, RetentionPolicy
from ci_llm.checkpoints.state_files import State, StateEntry, hand_off, snapshot_of, take_snapshot
from ci_llm.checkpoints.store import SURVIVOR_TIMEOUT_S, WRITER_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.checkpoints.votes import Contribution, EachProcess, Exchanged, Votes, add_up, own_parts, replace_entries
from ci_llm.distributed import side_channel
from ci_llm.distributed.loader_workers import shield_workers
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, TorchProcessGroup
from ci_llm.interrupts import Interrupts

logger = logging.getLogger(__name__)

#: Seconds to wait for a full disk while others wait in a collective, twice in `finish`. NCCL gives up after 600.
LONGEST_PAUSE_S = 240.0


class CheckpointManager(FolderAccess):
    """The checkpoints of one training loop.

    Reading needs no lease; the first `save` acquires that of the folder. On several processes `save`,
    `reached_preemption` and `finish` are collectives: every process calls them with the same step, and process 0 writes
    its own `state`, or each process its part. The next call raises the error of a save in the background.

    It logs to loggers below `ci_llm.checkpoints`: warnings about what was not saved, and notes (INFO) about saves.

    Args:
        directory: the folder of the run.
        save_interval_steps: `save` saves at each multiple of it; None: never by steps.
        save_interval_seconds: and when so much time has passed since the last; None: never by time; "auto": the
            interval that loses the least time, from what saves cost here and how often the run failed (interval.py).
        save_on_steps: and at these steps.
        max_to_keep: numbered checkpoints to keep; None keeps all.
        keep_period: multiples of it are not pruned.
        best_fn: given the `metrics` of a save, how good it is: `max_to_keep` keeps the best, and the newest as well.
        best_mode: whether more is better ("max"), or less ("min").
        read_only: nothing is written or moved, and `save` always returns False.
        async_save: copy the state, return, and write it in a thread. One save is in flight at a time. A save in flight
            at the end of the process is finished. False: `save` returns when the checkpoint is durable.
        optimizers: those of the loop. With `async_save` what they own is copied in the thread as well, and each
            waits for that before its next step; call `wait_until_copied` before you change it in another way.
        checkpoint_backend: "vanilla", process 0 writes its own `state`; "distributed", the tensors of a state that all
            processes hold are dealt out, and each writes its part of the same checkpoint at the same time. What one
            backend wrote, the other restores, on any number of processes.
        accelerator: an `Accelerator`, for the device of its collectives, its count of micro-steps, and the loaders that
            it has prepared: their workers ignore the signals of the run.
        processes: for the votes of several processes; those of `torch.distributed` by default, if it is initialised.
        interrupts: signal handlers that the caller installs. By default the manager installs its own at the first
            `reached_preemption`, in the main thread, and restores the old ones on close.
        on_disk_full: "drop" the new checkpoint, or "pause" until there is space (several processes: 4 minutes at most).
        writer_timeout: seconds without heartbeat after which another writer counts as dead.
        clock: seconds, monotonic.
        options: Orbax's way to say it: `CheckpointManagerOptions`, ours or Orbax's own, replaces the arguments of the
            same meaning; the first save of an empty folder is then due at any step, as it is there.
        positional: Orbax's older call, `CheckpointManager(directory, checkpointers, options)`.
    """

    EachProcess: ClassVar = EachProcess  # for what every process has of its own, in a state

    def __init__(
        self,
        directory: Path | str,
        *positional: Any,
        save_interval_steps: int | None = 1,
        save_interval_seconds: float | Literal["auto"] | None = None,
        save_on_steps: Collection[int] = (),
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        best_fn: Callable[[Any], float] | None = None,
        best_mode: Literal["max", "min"] = "max",
        read_only: bool = False,
        async_save: bool = True,
        accelerator: Any = None,
        optimizers: Iterable[Any] = (),
        checkpoint_backend: str = "vanilla",
        processes: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
        on_disk_full: Literal["drop", "pause"] = "drop",
        writer_timeout: float = WRITER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        options: Any = None,
    ) -> None:
        best = (best_fn, best_mode)
        own = Rules(save_interval_steps, save_on_steps, max_to_keep, keep_period, *best, read_only, async_save)
        rules = own.under(positional, options)
        self._interval = BestInterval(clock) if save_interval_seconds == "auto" else None
        seconds = None if save_interval_seconds == "auto" else save_interval_seconds
        self._policy = SavePolicy(rules.save_interval_steps, seconds, frozenset(rules.save_on_steps), rules.initially)
        retention = RetentionPolicy(rules.max_to_keep, rules.keep_period, rules.best_fn, rules.best_mode)
        self.last_result: SaveResult | None = None
        self._interrupts, self._own_interrupts = interrupts or Interrupts(), interrupts is None
        store = CheckpointStore(
            Path(directory).absolute(),  # the loop may change the working folder, also while a save is in flight
            save_total_limit=retention.newest,
            on_disk_full=on_disk_full,
            writer_timeout=writer_timeout,
            stop_waiting=self._stop_waiting,
            sleep=self._interrupts.wait,
        )
        processes = processes or TorchProcessGroup(getattr(accelerator, "device", None))
        shield_workers(*getattr(accelerator, "_dataloaders", ()))
        self._backend = open_backend(checkpoint_backend, processes)
        optimizers = list(optimizers)
        gradients = Gradients(processes, optimizers, accelerator)
        super().__init__(store, processes, retention, gradients, read_only=rules.read_only)
        self._channel: SideChannel | None = None
        self._async_saver = AsyncSaver(optimizers) if rules.async_save else None
        if self._async_saver is not None:
            weakref.finalize(self, finish_at_exit, self._async_saver, os.getpid())
        self._clock, self._tried_at = clock, clock()
        self._begun: int | None = None  # the step of the save that was begun last

    # Saving

    @property
    def policy(self) -> SavePolicy:
        """When to save, as things are now."""
        return self._policy if self._interval is None else replace(self._policy, every_seconds=self._interval.seconds)

    def should_save(self, step: int) -> bool:
        """Whether this process, asked alone, would save `step`: by the policy, a stop or a request."""
        votes = self._own_opinion(step)
        return bool(votes.newer) and votes.wanted

    def save(
        self,
        step: int,
        state: State | None = None,
        *,
        args: Any = None,
        metrics: Metrics | None = None,
        force: bool = False,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
    ) -> bool:
        """Save `state` as `step` if that is due. Returns whether it is saved; with `async_save`, begun.

        A step that is not newer than the newest is never saved. A disk that fails drops the new checkpoint,
        says so, and training goes on.

        Args:
            state: dict; its keys name files (see state_files.py). Tensors, plain values, nested containers,
                objects with `state_dict`, bytes for files to be kept verbatim, and `EachProcess` for what every
                process has of its own. Between two steps of an optimizer in it (or of the `optimizers`) the gradients
                that wait are saved as well (gradients.py).
            args: Orbax's way to give it: `StandardSave(state)`, or a `Composite` of items.
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
        state = state_of(state, args)
        if self._read_only:
            return False
        self._opened = None
        if not force:
            self._save_vote.forget_refusal(step)
            votes = self._agree(step)
            if not (votes.newer and votes.wanted):
                self._log_if_saved(step, votes)
                return False
        began = time.perf_counter()
        manifest_info = {**(info or {}), **({} if metrics is None else {METRICS: metrics})}
        contributions, entries, spared = self._exchange(step, state, manifest_info)
        votes = add_up(contributions)
        if force:
            self._save_vote.record(step, votes)
        if not votes.newer:
            self._log_if_saved(step, votes)
            return False
        self._complete(entries, state, contributions)
        self._interrupts.take_save_request()
        self._tried_at = self._clock()
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
        """Whether the run shall stop at `step`: a signal has reached any of its processes. A collective.

        The answer for a step is the one that `save` acted on at that step, so that a loop never stops unsaved.
        """
        if self._own_interrupts and not self._interrupts.installed and not self._closed:
            self._interrupts.install()
        return self._agree(step).stop > 0

    def finish(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> bool:
        """Make `final_checkpoint` of a committed step, the newest by default, and `extra` files. A collective."""
        self._require_open(writing=True)
        [made] = side_channel.run_collectively(self._processes, lambda: [self._finish(extra or {}, step)])
        return made > 0

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
        """Whether a save is in flight."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Between processes

    def _agree(self, step: int) -> Votes:
        return self._save_vote.count(step, lambda: self._own_votes(step))

    def _own_votes(self, step: int) -> Votes:
        own = self._own_opinion(step)
        return own if self._is_main_process else own._replace(due=0, newer=0)

    def _own_opinion(self, step: int) -> Votes:
        stop = self._interrupts.stop_reason is not None
        requested = self._interrupts.save_requested
        self.check_for_errors()
        if self._read_only:
            return Votes(stop, requested, 0, 0)
        newest = self._newest()
        due = self.policy.due(step, newest=newest, elapsed_s=self._clock() - self._tried_at)
        return Votes(stop, requested, due, self.policy.due(step, newest=newest, elapsed_s=0.0, must=True))

    def _exchange(self, step: int, state: Any, info: Mapping[str, object]) -> Exchanged:
        """Get ready to save, then tell the other processes: what has failed on one alone becomes an error of all."""
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

        self._channel = self._channel or SideChannel()
        told = Contribution.unpack_all(self._channel.exchange_result_of(contribute))
        return Exchanged(told, entries, spared)

    def _complete(self, entries: list[StateEntry], state: Any, contributions: Sequence[Contribution]) -> None:
        """Add to the entries what the other processes have of their own."""
        collected = {key: Contribution.by_process(contributions, key) for key in own_parts(state)}
        if any(each.inside_window for each in contributions):
            assert self._channel is not None
            collected[KEY] = self._gradients.of_everyone(state, self._channel)
        if self._backend.all_write or self._is_main_process:
            replace_entries(entries, hand_off(collected))

    def _note_restored(self) -> None:
        self._tried_at = self._clock()

    def _write(
        self, step: int, entries: list[StateEntry], info: Mapping[str, object], keep: Collection[int], waited_s: float
    ) -> bool:
        asynchronous = self._async_saver is not None
        task = self._backend.prepare(SaveRequest(self._store, step, entries, copy_info(info), keep, asynchronous))
        saved = True
        if self._async_saver is None:
            saved = self._save_now(task)
        elif task is not None:
            self._async_saver.begin(task, self._note, waited_s=waited_s)
        if saved:
            self._has_looked, self._newest_step, self._begun = True, step, step
            self._save_vote.note_saved(step)
        return saved

    def _save_now(self, task: SaveTask | None) -> bool:
        def work() -> list[int]:
            return [task is not None and self._note(task.save(partial(snapshot_of, task.entries)))]

        # Only process 0 knows whether the disk took the checkpoint: telling the others costs one collective more.
        [count] = side_channel.run_collectively(self._processes, work)
        return count > 0

    # On process 0

    def _stop_waiting(self, paused_s: float) -> bool:
        others_wait = paused_s >= LONGEST_PAUSE_S and side_channel.has_other_processes()
        return others_wait or self._interrupts.stop_reason is not None

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
        """What the manifest says of the failures of the run, for the attempts after this one."""
        if self._interval is None or not self._is_main_process:
            return {}
        self._load_failures()
        return self._interval.record(left=left)

    def _finish(self, extra: Mapping[str, bytes], step: int | None) -> bool:
        self.wait_until_finished()
        return self._is_main_process and self._log(self._store.finish(extra, step=step))

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
