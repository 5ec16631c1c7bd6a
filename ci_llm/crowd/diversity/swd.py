"""The squared sliced Wasserstein distance between the agents' final states, scaled to unit length: at most 4.

It compares sets of rows, so its value depends on how a step is split into micro-batches and processes.
Source: Bonneel, Rabin, Peyré, Pfister, "Sliced and Radon Wasserstein Barycenters of Measures", 2015.

Legend: K agents, B rows, N packed tokens, D hidden width, L projections.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.diversity import DiversityForm, TermInputs
from ci_llm.data.batches import Batch

#: Random directions of a step: the states of a step are far fewer, and the next step draws others.
NUM_DIRECTIONS: Final = 64


def sliced_wasserstein(points: Tensor, directions: Tensor, finite: Tensor) -> Tensor:
    """Squared sliced 2-Wasserstein distance between the agents' point sets, mean over pairs of agents.

    In one dimension the optimal plan couples equal ranks, so the projections are sorted. All pairs share the
    directions, and the sum over pairs is K·Σ|p - mean|², so one sort serves all pairs.

    Args:
        points: [K, B, D], the same number of points for every agent.
        directions: [D, L] unit columns.
        finite: [K] bool, the agents that count.

    Returns:
        [], which is 0 with fewer than two agents. The distance is squared so that its gradient is finite where two
        agents coincide.
    """
    projected = torch.sort(points @ directions, dim=1).values  # [K, B, L]
    count, chosen = finite.sum(), finite[:, None, None]
    mean = projected.masked_fill(~chosen, 0.0).sum(0, keepdim=True) / count.clamp(min=1)
    spread = (projected - mean).masked_fill(~chosen, 0.0).square().sum()
    return 2 * spread / ((count - 1).clamp(min=1) * projected.shape[1] * projected.shape[2])


def unit_directions(width: int, count: int, generator: torch.Generator) -> Tensor:
    """Directions [D, L] drawn uniformly from the sphere, in fp64 on the CPU."""
    return F.normalize(torch.randn(width, count, generator=generator, dtype=torch.float64), dim=0)


def row_states(states: Tensor, batch: Batch, representation: str) -> Tensor:
    """One point per row and agent: packed states [K, N, D] -> [K, B, D].

    Args:
        representation: "last_token", "first_token" or "mean" (over the tokens of the row).
    """
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


def term(inputs: TermInputs) -> Tensor:
    """The distance [] between the agents' row states, times the number of targets; 0 for fewer than two rows."""
    batch = inputs.batch
    if batch.num_rows < 2:  # there is nothing to compare in sets of one point
        return inputs.log_probs.new_zeros(())
    states = row_states(inputs.states, batch, inputs.representation).to(inputs.log_probs.dtype)
    points = F.normalize(states, dim=-1)
    # Keyed by the step: a resumed run draws the directions that an uninterrupted one draws.
    generator = generator_for(inputs.seed, "directions", inputs.step)
    directions = unit_directions(points.shape[-1], NUM_DIRECTIONS, generator)
    return sliced_wasserstein(points, directions.to(points, non_blocking=True), inputs.finite) * batch.num_targets


form = DiversityForm(term)
