"""What validation rows say about a crowd: how probable it is that an answer is right, and what each agent is worth.

Fitted once, kept as `calibration.json` beside the agents, and used by whoever opens them:

    learned      weights of the agents and a temperature, by which the aggregator `dirichlet` mixes them
    right        from the numbers of an answer of the crowd to the probability that it is right
    agent        the agent that is asked first, if not all are asked, and the same probability for its answers

Sources: Platt, "Probabilistic Outputs for Support Vector Machines", 1999, for the logistic fit; Guo et al., "On
Calibration of Modern Neural Networks", 2017, for the temperature.

Legend: K agents, n answers, F signals, S targets, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ci_llm.crowd.aggregators import Learned, dirichlet
from ci_llm.crowd.uncertainty import TokenUncertainty

if TYPE_CHECKING:
    from ci_llm.crowd.model import Crowd
    from ci_llm.data.batches import Batch

_LOWEST: Final = 0.5
#: From the lowest temperature to the highest: this factor, in so many equal factors.
_RANGE: Final = 4
_STEPS: Final = 24
#: The temperatures that are tried; the best one is refined by a parabola through it and its neighbours.
TEMPERATURES: Final = tuple(_LOWEST * _RANGE ** (step / _STEPS) for step in range(_STEPS + 1))
#: Shares of the validation rows for which the probability of the agent that is asked first is kept.
QUANTILES: Final = 100
#: A probability below this counts as this, so that its logarithm is finite.
_LEAST: Final = 1e-30


def signals(tokens: Sequence[TokenUncertainty]) -> list[float]:
    """The numbers of an answer that say whether it is right: [F].

    Log-probability of the text, in sum and per token, that of its least probable token, and entropy and disagreement
    per token; in nats.
    """
    logs = [math.log(max(token.probability, _LEAST)) for token in tokens] or [0.0]
    count = len(logs)
    entropy = sum(token.entropy for token in tokens) / count
    disagreement = sum(token.disagreement for token in tokens) / count
    return [sum(logs), sum(logs) / count, min(logs), entropy, disagreement]


@dataclass(frozen=True)
class Logistic:
    """The probability that an answer is right: the logistic function of a weighted sum of its signals."""

    coefficients: tuple[float, ...]
    intercept: float

    def __call__(self, found: Sequence[float]) -> float:
        z = self.intercept + sum(c * x for c, x in zip(self.coefficients, found, strict=True))
        return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))

    @classmethod
    def fit(cls, found: ArrayLike, right: Sequence[bool], penalty: ArrayLike = 1.0) -> Logistic:
        """Fit by Newton's method, with a penalty on half the squared coefficients of standardised signals.

        Args:
            found: [n, F] signals, with n at least 1.
            right: [n]. As Platt does, the goals stay away from 0 and 1, so that the fit exists if all are alike.
            penalty: of every coefficient, or [F] of each; more where many signals say little alone (benchmarks.probe).
        """
        x, positive = np.asarray(found, float), np.asarray(right, bool)
        mean, spread = x.mean(0), x.std(0)
        spread[spread == 0] = 1
        standard = np.column_stack([(x - mean) / spread, np.ones(len(x))])
        goals = np.where(positive, (positive.sum() + 1) / (positive.sum() + 2), 1 / ((~positive).sum() + 2))
        ridge = np.diag([*np.broadcast_to(np.asarray(penalty, float), x.shape[1:]), 0.0])
        w = np.zeros(standard.shape[1])
        for _ in range(50):
            p = 1 / (1 + np.exp(-np.clip(standard @ w, -30, 30)))
            slope = standard.T @ (p - goals) + ridge @ w
            step = np.linalg.solve((standard.T * (p * (1 - p))) @ standard + ridge, slope)
            w -= step
            if np.abs(step).max() < 1e-9:
                break
        coefficients = w[:-1] / spread
        return cls(tuple(coefficients.tolist()), float(w[-1] - coefficients @ mean))


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and on what.

    Attributes:
        learned: for the aggregator `dirichlet`.
        right: of the crowd's answers.
        agent: the one that is asked first.
        agent_right: of its answers.
        quantiles: of the probabilities that its answers on the validation rows are right: `QUANTILES` + 1 numbers that
            rise.
        aggregator: whose answers `right` is about.
        rows, data: how many validation rows, and of what.
        weights: fingerprint of agents and base.
    """

    learned: Learned
    right: Logistic
    agent: int
    agent_right: Logistic
    quantiles: tuple[float, ...]
    aggregator: str
    rows: int
    data: str
    weights: str = ""

    def escalates_below(self, agents_per_prompt: float) -> float:
        """The probability below which all agents are asked, so that a prompt takes so many agents on average.

        Each of these prompts takes the K agents of the crowd after the one that was asked first.
        """
        share = (agents_per_prompt - 1) / len(self.learned.weights)
        if share >= 1:
            return 1.0  # all prompts, also that of the highest probability
        return float(np.interp(share, np.linspace(0, 1, len(self.quantiles)), self.quantiles))

    def record(self) -> dict[str, Any]:
        """As plain JSON."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Calibration:
        """The inverse of `record`. Raises KeyError, TypeError: it is none."""
        learned = record["learned"]

        def logistic(values: Mapping[str, Any]) -> Logistic:
            return Logistic(tuple(values["coefficients"]), values["intercept"])

        return cls(
            **{
                **record,
                "learned": Learned(tuple(learned["weights"]), learned["temperature"]),
                "right": logistic(record["right"]),
                "agent_right": logistic(record["agent_right"]),
                "quantiles": tuple(record["quantiles"]),
            }
        )


def learn_weights(log_probs: Tensor, concentration: float = 1.0) -> tuple[float, ...]:
    """The agents' weights in their mixture, by maximum likelihood: the mean of the Dirichlet that the targets leave.

    EM: every target is shared among the agents as they predicted it, and the shares are counted. The likelihood is
    concave in the weights, so where it begins has no effect.

    Args:
        log_probs: [K, S] of the targets.
        concentration: of the symmetric Dirichlet before any target is seen, per agent.
    """
    probabilities, agents = log_probs.double().exp(), len(log_probs)
    weights = torch.full((agents, 1), 1 / agents, dtype=torch.float64)
    for _ in range(1000):
        parts = weights * probabilities
        shares = parts / parts.sum(0).clamp_min(_LEAST)
        found = (shares.sum(1, keepdim=True) + concentration) / (shares.sum() + agents * concentration)
        moved = float((found - weights).abs().max())
        weights = found
        if moved < 1e-8:
            break
    return tuple(weights.flatten().tolist())


def learn_temperature(nats: Sequence[float]) -> float:
    """The best of `TEMPERATURES`, from the summed nats at each of them."""
    best = min(range(len(nats)), key=lambda n: nats[n])
    shift = 0.0
    if 0 < best < len(nats) - 1:
        before, here, after = nats[best - 1 : best + 2]
        bend = before - 2 * here + after
        shift = (before - after) / (2 * bend) if bend > 0 else 0.0
    # The power above rounds in another way. Both forms stay, so that what is learned keeps its last bit.
    return _LOWEST * math.exp(math.log(_RANGE) / _STEPS * (best + shift))


@torch.no_grad()
def learn(crowd: Crowd, batches: Callable[[], Iterable[Batch]], concentration: float = 1.0) -> Learned:
    """Weights and temperature from the targets of validation rows, in two passes over them.

    Args:
        crowd: in evaluation mode.
        batches: gives the same batches at every call.
    """
    targets = []
    for log_probs, wanted in _targets(crowd, batches()):
        targets.append(log_probs.gather(-1, wanted.expand(crowd.num_agents, -1)[..., None]).squeeze(-1).cpu())
    weights = Learned(learn_weights(torch.cat(targets, dim=1), concentration))
    nats = [0.0] * len(TEMPERATURES)
    for log_probs, wanted in _targets(crowd, batches()):
        mixture = dirichlet.aggregate(log_probs, weights)
        nats = [sum(pair) for pair in zip(nats, nats_by_temperature(mixture, wanted), strict=True)]
    return Learned(weights.weights, learn_temperature(nats))


def nats_by_temperature(mixture: Tensor, wanted: Tensor) -> list[float]:
    """The nats of the targets [S] under log-probabilities [S, V], in sum, at each of `TEMPERATURES`.

    A temperature changes the sum by which a distribution is normalised, so that sum is taken anew for each. Nothing
    else is: the targets are picked once, and the largest log-probability is subtracted once.
    """
    below = mixture - mixture.amax(-1, keepdim=True)
    picked = below.gather(-1, wanted[:, None]).squeeze(-1)
    return [float(((below / t).exp_().sum(-1).log_() - picked / t).double().sum()) for t in TEMPERATURES]


def _targets(crowd: Crowd, batches: Iterable[Batch]) -> Iterable[tuple[Tensor, Tensor]]:
    """The agents' log-probabilities [K, S', V] and the targets [S'], chunk by chunk."""
    for batch in (batch.to(crowd.device) for batch in batches):
        states = crowd.states(batch)[:, batch.predict_from]
        for chunk in crowd.head.chunks(batch.num_targets):
            yield crowd.head.logits(states[:, chunk]).log_softmax(-1), batch.targets[chunk]


def fit(
    learned: Learned,
    crowd: tuple[Sequence[Sequence[float]], Sequence[bool]],
    agents: Sequence[tuple[Sequence[Sequence[float]], Sequence[bool]]],
    **about: Any,
) -> Calibration:
    """A calibration from answers to n validation rows.

    Args:
        crowd: the signals of its answers [n, F], and which are right [n].
        agents: the same of each of K agents. The one that is right most often is asked first.
        about: `aggregator`, `rows`, `data` and `weights`.
    """
    first = max(range(len(agents)), key=lambda k: sum(agents[k][1]))
    agent_right = Logistic.fit(*agents[first])
    quantiles = np.quantile([agent_right(found) for found in agents[first][0]], np.linspace(0, 1, QUANTILES + 1))
    return Calibration(learned, Logistic.fit(*crowd), first, agent_right, tuple(quantiles.tolist()), **about)
