"""A vote: each agent answers alone, and the answer that most of them give wins."""

from __future__ import annotations

from collections.abc import Sequence

from ci_llm.crowd.aggregators import probability

#: A vote has no distribution: in likelihoods the mean of the agents' probabilities stands for it.
aggregate = probability.aggregate


def vote(answers: Sequence[str], confidences: Sequence[float]) -> int:
    """The most confident text with the answer of the majority; on a tie with the answer of most confidence in sum."""
    votes, weight = dict.fromkeys(answers, 0), dict.fromkeys(answers, 0.0)
    for answer, confidence in zip(answers, confidences, strict=True):
        if answer:
            votes[answer] += 1
            weight[answer] += confidence
    wins = max(votes, key=lambda answer: (votes[answer], weight[answer]))
    return max((n for n, answer in enumerate(answers) if answer == wins), key=lambda n: confidences[n])
