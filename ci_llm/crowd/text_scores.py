"""Judgements on given texts: the probability of answers, the agents' disagreement, and the scores of heads.

Texts may also be batches of tensors, as a data collator of Transformers makes them.

Legend: K agents, N rows or texts of at most L tokens, S targets, n numbers of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ci_llm.crowd import generation
from ci_llm.crowd.answers import decompose
from ci_llm.crowd.asking import prompter_of, require_writers
from ci_llm.crowd.decoding import Decoding, free_positions, num_positions
from ci_llm.crowd.judging import tempered
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.scoring import score
from ci_llm.data.batches import Batch, Packable, in_order
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompt, prompts_of
from ci_llm.data.units import unit_of, without_end
from ci_llm.errors import BadInput, DataError, ModelError
from ci_llm.lora.heads import pad_of

TokenBatch = Tensor | Mapping[str, Tensor]
Asked = Prompt | Sequence[Prompt] | TokenBatch
_IGNORED = -100  # in labels, as everywhere


def is_tokens(given: object) -> bool:
    """True if these are token ids, as a tensor or a batch, and not texts."""
    return isinstance(given, Tensor) or (isinstance(given, Mapping) and "input_ids" in given)


def token_rows(batch: TokenBatch) -> list[Example]:
    """The rows of a batch without their padding, for `pack`.

    Args:
        batch: ids [N, L]; or `input_ids` [N, L], with `attention_mask` [N, L] where rows are padded, at either end, and
            `labels` [N, L], -100 where a token is not counted.

    Raises:
        BadInput: one of them is not a tensor, has another shape, or does not hold whole numbers.
    """
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given["input_ids"]
    beside = [given[name] for name in ("attention_mask", "labels") if name in given]
    is_batch = isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point()
    if not is_batch or any(not isinstance(each, Tensor) or each.shape != ids.shape for each in beside):
        raise BadInput(
            "a batch is input_ids [N, L] of whole numbers, with attention_mask and labels of the same shape",
            where=f"input_ids {list(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else "input_ids, a list",
            hint='give tokenizer(texts, return_tensors="pt", padding=True)',
        )
    mask, labels = given.get("attention_mask", torch.ones_like(ids)), given.get("labels", ids)
    found = []
    for row, kept, label in zip(ids.cpu(), mask.bool().cpu(), labels.cpu(), strict=True):
        if not kept.any():
            raise BadInput("a row of the batch has no token", where="attention_mask", hint="leave the row out")
        counted = (label[kept] != _IGNORED).numpy()
        counted[:1] = False  # nothing comes before the first token
        found.append(Example(row[kept].numpy().astype(np.int32), counted))
    return found


def continued(crowd: CrowdModel, batch: TokenBatch, options: Decoding, batch_size: int, *, details: bool) -> Tensor:
    """The ids [N, T] that follow each row, without the end of the answer; short ones are padded by `pad_id`.

    Raises:
        BadInput: an option needs prompts as texts.
    """
    if details or options.stop_strings or options.abstain_below is not None:
        only = "give prompts as texts for details, stop_strings and abstain_below"
        raise BadInput("of a batch of tensors only token ids come back", where="Crowd.generate", hint=only)
    rows = [row.input_ids.tolist() for row in token_rows(batch)]
    if rows:
        free_positions(crowd.model, rows)
    found = generation.generate_each(crowd, enumerate(rows), generation.Wanted(options), batch_size)
    ids = [torch.tensor(each.crowd[0], dtype=torch.long) for each in found]
    return pad_sequence(ids, batch_first=True, padding_value=crowd.pad_id) if ids else torch.zeros(0, 0).long()


def log_probs(crowd: CrowdModel, asked: Asked, answers: str | Sequence[str] | None, batch_size: int) -> Tensor:
    """See `Crowd.log_probs`."""
    scores = score(crowd, _batches(_rows(crowd, asked, answers), batch_size), "probability")
    assert scores is not None, "nobody asks to stop"
    return -scores.nll


def disagreement(crowd: CrowdModel, asked: Asked, answers: str | Sequence[str] | None, batch_size: int) -> Tensor:
    """See `Crowd.disagreement`."""
    rows, found = _rows(crowd, asked, answers), []
    with crowd.evaluating(), torch.no_grad():
        for batch in _batches(rows, batch_size):
            apart = torch.cat([decompose(each)[2].double().cpu() for each, _ in generation.targets_of(crowd, [batch])])
            sums = torch.zeros(batch.num_rows, dtype=torch.float64).index_add_(0, batch.target_rows, apart)
            found.append(sums / torch.bincount(batch.target_rows, minlength=batch.num_rows).clamp_min(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _rows(crowd: CrowdModel, asked: Asked, answers: str | Sequence[str] | None) -> Sequence[Packable]:
    require_writers(crowd)
    if is_tokens(asked):
        if answers is not None:
            raise BadInput("a batch of tensors has its answers in labels", where="answers", hint="leave answers out")
        return token_rows(asked)  # type: ignore[arg-type]
    return _answered(crowd, prompts_of(asked), answers or [])  # type: ignore[arg-type]


def _answered(crowd: CrowdModel, prompts: Sequence[Prompt], answers: str | Sequence[str]) -> list[Example]:
    """Tokenised rows of each prompt with its answer."""
    given = [answers] if isinstance(answers, str) else list(answers)
    if len(prompts) != len(given):
        raise BadInput(f"{len(prompts)} prompts and {len(given)} answers", where="answers", hint="give one for each")
    prompter = prompter_of(crowd)
    return [prompter.row(prompt, answer) for prompt, answer in zip(prompts, given, strict=True)]


def _batches(rows: Sequence[Packable], batch_size: int) -> Iterator[Batch]:
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="batch_size", hint="give 1 or more")
    return in_order(rows, batch_size)


@dataclass(frozen=True)
class TextScore:
    """The scores of one text.

    Attributes:
        scores: [K] every agent's reward or number, or for classes its probability of `label`.
        mean: the mean of `scores`. For rewards, only differences between answers to one prompt have a meaning.
        std: the agents' sample standard deviation; 0 for one agent.
        lower: mean - c · std.
        label: the most probable class by the mean of the agents; None where there are no classes.
        probabilities: the agents' mean probability of every class by its name, at the temperature of the crowd's
            calibration if it has one.
        abstained: whether the probability of `label` is below `abstain_below`.
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
    if abstain_below is not None and crowd.settings.outputs == 1:
        what = "abstain_below is a probability of a class, and these heads give one number"
        raise BadInput(what, where="Crowd.score", hint="leave it out; `lower` says how sure the agents are")
    found = head_outputs(crowd, texts, answers, batch_size)
    return [_score(crowd, own, spreads, abstain_below) for own in found.unbind(1)]


@torch.no_grad()
def head_outputs(
    crowd: CrowdModel, texts: Prompt | Sequence[Prompt], answers: str | Sequence[str] | None, batch_size: int
) -> Tensor:
    """The numbers of the heads for texts, [K, N, n] in fp64; for arguments and errors see `Crowd.score`."""
    if not crowd.settings.outputs:
        raise ModelError(
            "these agents have no heads: they write answers and score none",
            where="Crowd.score",
            hint="ask them by generate; objective=reward, classification or regression trains agents that score",
        )
    rows = [unit_of([row]) for row in _read_by_heads(crowd, texts, answers)]
    parts = [torch.zeros(crowd.num_agents, 0, crowd.settings.outputs, dtype=torch.float64)]
    with crowd.evaluating():
        for batch in _batches(rows, batch_size):
            parts.append(crowd(batch.to(crowd.device)).values.double().cpu())
    return torch.cat(parts, 1)


def _read_by_heads(
    crowd: CrowdModel, texts: Prompt | Sequence[Prompt], answers: str | Sequence[str] | None
) -> list[Example]:
    prompter = prompter_of(crowd)
    if answers is None:
        found = [prompter.read(text, is_answer=crowd.reads_pairs) for text in prompts_of(texts)]
    elif not crowd.reads_pairs:
        hint = "give texts alone, in a file by a column text or messages; heads of objective=reward take answers"
        raise BadInput("these heads score texts, and not answers to prompts", where="Crowd.score", hint=hint)
    else:
        found = _answered(crowd, prompts_of(texts), answers)
    limit = num_positions(crowd.model)
    if long := [number for number, row in enumerate(found) if len(row.input_ids) > limit]:
        what = f"text {long[0]} has {len(found[long[0]].input_ids)} tokens, and the base reads {limit}"
        raise DataError(what, where="Crowd.score", hint="shorten it")
    if empty := [number for number, row in enumerate(found) if not len(row.input_ids)]:
        raise DataError(f"text {empty[0]} is empty", where="Crowd.score", hint="leave it out")
    pad = pad_of(crowd.model.config, prompter.tokenizer)
    return [without_end(row, pad) for row in found]


def _score(crowd: CrowdModel, outputs: Tensor, spreads: float, abstain_below: float | None) -> TextScore:
    """The score of one text from the numbers [K, n] of the heads."""
    about_classes: dict[str, Any] = {}
    scores = outputs[:, 0]
    if crowd.settings.outputs > 1:
        each = outputs.softmax(-1)
        together = tempered(each.mean(0), crowd.learned.temperature if crowd.learned else 1.0)
        probabilities = dict(zip(crowd.classes, together.tolist(), strict=True))
        label = max(probabilities, key=probabilities.__getitem__)
        scores = each[:, crowd.classes.index(label)]
        abstained = abstain_below is not None and probabilities[label] < abstain_below
        about_classes = {"label": label, "probabilities": probabilities, "abstained": abstained}
    values = tuple(scores.tolist())
    mean, std = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return TextScore(values, mean, std, mean - spreads * std, **about_classes)
