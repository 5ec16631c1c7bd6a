"""The saver: the way of a save, from what the processes tell each other before it to its result.

It collects what each process contributes (contributions.py), hands the state to the backend, and runs the task of this
process here or in a thread (async_saver.py).
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ci_llm.checkpoints.async_saver import AsyncSaver, SaveTask, finish_at_exit
from ci_llm.checkpoints.backends import SaveRequest, open_backend
from ci_llm.checkpoints.contributions import Contribution, add_up, own_parts, replace_entries
from ci_llm.checkpoints.due import Due
from ci_llm.checkpoints.gradients import KEY, Gradients
from ci_llm.checkpoints.manifest import copy_info
from ci_llm.checkpoints.policy import METRICS, BestInterval, RetentionPolicy
from ci_llm.checkpoints.state_files import State, StateEntry, hand_off, snapshot_of, take_snapshot
from ci_llm.checkpoints.store import SURVIVOR_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, is_true_anywhere

logger = logging.getLogger(__name__)


class Saver:
    """Saves the states of one loop, one at a time.

    Args:
        backend: the name of a module of `backends/`.
        asynchronous: saves run in a thread.
        optimizers: those that change the state; see `AsyncSaver`.
        interval: what is told how long saves take; None if nobody wants to know.

    Attributes:
        gradients: those of the loop, which a save inside an accumulation window holds.
        behind: the thread.
        last_result: what became of the last save.
        after_save: called with every result, in the thread that saved: a mirror looks at the folder then.
    """

    def __init__(
        self,
        store: CheckpointStore,
        processes: ProcessGroup,
        gradients: Gradients,
        retention: RetentionPolicy,
        backend: str,
        *,
        asynchronous: bool,
        optimizers: Iterable[Any],
        interval: BestInterval | None,
    ) -> None:
        self._store, self._processes, self._retention, self._interval = store, processes, retention, interval
        self._backend, self._asynchronous = open_backend(backend, processes), asynchronous
        self._channel: SideChannel | None = None
        self._begun: int | None = None
        self.gradients = gradients
        self.behind = AsyncSaver(optimizers if asynchronous else ())
        weakref.finalize(self, finish_at_exit, self.behind, os.getpid())
        self.last_result: SaveResult | None = None
        self.after_save: Callable[[SaveResult], object] = lambda result: None

    @property
    def _is_main_process(self) -> bool:
        return self._processes.process_index == 0

    def connect(self) -> None:
        """Open the connections of saves before the first one, which does it otherwise. A collective.

        Processes meet at a store that their launcher keeps, and a launcher may die: no save then needs it.
        """
        self._channel = self._channel or SideChannel()
        self._backend.connect(asynchronous=self._asynchronous)

    def watch(self, optimizer: Any) -> None:
        """Add an optimizer of the loop that was made later than the saver."""
        self.gradients.watch(optimizer)
        if self._asynchronous:
            self.behind.watch(optimizer)

    def newest(self) -> int | None:
        """The newest step, one in flight included. Raises the error of a save that has ended in its thread."""
        begun = self._begun
        if self.behind.busy:
            return begun
        self.behind.wait()
        if self._is_main_process:
            return self._store.newest()
        # Process 0 decides, and knows what became of it; on the others this is for `should_save` only.
        return max(self._store.all_steps(), default=None) if begun is None else begun

    def save(self, step: int, state: State, info: Mapping[str, object], keep: Collection[int], due: Due) -> bool:
        """Save `state` as `step` if it is newer than the newest; see `CheckpointManager.save`. A collective."""
        began = time.perf_counter()
        contributions, entries, spared = self._exchange(step, state, info, due)
        votes = add_up(contributions)
        if not due.begins(step, votes):
            return False
        self._complete(entries, state, contributions)
        whole_info = copy_info({**info, **self._failures(left=votes.stop > 0)})
        task = self._backend.prepare(SaveRequest(self._store, step, entries, whole_info, spared.union(keep)))
        self._begun = step
        if not self._asynchronous:
            return self._save_now(task)
        if task is not None:
            self.behind.begin(task, self._note, waited_s=time.perf_counter() - began)
        return True

    def say_if_saved(self, step: int) -> None:
        """Say that a step which was not saved now is the newest one already."""
        if self._is_main_process and step == self.newest():
            logger.info("step %d is saved already", step)

    def save_last(self, step: int, state: State, info: Mapping[str, object], keep: Collection[int]) -> bool:
        """See `CheckpointManager.save_last`."""
        self.behind.wait()
        self._store.acquire_lease(SURVIVOR_TIMEOUT_S)
        snapshot, whole_info = take_snapshot(state), {**copy_info(info), **self._failures(left=True)}
        return self._note(self._store.save(step, snapshot.files, forms=snapshot.forms, info=whole_info, keep=keep))

    def finish(self, extra: Mapping[str, bytes] | None, step: int | None) -> bool:
        """See `CheckpointManager.finish`. A collective."""

        def work() -> bool:
            self.behind.wait()
            return self._is_main_process and self._log(self._store.finish(extra, step=step))

        return is_true_anywhere(self._processes, work)

    def close(self) -> None:
        """End the thread, and follow no optimizer any more."""
        self.behind.close()
        self.gradients.close()

    def _exchange(
        self, step: int, state: Any, info: Mapping[str, object], due: Due
    ) -> tuple[list[Contribution], list[StateEntry], set[int]]:
        """Get ready to save, then tell the other processes: what has failed on one alone becomes an error of all.

        Returns:
            the contributions of all processes, by index; what this one writes; on process 0 older steps that stay.
        """
        entries, spared = list[StateEntry](), set[int]()

        def contribute() -> bytes:
            votes, own = due.vote(step), own_parts(state)
            if self._backend.all_write or votes.newer:
                if self._is_main_process and self.behind.busy:
                    warning = "saving step %d waits for the save before it: saves are due faster than they are written"
                    logger.warning(warning, step)
                self.behind.wait()
                entries.extend(hand_off({**state, **own} if own else state))
                metrics = copy_info(info).get(METRICS)  # a copy: the loop may change its own
                if self._is_main_process:
                    self._load_failures()
                    spared.update(self._retention.spared(self._store.directory, step, metrics))
            return Contribution(votes, self.gradients.are_waiting(state), own).pack()

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
            collected[KEY] = self.gradients.of_everyone(state, self._channel)
        if self._backend.all_write or self._is_main_process:
            replace_entries(entries, hand_off(collected))

    def _save_now(self, task: SaveTask | None) -> bool:
        def work() -> bool:
            return task is not None and self._note(task.save(partial(snapshot_of, task.entries)))

        # Only process 0 knows whether the disk took the checkpoint: telling the others costs one collective more.
        return is_true_anywhere(self._processes, work)

    def _load_failures(self) -> None:
        """Look up the failures before this attempt, where the interval follows from them."""
        if self._interval is not None:
            self._interval.load_past(self._store.directory, self.newest(), self._store.acquire_lease())

    def _failures(self, *, left: bool) -> dict[str, Any]:
        """The entry of the manifest about the failures of the run, for the attempts after this one."""
        if self._interval is None or not self._is_main_process:
            return {}
        self._load_failures()
        return self._interval.record(left=left)

    def _note(self, result: SaveResult) -> bool:
        if result.saved and self._interval is not None and self._is_main_process:
            self._interval.measured(self.behind.stall_s if self._asynchronous else result.seconds, result.seconds)
        return self._log(result)

    def _log(self, result: SaveResult) -> bool:
        self.last_result = result
        if result.note and self._is_main_process:
            logger.log(logging.WARNING if result.saved or result.cause else logging.INFO, result.note)
        self.after_save(result)
        return result.saved
