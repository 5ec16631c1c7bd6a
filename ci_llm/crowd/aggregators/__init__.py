"""The aggregators, one per module of this package: each combines the distributions or answers of K agents into one.

To add one, add a file `aggregators/<name>.py`, and `aggregator: <name>` selects it, in a configuration and in
`Crowd.generate`. It defines how the agents' distributions of the next token become one:

    def aggregate(log_probs: Tensor) -> Tensor      [K, ..., V] of K agents -> [..., V] of the crowd

Input and output are normalised log-probabilities; the function is pure and must not wait for the device. With a second
parameter, `learned`, it also gets the learned numbers of a calibration, or None before there is one.

A module may decide between whole answers instead. It then also defines

    def vote(answers: Sequence[str], log_probabilities: Sequence[float]) -> int    the number of the answer that wins

Each agent gives the answer that it decodes greedily; or `SAMPLES` answers, drawn at `TEMPERATURE`, if the module has
these names. "" is not an answer. Log-probabilities are those of whole texts under `aggregate`, in nats, because the
probability of a long text rounds to 0. A vote has no likelihood, so `aggregate` stands for the crowd in likelihoods.

Legend: K agents, V vocabulary; any shape in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from ci_llm.core.imports import load_plugin, plugin_names

AGGREGATORS = plugin_names(__name__, first="probability")


@dataclass(frozen=True)
class Learned:
    """The numbers that a calibration has learned from validation rows.

    Attributes:
        weights: [K], at least 0, with the sum 1.
        temperature: the temperature of the weighted mean of the agents' distributions; below 1 it is made sharper.
    """

    weights: tuple[float, ...]
    temperature: float = 1.0

    def only(self, agents: Sequence[bool]) -> Learned:
        """The learned numbers of some of the agents."""
        kept = [weight for weight, is_kept in zip(self.weights, agents, strict=True) if is_kept]
        total = sum(kept)
        return replace(self, weights=tuple(w / total if total else 1 / len(kept) for w in kept))


@dataclass(frozen=True)
class Vote:
    """How an aggregator decides between whole answers.

    Attributes:
        winner: the module's `vote`.
        samples: how many answers each agent draws; None for the one that it decodes greedily.
        temperature: the temperature of the draws.
    """

    winner: Callable[[Sequence[str], Sequence[float]], int]
    samples: int | None = None
    temperature: float = 1.0


def aggregate(log_probs: Tensor, aggregator: str, learned: Learned | None = None) -> Tensor:
    """The crowd's log-probabilities [..., V] from the agents' [K, ..., V].

    Raises:
        BadInput: no module of this package has that name.
    """
    function: Callable[..., Tensor] = load_plugin(__name__, aggregator, "aggregate")
    return function(log_probs, learned) if _learns(aggregator) else function(log_probs)


@cache
def is_mean(aggregator: str) -> bool:
    """Whether the aggregator's distribution is the mean of the agents' probabilities.

    Raises:
        BadInput: no module of this package has that name.
    """
    own, mean = (load_plugin(__name__, name, "aggregate") for name in (aggregator, "probability"))
    return own is mean


@cache
def find_vote(aggregator: str) -> Vote | None:
    """The vote of this aggregator; None if it decides token by token.

    Raises:
        BadInput: no module of this package has that name.
    """
    winner = load_plugin(__name__, aggregator, "vote", None)
    if winner is None:
        return None
    samples, temperature = (load_plugin(__name__, aggregator, name, None) for name in ("SAMPLES", "TEMPERATURE"))
    return Vote(winner, samples, temperature or 1.0)


@cache
def _learns(aggregator: str) -> bool:
    return "learned" in inspect.signature(load_plugin(__name__, aggregator, "aggregate")).parameters
