"""A mixture in which an agent weighs more where its own distribution is sharper.

At every token the weight of an agent is the softmax over agents of minus twice its entropy, in nats.

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: How fast the weight of an agent falls with its entropy; 0 would be the plain mean.
SHARPNESS: Final = 2.0


def aggregate(log_probs: Tensor) -> Tensor:
    """The log of the weighted mean of the agents' probabilities: [K, ..., V] -> [..., V]."""
    terms: Tensor = torch.special.entr(log_probs.exp())  # 0 where a probability is 0
    weights = torch.log_softmax(-SHARPNESS * terms.sum(-1, keepdim=True), dim=0)
    return torch.logsumexp(log_probs + weights, dim=0)
