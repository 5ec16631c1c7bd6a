"""The vote on one optimizer step: what a process says, as one small vector, and what all say together.

Every field is a count or a sum, so that one all-reduce of the vector is the whole election.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_STOP: Final = 2  # its place in the vector


@dataclass(frozen=True)
class Ballot:
    """What one process has to say about a step before any other collective.

    Attributes:
        num_targets: targets in this process's micro-batches of the step; the sum divides the gradient.
        nonfinite: [K] whether an agent's loss or gradient is not finite here; a tensor on any device will do.
        sums: numbers to be added over all processes (losses, diversity); as many on every process.
        out_of_memory: this process could not do its part.
        stop: why the run shall end after this step.
        save: a checkpoint is due.
    """

    num_targets: int
    nonfinite: Sequence[bool] | Tensor = ()
    sums: Sequence[float] | Tensor = ()
    out_of_memory: bool = False
    stop: str | None = None
    save: bool = False


@dataclass(frozen=True)
class Verdict:
    """What all processes have to say together; the same, bit for bit, on each of them.

    Attributes:
        num_targets, sums: added over all processes.
        nonfinite: [K] whether any process said so.
        out_of_memory, save: whether any process said so.
        stop: the reason of the first process, by index, that has one.
    """

    num_targets: int
    nonfinite: tuple[bool, ...]
    sums: tuple[float, ...]
    out_of_memory: bool
    stop: str | None
    save: bool


def encode(ballot: Ballot) -> Tensor:
    """[4 + K + number of sums] float64 on the CPU, where counts are exact up to 2^53.

    If any part lies on a GPU, this waits for it, once.
    """
    flags = [ballot.num_targets, ballot.out_of_memory, ballot.stop is not None, ballot.save]
    parts = [torch.as_tensor(part) for part in (ballot.nonfinite, ballot.sums)]
    device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
    measured = torch.cat([part.to(device, torch.float64).flatten() for part in parts])
    return torch.cat([torch.tensor(flags, dtype=torch.float64), measured.cpu()])


def anybody_stops(votes: Tensor) -> bool:
    """Whether the added ballots hold a reason to stop; the reasons themselves are words and travel after."""
    return bool(votes[_STOP] > 0)


def decode(votes: Tensor, num_agents: int, reasons: Sequence[str | None]) -> Verdict:
    """The verdict of the added ballots and of the reasons to stop, by process index; no reason: go on."""
    tokens, out_of_memory, _, save, *rest = votes.tolist()
    return Verdict(
        num_targets=int(tokens),
        nonfinite=tuple(count > 0 for count in rest[:num_agents]),
        sums=tuple(rest[num_agents:]),
        out_of_memory=out_of_memory > 0,
        stop=next((reason for reason in reasons if reason is not None), None),
        save=save > 0,
    )
