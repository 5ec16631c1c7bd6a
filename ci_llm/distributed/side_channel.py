"""What several processes say about a checkpoint: votes, in which an error of one is an error of all, and messages.

For loops that bring nothing of ours but the manager. Our own trainer brings its `Peers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.errors import CheckpointError

MAX_VOTES = 8


class PeerGone(CheckpointError):
    """Another process is gone or silent: what was begun together cannot be ended together."""


class Peers(Protocol):
    """What the manager must know about the processes of a run."""

    @property
    def index(self) -> int: ...

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all processes, in place. A collective."""
        ...


class TorchPeers:
    """The processes of `torch.distributed` if it is initialised, this one alone otherwise.

    Args:
        device: where tensors of a collective must be; found by the backend if None.
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
    """A connection of all processes beside the one of the training, so that another thread may speak on it.

    Building it is a collective, and so is every `exchange`; on one process it has one end.

    Attributes:
        index, count: of this process, and of how many.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if _distributed() else None
        self._gone: PeerGone | None = None
        self.index, self.count = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)

    def exchange(self, said: bytes) -> list[bytes]:
        """What every process says, by index. Nothing that is received is executed.

        Raises:
            PeerGone: a process has ended.
        """
        if self._gone is not None:
            raise self._gone
        if self._group is None:
            return [said]
        try:
            sizes = [int(size) for size in self._gather(torch.tensor([len(said)]))]
            padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
            padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            texts = self._gather(padded)
            return [text[:size].numpy().tobytes() for text, size in zip(texts, sizes, strict=True)]
        except RuntimeError as error:  # gloo knows no narrower class
            reason = str(error).splitlines()[0]
        # Out here, for the error's traceback holds the group, and a group that is held keeps its connections.
        raise self._hung_up(reason)

    def _hung_up(self, reason: str) -> PeerGone:
        """Close every connection: whoever waits for this process, and not for the one that is gone, hears as well."""
        self._gone = PeerGone("another process is gone: nothing can be saved together", where=reason)
        dist.destroy_process_group(self._group)
        self._group = None
        return self._gone

    def _gather(self, own: Tensor) -> list[Tensor]:
        everyones = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(everyones, own, group=self._group)
        return everyones


class Word:
    """What process 0 tells the others in its own time: whether something came about. Building it is a collective.

    Process 0 never waits for the others to hear it, which may be busy, or gone.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self._underway: list[Any] = []  # what is sent, with its memory

    def tell(self, step: int, happened: bool) -> None:
        """On process 0: what became of `step`."""
        self._underway = [(work, said) for work, said in self._underway if not work.is_completed()]
        for index in range(1, dist.get_world_size()):
            said = torch.tensor([step, int(happened)])
            with contextlib.suppress(RuntimeError):  # it is gone, and hears nothing any more
                self._underway.append((dist.isend(said, index, group=self._group), said))

    def hear(self, step: int) -> bool:
        """On every other process. False as well if process 0 is gone: the next collective says so to everybody."""
        said = torch.zeros(2, dtype=torch.int64)
        with contextlib.suppress(RuntimeError):
            dist.recv(said, 0, group=self._group)
            while said[0] < step:  # of a save that failed elsewhere, and that nobody here has waited for
                dist.recv(said, 0, group=self._group)
        return said.tolist() == [step, 1]


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def has_peers() -> bool:
    """Whether others wait for this process in a collective, while it is busy outside of one."""
    return _distributed() and dist.get_world_size() > 1


def run_collectively(processes: Peers, work: Callable[[], Sequence[int]]) -> list[int]:
    """Do `work` on every process and add up what it returns. A collective.

    Raises:
        CheckpointError: `work` raised on another process; where it raised, its own error goes on. Either way
            every process comes out of the collective, so that none waits for one that failed.
        PeerGone: at once and without a vote, in which those who still wait elsewhere could not take part.
    """
    try:
        votes = work()
    except PeerGone:
        raise
    except BaseException:
        _add_up(processes, failed=True)
        raise
    failed, *totals = _add_up(processes, votes)
    if failed:
        raise CheckpointError("another process of this run has failed at this point", hint="its own message says why")
    return totals[: len(votes)]


def _add_up(processes: Peers, votes: Sequence[int] = (), *, failed: bool = False) -> list[int]:
    ballot = torch.zeros(1 + MAX_VOTES, dtype=torch.int64)
    ballot[: 1 + len(votes)] = torch.tensor([int(failed), *map(int, votes)])
    return processes.reduce_flat_(ballot).tolist()
