"""The mean of the agents' probabilities (a mixture).

It is the mean of a symmetric Dirichlet over mixture weights, whatever the concentration of the Dirichlet is.

Legend: K agents; any shape behind.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def aggregate(log_probs: Tensor) -> Tensor:
    """The log of the mean of the agents' probabilities: [K, ...] -> [...]."""
    return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])


def aggregate_finite(log_probs: Tensor, finite: Tensor) -> Tensor:
    """The log of the mean over the agents that `finite [K]` (bool) marks: [K, ...] -> [...].

    The other agents are masked out before their numbers are used.
    """
    mask = ~finite.view(-1, *[1] * (log_probs.ndim - 1))
    masked = log_probs.masked_fill(mask, float("-inf"))
    return torch.logsumexp(masked, dim=0) - finite.sum().to(log_probs.dtype).log()
