"""The squared sliced Wasserstein distance between the agents' unscaled final states: the term of the first CI-LLM.

It is unbounded and kept for comparison. Like `swd` it compares sets of rows.
"""

from __future__ import annotations

from torch import Tensor

from ci_llm.crowd.diversity import DiversityForm, TermInputs
from ci_llm.crowd.diversity.swd import distance_between_rows


def term(inputs: TermInputs) -> Tensor:
    """The distance [] times the number of targets; 0 for fewer than two rows."""
    return distance_between_rows(inputs)


form = DiversityForm(term)
