"""What several processes say about a checkpoint: a sum of votes, in which an error of one is an error of all.

For loops that bring nothing of ours but the manager. Our own trainer brings its `Processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.errors import CheckpointError

MAX_VOTES = 8


class Processes(Protocol):
    """What the manager must know about the processes of a run."""

    @property
    def index(self) -> int: ...

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all processes, in place. A collective."""
        ...


class TorchProcesses:
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


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def together(processes: Processes, work: Callable[[], Sequence[int]]) -> list[int]:
    """Do `work` on every process and add up what it returns. A collective.

    Raises:
        CheckpointError: `work` raised on another process; where it raised, its own error goes on. Either way
            every process comes out of the collective, so that none waits for one that failed.
    """
    votes: Sequence[int] | None = None
    try:
        votes = work()
    finally:
        ballot = torch.zeros(1 + MAX_VOTES, dtype=torch.int64)
        ballot[0] = votes is None
        for place, vote in enumerate(votes or (), start=1):
            ballot[place] = int(vote)
        failed, *totals = processes.reduce_flat_(ballot).tolist()
    if failed:
        raise CheckpointError("another process of this run has failed at this point", cure="its own message says why")
    return totals[: len(votes)]
