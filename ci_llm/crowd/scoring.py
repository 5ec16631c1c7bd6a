"""The scores of each agent and of the crowd on given texts and of their answers, and the figures from them.

Texts are scored by teacher forcing, or by heads. In teacher forcing, exact match means that every token of the
reference solution is the most probable one given the tokens before it, so that greedy decoding would reproduce the
solution. The crowd's most probable token is that of the aggregated distribution.

Legend: K agents, S targets, V vocabulary, n rows or questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.core.evaluation_file import AnsweredQuestions, BaseScores, BestAgent, Difference, Figure, TeacherForced
from ci_llm.core.measures import PrimaryMetric, paired_interval
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.judging import UnitScores, judge
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.batches import Batch


@dataclass(frozen=True)
class Scores:
    """The scores of n rows; index K stands for the crowd.

    Attributes:
        right: [K+1, n] bool, True for an exact match; for heads if the class, or the order of a pair, is right; for
            rewards if it is 1.
        nll: [K+1, n] fp64, nats summed over the targets of the row; for heads the loss of the row, for rewards minus
            the reward.
        tokens: [n] int64, the number of targets of the row; 1 for heads and rewards.
        own: per agent the rows that score it, if agents are evaluated on rows of their own; empty if all rows score all
            agents. All rows score the crowd.
        units: the numbers of pairs, rated or labelled rows of the same data; None for an objective of single rows.
    """

    right: Tensor
    nll: Tensor
    tokens: Tensor
    own: tuple[slice, ...] = ()
    units: UnitScores | None = None

    @classmethod
    def joined(cls, parts: Iterable[Scores]) -> Scores:
        """The rows of all parts, in order."""
        listed = list(parts)
        units = [part.units for part in listed if part.units is not None]
        # In one copy, which is the only wait for a GPU.
        right, nll = torch.cat([torch.stack([part.right.double(), part.nll]) for part in listed], dim=2).cpu()
        return cls(
            right.bool(),
            nll,
            torch.cat([part.tokens for part in listed]),
            units=units[0].joined(units) if units else None,
        )

    @property
    def exact_match(self) -> list[float]:
        """The share of rows that match: K agents, then the crowd."""
        return [float(line[rows].double().mean()) for line, rows in zip(self.right, self._rows_of_each, strict=True)]

    @property
    def mean_nll(self) -> list[float]:
        """Nats per target token: K agents, then the crowd."""
        lines = zip(self.nll, self._rows_of_each, strict=True)
        return [float(line[rows].double()[None].sum(1) / self.tokens[rows].sum()) for line, rows in lines]

    @property
    def _rows_of_each(self) -> tuple[slice, ...]:
        """The rows that score each agent, and then those that score the crowd."""
        return (*(self.own or [slice(None)] * (len(self.right) - 1)), slice(None))

    def rows(self, chosen: slice) -> Scores:
        """The scores of some of the rows, which then score all agents."""
        return Scores(self.right[:, chosen], self.nll[:, chosen], self.tokens[chosen])

    def nll_gain(self, over: str) -> Difference:
        """The crowd's NLL minus that of the agents' mean or of the best agent, paired over all rows: less is better.

        Long rows count more, as in `mean_nll`.

        Args:
            over: "mean" or "best". The best agent is chosen on these same rows, which favours the agent.

        Returns:
            the difference; its interval covers the choice of the rows, not of the seed.
        """
        *agents, crowd = self.nll.double()
        of_all = torch.stack(agents)
        other = of_all.mean(0) if over == "mean" else agents[int(of_all.sum(1).argmin())]
        tokens = self.tokens.double()
        difference = (crowd - other) / tokens.mean()
        # The mean of a ratio, linearised: the part of a row beyond its share of the tokens.
        return paired_gain(difference, difference.mean() * (tokens / tokens.mean() - 1))


@dataclass(frozen=True)
class Solved:
    """One question with the answer of the crowd, for people.

    Attributes:
        answer: the crowd's whole text.
        wanted: the right final answer.
        right: [K+2] whose final answers are right: K agents, the crowd, the vote.
    """

    question: str
    answer: str
    wanted: str
    right: tuple[bool, ...]


@dataclass(frozen=True)
class AnswerScores:
    """The right ones among the final answers to n questions.

    Attributes:
        right: [K+2, n] bool: K agents, the crowd, the vote.
        example: the first question; None without questions.
        own: per agent the questions that score it, if agents are evaluated on rows of their own; empty if all questions
            score all agents.
        answered: the identity of the questions; None before that of all sets is known.
    """

    right: Tensor
    example: Solved | None = None
    own: tuple[slice, ...] = ()
    answered: AnsweredQuestions | None = None

    @classmethod
    def joined(cls, parts: Iterable[AnswerScores]) -> AnswerScores:
        """The questions of all parts, in order."""
        listed = list(parts)
        example = next((part.example for part in listed if part.example is not None), None)
        return cls(torch.cat([part.right for part in listed], dim=1), example)

    @property
    def shares(self) -> Figure:
        """The share of right answers; differences are paired over all questions."""
        return shares(self.right[:-1], self.own, self.right[-1])


def own_rows(sets: Sequence[Scores | AnswerScores], of_agent: Sequence[int]) -> tuple[slice, ...]:
    """The rows of each agent's set, where the rows of these sets follow one another.

    Args:
        of_agent: the number of each agent's set.
    """
    counts = [part.right.shape[1] for part in sets]
    ends = [*accumulate(counts)]
    return tuple(slice(ends[number] - counts[number], ends[number]) for number in of_agent)


def paired_gain(one: Tensor, other: Tensor) -> Difference:
    """The mean of `one - other`, each [n], over rows, and its `paired_interval`."""
    difference = one - other
    return Difference(float(difference.mean()), paired_interval(difference.tolist()))


def shares(right: Tensor, own: Sequence[slice], vote: Tensor | None = None) -> Figure:
    """The share of right rows, from which rows are right, [K+1, n]; differences are paired over all rows."""
    *agents, crowd = right.double()
    of_each = zip(agents, own or [slice(None)] * len(agents), strict=True)
    voted = None if vote is None else vote.double()
    return Figure(
        agents=tuple(float(agent[rows].mean()) for agent, rows in of_each),
        crowd=float(crowd.mean()),
        vote=None if voted is None else float(voted.mean()),
        crowd_minus_mean=paired_gain(crowd, torch.stack(agents).mean(0)),
        crowd_minus_best=paired_gain(crowd, max(agents, key=lambda agent: float(agent.mean()))),
        crowd_minus_vote=None if voted is None else paired_gain(crowd, voted),
    )


@torch.no_grad()
def score(
    crowd: CrowdModel, batches: Iterable[Batch], aggregator: str, stop: Callable[[], bool] = lambda: False
) -> Scores | None:
    """Score every row of `batches`.

    Args:
        aggregator: one of `ci_llm.crowd.aggregators`.
        stop: called before every batch.

    Returns:
        the scores, of no row if there is no batch; None if `stop` returned True.
    """
    nothing = torch.zeros(crowd.num_agents + 1, 0, dtype=torch.float64)
    parts = list[Scores]()
    with crowd.evaluating():
        for batch in batches:
            if stop():
                return None
            parts.append(_score_batch(crowd, batch, aggregator))
    return Scores.joined(parts or [Scores(nothing.bool(), nothing, nothing[0].long())])  # a process may have no row


#: Scores are computed in chunks that fit the logits of this many agents. The number is fixed, so that an agent's chunks
#: and the bits of its NLL are the same alone and among others.
SCORED_AT_ONCE: Final = 8


def _score_batch(crowd: CrowdModel, batch: Batch, aggregator: str) -> Scores:
    """The scores of a batch; `right` and `nll` stay on the device, because only the last batch waits for it."""
    tokens = torch.bincount(batch.target_rows, minlength=batch.num_rows)
    batch = batch.to(crowd.device)
    if crowd.settings.outputs:
        units = judge(crowd, batch)
        return Scores(*units.outcome, torch.ones(batch.num_units, dtype=torch.long), units=units)
    states = crowd.states(batch)[:, batch.predict_from]
    lines = crowd.num_agents + 1
    wrong = states.new_zeros(lines, batch.num_rows, dtype=torch.float64)
    nll = torch.zeros_like(wrong)
    head = crowd.head.to(states.dtype)
    # Chunk by chunk, because the logits of all targets of all agents need not fit into memory.
    for chunk in head.chunks(batch.num_targets, SCORED_AT_ONCE):
        log_probs = head.logits(states[:, chunk]).log_softmax(-1)
        everyone = torch.cat([log_probs, aggregate(log_probs, aggregator)[None]])
        targets, rows = batch.targets[chunk], batch.target_rows[chunk]
        wrong.index_add_(1, rows, (everyone.argmax(-1) != targets).double())
        picked = everyone.gather(-1, targets.expand(lines, -1)[..., None]).squeeze(-1)
        nll.index_add_(1, rows, -picked.double())
    return Scores(wrong == 0, nll, tokens)


# The figures of an `Evaluation`


def fields_of(scores: Scores, answers: AnswerScores | None, *, heads: bool) -> dict[str, Any]:
    """The fields of an `Evaluation` that follow from the scores.

    With generated answers, `n` and `exact_match` are about final answers, and the figures of whole solutions are under
    `teacher_forced` with their own `n`.

    Args:
        heads: True if heads, and no tokens, were scored.
    """
    n = scores.right.shape[1]
    exact_match = shares(scores.right, scores.own)
    found: dict[str, Any] = {"n": n, "exact_match": exact_match, "measured_by": _measured_by(scores, heads=heads)}
    if answers is not None:
        found |= {"n": answers.right.shape[1], "exact_match": answers.shares, "measured_by": "generation"}
        found |= {"answered": answers.answered, "teacher_forced": TeacherForced(n, exact_match)}
    if scores.units is not None:
        found[scores.units.part] = scores.units.judgement()
    *agents, crowd = scores.mean_nll
    mean, best = map(scores.nll_gain, ("mean", "best"))
    return {**found, "nll": Figure(tuple(agents), crowd, crowd_minus_mean=mean, crowd_minus_best=best)}


def _measured_by(scores: Scores, *, heads: bool) -> str:
    if scores.units is not None and scores.units.part == "rewards":
        return "rewards"
    return "heads" if heads else "teacher_forcing"


def base_scores(scores: Scores, answers: AnswerScores | None) -> BaseScores:
    """The scores of the base, from a pass of the base alone; see `CrowdModel.without_agents`."""
    right = scores.right if answers is None else answers.right
    return BaseScores(float(right[0].double().mean()), replace(scores, own=()).mean_nll[0])


def best_agent(scores: Scores, answers: AnswerScores | None, primary: PrimaryMetric) -> BestAgent:
    """The two best agents by the measure that judges the rows, and how many rows each of them wins."""
    better = -scores.nll[:-1] if primary == "nll" else (scores.right[:-1] if answers is None else answers.right[:-2])
    first, second = better.double().sum(1).argsort(descending=True, stable=True)[:2].tolist()
    wins, losses = (int((better[one] > better[other]).sum()) for one, other in ((first, second), (second, first)))
    return BestAgent(first, second, wins, losses)


def parts_of_rows(scores: Scores, answers: AnswerScores | None) -> dict[str, tuple[tuple[float, ...], ...]]:
    """The contribution of each row to an agent's mean, by metric [K][n].

    The NLL, a ratio, is linearised as in `Scores.nll_gain`.
    """
    mean = scores.tokens.double().mean()
    nll = scores.nll[:-1] / mean
    right = scores.right[:-1] if answers is None else answers.right[:-2]
    by_row = nll - nll.mean(1, keepdim=True) * (scores.tokens / mean - 1)
    found = {"nll": by_row, "exact_match": right.double()}
    if _measured_by(scores, heads=False) == "rewards":
        found |= {"reward": -scores.nll[:-1]}
    return {metric: tuple(map(tuple, rows.tolist())) for metric, rows in found.items()}
