"""Collectives for checkpoints: work whose error on one process is an error on all, and messages beside the training.

A `CheckpointManager` in a loop of its user reaches the other processes through `TorchProcessGroup`. The trainer of this
package passes its own `Processes`, which has the same interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.errors import CheckpointError, PeerLost

MAX_VOTES = 8


class ProcessGroup(Protocol):
    """The processes of a run, as a checkpoint manager needs them."""

    @property
    def index(self) -> int: ...

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all processes, in place. A collective."""
        ...


class TorchProcessGroup:
    """The processes of `torch.distributed` if it is initialised; otherwise this process alone.

    Args:
        device: of the tensors in a collective; chosen by the backend if None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    @property
    def index(self) -> int:
        return dist.get_rank() if _distributed() else 0

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        if not _distributed():
            return tensor
        own = "cuda" if dist.get_backend() == "nccl" else "cpu"
        there = tensor.to(self._device or own)
        dist.all_reduce(there)
        return tensor.copy_(there)


class SideChannel:
    """A process group of its own, so that another thread can communicate while the training uses the default one.

    Two threads must not share a group: their collectives would be matched in the order in which each process happens to
    start them. The constructor is a collective, and so is every `exchange`. A single process communicates nothing.

    Attributes:
        index: of this process.
        count: of all processes.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if _distributed() else None
        self._lost: PeerLost | None = None
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by index. A collective. The bytes are returned and never executed.

        Raises:
            PeerLost: a process has ended.
        """
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            return [message]
        try:
            # Tensors in an all-gather have one shape: the first one tells the lengths, the second is padded.
            sizes = [int(size) for size in self._gather(torch.tensor([len(message)]))]
            padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            messages = self._gather(padded)
            return [each[:size].numpy().tobytes() for each, size in zip(messages, sizes, strict=True)]
        except RuntimeError as error:  # gloo raises no narrower class
            reason = str(error).splitlines()[0]
        # Outside of the except block: the traceback refers to the group, and a group keeps its connections as long as
        # anything refers to it.
        raise self._close(reason)

    def _close(self, reason: str) -> PeerLost:
        """Close every connection: a process that waits for this one, and not for the lost one, must notice as well."""
        self._lost = PeerLost("another process is gone: nothing can be saved together", where=reason)
        dist.destroy_process_group(self._group)
        self._group = None
        return self._lost

    def _gather(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(gathered, own, group=self._group)
        return gathered


class SaveResultChannel:
    """Process 0 tells the others whether a save succeeded, at its own time. The constructor is a collective.

    Process 0 never waits until a message is received: another process may be busy, or gone.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self._in_flight: list[Any] = []  # each send with its tensor, which must live as long as the send

    def send(self, step: int, saved: bool) -> None:
        """On process 0: tell whether `step` is saved."""
        self._in_flight = [(work, message) for work, message in self._in_flight if not work.is_completed()]
        for index in range(1, dist.get_world_size()):
            message = torch.tensor([step, int(saved)])
            with contextlib.suppress(RuntimeError):  # a process that is gone needs no message
                self._in_flight.append((dist.isend(message, index, group=self._group), message))

    def receive(self, step: int) -> bool:
        """On every other process: wait for the message about `step`, and return whether that step is saved.

        Returns:
            False as well if process 0 is gone; the next collective reports that on every process.
        """
        message = torch.zeros(2, dtype=torch.int64)
        with contextlib.suppress(RuntimeError):
            dist.recv(message, 0, group=self._group)
            while message[0] < step:  # about an earlier save, for which nobody here has waited
                dist.recv(message, 0, group=self._group)
        return message.tolist() == [step, 1]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def has_other_processes() -> bool:
    """Whether the run has other processes, which may wait for this one in a collective."""
    return _distributed() and dist.get_world_size() > 1


def run_collectively(processes: ProcessGroup, work: Callable[[], Sequence[int]]) -> list[int]:
    """Run `work` on every process and add up the numbers that it returns. A collective.

    Args:
        processes: of the run.
        work: returns up to 8 counts.

    Returns:
        the sum of each count over all processes.

    Raises:
        CheckpointError: `work` raised on another process; a process on which it raised raises that error. Every process
            leaves the collective in either case, so that none waits for one that failed.
        PeerLost: at once, without a vote: processes that still wait in another collective could not take part.
    """
    try:
        votes = work()
    except PeerLost:
        raise
    except BaseException:
        _add_up(processes, failed=True)
        raise
    failed, *totals = _add_up(processes, votes)
    if failed:
        raise CheckpointError("another process of this run has failed at this point", hint="see its own message")
    return totals[: len(votes)]


def _add_up(processes: ProcessGroup, votes: Sequence[int] = (), *, failed: bool = False) -> list[int]:
    ballot = torch.zeros(1 + MAX_VOTES, dtype=torch.int64)
    ballot[: 1 + len(votes)] = torch.tensor([int(failed), *map(int, votes)])
    return processes.reduce_flat_(ballot).tolist()
