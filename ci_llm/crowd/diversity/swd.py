"""The squared sliced Wasserstein distance between the agents' final states, scaled to unit length: at most 4.

It compares sets of rows, so its value depends on how a step is split into micro-batches and processes.

Legend: K agents, B rows, D hidden width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from ci_llm.crowd.diversity import DiversityForm, TermInputs
from ci_llm.crowd.sliced_wasserstein import distance_between_rows


def term(inputs: TermInputs) -> Tensor:
    """[] the distance times the number of targets; 0 for fewer than two rows."""
    return distance_between_rows(inputs, lambda points: normalize(points, dim=-1))


form = DiversityForm(term)
