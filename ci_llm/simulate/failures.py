"""Failures of the nodes of one job as a stream of moments: exponential, Weibull, or in bursts; drawn by a seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.random import Generator

from ci_llm.simulate.cluster import Cluster

#: What strikes. A node takes the supervisor with it; after the others it lives. `damaged`: the newest checkpoint, too.
Kind: TypeAlias = Literal["node", "process", "silent", "damaged", "preempted", "disk_full"]


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        disk_lost: the checkpoints on the disk are gone as well.
    """

    kind: Kind
    disk_lost: bool = False


@dataclass(frozen=True)
class Planned:
    """A fault that strikes at a step and not at a time: a campaign. The steps before `step` are done then."""

    step: int
    kind: Kind


def moments(cluster: Cluster, dice: Generator) -> Iterator[float]:
    """The seconds at which the job fails, from 0 on, without end."""
    match cluster.failures:
        case "exponential":
            return _exponential(cluster.mtbf_s, dice)
        case "weibull":
            return _weibull(cluster, dice)
        case "correlated":
            return _bursts(cluster, dice)


def strike(cluster: Cluster, dice: Generator) -> Strike:
    """What the next failure is."""
    drawn, disk = dice.random(2)
    kind: Kind = "node"
    if drawn < cluster.silent_share:
        kind = "silent"
    elif drawn < cluster.silent_share + cluster.process_share:
        kind = "process"
    return Strike(kind, kind != "process" and disk < cluster.disk_lost_share)


def _exponential(mean_s: float, dice: Generator) -> Iterator[float]:
    at = 0.0
    while True:
        at += dice.exponential(mean_s)
        yield at


def _weibull(cluster: Cluster, dice: Generator) -> Iterator[float]:
    """Every node is replaced by a new one when it fails; at 0 the nodes have run for a long time already."""
    shape, nodes = cluster.weibull_shape, cluster.nodes
    scale = cluster.mtbf_s * nodes / math.gamma(1 + 1 / shape)
    # In a renewal process that has run for long the present lifetime is drawn in proportion to its length.
    lives = scale * dice.gamma(1 + 1 / shape, size=nodes) ** (1 / shape)
    following = list(lives * dice.random(nodes))
    heapq.heapify(following)
    while True:
        at = following[0]
        heapq.heapreplace(following, at + scale * dice.weibull(shape))
        yield at


def _bursts(cluster: Cluster, dice: Generator) -> Iterator[float]:
    """A first failure, and others that follow it: a switch, a power supply, a bad batch. The mean rate is the same."""
    coming: list[float] = []
    firsts = _exponential(cluster.mtbf_s * cluster.burst, dice)
    first = next(firsts)
    while True:
        while not coming or first <= coming[0]:
            others = int(dice.geometric(1 / cluster.burst)) - 1
            for at in (first, *(first + cluster.burst_within * dice.random(others))):
                heapq.heappush(coming, float(at))
            first = next(firsts)
        yield heapq.heappop(coming)


def generators(cluster: Cluster, repeat: int) -> Sequence[Generator]:
    """Independent generators of one simulated job: of its failures, of their kinds, of its preemptions."""
    return [np.random.default_rng(seed) for seed in np.random.SeedSequence([cluster.seed, repeat]).spawn(3)]
