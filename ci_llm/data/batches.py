"""Micro-batches: the rows of a step laid end to end, with their targets.

Legend: the B rows of a micro-batch, laid end to end, are N tokens, of which S are targets; the longest row has T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ci_llm.data.encoder import Example
from ci_llm.data.units import Unit

if TYPE_CHECKING:
    from ci_llm.data.tokens import TokenizedRows


@dataclass(frozen=True)
class Batch:
    """One micro-batch, packed: no pads, and the one-token shift already taken.

    Attributes:
        input_ids: int64 [N], the rows end to end.
        position_ids: int64 [N], from 0 in every row.
        bounds: B+1 ints; row b is `input_ids[bounds[b]:bounds[b + 1]]`.
        predict_from: int64 [S], the packed position that predicts the target: the one before it.
        targets: int64 [S], the token ids to be predicted.
        target_rows: int64 [S], the row (0..B-1) each target belongs to.
        last_tokens: int64 [B], the packed position of each row's last token.
        sample_ids: the dataset rows, B ints; of pairs B / 2, as each has two rows, chosen before rejected.
        target_counts: only for units: B ints, the targets of each row.
        answered: only for units: bool [S], whether a target belongs to the answer of its row.
        labels: only for units: fp64, for each of `sample_ids`; see `Unit.label`.
        shared: only for units: B ints, how many tokens at the beginning of a row are those of the row before it, which
            has the same prompt; fewer than either row has. A pass may compute them once. Empty: none are.
        advantages: only for completions that an agent has drawn: fp64 [B].
        weights: only for completions: fp64 [B], the weight of the loss of each token; 0 where none is learned.
        counted: only for completions: what they add to the number that divides the sum of these losses.
    """

    input_ids: Tensor
    position_ids: Tensor
    bounds: tuple[int, ...]
    predict_from: Tensor
    targets: Tensor
    target_rows: Tensor
    last_tokens: Tensor
    sample_ids: tuple[int, ...]
    target_counts: tuple[int, ...] = ()
    answered: Tensor | None = None
    labels: Tensor | None = None
    shared: tuple[int, ...] = ()
    advantages: Tensor | None = None
    weights: Tensor | None = None
    counted: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_units(self) -> int:
        """Rows of the data set: a pair counts as one."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`; from pinned memory the copies do not wait."""
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in self._tensors()})

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which CUDA copies without waiting."""
        return replace(self, **{name: t.pin_memory() for name, t in self._tensors()})

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, value) for name, value in values if isinstance(value, Tensor))


class Owned(NamedTuple):
    """Rows of a micro-batch, and whose they are.

    Attributes:
        agents: the places of the agents that read them; each reads all of them.
    """

    agents: tuple[int, ...]
    batch: Batch

    def to(self, device: torch.device | str) -> Owned:
        """The rows on `device`."""
        return Owned(self.agents, self.batch.to(device))


#: What one micro-step trains on: every agent that has a row in it stands in one of them.
MicroBatch = Sequence[Owned]


def num_units(micro_batch: MicroBatch) -> int:
    """Rows of the data set, of the agent that has the most: a bound on micro-batches is one per agent."""
    return max(own.batch.num_units for own in micro_batch)


def select_agents(micro_batches: Sequence[MicroBatch], places: Sequence[int]) -> list[MicroBatch]:
    """The micro-batches of the agents at these places alone, which stand in this order from now on."""
    found = []
    for micro_batch in micro_batches:
        left = [(tuple(at for at, k in enumerate(places) if k in own.agents), own.batch) for own in micro_batch]
        if kept := [Owned(agents, batch) for agents, batch in left if agents]:
            found.append(kept)
    return found  # type: ignore[return-value]


def pack(examples: Sequence[Example], sample_ids: Sequence[int]) -> Batch:
    """Lay the rows end to end; a pair is two rows.

    Raises:
        ValueError: no row, an empty row, or a row whose first token is a target: nothing comes before it.

    Examples:
        >>> rows = ci_llm.load_rows(ci_llm.Config(max_train_samples=20, eval_samples=9), "train")
        >>> tokenizer = ci_llm.load_base("embedded").tokenizer
        >>> tokens = ci_llm.tokenize(rows, tokenizer, max_seq_length=256, cache_folder=folder)
        >>> batch = ci_llm.pack([tokens[0], tokens[1]], [0, 1])
        >>> batch.num_rows, batch.num_tokens == len(batch.input_ids)
        (2, True)
    """
    units = [example for example in examples if isinstance(example, Unit)]
    if units:
        examples = [branch for unit in units for branch in unit.branches]
    lengths = [len(example.input_ids) for example in examples]
    if not lengths or not all(lengths) or any(example.supervised[0] for example in examples):
        raise ValueError("a batch needs rows of at least one token, whose first token is not a target")
    ends = np.cumsum(lengths)
    starts = ends - lengths
    input_ids = np.concatenate([example.input_ids for example in examples]).astype(np.int64)
    at = np.flatnonzero(np.concatenate([example.supervised for example in examples]))
    rows = np.searchsorted(ends, at, side="right")
    judged: dict[str, Any] = {}
    if units:
        answers = starts + [length for unit in units for length in unit.prompts]
        judged["target_counts"] = tuple(np.bincount(rows, minlength=len(ends)).tolist())
        judged["answered"] = torch.from_numpy(at >= answers[rows])
        judged["labels"] = torch.tensor([unit.label for unit in units], dtype=torch.float64)
        judged["shared"] = tuple(tokens for unit in units for tokens in unit.shared)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(np.arange(len(input_ids)) - np.repeat(starts, lengths)),
        bounds=(0, *ends.tolist()),
        predict_from=torch.from_numpy(at - 1),
        targets=torch.from_numpy(input_ids[at]),
        target_rows=torch.from_numpy(rows),
        last_tokens=torch.from_numpy(ends - 1),
        sample_ids=tuple(sample_ids),
        **judged,
    )


def in_order(rows: Sequence[Example] | TokenizedRows, size: int) -> Iterator[Batch]:
    """All rows in their order, at most `size` in a batch."""
    for at in range(0, len(rows), size):
        part = range(at, min(at + size, len(rows)))
        yield pack([rows[number] for number in part], part)


def without_repeats(batch: Batch) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """The packed tokens in which rows that begin with the same prompt have it once.

    Such rows become several: the prompt, and after it the rest of each row, which attends to the prompt as well.

    Returns:
        int64 [N'], the packed positions that are kept; int64 [N], for each packed position its place among these; the
        bounds of the new rows, as `Batch.bounds`; and for each new row, how many rows back its prompt lies, whose keys
        it also reads; 0 for a whole row.
    """
    left, places = list[Any](), list[Any]()
    bounds, rows_back = [0], list[int]()
    first = 0
    shared_by_next = (*batch.shared[1:], 0)
    for (start, end), shared, next_shared in zip(pairwise(batch.bounds), batch.shared, shared_by_next, strict=True):
        size = bounds[-1]
        first = first if shared else size
        left.append(np.arange(start + shared, end))
        places += [np.arange(first, first + shared), np.arange(size, size + end - start - shared)]
        if next_shared and not shared:
            bounds.append(size + next_shared)
            rows_back.append(0)
        rows_back.append(rows_back[-1] + 1 if shared or next_shared else 0)
        bounds.append(size + end - start - shared)
    tensors = (torch.from_numpy(np.concatenate(each)) for each in (left, places))
    device = batch.input_ids.device
    kept, of_each = (each.pin_memory() if device.type == "cuda" else each for each in tensors)
    return kept.to(device, non_blocking=True), of_each.to(device, non_blocking=True), tuple(bounds), tuple(rows_back)


def padded(batch: Batch, pad_id: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """The rows of a batch as a right-padded rectangle, for models that cannot run packed.

    Returns:
        The model's inputs, each int64 [B, T]: `input_ids`, `attention_mask` (1 on tokens, 0 on pads) and
        `position_ids`; and the index that leads back: `hidden[index]` of a `hidden` [B, T, ...] is [N, ...],
        the packed positions in order.
    """
    device = batch.input_ids.device
    bounds = torch.tensor(batch.bounds).to(device, non_blocking=True)
    lengths = bounds.diff()
    rows = torch.repeat_interleave(torch.arange(batch.num_rows, device=device), lengths, output_size=batch.num_tokens)
    index = (rows, batch.position_ids)
    shape = (batch.num_rows, max(end - start for start, end in pairwise(batch.bounds)))
    columns = torch.arange(shape[1], device=device)
    inputs = {
        "input_ids": torch.full(shape, pad_id, device=device).index_put_(index, batch.input_ids),
        "attention_mask": (columns < lengths[:, None]).long(),
        "position_ids": columns.expand(shape),
    }
    return inputs, index
