"""The aggregators: each combines the distributions or the answers of K agents into one.

One of your own is a file in this folder, `aggregators/<name>.py`, and `aggregator: <name>` selects it, in a
configuration and in `Crowd.generate`. It defines how the agents' distributions of the next token become one:

    def aggregate(log_probs: Tensor) -> Tensor      [K, ..., V] of K agents -> [..., V] of the crowd

Input and output are normalised log-probabilities; the function is pure and must not wait for the device.

A file may decide between whole answers instead. It then also defines

    def vote(answers: Sequence[str], log_probabilities: Sequence[float]) -> int    the number of the answer that wins

Each agent gives the answer that it decodes greedily; "" is not an answer. Log-probabilities are those of whole texts
under `aggregate`, in nats, because the probability of a long text rounds to 0. A vote has no likelihood, so `aggregate`
stands for the crowd in likelihoods.

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ci_llm.core.imports import load_plugin, plugin_names

AGGREGATORS = plugin_names(__name__)

#: Decides between whole answers: the number of the one that wins, from answers and log-probabilities of their texts.
Vote: TypeAlias = Callable[[Sequence[str], Sequence[float]], int]


def aggregate(log_probs: Tensor, aggregator: str) -> Tensor:
    """The crowd's log-probabilities [..., V] from the agents' [K, ..., V].

    Raises:
        BadInput: there is no aggregator of that name.
    """
    return _find(aggregator)[0](log_probs)


def is_mean(aggregator: str) -> bool:
    """True if the aggregator's distribution is the mean of the agents' probabilities.

    Raises:
        BadInput: there is no aggregator of that name.
    """
    return _find(aggregator)[0] is mean


def find_vote(aggregator: str) -> Vote | None:
    """The vote of this aggregator; None if it decides token by token.

    Raises:
        BadInput: there is no aggregator of that name.
    """
    return _find(aggregator)[1]


def mean(log_probs: Tensor) -> Tensor:
    """The log of the mean of the agents' probabilities (a mixture): [K, ...] -> [...].

    It is the mean of a symmetric Dirichlet over mixture weights, whatever the concentration of the Dirichlet is.
    """
    return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])


def mean_of_finite(log_probs: Tensor, finite: Tensor) -> Tensor:
    """The log of the mean over the agents that `finite [K]` (bool) marks: [K, ...] -> [...].

    The other agents are masked out before their numbers are used.
    """
    mask = ~finite.view(-1, *[1] * (log_probs.ndim - 1))
    masked = log_probs.masked_fill(mask, float("-inf"))
    return torch.logsumexp(masked, dim=0) - finite.sum().to(log_probs.dtype).log()


def mean_of_logits(log_probs: Tensor) -> Tensor:
    """The normalised mean of the agents' logits (a product of experts).

    Logits and log-probabilities differ by a number per agent, which the normalisation removes.
    """
    return torch.log_softmax(log_probs.mean(0), dim=-1)


def most_probable(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The text that the crowd finds most probable; one without an answer only if none has one.

    Decoding token by token takes the most probable next token and cannot go back. Here the crowd judges whole texts.
    """
    return max(range(len(answers)), key=lambda n: (answers[n] != "", log_probabilities[n]))


def most_probability(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The most probable text with the answer that has most probability in sum."""
    total = dict.fromkeys(answers, -math.inf)  # the logarithm of the sum: long texts have no probability as a float
    for answer, nats in zip(answers, log_probabilities, strict=True):
        total[answer] = float(np.logaddexp(total[answer], nats))
    wins = max(total, key=lambda answer: (answer != "", total[answer]))
    return max((n for n, answer in enumerate(answers) if answer == wins), key=lambda n: log_probabilities[n])


def majority(answers: Sequence[str], crowd: str) -> str:
    """The answer that most agents give; the crowd's own answer breaks a tie, or else the first agent's.

    Returns:
        the answer; "", which is not a vote, if no agent has one.
    """
    tied = _most_given(answers)
    return crowd if crowd in tied else next(iter(tied), "")


def _most_given(answers: Sequence[str]) -> list[str]:
    """The answer that is given most often, or all that are tied; "" is not an answer."""
    votes = Counter(answer for answer in answers if answer)
    return [answer for answer, count in votes.items() if count == max(votes.values())]


def most_votes(answers: Sequence[str], log_probabilities: Sequence[float]) -> int:
    """The most probable text with the answer of the majority; of tied answers the one with most probability in sum."""
    tied = _most_given(answers)
    return most_probability([answer if answer in tied else "" for answer in answers], log_probabilities)


#: Each aggregator's distribution and vote.
_OWN: Final[Mapping[str, tuple[Callable[..., Tensor], Vote | None]]] = {
    "probability": (mean, None),
    "logit": (mean_of_logits, None),
    "majority": (mean, most_votes),
    "rerank": (mean, most_probable),
    "weighted_vote": (mean, most_probability),
}


def _find(name: str) -> tuple[Callable[..., Tensor], Vote | None]:
    if name in _OWN:
        return _OWN[name]
    return load_plugin(__name__, name, "aggregate"), load_plugin(__name__, name, "vote", None)
