"""What theory says of saving and failing, and the bound that no policy can pass."""

from __future__ import annotations

import math

from ci_llm.checkpoints.policy import best_interval_s
from ci_llm.simulate.cluster import Cluster


def young_s(cost_s: float, mtbf_s: float) -> float:
    """The first-order best interval (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


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


def best_goodput(cluster: Cluster) -> float:
    """Daly's goodput at the best interval: what the best policy can reach with these costs."""
    cost_s, mtbf_s = save_cost_s(cluster), cluster.mtbf_s
    return daly_goodput(best_interval_s(cost_s, mtbf_s), cost_s, recovery_s(cluster), mtbf_s)


def bound(cluster: Cluster) -> float:
    """The goodput with saves that cost nothing and lose nothing: failures cost their recovery alone."""
    return math.exp(-recovery_s(cluster) / cluster.mtbf_s)


def longest_recovery_s(cluster: Cluster, goodput: float) -> float:
    """The mean recovery that still reaches `goodput` at the best interval; negative if none does."""
    return recovery_s(cluster) + cluster.mtbf_s * math.log(best_goodput(cluster) / goodput)
