"""A vote in which a text counts by the probability that the crowd gives to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ci_llm.crowd.aggregators import probability

#: A vote has no distribution: in likelihoods the mean of the agents' probabilities stands for it.
aggregate = probability.aggregate


def vote(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The most probable text with the answer that has most probability in sum."""
    total = dict.fromkeys(answers, -math.inf)  # the logarithm of the sum: long texts have no probability as a float
    for answer, nats in zip(answers, log_probabilities, strict=True):
        total[answer] = float(np.logaddexp(total[answer], nats))
    wins = max(total, key=lambda answer: (answer != "", total[answer]))
    return max((n for n, answer in enumerate(answers) if answer == wins), key=lambda n: log_probabilities[n])
