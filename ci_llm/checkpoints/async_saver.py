"""One save in flight: the rest of its copy, and its commit, in a thread while the training goes on.

The copy is what training must wait for, because the optimizer changes what is being copied. So each optimizer that is
watched waits for the copy in a pre-hook of its step, and the forward and backward pass in between hide it. The commit
needs only the copy.

An error of the thread is raised by `wait`, and by nothing else. An optimizer's step would be the wrong place: one
process would leave it by an exception while the others wait for that process in the next collective.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ci_llm.checkpoints.arena import Arena, Copy, owned_memory
from ci_llm.checkpoints.state_files import Snapshot, StateEntry
from ci_llm.checkpoints.store import SaveResult
from ci_llm.errors import CiLlmError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveTask:
    """A save that is to be run.

    Attributes:
        entries: the state that is to be copied.
        save: writes the files of the copy; called with a function that finishes the copy, and raises if it cannot.
        give_up: called instead of `save` if this process cannot start it; tells the others, if they wait for it.
    """

    entries: Sequence[StateEntry]
    save: Callable[[Callable[[], Snapshot]], SaveResult]
    give_up: Callable[[], None] = lambda: None


class AsyncSaver:
    """Saves in a thread, one at a time.

    Args:
        optimizers: those that change the state; without any, a state is copied before `begin` returns.

    Attributes:
        stall_s: seconds that the training waited for the last save: for its start, and for its copy.
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
        """Let the thread copy what `optimizer` owns: its next step waits until that is copied."""
        # Accelerate's wrapper never runs the constructor of torch's Optimizer, and so it can carry no hook.
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._optimizers.append(inner)
        self._hooks.append(inner.register_step_pre_hook(lambda *_: self.wait_until_copied()))

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        job = self._job
        return job is not None and not job.done()

    def begin(self, task: SaveTask, done: Callable[[SaveResult], object], *, waited_s: float = 0.0) -> None:
        """Take the state as it is now, and leave the rest to the thread. Waits for the save before, and raises for it.

        Args:
            done: called in the thread with the result.
            waited_s: seconds that the training has waited for this save already.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        began = time.perf_counter()
        try:
            # The arena has room for one copy, and the one before lies in it until it is written.
            self.wait()
            copy, copied = Copy(self._arena, task.entries, owned_memory(self._optimizers)), threading.Event()
            self._job = self._pool.submit(_run, copy, copied, task, done)
        except BaseException:
            # A pool whose thread did not start keeps the job, and would run it before the next one.
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = _one_thread()
            task.give_up()
            raise
        # Only now: had `submit` failed, the next step of an optimizer would wait for an event that nobody sets.
        self._copied = copied
        self.stall_s = waited_s + time.perf_counter() - began

    def wait_until_copied(self) -> None:
        """Return when the state of the save in flight may be changed."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.stall_s += time.perf_counter() - began

    def wait(self) -> None:
        """Return when nothing is in flight. Raises the error of that save, once."""
        if (job := self._job) is not None:
            try:
                job.result()
            finally:
                # Another thread may have begun the next one meanwhile: only the job that was waited for is done with.
                if self._job is job:
                    self._job = None

    def close(self) -> None:
        """Wait for the end of the thread, whatever the result; the optimizers are free again."""
        self._pool.shutdown()  # first, because a copy may still be under way
        for hook in self._hooks:
            hook.remove()


def finish_at_exit(saver: AsyncSaver, pid: int) -> None:
    """Report a save that failed at the end of the process: Python waits for its thread, but not for its result."""
    if os.getpid() != pid:
        return  # a forked child, which does not have the thread
    try:
        saver.wait()
    except CiLlmError as error:
        logger.warning("the last checkpoint was not saved: %s", error)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ci_llm checkpoint")  # its thread starts with the first save


def _run(copy: Copy, copied: threading.Event, task: SaveTask, done: Callable[[SaveResult], object]) -> None:
    def take() -> Snapshot:
        try:
            return copy.finish()
        finally:
            copied.set()

    try:
        done(task.save(take))
    finally:
        copied.set()  # also if `save` failed before it took the copy: the optimizers must not wait for ever
