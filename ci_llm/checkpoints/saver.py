"""The way of a save: what the processes tell each other before it, the task of each of them, and its result.

A save costs one exchange of messages more than the votes on its step (due.py). It carries everything that the others
must know before process 0 may begin: whether a process has failed, whether gradients of an unfinished window wait on
any of them, and the parts of the state that each process has of its own. Nothing is confirmed after it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ci_llm.checkpoints.async_saver import AsyncSaver, SaveTask, finish_at_exit
from ci_llm.checkpoints.backends import SaveRequest, open_backend
from ci_llm.checkpoints.due import Due, Votes
from ci_llm.checkpoints.gradients import KEY, Gradients, inner_optimizer
from ci_llm.checkpoints.manifest import copy_info
from ci_llm.checkpoints.state_files import State, StateEntry, entries_of, files_of, from_bytes, to_bytes
from ci_llm.checkpoints.store import SURVIVOR_TIMEOUT_S, CheckpointStore, SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, is_true_anywhere
from ci_llm.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EachProcess:
    """Stands in a state for what every process has of its own: generators, for instance.

    `save` collects it: the checkpoint holds {"process0": ..., "process1": ...} under that key. Restored into a state
    that has one there, it is again one with the value of this process.

    Args:
        value: what this process has: tensors, plain values, nested containers.
    """

    value: Any


@dataclass(frozen=True)
class Contribution:
    """The message of one process to the others before a save.

    Attributes:
        inside_window: whether gradients wait here for the next step of an optimizer.
        own: the values of `EachProcess` in the state, by key.
    """

    votes: Votes
    inside_window: bool
    own: Mapping[str, Any]

    def pack(self) -> bytes:
        """Raises CheckpointError: a value cannot be saved."""
        votes = list(map(int, self.votes))
        return to_bytes({"votes": votes, "inside_window": self.inside_window, "own": dict(self.own)})

    @classmethod
    def unpack_all(cls, messages: Sequence[bytes]) -> list[Contribution]:
        """The contributions of all processes, by index.

        Raises:
            CheckpointError: some have an `EachProcess` where others have none; on every process alike.
        """
        contents: list[Any] = [from_bytes(message) for message in messages]
        told = [cls(Votes(*each["votes"]), each["inside_window"], each["own"]) for each in contents]
        for key in dict.fromkeys(key for each in told for key in each.own):
            if without := [str(index) for index, each in enumerate(told) if key not in each.own]:
                raise CheckpointError(
                    f"an EachProcess is in the state of some processes only; process {', '.join(without)} has none",
                    where=key,
                    hint="give every process a value of its own under this key, or put a plain value there",
                )
        return told


def own_parts(state: Any) -> dict[str, Any]:
    """The values of `EachProcess` in a state, by key; nothing if it is not a state, which is refused elsewhere."""
    items = state.items() if isinstance(state, Mapping) else ()
    return {key: item.value for key, item in items if isinstance(item, EachProcess)}


class Saver:
    """Saves the states of one loop, one at a time.

    Args:
        backend: the name of a module of `backends/`.
        accelerator: see `Gradients`.
        asynchronous: saves run in a thread.

    Attributes:
        gradients: the gradients of the loop, which a save inside an accumulation window holds.
        behind: the thread.
        closed: whether nothing is saved any more.
        last_result: the result of the last save that has ended.
        after_save: called with every result, in the thread that saved: a mirror looks at the folder then.
    """

    def __init__(
        self, store: CheckpointStore, processes: ProcessGroup, backend: str, accelerator: Any, *, asynchronous: bool
    ) -> None:
        self._store = store
        self._processes = processes
        self._backend = open_backend(backend, processes)
        self._asynchronous = asynchronous
        self._channel: SideChannel | None = None
        self._begun: int | None = None
        self.gradients = Gradients(processes, accelerator)
        self.behind = AsyncSaver()
        weakref.finalize(self, finish_at_exit, self.behind, os.getpid())
        self.closed = False
        self.last_result: SaveResult | None = None
        self.after_save: Callable[[SaveResult], object] = lambda result: None

    @property
    def _is_main_process(self) -> bool:
        return self._processes.process_index == 0

    def require_open(self) -> None:
        """Raises CheckpointError after the end."""
        if self.closed:
            where = str(self._store.directory)
            raise CheckpointError("this manager is closed", where=where, hint="make another one")

    def connect(self) -> SideChannel:
        """Open the connections of saves before the first one, which does it otherwise. A collective.

        Processes meet at a store that their launcher keeps, and a launcher may die: no save then needs it.
        """
        self._channel = self._channel or SideChannel()
        self._backend.connect(asynchronous=self._asynchronous)
        return self._channel

    def watch(self, optimizer: Any) -> None:
        """Add an optimizer that changes the state; see `AsyncSaver` and `Gradients`."""
        inner = inner_optimizer(optimizer)
        self.gradients.watch(inner)
        if self._asynchronous:
            self.behind.watch(inner)

    def newest(self) -> int | None:
        """The newest step, one in flight included. Raises the error of a save that has ended in its thread."""
        if not self.behind.busy:
            self.behind.wait()
        return self._known_newest()

    def _known_newest(self) -> int | None:
        begun = self._begun
        if self.behind.busy:
            return begun
        if self._is_main_process:
            return self._store.newest()
        # Process 0 decides, and knows what became of it; on the others this is for `should_save` only.
        return max(self._store.all_steps(), default=None) if begun is None else begun

    def save(self, step: int, state: State, info: Mapping[str, object], keep: Collection[int], due: Due) -> bool:
        """Save `state` as `step` if it is newer than the newest; see `CheckpointManager.save`. A collective."""
        contributions, entries, own_info = self._exchange(step, state, info, due)
        votes = Votes(*map(sum, zip(*(each.votes for each in contributions), strict=True)))
        if not due.begin_save(step, votes):
            return False
        self._complete(entries, state, contributions)
        task = self._backend.task_of(SaveRequest(self._store, step, entries, own_info, frozenset(keep)))
        self._begun = step
        if not self._asynchronous:
            return self._save_now(task)
        if task is not None:
            self.behind.submit(task, self._record)
        return True

    def say_if_saved(self, step: int) -> None:
        """Say that a step which is not newer is the newest one already; on process 0, and outside of every vote."""
        if self._is_main_process and step == self._known_newest():
            logger.info("step %d is saved already", step)

    def save_last(self, step: int, state: State, *, info: Mapping[str, object], keep: Collection[int] = ()) -> bool:
        """Commit `step` at once and without a collective, as the last of this attempt. Raises as `save` does.

        For process 0 as it ends all others, or a process that has lost a peer: it takes the folder over from the dead.
        """
        self.require_open()
        self.behind.wait()
        self._store.acquire_lease(SURVIVOR_TIMEOUT_S)
        entries = entries_of(state)
        return self._record(SaveRequest(self._store, step, entries, info, keep).commit(files_of(entries)))

    def make_final(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> bool:
        """Make `final_checkpoint` of a committed step, the newest by default, and `extra` files. A collective."""
        self.require_open()

        def work() -> bool:
            self.behind.wait()
            return self._is_main_process and self._record(self._store.make_final(extra, step=step))

        return is_true_anywhere(self._processes, work)

    def shutdown(self) -> None:
        """End the thread, and follow no optimizer any more."""
        self.behind.shutdown()
        self.gradients.stop_following()

    def _exchange(
        self, step: int, state: Any, info: Mapping[str, object], due: Due
    ) -> tuple[list[Contribution], list[StateEntry], dict[str, Any]]:
        """Get ready to save, then tell the other processes: what has failed on one alone becomes an error of all.

        Returns:
            the contributions of all processes, by index; what this one writes; its own copy of the info.
        """
        entries: list[StateEntry] = []
        own_info: dict[str, Any] = {}

        def contribute() -> bytes:
            votes = due.vote(step)
            own = own_parts(state)
            if self._backend.all_write or votes.newer:
                if self._is_main_process and self.behind.busy:
                    warning = "saving step %d waits for the save before it: saves are due faster than they are written"
                    logger.warning(warning, step)
                self.behind.wait()
                entries.extend(entries_of({**state, **own} if own else state))
                own_info.update(copy_info(info))  # the loop may change it
            return Contribution(votes, self.gradients.are_waiting(state), own).pack()

        return Contribution.unpack_all(self.connect().exchange_result_of(contribute)), entries, own_info

    def _complete(self, entries: list[StateEntry], state: Any, contributions: Sequence[Contribution]) -> None:
        """Put what all processes have of their own in the place of what one of them has; gradients come first."""
        collected: dict[str, Any] = {
            key: {f"process{index}": each.own[key] for index, each in enumerate(contributions)}
            for key in own_parts(state)
        }
        if any(each.inside_window for each in contributions):
            collected[KEY] = self.gradients.of_everyone(state, self.connect())
        if self._backend.all_write or self._is_main_process:
            by_key = {entry.key: entry for entry in entries_of(collected)}
            entries[:] = [by_key.pop(entry.key, entry) for entry in entries]
            entries[:0] = by_key.values()

    def _save_now(self, task: SaveTask | None) -> bool:
        def work() -> bool:
            return task is not None and self._record(task.save(partial(files_of, task.entries)))

        # Only process 0 knows whether the disk took the checkpoint: telling the others costs one collective more.
        return is_true_anywhere(self._processes, work)

    def _record(self, result: SaveResult) -> bool:
        self.last_result = result
        if result.note and self._is_main_process:
            logger.log(logging.WARNING if result.saved or result.cause else logging.INFO, result.note)
        self.after_save(result)
        return result.saved
