"""The diversity forms: each is a term that rewards agents for being different.

`none` has no reward: cross-entropy alone is learned, and the Jensen gap is measured for the log. `swd` is the squared
sliced Wasserstein distance between the agents' final states, scaled to unit length: at most 4. It compares sets of
rows, so its value depends on how a step is split into micro-batches and processes.
Source: Bonneel, Rabin, Peyré, Pfister, "Sliced and Radon Wasserstein Barycenters of Measures", 2015.

One of your own is a file in this folder, `diversity/<name>.py`, and `diversity: <name>` selects it. It defines

    def term(inputs: TermInputs) -> Tensor          one number, multiplied by the number of targets S
    form = DiversityForm(term)

The objective then subtracts `lambda_sw`·K·term from the summed cross-entropy. A term masks out the agents that
`inputs.finite` does not mark, before it computes with their numbers, because NaN times zero is NaN. It must not wait
for the device.

Legend: K agents, B rows, S targets, N packed tokens, D hidden width, L projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.core.determinism import generator_for
from ci_llm.core.imports import load_plugin
from ci_llm.crowd.aggregators import mean_of_finite
from ci_llm.data.batches import Batch

#: Random directions of a step: the states of a step are far fewer, and the next step draws others.
NUM_DIRECTIONS: Final = 64


@dataclass(frozen=True)
class TermInputs:
    """The inputs of a term: one micro-batch of one optimizer step.

    Attributes:
        log_probs: [K, S] log-probability of every target under every agent, in nats.
        states: [K, N, D] final hidden states, in packed order; empty for a form without a reward where every agent
            takes a pass of its own.
        finite: [K] bool, the agents whose log-probabilities are all finite.
        batch: the rows of the micro-batch.
        step: the optimizer step; with `seed` it keys random numbers, so that a resumed run draws the same.
        representation: `swd_representation`.
    """

    log_probs: Tensor
    states: Tensor
    finite: Tensor
    batch: Batch
    step: int
    seed: int
    representation: str


@dataclass(frozen=True)
class DiversityForm:
    """A term; agents are rewarded for it if `rewarded`, and otherwise it is measured for the log only."""

    term: Callable[[TermInputs], Tensor]
    rewarded: bool = True


def find_form(name: str) -> DiversityForm:
    """The form of this name.

    Raises:
        BadInput: there is none.
    """
    form: DiversityForm = _OWN.get(name) or load_plugin(__name__, name, "form")
    return form


def jensen_gap(log_probs: Tensor, finite: Tensor) -> Tensor:
    """Sum over targets of (mean cross-entropy of the agents) - (cross-entropy of the crowd), in nats.

    It is never negative (Jensen's inequality). It adds up over tokens, so it does not depend on how a step is split
    into micro-batches and processes.

    Args:
        log_probs: [K, S] log-probability of every target under every agent.
        finite: [K] bool, the agents that count.

    Returns:
        [] in nats.
    """
    kept = log_probs.masked_fill(~finite[:, None], 0.0)
    return (mean_of_finite(log_probs, finite) - kept.sum(0) / finite.sum()).sum()


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
    count = finite.sum()
    chosen = finite[:, None, None]
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


def _distance(inputs: TermInputs) -> Tensor:
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


_OWN: Final[Mapping[str, DiversityForm]] = {
    "none": DiversityForm(lambda inputs: jensen_gap(inputs.log_probs, inputs.finite), rewarded=False),
    "swd": DiversityForm(_distance),
}
