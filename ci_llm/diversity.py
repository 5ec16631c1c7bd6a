"""How different the agents are: terms that a training objective may reward.

Legend: K agents, S targets, B rows, D hidden width, L projections.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.batches import Batch


def crowd_log_probs(log_probs: Tensor, healthy: Tensor | None = None) -> Tensor:
    """Log of the mean of the agents' probabilities: [K, ...] -> [...]. `healthy [K]` leaves the others out."""
    if healthy is None:
        return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])
    shape = (-1, *[1] * (log_probs.ndim - 1))
    masked = log_probs.masked_fill(~healthy.view(shape), float("-inf"))
    return torch.logsumexp(masked, dim=0) - healthy.sum().log()


def jensen_gap(log_probs: Tensor, healthy: Tensor | None = None) -> Tensor:
    """Sum over targets of (mean cross-entropy of the agents) - (cross-entropy of the crowd): [K, S] -> [].

    Never negative (Jensen's inequality), additive over tokens, so independent of how a step is split.
    """
    crowd = crowd_log_probs(log_probs, healthy)
    if healthy is None:
        return (crowd - log_probs.mean(0)).sum()
    kept = log_probs.masked_fill(~healthy[:, None], 0.0)
    return (crowd - kept.sum(0) / healthy.sum()).sum()


def sliced_wasserstein(points: Tensor, directions: Tensor, healthy: Tensor | None = None) -> Tensor:
    """Squared sliced 2-Wasserstein distance, mean over pairs of agents.

    Sort the projections of each agent's points; in one dimension the optimal plan couples equal ranks. All pairs share
    the directions, and the sum over pairs is K Σ|p - mean|², so one sort serves them all. Source: Bonneel, Rabin,
    Peyré, Pfister, "Sliced and Radon Wasserstein barycenters of measures", 2015.

    Args:
        points: [K, B, D], the same number of points for every agent.
        directions: [D, L] unit columns.

    Returns:
        [], 0 when fewer than two agents are healthy.
    """
    projected = torch.sort(points @ directions, dim=1).values  # [K, B, L]
    if healthy is not None:
        projected = projected[healthy]
    agents = projected.shape[0]
    if agents < 2:
        return projected.new_zeros(())
    spread = (projected - projected.mean(0, keepdim=True)).square().sum()
    pairs = agents * (agents - 1) / 2
    return spread * agents / (pairs * projected.shape[1] * projected.shape[2])


def unit_directions(width: int, count: int, generator: torch.Generator) -> Tensor:
    """[D, L] directions drawn uniformly from the sphere, in fp64 on the CPU."""
    return F.normalize(torch.randn(width, count, generator=generator, dtype=torch.float64), dim=0)


def row_states(states: Tensor, batch: Batch, representation: str) -> Tensor:
    """One point per row and agent: [K, N, D] packed states -> [K, B, D]. Pads are never among them."""
    if representation == "last_token":
        return states[:, batch.last_tokens]
    if representation == "first_token":
        return states[:, torch.tensor(batch.bounds[:-1], device=states.device)]
    lengths = torch.tensor([e - s for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)], device=states.device)
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=states.device), lengths)
    sums = states.new_zeros(states.shape[0], len(lengths), states.shape[-1]).index_add(1, row_of, states)
    return sums / lengths[None, :, None]
