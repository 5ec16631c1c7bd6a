"""What the heads of a crowd say about texts: rewards, classes or numbers, of every agent and of all, with their spread.

Legend: K agents, N texts, n numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from ci_llm.crowd.asking import prompter_of
from ci_llm.crowd.decoding import num_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompt, prompts_of
from ci_llm.data.units import unit_of, without_end
from ci_llm.errors import BadInput, DataError, ModelError
from ci_llm.lora.heads import pad_of


@dataclass(frozen=True)
class TextScore:
    """What was found about one text.

    Attributes:
        scores: [K] the reward or number of every agent; of classes the agent's probability of `label`.
        mean: of these. Of rewards only differences have a meaning, between answers to one prompt.
        std: how far the agents are apart: their sample standard deviation; 0 for one agent.
        lower: mean - c · std.
        label: the most probable class, by the mean of the agents; None where there are no classes.
        probabilities: of every class by its name, the mean of the agents.
        abstained: whether the probability of `label` is too low to be given.
    """

    scores: tuple[float, ...]
    mean: float
    std: float
    lower: float
    label: str | None = None
    probabilities: dict[str, float] | None = None
    abstained: bool = False


def score_texts(
    crowd: CrowdModel,
    texts: Prompt | Sequence[Prompt],
    answers: str | Sequence[str] | None = None,
    *,
    spreads: float = 1.0,
    abstain_below: float | None = None,
    batch_size: int = 16,
) -> list[TextScore]:
    """See `Crowd.score`."""
    found = head_outputs(crowd, texts, answers, batch_size)
    return [_score(crowd, own, spreads, abstain_below) for own in found.unbind(1)]


@torch.no_grad()
def head_outputs(
    crowd: CrowdModel, texts: Prompt | Sequence[Prompt], answers: str | Sequence[str] | None, batch_size: int
) -> Tensor:
    """[K, N, n] fp64 what the heads say about texts, for whose arguments and errors see `Crowd.score`."""
    if not crowd.settings.outputs:
        raise ModelError(
            "these agents have no heads: they write answers and score none",
            where="Crowd.score",
            hint="ask them by generate; objective=reward, classification or regression trains agents that score",
        )
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="batch_size", hint="give 1 or more")
    rows = _rows(crowd, texts, answers)
    parts = [torch.zeros(crowd.num_agents, 0, crowd.settings.outputs, dtype=torch.float64)]
    with crowd.evaluating():
        for at in range(0, len(rows), batch_size):
            part = rows[at : at + batch_size]
            batch = pack([unit_of([row]) for row in part], range(len(part))).to(crowd.device)
            parts.append(crowd(batch).values.double().cpu())
    return torch.cat(parts, 1)


def _rows(crowd: CrowdModel, texts: Prompt | Sequence[Prompt], answers: str | Sequence[str] | None) -> list[Example]:
    given, prompter = prompts_of(texts), prompter_of(crowd)
    if answers is None:
        found = [prompter.read(text, is_answer=crowd.reads_pairs) for text in given]
    else:
        said = [answers] if isinstance(answers, str) else list(answers)
        if len(given) != len(said) or not crowd.reads_pairs:
            what = f"{len(given)} prompts and {len(said)} answers" if crowd.reads_pairs else "these heads read texts"
            raise BadInput(what, where="answers", hint="give one answer for each prompt, to heads of rewards only")
        found = [prompter.row(prompt, answer) for prompt, answer in zip(given, said, strict=True)]
    limit = num_positions(crowd.model)
    if long := [number for number, row in enumerate(found) if len(row.input_ids) > limit]:
        what = f"text {long[0]} has {len(found[long[0]].input_ids)} tokens, and the base reads {limit}"
        raise DataError(what, where="Crowd.score", hint="shorten it")
    if empty := [number for number, row in enumerate(found) if not len(row.input_ids)]:
        raise DataError(f"text {empty[0]} is empty", where="Crowd.score", hint="leave it out")
    pad = pad_of(crowd.model.config, prompter.tokenizer)
    return [without_end(row, pad) for row in found]


def _score(crowd: CrowdModel, outputs: Tensor, spreads: float, abstain_below: float | None) -> TextScore:
    """The score of one text by the numbers [K, n] of the heads."""
    about_classes: dict[str, Any] = {}
    scores = outputs[:, 0]
    if crowd.settings.outputs > 1:
        each = outputs.softmax(-1)
        probabilities = dict(zip(crowd.classes, each.mean(0).tolist(), strict=True))
        label = max(probabilities, key=probabilities.__getitem__)
        scores = each[:, crowd.classes.index(label)]
        abstained = abstain_below is not None and probabilities[label] < abstain_below
        about_classes = {"label": label, "probabilities": probabilities, "abstained": abstained}
    values = tuple(scores.tolist())
    mean, std = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return TextScore(values, mean, std, mean - spreads * std, **about_classes)
