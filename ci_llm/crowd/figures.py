"""The figures of an evaluation, from the scores of given texts and those of generated answers.

Legend: K agents, n rows or questions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ci_llm.core.evaluation_file import BaseScores, BestAgent, Figure, TeacherForced
from ci_llm.core.measures import JudgedBy
from ci_llm.crowd.questions import AnswerScores
from ci_llm.crowd.scoring import Scores, shares


def fields_of(scores: Scores, answers: AnswerScores | None, *, heads: bool) -> dict[str, Any]:
    """The fields of an `Evaluation` that follow from the scores.

    With generated answers, `n` and `exact_match` are about final answers, and the figures of whole solutions are under
    `teacher_forced` with their own `n`.

    Args:
        heads: True if heads, and no tokens, were scored.
    """
    n, exact_match = scores.right.shape[1], shares(scores.right, scores.own)
    found: dict[str, Any] = {"n": n, "exact_match": exact_match, "measured_by": _measured_by(scores, heads=heads)}
    if answers is not None:
        found |= {"n": answers.right.shape[1], "exact_match": answers.shares, "measured_by": "generation"}
        found |= {"asked": answers.asked, "teacher_forced": TeacherForced(n, exact_match)}
    if scores.judged is not None:
        found[scores.judged.part] = scores.judged.judgement()
    *agents, crowd = scores.mean_nll
    mean, best = map(scores.nll_gain, ("mean", "best"))
    return {**found, "nll": Figure(tuple(agents), crowd, crowd_minus_mean=mean, crowd_minus_best=best)}


def _measured_by(scores: Scores, *, heads: bool) -> str:
    if scores.judged is not None and scores.judged.part == "rewards":
        return "rewards"
    return "heads" if heads else "teacher_forcing"


def base_scores(scores: Scores, answers: AnswerScores | None) -> BaseScores:
    """The scores of the base, from a pass of the base alone; see `CrowdModel.without_agents`."""
    right = scores.right if answers is None else answers.right
    return BaseScores(float(right[0].double().mean()), replace(scores, own=()).mean_nll[0])


def best_agent(scores: Scores, answers: AnswerScores | None, judged_by: JudgedBy) -> BestAgent:
    """The two best agents by the measure that judges the rows, and how many rows each of them wins."""
    better = -scores.nll[:-1] if judged_by == "nll" else (scores.right[:-1] if answers is None else answers.right[:-2])
    first, second = better.double().sum(1).argsort(descending=True, stable=True)[:2].tolist()
    wins, losses = (int((better[one] > better[other]).sum()) for one, other in ((first, second), (second, first)))
    return BestAgent(first, second, wins, losses)


def parts_of_rows(scores: Scores, answers: AnswerScores | None) -> dict[str, tuple[tuple[float, ...], ...]]:
    """The contribution of each row to an agent's mean, by metric [K][n].

    The NLL, a ratio, is linearised as in `Scores.nll_gain`.
    """
    weights, nll = scores.tokens / scores.tokens.double().mean(), scores.nll[:-1] / scores.tokens.double().mean()
    right = scores.right[:-1] if answers is None else answers.right[:-2]
    by_row = nll - nll.mean(1, keepdim=True) * (weights - 1)
    found = {"nll": by_row, "exact_match": right.double()}
    if _measured_by(scores, heads=False) == "rewards":
        found |= {"reward": -scores.nll[:-1]}
    return {metric: tuple(map(tuple, rows.tolist())) for metric, rows in found.items()}
