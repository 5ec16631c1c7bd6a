"""How different the agents are: terms that a training objective may reward.

Every term takes `healthy [K]`: an agent with a non-finite number is masked out before the operation, because NaN times
zero is NaN. Nothing here waits for the device.

Legend: K agents, S targets, B rows, N packed tokens, D hidden width, L projections.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.crowd.aggregate import mean_of_probabilities
from ci_llm.data.batches import Batch


def jensen_gap(log_probs: Tensor, healthy: Tensor) -> Tensor:
    """Sum over targets of (mean cross-entropy of the agents) - (cross-entropy of the crowd): [K, S] -> [].

    Never negative (Jensen's inequality), and additive over tokens, so independent of how a step is split.
    """
    kept = log_probs.masked_fill(~healthy[:, None], 0.0)
    return (mean_of_probabilities(log_probs, healthy) - kept.sum(0) / healthy.sum()).sum()


def sliced_wasserstein(points: Tensor, directions: Tensor, healthy: Tensor) -> Tensor:
    """Squared sliced 2-Wasserstein distance between the agents' point sets, mean over pairs of agents.

    In one dimension the optimal plan couples equal ranks, so the projections are sorted; all pairs share the
    directions, and the sum over pairs is K·Σ|p - mean|², so one sort serves them all. Source: Bonneel, Rabin, Peyré,
    Pfister, "Sliced and Radon Wasserstein Barycenters of Measures", 2015.

    Args:
        points: [K, B, D], the same number of points for every agent.
        directions: [D, L] unit columns.

    Returns:
        [], and 0 when fewer than two agents are healthy. Gradients are finite where agents coincide, which is why it
        is the squared distance.
    """
    projected = torch.sort(points @ directions, dim=1).values  # [K, B, L]
    count, chosen = healthy.sum(), healthy[:, None, None]
    mean = projected.masked_fill(~chosen, 0.0).sum(0, keepdim=True) / count.clamp(min=1)
    spread = (projected - mean).masked_fill(~chosen, 0.0).square().sum()
    return 2 * spread / ((count - 1).clamp(min=1) * projected.shape[1] * projected.shape[2])


def unit_directions(width: int, count: int, generator: torch.Generator) -> Tensor:
    """[D, L] directions drawn uniformly from the sphere, in fp64 on the CPU."""
    return F.normalize(torch.randn(width, count, generator=generator, dtype=torch.float64), dim=0)


def row_states(states: Tensor, batch: Batch, representation: str) -> Tensor:
    """One point per row and agent: packed states [K, N, D] -> [K, B, D]. Pads are never among them."""
    if representation == "last_token":
        return states[:, batch.last_tokens]
    first_tokens = F.pad(batch.last_tokens[:-1] + 1, (1, 0))
    if representation == "first_token":
        return states[:, first_tokens]
    lengths = batch.last_tokens - first_tokens + 1
    rows = torch.arange(batch.num_rows, device=states.device)
    row_of = torch.repeat_interleave(rows, lengths, output_size=batch.num_tokens)
    sums = states.new_zeros(states.shape[0], batch.num_rows, states.shape[-1]).index_add(1, row_of, states)
    return sums / lengths[None, :, None]
