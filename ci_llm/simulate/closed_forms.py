"""What theory says of saving and failing, and the bound that no policy can pass."""

from __future__ import annotations

import math

from ci_llm.checkpoints.interval import best_interval_s
from ci_llm.simulate.cluster import Cluster


def daly_goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time that is work, by Daly's complete model for exponential failures (FGCS 22, 2006, eq. 13).

    Args:
        interval_s: seconds of work between two saves.
        cost_s: seconds that a save adds.
        restart_s: seconds from a failure to the first step.
    """
    per_segment = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    return interval_s / per_segment


def save_cost_s(cluster: Cluster) -> float:
    """All that one save costs the training, in seconds."""
    return cluster.stall + cluster.slowdown


def recovery_s(cluster: Cluster) -> float:
    """Mean seconds from a failure to the first step."""
    silent = cluster.silent_share
    by_node = max(0.0, 1 - silent - cluster.process_share)
    return cluster.start_s + by_node * cluster.queue + silent * cluster.watchdog


def announced_share(cluster: Cluster) -> float:
    """The share of time that preemptions and limits leave: each costs a wait in the queue and a start."""
    preempted_s, limit_s = cluster.preemption or math.inf, cluster.walltime or math.inf
    # A preempted job begins its time anew, so that fewer of them reach their limit.
    mean_s = limit_s if math.isinf(preempted_s) else preempted_s * -math.expm1(-limit_s / preempted_s)
    return math.exp(-(cluster.start_s + cluster.queue) / mean_s)


def best_goodput(cluster: Cluster) -> float:
    """Daly's goodput at the best interval: what the best policy can reach with these costs."""
    cost_s, mtbf_s = save_cost_s(cluster), cluster.mtbf_s
    found = daly_goodput(best_interval_s(cost_s, mtbf_s), cost_s, recovery_s(cluster), mtbf_s)
    return found * announced_share(cluster)


def bound(cluster: Cluster) -> float:
    """The goodput with saves that cost nothing and lose nothing: every end costs its recovery alone."""
    return math.exp(-recovery_s(cluster) / cluster.mtbf_s) * announced_share(cluster)


def longest_recovery_s(cluster: Cluster, goodput: float) -> float:
    """The mean recovery that still reaches `goodput` at the best interval; negative if none does."""
    return recovery_s(cluster) + cluster.mtbf_s * math.log(best_goodput(cluster) / goodput)
