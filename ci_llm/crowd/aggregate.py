"""Many answers into one: how the agents' distributions become the crowd's. Pure functions of tensors.

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Aggregator = Literal["probability", "logit"]


def mean_of_probabilities(log_probs: Tensor, healthy: Tensor | None = None) -> Tensor:
    """Log of the mean of the agents' probabilities: [K, ...] -> [...].

    This is the mean of a symmetric Dirichlet over mixture weights, whatever its concentration is. `healthy [K]`
    leaves the other agents out before anything is computed with their numbers.
    """
    if healthy is None:
        return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])
    masked = log_probs.masked_fill(~_column(healthy, log_probs), float("-inf"))
    return torch.logsumexp(masked, dim=0) - healthy.sum().to(log_probs.dtype).log()


def mean_of_logits(log_probs: Tensor) -> Tensor:
    """Normalised mean of the agents' logits (a product of experts): [K, ..., V] -> [..., V] log-probabilities."""
    return torch.log_softmax(log_probs.mean(0), dim=-1)


def aggregate(log_probs: Tensor, how: Aggregator) -> Tensor:
    """The crowd's log-probabilities [..., V] from the agents' [K, ..., V]."""
    return mean_of_probabilities(log_probs) if how == "probability" else mean_of_logits(log_probs)


def _column(healthy: Tensor, like: Tensor) -> Tensor:
    return healthy.view(-1, *[1] * (like.ndim - 1))
