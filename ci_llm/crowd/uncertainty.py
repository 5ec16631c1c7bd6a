"""The uncertainty of the crowd about an answer, and the probability that the answer is right.

`decompose` splits the crowd's entropy into a part common to the agents and a part on which they disagree. A
`Calibration`, fitted on validation rows, turns such signals into the probability that an answer is right.

Legend: K agents, B texts, n answers, F signals, S targets, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import TypeAdapter
from torch import Tensor

from ci_llm.crowd import aggregators
from ci_llm.crowd.metrics import AnswerStyle, final_answer


@dataclass(frozen=True)
class TokenUncertainty:
    """The uncertainty of the crowd about one token that it chose; entropies are in nats.

    Attributes:
        probability: the probability of this token in the crowd's distribution, before temperature, `top_k` and `top_p`.
        entropy: the entropy of the mean of the agents' distributions.
        expected_entropy: the mean of the agents' entropies.
        disagreement: their difference, the mutual information; at most log K.
    """

    probability: float
    entropy: float
    expected_entropy: float
    disagreement: float


@dataclass(frozen=True)
class Uncertainty:
    """The uncertainty of the crowd about a whole text: its probability, and means over its tokens.

    Source of the means: Malinin and Gales, "Uncertainty Estimation in Autoregressive Structured Prediction", 2021.

    Attributes:
        log_probability: the crowd's log-probability of the text, in nats: the sum over its tokens, the end included.
        confidence: the probability of the text, exp(`log_probability`).
        probability_per_token: the geometric mean of the tokens' probabilities, which the length does not lower.
        entropy, expected_entropy, disagreement: means over the tokens, in nats.
    """

    log_probability: float
    confidence: float
    probability_per_token: float
    entropy: float
    expected_entropy: float
    disagreement: float


def entropy(log_probs: Tensor) -> Tensor:
    """The Shannon entropy [...] in nats of normalised log-probabilities [..., V]."""
    terms: Tensor = torch.special.entr(log_probs.exp())  # 0 where a probability is 0
    return terms.sum(-1)


def decompose(log_probs: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The entropy of the agents' mean, the mean of their entropies, and the mutual information.

    The entropy of the mean is the total uncertainty. The mean of the agents' entropies is the part that they have in
    common. The difference, the mutual information between token and agent, is their disagreement. It is also the
    Jensen-Shannon divergence of the agents, and 0 if all have the same distribution.

    Source: Depeweg et al., "Decomposition of Uncertainty in Bayesian Deep Learning for Efficient and Risk-sensitive
    Learning", 2018.

    Args:
        log_probs: [K, ..., V], normalised.
        mean: [..., V], the logarithm of their mean probabilities; None to compute it here.

    Returns:
        three tensors [...] in nats; the third is the first minus the second, and never below 0.
    """
    total = entropy(aggregators.mean(log_probs) if mean is None else mean)
    expected = entropy(log_probs).mean(0)
    return total, expected, (total - expected).clamp_min(0)  # below 0 by rounding only: entropy is concave


def token_uncertainty(log_probs: Tensor, crowd: Tensor, chosen: Tensor, *, is_mean: bool = False) -> Tensor:
    """The four numbers [4, B] of `TokenUncertainty` for one token of each text, the probability as its logarithm.

    Args:
        log_probs: [K, B, V] the agents' log-probabilities.
        crowd: [B, V] the aggregated log-probabilities that the tokens were chosen from.
        chosen: [B] token ids.
        is_mean: True if `crowd` is the log of the agents' mean probabilities, which then is not computed again.
    """
    picked = crowd.gather(-1, chosen[:, None]).squeeze(-1)
    return torch.stack([picked, *decompose(log_probs, crowd if is_mean else None)])


def tokens_of(numbers: Tensor) -> list[TokenUncertainty]:
    """A `TokenUncertainty` for each of the T columns [4, T] that `token_uncertainty` returns."""
    log_probs, *entropies = numbers.double().cpu()
    return [TokenUncertainty(*token) for token in torch.stack([log_probs.exp(), *entropies], dim=-1).tolist()]


def of_text(tokens: Sequence[TokenUncertainty]) -> Uncertainty:
    """The uncertainty of a text from that of its tokens; an empty text is certain."""
    count = max(1, len(tokens))
    nats = sum(math.log(token.probability) if token.probability else -math.inf for token in tokens)
    names = ("entropy", "expected_entropy", "disagreement")
    means = {name: sum(getattr(token, name) for token in tokens) / count for name in names}
    return Uncertainty(nats, math.exp(nats), math.exp(nats / count), **means)


def agreement(answer: str, agents: Sequence[str]) -> float:
    """The share of agents whose own answer is the crowd's.

    Answers with the mark "####" are compared by the final answer after it, and others as whole texts.
    """
    style: AnswerStyle = "marked" if "####" in answer else "text"
    wanted = final_answer(answer, style)
    return sum(final_answer(agent, style) == wanted for agent in agents) / len(agents)


#: A probability below this counts as this, so that its logarithm is finite.
_LEAST: Final = 1e-30


def signals(tokens: Sequence[TokenUncertainty]) -> list[float]:
    """The numbers [F] of an answer from which the probability that it is right is computed, in nats.

    They are the log-probability of the text in sum, per token and of its least probable token, and the entropy and the
    disagreement per token.
    """
    logs = [math.log(max(token.probability, _LEAST)) for token in tokens] or [0.0]
    text = of_text(tokens)
    return [sum(logs), sum(logs) / len(logs), min(logs), text.entropy, text.disagreement]


@dataclass(frozen=True)
class Logistic:
    """The probability that an answer is right: the logistic function of a weighted sum of its signals.

    Source: Platt, "Probabilistic Outputs for Support Vector Machines", 1999.
    """

    coefficients: tuple[float, ...]
    intercept: float

    def __call__(self, found: Sequence[float]) -> float:
        z = self.intercept + sum(c * x for c, x in zip(self.coefficients, found, strict=True))
        return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))

    @classmethod
    def fit(cls, found: ArrayLike, right: Sequence[bool]) -> Logistic:
        """Fit by Newton's method, with a penalty on half the squared coefficients of standardised signals.

        As in Platt's paper, the targets stay away from 0 and 1, so that a fit exists if all answers are right or wrong.

        Args:
            found: [n, F] signals, with n at least 1.
            right: [n] which answers are right.
        """
        x, positive = np.asarray(found, float), np.asarray(right, bool)
        mean, spread = x.mean(0), x.std(0)
        spread[spread == 0] = 1
        standard = np.column_stack([(x - mean) / spread, np.ones(len(x))])
        goals = np.where(positive, (positive.sum() + 1) / (positive.sum() + 2), 1 / ((~positive).sum() + 2))
        ridge = np.diag([*np.ones(x.shape[1]), 0.0])
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
    """The lessons of validation rows about the answers of a crowd, kept as `calibration.json` beside the agents.

    Attributes:
        right: the function from the signals of a crowd's answer to the probability that it is right.
        agent: the number of the agent that is right most often.
        aggregator: the aggregator whose answers `right` is about.
        rows, data: how many validation rows there were, and the name of their data set.
        weights: the fingerprint of agents and base.
        temperature: the temperature of the crowd's class probabilities, below 1 if it makes them sharper; 1 for agents
            that write answers.
    """

    right: Logistic
    agent: int
    aggregator: str
    rows: int
    data: str
    weights: str = ""
    temperature: float = 1.0

    def record(self) -> dict[str, Any]:
        """The calibration as plain JSON."""
        found: dict[str, Any] = TypeAdapter(Calibration).dump_python(self, mode="json")
        return found

    @classmethod
    def of_classes(cls, log_probs: Tensor, labels: Tensor, **about: Any) -> Calibration:
        """A calibration of agents that classify texts: a temperature alone, because they write no answers.

        Args:
            log_probs: [n, classes] the crowd's log-probabilities.
            labels: [n] the numbers of the right classes.
            about: `rows`, `data` and `weights`.
        """
        temperature = fit_temperature(log_probs, labels)
        return cls(Logistic((), 0.0), 0, aggregator="heads", temperature=temperature, **about)

    @classmethod
    def of(cls, record: Any) -> Calibration:
        """The inverse of `record`. Raises ValueError if the record is not a calibration."""
        return TypeAdapter(cls).validate_python(record, extra="forbid")


def calibrated(calibration: Calibration | None, aggregator: str) -> Logistic | None:
    """The function from the signals of a crowd's answer to the probability that it is right.

    None without a calibration, or if it is about the answers of another aggregator.
    """
    return calibration.right if calibration is not None and calibration.aggregator == aggregator else None


def uncalibrated(calibration: Calibration | None, aggregator: str) -> str | None:
    """The reason why there is no calibrated probability for this aggregator; None if there is one."""
    if calibration is None:
        return "this crowd has no calibration: ci-llm evaluate RUN --calibrate makes one"
    if calibration.aggregator != aggregator:
        return f"the calibration is about the aggregator {calibration.aggregator}"
    return None


def fit_temperature(log_probs: Tensor, wanted: Tensor) -> float:
    """The temperature from 1/16 to 16 with the least nats, by bisection: they are convex in its inverse.

    Source: Guo et al., "On Calibration of Modern Neural Networks", 2017.

    Args:
        log_probs: [S, n].
        wanted: [S] the right classes.
    """
    logs, low, high = log_probs.double().clamp_min(-1e3), 1 / 16, 16.0
    picked = logs.gather(-1, wanted[:, None]).sum()
    for _ in range(60):
        middle = math.sqrt(low * high)
        slope = float(((logs * middle).softmax(-1) * logs).sum() - picked)
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1 / middle


def fit(
    found: Sequence[Sequence[float]], right: Sequence[bool], agents: Sequence[Sequence[bool]], **about: Any
) -> Calibration:
    """A calibration from answers to n validation rows.

    Args:
        found: [n, F] the signals of the crowd's answers.
        right: [n] which of them are right.
        agents: [K, n] which answers of each agent are right.
        about: `aggregator`, `rows`, `data` and `weights`.
    """
    best = max(range(len(agents)), key=lambda k: sum(agents[k]))
    return Calibration(Logistic.fit(found, right), best, **about)
