"""The judgement of an answer: what it says in the end, how sure the crowd is of it, and how probably it is right.

A task's references show how final answers are written (`style_of`). The crowd's entropy has a part that the agents see
alike and a part on which they disagree (`decompose`). A `Calibration`, fitted on validation rows, turns such signals
into the probability that an answer is right.

Legend: K agents, B texts, n answers, F signals, S targets, V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ci_llm.crowd.aggregators import Learned, dirichlet, probability

AnswerStyle = Literal["marked", "number", "text"]

_MARK = re.compile(r"####[ \t]*(.*)")
#: A sign right after a digit is an operation: 10-3 ends with 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9])[-+])?\$?(?P<digits>(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_BEGINS_WITH_NUMBER = re.compile(rf"{_NUMBER.pattern}(?![.,]?[\w/:^*+=-])")
#: The number is the answer, and not its last part as in 3/4, 9:30 or 10-3; "Answer:42" and "US$5" end with a whole one.
_IS_WHOLE = r"(?:(?<![\w/^*.,+$-])(?<!\d:)|(?<![\d/:^*.,+-])(?=\$))"
_ENDS_WITH_NUMBER = re.compile(rf"{_IS_WHOLE}{_NUMBER.pattern}\s*%?[.!]?\s*$")


def style_of(references: Sequence[str]) -> AnswerStyle:
    """How the answers of a task are written, judged by all its reference answers.

    marked    "... #### 1,234"  as in GSM8K: what follows the mark; the last number if a text has no mark
    number    "... is 42."      every reference ends with a number: the last number of a text
    text      anything else, such as fractions, dates and times: the whole text, with white space evened out
    """
    if all(_MARK.search(text) for text in references):
        return "marked"
    return "number" if all(_ENDS_WITH_NUMBER.search(text) for text in references) else "text"


def final_answer(text: str, style: AnswerStyle) -> str:
    """The final answer of `text`, normalised; "" if there is none.

    Numbers are compared as numbers: 1,234 = $1234.00.
    """
    if style == "marked" and (mark := _MARK.search(text)):
        # The first mark counts: a text that goes on after its answer goes on with the next question.
        return _number(_BEGINS_WITH_NUMBER.match(mark[1])) or _even(mark[1])
    if style == "text":
        return _even(text)
    *_, last = [None, *_NUMBER.finditer(text)]
    return _number(last)


def majority(answers: Sequence[str], crowd: str) -> str:
    """The answer that most agents give; on a tie the crowd's if it is among the tied, else that of the first agent.

    Args:
        answers: one per agent; "" is not a vote.
        crowd: the crowd's own answer, which breaks ties.

    Returns:
        the answer; "" if no agent has one.
    """
    votes = Counter(answer for answer in answers if answer)
    tied = [answer for answer, count in votes.items() if count == max(votes.values())]
    return crowd if crowd in tied else next(iter(tied), "")


def _number(found: re.Match[str] | None) -> str:
    """1,234.50 as 1234.5, by its digits: different long numbers can be equal as floats."""
    if found is None:
        return ""
    whole, _, part = found["digits"].replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["sign"] == "-" and value != "0" else value


def _even(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class TokenUncertainty:
    """One token that the crowd chose; entropies in nats.

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
    """A whole text: the product of its tokens' probabilities, and means over its tokens.

    Source of the means: Malinin and Gales, "Uncertainty Estimation in Autoregressive Structured Prediction", 2021.

    Attributes:
        log_probability: how probable the text is to the crowd, in nats: the sum over its tokens, the end included.
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
    """Shannon entropy in nats of normalised log-probabilities: [..., V] -> [...]."""
    terms: Tensor = torch.special.entr(log_probs.exp())  # 0 where a probability is 0
    return terms.sum(-1)


def decompose(log_probs: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The entropy of the agents' mean, the mean of their entropies, and the mutual information.

    The entropy of the mean is what an answer leaves open. The mean of the agents' own entropies is the part that they
    see alike. The rest, the mutual information between the token and the agent, is what they disagree on. It is also
    the Jensen-Shannon divergence of the agents, and is 0 if all of them say the same.

    Source: Depeweg et al., "Decomposition of Uncertainty in Bayesian Deep Learning for Efficient and Risk-sensitive
    Learning", 2018.

    Args:
        log_probs: [K, ..., V], normalised.
        mean: [..., V], the logarithm of their mean probabilities, if the caller has it.

    Returns:
        three tensors [...] in nats; the third is the first minus the second, and never below 0.
    """
    total = entropy(probability.aggregate(log_probs) if mean is None else mean)
    expected = entropy(log_probs).mean(0)
    return total, expected, (total - expected).clamp_min(0)  # below 0 by rounding only: entropy is concave


def token_uncertainty(log_probs: Tensor, crowd: Tensor, chosen: Tensor, *, is_mean: bool = False) -> Tensor:
    """The four numbers of `TokenUncertainty` for one token of each text, the first as its logarithm: [4, B].

    Args:
        log_probs: [K, B, V] of the agents.
        crowd: [B, V], the aggregated log-probabilities that the token was chosen from.
        chosen: [B] token ids.
        is_mean: whether `crowd` is the mean of the agents' probabilities, which then need not be computed again.
    """
    picked = crowd.gather(-1, chosen[:, None]).squeeze(-1)
    return torch.stack([picked, *decompose(log_probs, crowd if is_mean else None)])


def tokens_of(numbers: Tensor) -> list[TokenUncertainty]:
    """One for each column of [4, T], as `token_uncertainty` gives them."""
    log_probs, *entropies = numbers.double().cpu()
    return [TokenUncertainty(*token) for token in torch.stack([log_probs.exp(), *entropies], dim=-1).tolist()]


def of_text(tokens: Sequence[TokenUncertainty]) -> Uncertainty:
    """The whole text; a text of no token is certain, as nothing was chosen."""
    count = max(1, len(tokens))
    log_probability = sum(math.log(token.probability) if token.probability else -math.inf for token in tokens)
    return Uncertainty(
        log_probability=log_probability,
        confidence=math.exp(log_probability),
        probability_per_token=math.exp(log_probability / count),
        entropy=sum(token.entropy for token in tokens) / count,
        expected_entropy=sum(token.expected_entropy for token in tokens) / count,
        disagreement=sum(token.disagreement for token in tokens) / count,
    )


def agreement(answer: str, agents: Sequence[str]) -> float:
    """The share of agents whose own answer is the crowd's.

    Answers with a mark "#### ..." are compared by what follows it, as in `ci_llm.crowd.answers`; others as whole texts.
    """
    style: AnswerStyle = "marked" if "####" in answer else "text"
    wanted = final_answer(answer, style)
    return sum(final_answer(agent, style) == wanted for agent in agents) / len(agents)


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
    """The probability that an answer is right: the logistic function of a weighted sum of its signals.

    Source: Platt, "Probabilistic Outputs for Support Vector Machines", 1999.
    """

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
            penalty: one for all coefficients, or [F]; more where many signals say little alone (benchmarks.probe).
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

    It is fitted once, kept as `calibration.json` beside the agents, and used by whoever opens them.

    Attributes:
        learned: weights of the agents and a temperature, by which the aggregator `dirichlet` mixes them.
        right: from the signals of an answer of the crowd to the probability that it is right.
        agent: the one that is asked first, if not all are asked.
        agent_right: from the signals of its answer to the probability that it is right.
        quantiles: those of the probabilities that its answers on the validation rows are right: `QUANTILES` + 1 numbers
            that rise.
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
    def of_classes(cls, log_probs: Tensor, labels: Tensor, agents: int, **about: Any) -> Calibration:
        """One of agents that classify texts: a temperature alone, as they write no answers.

        Args:
            log_probs: [n, classes] of the crowd, and [n] their numbers.
            about: `rows`, `data` and `weights`.
        """
        learned, none = Learned((1 / agents,) * agents, fit_temperature(log_probs, labels)), Logistic((), 0.0)
        return cls(learned, none, 0, none, (), aggregator="heads", **about)

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
        concentration: the concentration of the symmetric Dirichlet before any target is seen, per agent.
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
    """The best of `TEMPERATURES`, from the summed nats at each of them.

    Source: Guo et al., "On Calibration of Modern Neural Networks", 2017.
    """
    best = min(range(len(nats)), key=lambda n: nats[n])
    shift = 0.0
    if 0 < best < len(nats) - 1:
        before, here, after = nats[best - 1 : best + 2]
        bend = before - 2 * here + after
        shift = (before - after) / (2 * bend) if bend > 0 else 0.0
    # The power above rounds in another way. Both forms stay, so that what is learned keeps its last bit.
    return _LOWEST * math.exp(math.log(_RANGE) / _STEPS * (best + shift))


def fit_temperature(log_probs: Tensor, wanted: Tensor) -> float:
    """The temperature of the least nats, within a factor of 16 of 1, by bisection: they are convex in its inverse.

    `learn_temperature` reads each part of its targets once and keeps sums alone, as a vocabulary is large. Classes are
    few, so all rows are at hand here, and a head that is too sure may need a temperature above 2.

    Args:
        log_probs: [S, n] and [S] what is right.
    """
    logs, low, high = log_probs.double().clamp_min(-1e3), 1 / 16, 16.0
    picked = logs.gather(-1, wanted[:, None]).sum()
    for _ in range(60):
        middle = math.sqrt(low * high)
        slope = float(((logs * middle).softmax(-1) * logs).sum() - picked)
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 1 / middle


@torch.no_grad()
def learn(targets: Callable[[], Iterable[tuple[Tensor, Tensor]]], concentration: float = 1.0) -> Learned:
    """Weights and temperature from the targets of validation rows, in two passes over them.

    Args:
        targets: gives the same at every call: the agents' log-probabilities [K, S', V] and the targets [S'], in parts.
    """
    parts = []
    for log_probs, wanted in targets():
        parts.append(log_probs.gather(-1, wanted.expand(len(log_probs), -1)[..., None]).squeeze(-1).cpu())
    weights = Learned(learn_weights(torch.cat(parts, dim=1), concentration))
    nats = [0.0] * len(TEMPERATURES)
    for log_probs, wanted in targets():
        mixture = dirichlet.aggregate(log_probs, weights)
        nats = [sum(pair) for pair in zip(nats, nats_by_temperature(mixture, wanted), strict=True)]
    return Learned(weights.weights, learn_temperature(nats))


def nats_by_temperature(mixture: Tensor, wanted: Tensor) -> list[float]:
    """The nats of the targets [S] under log-probabilities [S, V], in sum, at each of `TEMPERATURES`.

    A temperature changes the sum by which a distribution is normalised, so that sum is taken again for each. Nothing
    else is: the targets are picked once, and the largest log-probability is subtracted once.
    """
    below = mixture - mixture.amax(-1, keepdim=True)
    picked = below.gather(-1, wanted[:, None]).squeeze(-1)
    return [float(((below / t).exp_().sum(-1).log_() - picked / t).double().sum()) for t in TEMPERATURES]


def fit(
    learned: Learned,
    crowd: tuple[Sequence[Sequence[float]], Sequence[bool]],
    agents: Sequence[tuple[Sequence[Sequence[float]], Sequence[bool]]],
    **about: Any,
) -> Calibration:
    """A calibration from answers to n validation rows.

    Args:
        crowd: the signals of its answers [n, F], and which are right [n].
        agents: signals and right answers of each of K agents. The one that is right most often is asked first.
        about: `aggregator`, `rows`, `data` and `weights`.
    """
    first = max(range(len(agents)), key=lambda k: sum(agents[k][1]))
    agent_right = Logistic.fit(*agents[first])
    quantiles = np.quantile([agent_right(found) for found in agents[first][0]], np.linspace(0, 1, QUANTILES + 1))
    return Calibration(learned, Logistic.fit(*crowd), first, agent_right, tuple(quantiles.tolist()), **about)
