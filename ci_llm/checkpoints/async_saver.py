"""A save in the background: a thread finishes the copy of a state and commits it while training continues.

The copy is what training must wait for, because the optimizer changes what is being copied. So each optimizer that is
watched waits for the copy in a pre-hook of its step, and the forward and backward pass in between hide it. The commit
needs only the copy.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, compress, groupby
from typing import Any

import torch
from torch import Tensor

from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.state_files import StateEntry, files_of
from ci_llm.checkpoints.store import SaveResult
from ci_llm.errors import CheckpointError, CiLlmError

logger = logging.getLogger(__name__)


#: In bytes. The first tensor of each file starts at a multiple of it, which every item size divides.
ALIGNMENT = 64


class Arena:
    """One block of memory, as large as the largest state that was copied into it.

    Fresh memory costs ten times as much as the copy, in page faults, so the arena keeps its memory from save to save.
    On CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._places: list[list[Tensor]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.bodies: list[memoryview] = []

    def reserve(self, entries: Sequence[StateEntry]) -> list[list[Tensor]]:
        """A place for every tensor of every entry; `bodies` are then the bytes of each entry.

        Tensors of the same shapes and types as in the last call get the same places.
        """
        # Making views takes longer than copying small tensors, and a loop saves the same shapes again and again.
        if [len(places) for places in self._places] != [len(entry.tensors) for entry in entries] or not all(
            map(_alike, chain.from_iterable(self._places), chain.from_iterable(entry.tensors for entry in entries))
        ):
            self._lay_out(entries)
        return self._places

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a GPU on which copies run beside its work."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _lay_out(self, entries: Sequence[StateEntry]) -> None:
        sizes = [sum(tensor.nbytes for tensor in entry.tensors) for entry in entries]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._require(starts[-1], pinned=any(tensor.is_cuda for entry in entries for tensor in entry.tensors))
        block: memoryview = self._block.numpy().data
        self.bodies = [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._places = [
            list(_views(self._block[start:], entry.tensors)) for entry, start in zip(entries, starts, strict=False)
        ]

    def _require(self, nbytes: int, pinned: bool) -> None:
        if nbytes > self._block.nbytes or (pinned and not self._block.is_pinned()):
            self._places = []
            self.bodies = []
            was_pinned = self._block.is_pinned()
            self._block = torch.empty(0, dtype=torch.uint8)
            if was_pinned and hasattr(torch.accelerator, "empty_host_cache"):
                torch.accelerator.empty_host_cache()  # else torch keeps page-locked memory for later
            self._block = _allocate(nbytes, pinned)  # the old block is free: never two of them at once


class Copy:
    """The copy of one state. `finish` may run in another thread, as long as nobody changes the tensors left to it.

    The tensors of an optimizer change in its `step` and nowhere else, so `finish` may copy them in another thread as
    long as the optimizer waits; on CUDA it copies on a side stream. Everything else (buffers that a forward pass
    updates, averages, generators) may change at any time, and is copied at once.

    Args:
        later: addresses of the memory that `finish` may copy, as `owned_memory` returns them.
    """

    def __init__(self, arena: Arena, entries: Sequence[StateEntry], later: Collection[int] = ()) -> None:
        self._arena, self._entries = arena, entries
        # Two lists instead of pairs: thousands of new objects would start Python's garbage collector.
        self._places: list[Tensor] = []
        self._tensors: list[Tensor] = []
        places_now: list[Tensor] = []
        tensors_now: list[Tensor] = []
        places = chain.from_iterable(arena.reserve(entries))
        for place, tensor in zip(places, chain.from_iterable(entry.tensors for entry in entries), strict=True):
            wait = _memory(tensor) in later
            (self._places if wait else places_now).append(place)
            (self._tensors if wait else tensors_now).append(tensor)
        _copy(places_now, tensors_now)
        # PyTorch counts the changes of each tensor in place. If the count has moved when the copy is finished, somebody
        # changed the tensor who did not wait, and the copy may be a mixture of two states.
        self._versions = [tensor._version for tensor in self._tensors]
        # The kernels that produce these tensors may still be queued: the side stream has to wait for them.
        devices = {tensor.device for tensor in chain(tensors_now, self._tensors) if tensor.is_cuda}
        self._begun = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def finish(self) -> dict[str, FileImage]:
        """Copy the rest and return the files of the state as it was when the copy was begun.

        Raises:
            CheckpointError: a tensor was changed in the meantime.
        """
        if self._begun:
            self._copy_from_gpus()
        else:
            _copy(self._places, self._tensors)
        if self._versions != [tensor._version for tensor in self._tensors]:
            raise CheckpointError(
                "the state was changed before it was copied: this checkpoint is dropped",
                hint="give the manager every optimizer of the loop, or call wait_until_copied before changing weights",
            )
        return files_of(self._entries, self._arena.bodies)

    def _copy_from_gpus(self) -> None:
        self._copy_where([not tensor.is_cuda for tensor in self._tensors])
        for device, event in self._begun:
            stream = self._arena.side_stream(device)
            stream.wait_event(event)
            # On another current device, the way out of `stream` would make a context there: half a GB of that GPU.
            with torch.cuda.device(device), torch.cuda.stream(stream):
                self._copy_where([tensor.device == device for tensor in self._tensors])
            stream.synchronize()

    def _copy_where(self, chosen: Sequence[bool]) -> None:
        _copy(list(compress(self._places, chosen)), list(compress(self._tensors, chosen)))


def owned_memory(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Addresses of the memory in which parameters and moments of `optimizers` lie."""
    return {
        _memory(tensor)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, Tensor)
    }


def _alike(place: Tensor, tensor: Tensor) -> bool:
    return place.shape == tensor.shape and place.dtype == tensor.dtype


def _views(block: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Views of `block`, which is one of bytes, one after the other, with the types and shapes of `tensors`."""
    for dtype, run in groupby(tensors, key=lambda tensor: tensor.dtype):
        alike = list(run)
        counts = [tensor.numel() for tensor in alike]
        nbytes = sum(counts) * dtype.itemsize
        parts = block[:nbytes].view(dtype).split(counts)
        yield from (part.view(tensor.shape) for part, tensor in zip(parts, alike, strict=True))
        block = block[nbytes:]


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:  # on a CPU PyTorch has no narrower class for it
        raise CheckpointError(
            f"there is no memory for a copy of the state, {nbytes:,} bytes: {error}",
            hint="a manager with async_save=False saves without a copy, and the training waits",
        ) from error


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def _copy(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy with one call, which takes Python's lock once, however many tensors there are."""
    if tensors:
        torch._foreach_copy_(places, tensors, non_blocking=places[0].is_pinned())


@dataclass(frozen=True)
class SaveTask:
    """A save that is to be run.

    Attributes:
        entries: the state that is to be copied.
        save: writes the files of the copy; called with a function that finishes the copy, and raises if it cannot.
        give_up: called instead of `save` if this process cannot start it; tells the others, if they wait for it.
    """

    entries: Sequence[StateEntry]
    save: Callable[[Callable[[], dict[str, FileImage]]], SaveResult]
    give_up: Callable[[], object] = lambda: None


class AsyncSaver:
    """Saves in a thread, one at a time. What no watched optimizer owns is copied before `submit` returns."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._pool = _one_thread()
        self._job: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._hooks: dict[torch.optim.Optimizer, Any] = {}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the thread copy what `optimizer` owns: its next step waits until that is copied."""
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(lambda *_: self.wait_until_copied())

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        job = self._job
        return job is not None and not job.done()

    def submit(self, task: SaveTask, done: Callable[[SaveResult], object]) -> None:
        """Take the state as it is now, and leave the rest to the thread. Waits for the save before, and raises for it.

        Args:
            done: called in the thread with the result.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        try:
            # The arena has room for one copy, and the one before lies in it until it is written.
            self.wait()
            copy = Copy(self._arena, task.entries, owned_memory(self._hooks))
            copied = threading.Event()
            self._job = self._pool.submit(_run, copy, copied, task, done)
        except BaseException:
            # A pool whose thread did not start keeps the job, and would run it before the next one.
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = _one_thread()
            task.give_up()
            raise
        # Only now: had `submit` failed, the next step of an optimizer would wait for an event that nobody sets.
        self._copied = copied

    def wait_until_copied(self) -> None:
        """Return when the state of the save in flight may be changed."""
        self._copied.wait()

    def wait(self) -> None:
        """Return when nothing is in flight. Raises the error of that save, once.

        Only this method raises it, and `submit`, which calls it. An optimizer's step would be the wrong place: one
        process would leave it by an exception while the others wait for that process in the next collective.
        """
        job = self._job
        if job is None:
            return
        try:
            job.result()
        finally:
            # Another thread may have begun the next one meanwhile: only the job that was waited for is done with.
            if self._job is job:
                self._job = None

    def shutdown(self) -> None:
        """Wait for the end of the thread, whatever the result; the optimizers are free again."""
        self._pool.shutdown()  # first, because a copy may still be under way
        for hook in self._hooks.values():
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
    def finish_copy() -> dict[str, FileImage]:
        try:
            return copy.finish()
        finally:
            copied.set()

    try:
        done(task.save(finish_copy))
    finally:
        copied.set()  # also if `save` failed before it took the copy: the optimizers must not wait for ever
