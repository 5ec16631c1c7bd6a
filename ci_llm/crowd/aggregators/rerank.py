"""A vote for the text that the crowd finds most probable, among those that the agents write alone.

Decoding token by token takes the most probable next token and cannot go back. Here the crowd judges whole texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ci_llm.crowd.aggregators import probability

#: A vote has no distribution: the texts are judged by the mean of the agents' probabilities.
aggregate = probability.aggregate


def vote(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The most probable text; one without an answer only if none has one."""
    return max(range(len(answers)), key=lambda n: (answers[n] != "", log_probabilities[n]))
