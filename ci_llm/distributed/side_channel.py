"""The communication beside the training: messages, and votes in which an error of one process is an error of all.

A loop that brings nothing of this package but the manager of checkpoints needs no more than this. The trainer brings
its own `ProcessGroup` (processes.py) for the votes.

Each channel has a gloo group of its own. A thread that saves may then communicate while the training thread is in a
collective: two threads on one group would take each other's messages. And gloo reports a dead peer within milliseconds,
on every machine, where NCCL waits for minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.errors import CheckpointError, PeerLost, first_line

MAX_VOTES: Final = 8
#: Bytes that a message may have before it costs a second collective; generators of one process have about 20,000.
FIRST_CAPACITY: Final = 1 << 16
#: In bytes. A message up to this size costs the second collective once: its size is kept for the next ones.
MOST_KEPT: Final = 1 << 20
_LENGTH_BYTES: Final = 8
#: First byte of a message that says whether its sender has failed.
_FAILED, _FINE = b"\0", b"\1"


class ProcessGroup(Protocol):
    """The processes of a run, as far as the checkpoint manager needs them."""

    @property
    def process_index(self) -> int: ...

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all processes, in place. A collective."""


class TorchProcessGroup:
    """The processes of `torch.distributed` if it is initialised; otherwise this process alone.

    Args:
        device: the device of the tensors in a collective; chosen by the backend if None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    @property
    def process_index(self) -> int:
        return dist.get_rank() if _distributed() else 0

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        if not _distributed():
            return tensor
        own = "cuda" if dist.get_backend() == "nccl" else "cpu"
        there = tensor.to(self._device or own)
        dist.all_reduce(there)
        return tensor.copy_(there)


class SideChannel:
    """Messages between all processes, on a connection of their own.

    Building it is a collective, and so is every exchange. On a single process it returns what it is given.

    Attributes:
        index: the index of this process.
        count: the number of all processes.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if _distributed() else None
        self._lost: PeerLost | None = None
        self._capacity = FIRST_CAPACITY
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by index; one collective, and a second one for a message of record length.

        Nothing that is received is executed.

        Raises:
            PeerLost: a process has ended.
        """
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            return [message]
        try:
            return self._gather(message)
        except RuntimeError as error:  # gloo has no narrower class
            reason = first_line(error)
        # Outside of the `except`: the error's traceback holds the group, and a group that is held stays connected.
        raise self._disconnect(reason)

    def exchange_result_of(self, work: Callable[[], bytes]) -> list[bytes]:
        """Exchange what `work` returns on each process, with one collective.

        Raises:
            CheckpointError: `work` raised on another process; where it raised, its own error is raised. No process is
                left waiting for one that failed.
            PeerLost: a process has ended.
        """
        with _failure_told(lambda: self.exchange(_FAILED)):
            message = _FINE + work()
        received = self.exchange(message)
        if any(each[:1] == _FAILED for each in received):
            raise failed_elsewhere()
        return [each[1:] for each in received]

    def _gather(self, message: bytes) -> list[bytes]:
        capacity = self._capacity
        while True:
            # All processes send equally many bytes, as `all_gather` wants it: so no size has to be agreed on first.
            sent = torch.zeros(_LENGTH_BYTES + capacity, dtype=torch.uint8)
            head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:capacity]
            sent[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(self.count)]
            dist.all_gather(received, sent, group=self._group)
            lengths = [int.from_bytes(each[:_LENGTH_BYTES].numpy().tobytes(), "little") for each in received]
            if max(lengths) <= capacity:
                ends = [_LENGTH_BYTES + length for length in lengths]
                return [each[_LENGTH_BYTES:end].numpy().tobytes() for each, end in zip(received, ends, strict=True)]
            # Every process sees the same lengths, so all of them come to the same capacity and gather once more.
            capacity = 1 << (max(lengths) - 1).bit_length()
            if capacity <= MOST_KEPT:
                self._capacity = capacity

    def _disconnect(self, reason: str) -> PeerLost:
        """Close every connection of the group, so that a process that waits for this one gets an error as well."""
        self._lost = PeerLost("another process is gone: nothing can be saved by all of them", where=reason)
        dist.destroy_process_group(self._group)
        self._group = None
        return self._lost


class SaveResultChannel:
    """How process 0 tells the others what became of a save, when it knows. Building it is a collective.

    `send` never waits for the others, which may be busy or gone. `receive` runs in a thread of its own. Both ask the
    group itself: functions of `torch.distributed` know it no more once the loop has called `destroy_process_group`.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self._count = dist.get_world_size()
        self._in_flight: list[Any] = []  # each send with its tensor, which must live until it is sent

    def send(self, step: int, saved: bool) -> None:
        """On process 0: what became of `step`."""
        self._in_flight = [(work, message) for work, message in self._in_flight if not work.is_completed()]
        for index in range(1, self._count):
            message = torch.tensor([step, int(saved)])
            with contextlib.suppress(RuntimeError):  # that process is gone and needs no result
                self._in_flight.append((self._group.send([message], index, 0), message))

    def receive(self, step: int) -> bool:
        """On every other process: true if `step` was saved. False if process 0 is gone: the next collective fails."""
        message = torch.zeros(2, dtype=torch.int64)  # stays so if process 0 is gone, and then says "not saved"
        with contextlib.suppress(RuntimeError):
            self._group.recv([message], 0, 0).wait()
            while message[0] < step:  # the result of an earlier save that nobody here has waited for
                self._group.recv([message], 0, 0).wait()
        return message.tolist() == [step, 1]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def num_processes() -> int:
    """How many processes the run has."""
    return dist.get_world_size() if _distributed() else 1


def failed_elsewhere() -> CheckpointError:
    """The error of a process that did its part while another one failed."""
    return CheckpointError("another process of this run has failed at this point", hint="see its own message")


def run_collectively(processes: ProcessGroup, work: Callable[[], Sequence[int]]) -> list[int]:
    """Do `work` on every process and add up what it returns. A collective.

    Raises:
        CheckpointError: `work` raised on another process; where it raised, its own error is raised. No process is left
            waiting for one that failed.
        PeerLost: at once and without a vote, because processes that wait elsewhere could not take part in it.
    """
    with _failure_told(lambda: _add_up(processes, failed=True)):
        votes = work()
    failed, *totals = _add_up(processes, votes)
    if failed:
        raise failed_elsewhere()
    return totals[: len(votes)]


@contextlib.contextmanager
def _failure_told(tell: Callable[[], object]) -> Iterator[None]:
    """Call `tell` if the block fails: the other processes are in the collective that follows it already."""
    try:
        yield
    except PeerLost:
        raise  # there is nobody left to tell
    except BaseException:  # KeyboardInterrupt and SystemExit too
        tell()
        raise


def is_true_anywhere(processes: ProcessGroup, work: Callable[[], bool]) -> bool:
    """Do `work` on every process; true if it returned True on any. A collective, with the errors of the one above."""
    return run_collectively(processes, lambda: [work()])[0] > 0


def _add_up(processes: ProcessGroup, votes: Sequence[int] = (), *, failed: bool = False) -> list[int]:
    ballot = torch.zeros(1 + MAX_VOTES, dtype=torch.int64)
    ballot[: 1 + len(votes)] = torch.tensor([int(failed), *map(int, votes)])
    return processes.reduce_flat_(ballot).tolist()
