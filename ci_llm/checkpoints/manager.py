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

It speaks Orbax's CheckpointManager (https://orbax.readthedocs.io), and docs/coming_from/orbax.md says where it differs.
It knows names and tensors, nothing of agents, and serves any loop.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ci_llm.checkpoints.args import state_of
from ci_llm.checkpoints.async_saver import AsyncSaver, SaveTask, finish_at_exit
from ci_llm.checkpoints.backends import Wanted, open_backend
from ci_llm.checkpoints.gradients import Gradients
from ci_llm.checkpoints.keeping import METRICS, Keeping, Metrics
from ci_llm.checkpoints.manifest import copy_info
from ci_llm.checkpoints.options import Rules
from ci_llm.checkpoints.policy import BestInterval, SavePolicy
from ci_llm.checkpoints.reading import Reading
from ci_llm.checkpoints.state_files import State, snapshot_of, take_snapshot
from ci_llm.checkpoints.store import WRITER_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.checkpoints.votes import Ballot, Votes
from ci_llm.distributed.side_channel import ProcessGroup, TorchProcessGroup, has_other_processes, run_collectively
from ci_llm.errors import CheckpointError
from ci_llm.interrupts import Interrupts

_LOGGER = logging.getLogger(__name__)

#: The others wait in a collective meanwhile, and through two pauses at `finish`; NCCL gives up after ten minutes.
LONGEST_PAUSE_S = 240.0


class CheckpointManager(Reading):
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
        save_on_steps: and at these steps.
        max_to_keep: numbered checkpoints to keep; None keeps all.
        keep_period: multiples of it are not pruned.
        best_fn: given the `metrics` of a save, how good it is: `max_to_keep` keeps the best, and the newest as well.
        best_mode: whether more is better ("max"), or less ("min").
        read_only: nothing is written, moved or claimed, and `save` is always False.
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
        options: Orbax's way to say it: `CheckpointManagerOptions`, ours or Orbax's own, replaces the arguments of the
            same meaning; the first save of an empty folder is then due at any step, as it is there.
        positional: Orbax's older call, `CheckpointManager(directory, checkpointers, options)`.
    """

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
        checkpoint_backend: Literal["vanilla", "distributed"] = "vanilla",
        processes: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
        on_disk_full: Literal["drop", "pause"] = "drop",
        writer_timeout: float = WRITER_TIMEOUT_S,
        say: Callable[[str], None] = _LOGGER.warning,
        clock: Callable[[], float] = time.monotonic,
        options: Any = None,
    ) -> None:
        best = (best_fn, best_mode)
        own = Rules(save_interval_steps, save_on_steps, max_to_keep, keep_period, *best, read_only, async_save)
        rules = own.under(positional, options)
        self._interval = BestInterval(say, clock) if save_interval_seconds == "auto" else None
        seconds = None if save_interval_seconds == "auto" else save_interval_seconds
        self._policy = SavePolicy(rules.save_interval_steps, seconds, frozenset(rules.save_on_steps), rules.initially)
        self._keeping = Keeping(rules.max_to_keep, rules.keep_period, rules.best_fn, rules.best_mode)
        self._read_only, self._closed = rules.read_only, False
        self.last_result: SaveResult | None = None
        self._interrupts, self._own_interrupts = interrupts or Interrupts(), interrupts is None
        self.store = CheckpointStore(
            directory,
            save_total_limit=self._keeping.newest,
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
        optimizers = list(optimizers)
        self._gradients = Gradients(self._processes, optimizers, accelerator)
        self._behind = AsyncSaver(optimizers) if rules.async_save else None
        if self._behind is not None:
            weakref.finalize(self, finish_at_exit, self._behind, say, os.getpid())
        self._tried_at = clock()
        self._known_newest: list[int | None] = []
        self._begun: int | None = None
        self._ballot = Ballot(self._processes)

    # Saving

    @property
    def policy(self) -> SavePolicy:
        """When to save, as things are now."""
        if self._interval is None:
            return self._policy
        return replace(self._policy, every_seconds=self._interval.seconds)

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
            state: dict; its keys name files (see snapshot.py). Tensors, plain values, nested containers,
                objects with `state_dict`, and bytes for files to be kept verbatim. Between two steps of an
                optimizer in it (or of the `optimizers`) the gradients that wait are saved as well (gradients.py).
            args: Orbax's way to give it (args.py): `StandardSave(state)`, or a `Composite` of items.
            metrics: plain values by name, for `best_fn`; they are in the manifest.
            force: due whatever the policy says; the same on every process.
            info: plain values for the manifest: epoch, position, fingerprints.
            keep: steps that are not pruned, beside the `max_to_keep` newest: the best one, for instance.

        Raises:
            CheckpointError: the state holds a value that cannot be saved; the save before failed behind; the manager
                is closed, or the folder of the run is gone.
            WriterBusy: another process writes to this folder, or has taken it over.
        """
        self._require_open()
        state = state_of(state, args)
        if self._read_only:
            return False
        self._ballot.anew(step, force=force)  # what was begun at this step may have been dropped, or set aside
        votes = self._agree(step)
        if not votes.newer:
            self._say_if_saved(step)
            return False
        if not (force or votes.wanted):
            return False
        self._interrupts.take_save_request()
        self._tried_at = self._clock()
        whole = self._gradients.beside(state)
        told = {**(info or {}), **({} if metrics is None else {METRICS: metrics})}
        write = partial(self._write, step, whole, told, frozenset(keep), left=votes.stop > 0)
        [saved] = run_collectively(self._processes, lambda: [write()])
        if saved:
            self._ballot.saved(step)
            self._follow(step)
        return saved > 0

    def save_last(self, step: int, state: State, *, info: Mapping[str, object], keep: Collection[int] = ()) -> bool:
        """Commit `step` plainly and now, as the last of this attempt: for a thread of process 0 that ends them all.

        Raises: as `save` does.
        """
        self._require_open()
        self.wait_until_finished()
        whole, own = take_snapshot(state), self._own(info, left=True)
        return self._judge(self.store.save(step, whole.files, forms=whole.forms, info=own, keep=keep))

    def reached_preemption(self, step: int) -> bool:
        """Whether the run shall stop at `step`: a signal has reached any of its processes. A collective.

        Says at one step what `save` acted on at the same step, so that a loop never stops unsaved.
        """
        if self._own_interrupts and not self._interrupts.installed and not self._closed:
            self._interrupts.install()
        return self._agree(step).stop > 0

    def finish(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> bool:
        """Make `final_checkpoint` of a committed step, the newest by default, and `extra` files. A collective."""
        self._require_open(writing=True)
        [made] = run_collectively(self._processes, lambda: [self._finish(extra or {}, step)])
        return made > 0

    def watch(self, optimizer: Any) -> None:
        """Add to the `optimizers` one that was made later than the manager."""
        self._gradients.watch(optimizer)
        if self._behind is not None:
            self._behind.watch(optimizer)

    def wait_until_copied(self) -> None:
        """Return when the state given to `save` may be changed by others than its optimizers."""
        if self._behind is not None:
            self._behind.wait_until_copied()

    def wait_until_finished(self) -> None:
        """Return when nothing is in flight, on any process. Raises what a save behind has raised."""
        if self._behind is not None:
            self._behind.wait()

    def is_saving_in_progress(self) -> bool:
        """Whether a save is in flight."""
        return self._behind is not None and self._behind.busy

    def check_for_errors(self) -> None:
        """Raise what a save behind has raised, if it is at its end; waits for nothing."""
        if not self.is_saving_in_progress():
            self.wait_until_finished()

    # Going back

    def supersede(self, after_step: int) -> list[Path]:
        """Going back: move every newer checkpoint to `superseded/`. On every process; process 0 does it."""
        self._require_open(writing=True)
        self._forget_newest()
        return self.store.supersede(after_step) if self._is_main else []

    def delete(self, step: int) -> None:
        """Remove a committed step. On every process; process 0 does it.

        Raises:
            CheckpointError: there is no such step.
        """
        self._require_open(writing=True)
        self._forget_newest()
        if self._is_main:
            self.store.delete(step)

    # AttemptResult

    def close(self) -> None:
        """Finish what is in flight, give the folder free and the signal handlers back. Then it only reads."""
        self._closed = True
        try:
            self.wait_until_finished()
        finally:
            if self._behind is not None:
                self._behind.close()
            self._gradients.close()
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

    def _agree(self, step: int) -> Votes:
        return self._ballot.on(step, lambda: self._own_votes(step))

    def _own_votes(self, step: int) -> Votes:
        own = self._own_opinion(step)
        return own if self._is_main else own._replace(due=0, newer=0)

    def _own_opinion(self, step: int) -> Votes:
        stop = self._interrupts.stop_reason is not None
        requested = self._interrupts.save_requested
        self.check_for_errors()
        if self._read_only:
            return Votes(stop, requested, 0, 0)
        newest = self._newest()
        due = self.policy.due(step, newest=newest, elapsed_s=self._clock() - self._tried_at)
        return Votes(stop, requested, due, self.policy.due(step, newest=newest, elapsed_s=0.0, must=True))

    def _follow(self, step: int) -> None:
        """Wait behind for a save that process 0 has begun, so that `wait_until_finished` means it, too."""
        if self._behind is not None and (task := self._backend.follow(step)) is not None:

            def prepare(be_ready: Callable[[], None]) -> SaveTask:
                be_ready()
                return task

            self._behind.begin(prepare, self._judge)

    def _require_open(self, *, writing: bool = False) -> None:
        if self._closed:
            raise CheckpointError("this manager is closed", where=str(self.directory), hint="make another one")
        if writing and self._read_only:
            raise CheckpointError("this manager is read_only", where=str(self.directory))

    def _has_restored(self) -> None:
        self._tried_at = self._clock()

    # On process 0

    def _stop_waiting(self, paused_s: float) -> bool:
        return self._interrupts.stop_reason is not None or (paused_s >= LONGEST_PAUSE_S and has_other_processes())

    def _newest(self) -> int | None:
        if self._begun is not None and not self.is_saving_in_progress():
            last, begun, self._begun = self.last_result, self._begun, None
            if last is None or (last.step, last.saved) != (begun, True):
                self._known_newest = []
        if not self._known_newest and self._is_main:
            self.store.claim()
            self._known_newest = [self.store.latest()]
        # Process 0 decides, and has looked into them; the others name it for `should_save` only.
        return self._known_newest[0] if self._known_newest else max(self.store.all_steps(), default=None)

    def _say_if_saved(self, step: int) -> None:
        if self._is_main and step == self._newest():
            self._say(f"step {step} is saved already")

    def _write(self, step: int, state: State, info: Mapping[str, object], keep: Collection[int], *, left: bool) -> bool:
        self._say_if_busy(step)
        if self._is_main:
            keep = {*keep, *self._keeping.spared(self.directory, step, info.get(METRICS), self._begun)}
        describe, behind = partial(self._own, info, left), self._behind is not None
        prepare = partial(self._backend.prepare, Wanted(self.store, step, state, describe, keep, behind))
        saved = True
        if self._behind is not None:
            self._behind.begin(prepare, self._judge)
        elif (task := prepare(self.wait_until_finished)) is None:
            saved = False
        else:
            saved = self._judge(task.save(partial(snapshot_of, task.entries)))
        if saved:
            self._known_newest, self._begun = [step], step
        return saved

    def _own(self, info: Mapping[str, object], left: bool) -> dict[str, Any]:
        own = copy_info(info)
        if self._interval is not None and self._is_main:
            own |= self._interval.record(self.store.directory, self._newest(), self.store.claim(), left=left)
        return own

    def _say_if_busy(self, step: int) -> None:
        if self._is_main and self.is_saving_in_progress():
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
