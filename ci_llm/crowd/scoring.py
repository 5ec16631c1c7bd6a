"""How well each agent and the crowd answer, measured by teacher forcing: one pass for all.

Exact match here means that every token of the reference solution is the most probable one given the tokens before it.
Greedy decoding would then reproduce the whole solution. For the crowd, the most probable token is that of the
aggregated distribution.

Legend: K agents, S targets, V vocabulary, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ci_llm.core.intervals import paired_interval
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.model import Crowd
from ci_llm.data.batches import Batch
from ci_llm.data.rows import TrainedOn


@dataclass(frozen=True)
class Scores:
    """What each of n rows scored; index K stands for the crowd.

    Attributes:
        right: [K+1, n] bool, exact match.
        nll: [K+1, n] fp64, nats summed over the targets of the row.
        tokens: [n] int64, targets of the row.
        own: per agent the rows that score it, if agents are evaluated on rows of their own; empty: all rows. The crowd
            is scored by all rows.
    """

    right: Tensor
    nll: Tensor
    tokens: Tensor
    own: tuple[slice, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable[Scores]) -> Scores:
        """The rows of all parts, in order."""
        listed = list(parts)
        return cls(
            torch.cat([p.right for p in listed], dim=1),
            torch.cat([p.nll for p in listed], dim=1),
            torch.cat([p.tokens for p in listed]),
        )

    @classmethod
    def of_sets(cls, sets: Sequence[Scores], of_agent: Sequence[int]) -> Scores:
        """The rows of several sets, each of which scores the agents that it belongs to.

        Args:
            of_agent: the number of each agent's set.
        """
        together = cls.joined(sets)
        return replace(together, own=own_rows([part.right.shape[1] for part in sets], of_agent))

    @property
    def exact_match(self) -> list[float]:
        """Share of rows that match: K agents, then the crowd."""
        if self.own:
            lines = zip(self.right, (*self.own, slice(None)), strict=True)
            return [float(line[rows].double().mean()) for line, rows in lines]
        return self.right.double().mean(1).tolist()

    @property
    def mean_nll(self) -> list[float]:
        """Nats per target token: K agents, then the crowd."""
        if self.own:
            lines = zip(self.nll, (*self.own, slice(None)), strict=True)
            return [float(line[rows].double()[None].sum(1) / self.tokens[rows].sum()) for line, rows in lines]
        return (self.nll.double().sum(1) / self.tokens.sum()).tolist()

    def rows(self, chosen: slice) -> Scores:
        """Some of the rows, by which everybody is scored."""
        return Scores(self.right[:, chosen], self.nll[:, chosen], self.tokens[chosen])

    def gain(self, over: str) -> dict[str, float | None]:
        """The crowd's exact match minus that of the agents' mean or of the best agent, paired over all rows.

        Args:
            over: "mean" or "best". The best agent is chosen on these same rows, which favours the agent.

        Returns:
            {"value", "interval95"} of `paired_gain`. The interval covers the choice of the rows, not that of the seed.
        """
        right = self.right.double()
        agents = right[:-1]
        other = agents.mean(0) if over == "mean" else agents[int(agents.mean(1).argmax())]
        return paired_gain(right[-1], other)


def own_rows(counts: Sequence[int], of_agent: Sequence[int]) -> tuple[slice, ...]:
    """Per agent the rows of its set, where sets of so many rows follow one another."""
    ends = [*accumulate(counts)]
    return tuple(slice(ends[number] - counts[number], ends[number]) for number in of_agent)


def paired_gain(one: Tensor, other: Tensor) -> dict[str, float | None]:
    """The mean of `one - other`, each [n], over rows, and its `paired_interval`."""
    difference = one - other
    return {"value": float(difference.mean()), "interval95": paired_interval(difference.tolist())}


@torch.no_grad()
def score(
    crowd: Crowd, batches: Iterable[Batch], aggregator: str, stop: Callable[[], bool] = lambda: False
) -> Scores | None:
    """Score every row of `batches`.

    Args:
        crowd: is in training mode afterwards if it was before.
        aggregator: a module of `ci_llm.crowd.aggregators`.
        stop: called before every batch.

    Returns:
        the scores, of no row at all for no batch; None if `stop` returned True.
    """
    training = crowd.training
    crowd.eval()
    lines = crowd.num_agents + 1
    nothing = torch.zeros(lines, 0, dtype=torch.float64)
    parts = [Scores(nothing.bool(), nothing, nothing[0].long())]  # a process may have no row at all
    try:
        for batch in batches:
            if stop():
                return None
            parts.append(_score_batch(crowd, batch.to(crowd.device), aggregator))
    finally:
        crowd.train(training)
    return Scores.joined(parts)


def _score_batch(crowd: Crowd, batch: Batch, aggregator: str) -> Scores:
    states = crowd.states(batch)[:, batch.predict_from]
    lines = crowd.num_agents + 1
    wrong = states.new_zeros(lines, batch.num_rows, dtype=torch.float64)
    nll = torch.zeros_like(wrong)
    # Chunk by chunk, because the logits of all targets of all agents need not fit into memory.
    for chunk in crowd.head.chunks(batch.num_targets):
        log_probs = crowd.head.logits(states[:, chunk]).log_softmax(-1)
        everyone = torch.cat([log_probs, aggregate(log_probs, aggregator, crowd.learned)[None]])
        targets, rows = batch.targets[chunk], batch.target_rows[chunk]
        wrong.index_add_(1, rows, (everyone.argmax(-1) != targets).double())
        picked = everyone.gather(-1, targets.expand(lines, -1)[..., None]).squeeze(-1)
        nll.index_add_(1, rows, -picked.double())
    tokens = torch.bincount(batch.target_rows, minlength=batch.num_rows)
    return Scores((wrong == 0).cpu(), nll.cpu(), tokens.cpu())


def evaluation_record(scores: Scores, task: str, aggregator: str, trained_on: TrainedOn = "none") -> dict[str, Any]:
    """The content of `evaluation.json`.

    Args:
        task: name of the data set.
        trained_on: whether none, some or all of these rows were trained on.
    """
    *agents, crowd = scores.exact_match
    *agent_nll, crowd_nll = scores.mean_nll
    return {
        "task": task,
        "n": scores.right.shape[1],
        "rows_trained_on": trained_on,
        "aggregator": aggregator,
        "exact_match": {
            "agents": agents,
            "crowd": crowd,
            "crowd_minus_mean": scores.gain("mean"),
            "crowd_minus_best": scores.gain("best"),
        },
        "nll": {"agents": agent_nll, "crowd": crowd_nll},
    }
