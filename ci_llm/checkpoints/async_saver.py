"""One save in flight: the rest of its copy, and its commit, in a thread behind the training.

The optimizers that are watched wait for the copy before they move. What went wrong behind is raised by whoever waits
for the end of the save, and by nobody else: an optimizer step is no place to leave the other processes alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ci_llm.checkpoints.arena import Arena, Copy, owned_memory
from ci_llm.checkpoints.state_files import Snapshot, StateEntry
from ci_llm.checkpoints.store import SaveResult
from ci_llm.errors import CiLlmError


@dataclass(frozen=True)
class SaveTask:
    """A save that is to be run.

    Attributes:
        entries: what is to be copied.
        save: what is to be done with the files of the copy, which a function gives; it raises if there are none.
        give_up: to be called instead if it cannot be run.
    """

    entries: Sequence[StateEntry]
    save: Callable[[Callable[[], Snapshot]], SaveResult]
    give_up: Callable[[], None] = lambda: None


#: Makes a task, after it has called what it is given: that raises what has to end this save, too.
Prepare: TypeAlias = Callable[[Callable[[], None]], "SaveTask | None"]


class AsyncSaver:
    """Saves behind the training, one at a time.

    Args:
        optimizers: those that move the state; without any, a state is copied before `begin` returns.

    Attributes:
        stall_s: seconds that the training waited for the last save: for its beginning, and for its copy.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self.stall_s = 0.0
        self._arena = Arena()
        self._pool = _one_thread()
        self._job: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self.watch(optimizer)

    def watch(self, optimizer: Any) -> None:
        """Leave what `optimizer` owns to the thread: it will not step before that is copied."""
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's steps the one inside
        self._optimizers.append(inner)
        self._hooks.append(inner.register_step_pre_hook(lambda *_: self.wait_until_copied()))

    @property
    def busy(self) -> bool:
        """Whether a save is not yet at its end."""
        job = self._job
        return job is not None and not job.done()

    def begin(self, prepare: Prepare, tell: Callable[[SaveResult], object]) -> None:
        """Take a state as it is now, and leave the rest to the thread. Waits for, and raises for, the save before.

        Args:
            prepare: what there is to do, if anything.
            tell: called there with what became of it.

        Raises:
            CheckpointError: the state holds a value that cannot be saved.
        """
        began = time.perf_counter()
        if (task := prepare(self.wait)) is None:
            return
        try:
            copy, copied = Copy(self._arena, task.entries, owned_memory(self._optimizers)), threading.Event()
            self._job = self._pool.submit(_save, copy, copied, task, tell)
        except BaseException:
            # A pool whose thread did not start keeps the job, and would run it before the next one.
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = _one_thread()
            task.give_up()
            raise
        self._copied = copied
        self.stall_s = time.perf_counter() - began

    def wait_until_copied(self) -> None:
        """Return when the state of the save in flight may be changed."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.stall_s += time.perf_counter() - began

    def wait(self) -> None:
        """Return when nothing is in flight. Raises what the save has raised, once."""
        if (job := self._job) is not None:
            try:
                job.result()
            finally:
                if self._job is job:
                    self._job = None

    def close(self) -> None:
        """Wait for the end of the thread, whatever came of the save; the optimizers are free again."""
        self._pool.shutdown()
        for hook in self._hooks:
            hook.remove()


def finish_at_exit(behind: AsyncSaver, say: Callable[[str], None], pid: int) -> None:
    """Python waits for the thread by itself, but nobody would ask what became of the save."""
    if os.getpid() != pid:
        return  # a forked child, in which there is no such thread
    try:
        behind.wait()
    except CiLlmError as error:
        say(f"the last checkpoint was not saved: {error}")


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ci_llm checkpoint")  # which starts with the first save


def _save(copy: Copy, copied: threading.Event, task: SaveTask, tell: Callable[[SaveResult], object]) -> None:
    def take() -> Snapshot:
        try:
            return copy.finish()
        finally:
            copied.set()

    try:
        tell(task.save(take))
    finally:
        copied.set()
