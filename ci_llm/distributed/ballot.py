"""The vote on one optimizer step: the ballot of a process, and the verdict of all ballots.

Every field of a ballot is a count or a sum, so that one all-reduce of a small vector is the whole vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

#: The place in the vector of the number of processes that ask to stop. Their reasons are text, and come afterwards.
STOP: Final = 2


@dataclass(frozen=True)
class Ballot:
    """The vote of one process on a step, cast before any other collective of the step.

    Attributes:
        num_targets: targets in this process's micro-batches of the step; the sum divides the gradient.
        nonfinite: [K] true where loss or gradient of an agent are not finite here; a tensor may be on any device.
        sums: numbers to be added over all processes (losses, diversity); equally many on every process.
        out_of_memory: this process could not compute its part.
        stop: why the run shall end after this step.
        save: a checkpoint is due.
        request: a request to change the crowd lies in the run's folder.
        failed: an error here ends the run on every process, whatever else is asked for.
    """

    num_targets: int
    nonfinite: Sequence[bool] | Tensor = ()
    sums: Sequence[float] | Tensor = ()
    out_of_memory: bool = False
    stop: str | None = None
    save: bool = False
    request: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Verdict(Ballot):
    """The result of a vote, as the ballot of all processes; the same, bit for bit, on every one.

    Attributes:
        num_targets, sums: added over all processes.
        nonfinite: [K] set on some process.
        out_of_memory, save, request, failed: set on some process.
        stop: the reason of the first process, by index, that has one.
    """

    nonfinite: tuple[bool, ...] = ()
    sums: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepSums:
    """The sums of a ballot in training, in this order.

    Attributes:
        losses: [K] loss of every agent.
        targets: [K] what divides it: targets of its own rows, or units where an objective counts these.
        diversity: the diversity of the crowd.
        tokens: packed ones.
        metrics: [K] of every agent sum and count of each metric of the objective, one after the other.
    """

    losses: tuple[float, ...]
    targets: tuple[int, ...]
    diversity: float
    tokens: int
    metrics: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def size(num_agents: int, *, metrics: int = 0) -> int:
        """The number of values in the packed sums."""
        return 2 * num_agents * (1 + metrics) + 2

    @staticmethod
    def pack(
        losses: Tensor, targets: Sequence[int], diversity: Tensor, tokens: int, metrics: Tensor | None = None
    ) -> Tensor:
        """The sums of one micro-batch, on its device.

        Args:
            metrics: [K, M, 2] sums and counts of M metrics.
        """
        counts = torch.tensor(targets).to(losses, non_blocking=True)
        measured = [] if metrics is None else [metrics.flatten()]
        return torch.cat([losses, counts, diversity[None], losses.new_full((1,), tokens), *measured])

    @classmethod
    def unpack(cls, sums: Sequence[float], num_agents: int) -> StepSums:
        """The sums of a verdict."""
        at = 2 * num_agents
        (diversity, tokens), measured = sums[at : at + 2], sums[at + 2 :]
        size = len(measured) // num_agents
        metrics = tuple(tuple(measured[k * size : (k + 1) * size]) for k in range(num_agents)) if size else ()
        return cls(tuple(sums[:num_agents]), tuple(map(int, sums[num_agents:at])), diversity, int(tokens), metrics)


def encode(ballot: Ballot) -> Tensor:
    """The ballot as a vector: [6 + K + number of sums] float64 on the CPU, exact for counts up to 2^53.

    If a part is on a GPU, this waits for the device, once.
    """
    flags = [ballot.num_targets, ballot.out_of_memory, ballot.stop is not None]
    flags += [ballot.save, ballot.request, ballot.failed]
    parts = [torch.as_tensor(part) for part in (ballot.nonfinite, ballot.sums)]
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    measured = torch.cat([part.to(device, torch.float64).flatten() for part in parts])
    return torch.cat([torch.tensor(flags, dtype=torch.float64), measured.cpu()])


def decode(votes: Tensor, num_agents: int, reasons: Sequence[str | None]) -> Verdict:
    """The verdict of the added ballots.

    Args:
        votes: the sum of all encoded ballots.
        num_agents: K.
        reasons: to stop, by process index; empty if the run continues.
    """
    tokens, out_of_memory, _, save, request, failed, *rest = votes.tolist()
    return Verdict(
        num_targets=int(tokens),
        nonfinite=tuple(count > 0 for count in rest[:num_agents]),
        sums=tuple(rest[num_agents:]),
        out_of_memory=out_of_memory > 0,
        stop=next((reason for reason in reasons if reason is not None), None),
        save=save > 0,
        request=request > 0,
        failed=failed > 0,
    )
