"""A majority vote: each agent answers alone, and the answer that most of them give wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ci_llm.crowd.aggregators import probability, weighted_vote

#: A vote has no distribution: in likelihoods the mean of the agents' probabilities stands for it.
aggregate = probability.aggregate


def vote(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The most probable text with the answer of the majority; of tied answers the one with most probability in sum."""
    votes = Counter(answers)
    most = max((count for answer, count in votes.items() if answer), default=0)
    among = [answer if answer and votes[answer] == most else "" for answer in answers]
    return weighted_vote.vote(among, log_probabilities)
