"""The normalised mean of the agents' logits (a product of experts).

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

import torch
from torch import Tensor


def aggregate(log_probs: Tensor) -> Tensor:
    """Normalised mean of the agents' log-probabilities: [K, ..., V] -> [..., V].

    Logits and log-probabilities differ by a number per agent, which the normalisation removes.
    """
    return torch.log_softmax(log_probs.mean(0), dim=-1)
