"""How sure the crowd is of a token and of an answer: pure functions of the agents' log-probabilities.

The entropy of the agents' mean distribution is what an answer leaves open. It has two parts: the mean of the agents'
own entropies, which they see alike, and the mutual information between the token and the agent, which is what they
disagree on. The second is also the Jensen-Shannon divergence of the agents, and is 0 if all of them say the same.

Sources: for the decomposition Depeweg et al., "Decomposition of Uncertainty in Bayesian Deep Learning for Efficient and
Risk-sensitive Learning", 2018; for its mean over the tokens of a text Malinin and Gales, "Uncertainty Estimation in
Autoregressive Structured Prediction", 2021.

Legend: K agents, B texts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ci_llm.crowd.aggregators import probability
from ci_llm.crowd.answers import AnswerStyle, final_answer


@dataclass(frozen=True)
class TokenUncertainty:
    """One token that the crowd chose; entropies in nats.

    Attributes:
        probability: of this token in the crowd's distribution, before temperature, `top_k` and `top_p`.
        entropy: of the mean of the agents' distributions.
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

    Attributes:
        log_probability: of the text under the crowd, in nats: the sum over its tokens, the end included.
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


def own_uncertainty(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """`token_uncertainty` of agents that answer alone, and so disagree with nobody: [4, ...].

    Args:
        log_probs: [..., V] of each agent.
        chosen: [...] token ids.
    """
    own = entropy(log_probs)
    return torch.stack([log_probs.gather(-1, chosen[..., None]).squeeze(-1), own, own, torch.zeros_like(own)])


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
