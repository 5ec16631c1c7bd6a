"""A vote in which a text counts by its confidence, the probability that the crowd gives to it."""

from __future__ import annotations

from collections.abc import Sequence

from ci_llm.crowd.aggregators import probability

#: A vote has no distribution: in likelihoods the mean of the agents' probabilities stands for it.
aggregate = probability.aggregate


def vote(answers: Sequence[str], confidences: Sequence[float]) -> int:
    """The most confident text with the answer that has most confidence in sum."""
    weight = dict.fromkeys(answers, 0.0)
    for answer, confidence in zip(answers, confidences, strict=True):
        weight[answer] += confidence if answer else 0.0
    wins = max(weight, key=lambda answer: weight[answer])
    return max((n for n, answer in enumerate(answers) if answer == wins), key=lambda n: confidences[n])
