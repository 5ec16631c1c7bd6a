"""How probable given answers are to the crowd, and how much its agents disagree on them: prompts and answers as texts,
or batches of tensors as a collator of Transformers makes them.

Legend: K agents, N rows of at most L tokens, S targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ci_llm.crowd import generation
from ci_llm.crowd.answers import decompose
from ci_llm.crowd.asking import GenerationOptions, prompter_of, require_writers
from ci_llm.crowd.decoding import free_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.scoring import score, targets_of
from ci_llm.data.batches import Batch, Packable, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompt, prompts_of
from ci_llm.errors import BadInput

TokenBatch = Tensor | Mapping[str, Tensor]
Asked = Prompt | Sequence[Prompt] | TokenBatch
_IGNORED = -100  # in labels, as everywhere


def is_tokens(given: object) -> bool:
    """Whether these are token ids as tensors, and no texts."""
    return isinstance(given, Tensor) or (isinstance(given, Mapping) and "input_ids" in given)


def token_rows(batch: TokenBatch) -> list[Example]:
    """The rows of a batch without their padding, for `pack`.

    Args:
        batch: ids [N, L]; or `input_ids` [N, L], with `attention_mask` [N, L] where rows are padded, at either end, and
            `labels` [N, L], -100 where a token is not counted.

    Raises:
        BadInput: a tensor has another shape, or holds no whole numbers.
    """
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given["input_ids"]
    mask, labels = given.get("attention_mask", torch.ones_like(ids)), given.get("labels", ids)
    if ids.dim() != 2 or ids.is_floating_point() or not ids.shape == mask.shape == labels.shape:
        raise BadInput(
            "a batch is input_ids [N, L] of whole numbers, with attention_mask and labels of the same shape",
            where=f"input_ids {list(ids.shape)}, {ids.dtype}",
            hint='give tokenizer(texts, return_tensors="pt", padding=True)',
        )
    found = []
    for row, kept, label in zip(ids.cpu(), mask.bool().cpu(), labels.cpu(), strict=True):
        if not kept.any():
            raise BadInput("a row of the batch has no token", where="attention_mask", hint="leave the row out")
        counted = (label[kept] != _IGNORED).numpy()
        counted[:1] = False  # nothing comes before the first token
        found.append(Example(row[kept].numpy().astype(np.int32), counted))
    return found


def continued(
    crowd: CrowdModel, batch: TokenBatch, options: GenerationOptions, batch_size: int, *, details: bool
) -> Tensor:
    """[N, T] the ids that follow each row, without the end of the answer; short ones are padded by `pad_id`.

    Raises:
        BadInput: what is asked for needs texts.
    """
    if details or options != GenerationOptions(options.decoding):
        only = "give prompts as texts for details, stop_strings, abstain_below and agents_per_prompt"
        raise BadInput("of a batch of tensors only token ids come back", where="Crowd.generate", hint=only)
    rows = [row.input_ids.tolist() for row in token_rows(batch)]
    if rows:
        free_positions(crowd.model, rows)
    found = generation.generate_each(crowd, enumerate(rows), generation.Wanted(options.decoding), batch_size)
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
            apart = torch.cat([decompose(each)[2].double().cpu() for each, _ in targets_of(crowd, [batch])])
            sums = torch.zeros(batch.num_rows, dtype=torch.float64).index_add_(0, batch.target_rows, apart)
            found.append(sums / torch.bincount(batch.target_rows, minlength=batch.num_rows).clamp_min(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _rows(crowd: CrowdModel, asked: Asked, answers: str | Sequence[str] | None) -> Sequence[Packable]:
    require_writers(crowd)
    if is_tokens(asked):
        if answers is not None:
            raise BadInput("a batch of tensors has its answers in labels", where="answers", hint="leave answers out")
        return token_rows(asked)  # type: ignore[arg-type]
    prompts = prompts_of(asked)  # type: ignore[arg-type]
    given = [answers] if isinstance(answers, str) else list(answers or [])
    if len(prompts) != len(given):
        raise BadInput(f"{len(prompts)} prompts and {len(given)} answers", where="answers", hint="give one for each")
    prompter = prompter_of(crowd)
    return [prompter.row(prompt, answer) for prompt, answer in zip(prompts, given, strict=True)]


def _batches(rows: Sequence[Packable], batch_size: int) -> Iterator[Batch]:
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="batch_size", hint="give 1 or more")
    for at in range(0, len(rows), batch_size):
        part = range(len(rows))[at : at + batch_size]
        yield pack([rows[n] for n in part], part)
