"""A mixture of the agents with learned weights, at a learned temperature.

The weights are the mean of a Dirichlet: uniform before a calibration, and afterwards the posterior mean given the
validation rows (`ci_llm.crowd.answers.learn_weights`).

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ci_llm.crowd.aggregators import probability

if TYPE_CHECKING:
    from ci_llm.crowd.aggregators import Learned


def aggregate(log_probs: Tensor, learned: Learned | None) -> Tensor:
    """The log of the weighted mean of the agents' probabilities, at the temperature: [K, ..., V] -> [..., V]."""
    if learned is None:
        return probability.aggregate(log_probs)
    weights = log_probs.new_tensor(learned.weights).log()
    mixture = torch.logsumexp(log_probs + weights.view(-1, *[1] * (log_probs.ndim - 1)), dim=0)
    return torch.log_softmax(mixture / learned.temperature, dim=-1)
