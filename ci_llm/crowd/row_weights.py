"""Weights of rows that each agent draws for itself, once for the whole run: the Bayesian bootstrap.

An agent trained with weights Exp(1) is one draw of the distribution of agents that the data allow (Rubin, "The Bayesian
Bootstrap", 1981; Newton and Raftery, 1994). A weight depends on the agent's seed and the number of the row, and on
nothing else: it is the same in every epoch, on any number of processes and after a resume.

Legend: K agents, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ci_llm.core.determinism import derive_seed


def bootstrap_weights(keys: Sequence[tuple[int, int] | None], rows: Sequence[int]) -> Tensor:
    """The weight of every row for every agent: exponential with mean 1.

    Args:
        keys: [K] seed and index of the agents that draw; 1 for the others, which have None.
        rows: [B] numbers of the rows in the data set.

    Returns:
        [K, B] fp64.
    """
    weights = [[1.0 if key is None else _weight(*key, row) for row in rows] for key in keys]
    return torch.tensor(weights, dtype=torch.float64)


def _weight(seed: int, index: int, row: int) -> float:
    uniform = (derive_seed(seed, "row weight", index, row) + 0.5) / 2**63  # in (0, 1]
    return -math.log(uniform)
