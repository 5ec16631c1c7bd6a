"""A vote over n answers that each agent draws: the answer that most of the K·n texts give wins.

Source: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2023, for one model.
"""

from __future__ import annotations

from typing import Final

from ci_llm.crowd.aggregators import majority, probability

#: Answers that each agent draws, and the temperature of its distribution.
SAMPLES: Final = 4
TEMPERATURE: Final = 0.7

#: A vote has no distribution: in likelihoods the mean of the agents' probabilities stands for it.
aggregate = probability.aggregate
vote = majority.vote
