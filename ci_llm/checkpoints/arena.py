"""Memory for the copy of a state, kept from save to save, and the copy itself, most of it made behind the training.

Fresh memory costs ten times the copy, in page faults: so the arena stays. What belongs to an optimizer moves in its
`step` and nowhere else, so it is copied by whoever calls `Copy.finish` before that. Everything else (buffers that a
forward pass updates, averages, generators) may change at any time, and is copied when the copy is begun. On CUDA the
arena is pinned, and what is copied behind goes through a side stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain
from typing import TypeAlias

import torch
from torch import Tensor

from ci_llm.checkpoints.snapshot import Entry, Snapshot, snapshot_of
from ci_llm.errors import CheckpointError

ALIGNMENT = 64  # of the first tensor of a file; a multiple of every item size

#: A place in the arena, and the tensor that belongs there.
Pair: TypeAlias = tuple[Tensor, Tensor]


class Arena:
    """One block of memory, as large as the largest state that was copied into it."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._layout: list[list[tuple[torch.Size, torch.dtype]]] = []
        self._places: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.bodies: list[memoryview] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        return self._block.nbytes

    def reserve(self, entries: Sequence[Entry]) -> list[Tensor]:
        """A place for every tensor of `entries`, one after the other; `bodies` are then the bytes of each entry.

        The places are those of the last call if the tensors have the same shapes and types.
        """
        layout = [[(tensor.shape, tensor.dtype) for tensor in entry.tensors] for entry in entries]
        if layout != self._layout:
            self._lay_out(entries)
            self._layout = layout
        return self._places

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of a GPU on which copies run beside its work."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _lay_out(self, entries: Sequence[Entry]) -> None:
        sizes = [sum(tensor.nbytes for tensor in entry.tensors) for entry in entries]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._require(starts[-1], pinned=any(tensor.is_cuda for entry in entries for tensor in entry.tensors))
        block: memoryview = self._block.numpy().data
        self.bodies = [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._places = []
        for entry, start in zip(entries, starts, strict=False):
            ends = accumulate((tensor.nbytes for tensor in entry.tensors), initial=start)
            self._places += [self._place(tensor, at) for tensor, at in zip(entry.tensors, ends, strict=False)]

    def _require(self, nbytes: int, pinned: bool) -> None:
        if nbytes > self.nbytes or (pinned and not self._block.is_pinned()):
            self._layout, self._places, self.bodies = [], [], []
            self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes first: never both
            self._block = _allocate(nbytes, pinned)

    def _place(self, tensor: Tensor, start: int) -> Tensor:
        first = start // tensor.element_size()
        return self._block.view(tensor.dtype)[first : first + tensor.numel()].view(tensor.shape)


class Copy:
    """The copy of one state: `finish` may run in another thread, as long as what was left to it does not move.

    Args:
        later: addresses of the memory that may be copied in `finish`, as `owned_memory` gives them.
    """

    def __init__(self, arena: Arena, entries: Sequence[Entry], later: Collection[int] = ()) -> None:
        self._arena, self._entries = arena, entries
        tensors = chain.from_iterable(entry.tensors for entry in entries)
        pairs = list(zip(arena.reserve(entries), tensors, strict=True))
        self._pairs: list[Pair] = []
        at_once: list[Pair] = []
        for pair in pairs:
            (self._pairs if _memory(pair[1]) in later else at_once).append(pair)
        _copy(at_once)
        self._versions = [tensor._version for _, tensor in self._pairs]
        devices = {tensor.device for _, tensor in pairs if tensor.is_cuda}
        self._begun = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def finish(self) -> Snapshot:
        """Copy what is left; the files of the state as it was when the copy was begun.

        Raises:
            CheckpointError: a tensor was changed in the meantime.
        """
        _copy([pair for pair in self._pairs if not pair[1].is_cuda])
        for device, event in self._begun:
            stream = self._arena.side_stream(device)
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                _copy([pair for pair in self._pairs if pair[1].device == device])
            stream.synchronize()
        if self._versions != [tensor._version for _, tensor in self._pairs]:
            raise CheckpointError(
                "the state was changed before it was copied: this checkpoint is dropped",
                cure="give the manager every optimizer of the loop, or call wait_until_copied before changing weights",
            )
        self._pairs.clear()
        return snapshot_of(self._entries, self._arena.bodies)


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


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:  # PyTorch has no class of its own for it on a CPU
        raise CheckpointError(
            f"there is no memory for a copy of the state, {nbytes:,} bytes: {error}",
            cure="async_save: false saves without a copy, and the training waits",
        ) from error


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    """One call for all: it holds Python's lock once, however many there are."""
    if pairs:
        places, tensors = zip(*pairs, strict=True)
        torch._foreach_copy_(list(places), list(tensors), non_blocking=True)
