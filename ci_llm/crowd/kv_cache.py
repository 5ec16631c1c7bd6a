"""The KV cache of a decoder: keys and values of texts in groups that share it, and attention over them.

Position p of a text is column p of its cache. Texts that follow one prompt grow in step: they are rows of one cache,
and one call attends for all of them, as it would for each. Texts of different lengths need no padding, so they join and
leave a pass at any time, and their numbers do not depend on other texts.

Legend: R rows of a pass, N its tokens, C rows of a cache, T its columns in blocks of `BLOCK`, H heads, G key/value
heads, D width of a head, n texts with one new token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from ci_llm.crowd.next_token import BASE_ALONE, CROWD, Author, Request
from ci_llm.lora.reading import compute_dtype

#: The name under which Transformers finds the attention of this module.
CACHED_ATTENTION: Final = "ci_llm_cached"
#: How many fp32 numbers one AVX-512 register holds: sums over fewer columns have another order.
BLOCK: Final = 16
_GROWTH: Final = 1.25
_NO_AUTOCAST: Final = nullcontext()


def whole_blocks(count: int) -> int:
    """The least multiple of `BLOCK` that is not below `count`."""
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False)
class KVCache:
    """The keys and values of texts of equal length.

    Attributes:
        rows: C. A text has one row, or one for each agent.
        layers: for each layer number [2, C, G, T, D], keys first.
    """

    rows: int
    layers: dict[int, Tensor] = field(default_factory=dict)

    def update(self, layer: int, start: int, new: Tensor) -> Tensor:
        """Write columns [2, C, G, t, D] from `start` on, and return all columns of the layer."""
        _, rows, groups, count, width = new.shape
        end = start + count
        held = self.layers.get(layer)
        if held is None or held.shape[3] < end:
            room = whole_blocks(max(end, int(held.shape[3] * _GROWTH) if held is not None else 0))
            grown = new.new_zeros(2, rows, groups, room, width)
            if held is not None:
                grown[:, :, :, :start] = held[:, :, :, :start]
            self.layers[layer] = held = grown
        held.narrow(3, start, count).copy_(new)
        return held

    def copy(self, rows: Sequence[int], count: int | None = None) -> KVCache:
        """A copy of the first `count` columns of these rows, or of all; a row may be named several times."""
        copies = dict[int, Tensor]()
        places: Tensor | None = None  # the host waits for them once
        for layer, held in self.layers.items():
            places = torch.tensor(rows, device=held.device) if places is None else places
            part = held[:, :, :, :count].index_select(1, places)
            copies[layer] = F.pad(part, (0, 0, 0, -part.shape[3] % BLOCK))
        return KVCache(len(rows), copies)


@dataclass(eq=False)
class SequenceGroup:
    """Requests with the same tokens so far: of one prompt while it is read, and then each by itself.

    Attributes:
        prompt: the token ids of the prompt.
        author: who reads; `CROWD` for requests of the crowd and of single agents, which share a prompt.
        requests: those that go on from these tokens.
        cache: where their keys and values are.
        rows: the rows of the cache that they have.
        num_computed: how many tokens are in the cache.
    """

    prompt: Sequence[int]
    author: Author
    requests: list[Request]
    cache: KVCache
    rows: Sequence[int]
    num_computed: int = 0

    @property
    def is_prefill(self) -> bool:
        """True while the prompt is read."""
        return self.num_computed < len(self.prompt)

    def next_tokens(self, count: int) -> Sequence[int]:
        """The next tokens to read: `count` of the prompt, or the last one of the text."""
        if self.is_prefill:
            return self.prompt[self.num_computed : self.num_computed + count]
        return self.requests[0].tokens[-1:]

    def rows_of(self, author: Author) -> Sequence[int]:
        """The rows that an author needs: of what all agents have read, an agent takes its own."""
        return self.rows if author is CROWD or self.author is not CROWD else [self.rows[author]]

    def num_shared(self, other: SequenceGroup, count: int) -> int:
        """How many of the first `count` tokens of this prompt `other` can take over; always whole blocks.

        An answer is not taken over: what was not read as a prompt has other bits.
        """
        if self.author != other.author and (self.author is not CROWD or other.author == BASE_ALONE):
            return 0
        pairs = enumerate(zip(self.prompt[:count], other.prompt, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(count, len(self.prompt), len(other.prompt)))
        return min(same, len(other.prompt) - 1) // BLOCK * BLOCK


def repack(groups: Sequence[SequenceGroup], count: int | None = None) -> None:
    """Copy the first `count` columns of groups in one cache, or all, into a cache that only these groups have."""
    if not groups:
        return
    cache = groups[0].cache.copy([row for group in groups for row in group.rows], count)
    end = 0
    for group in groups:
        group.cache = cache
        group.rows = range(end, end + len(group.rows))
        end = group.rows.stop


@dataclass(frozen=True)
class Chunk:
    """The tokens of one group in a pass.

    Attributes:
        ids: the tokens.
        start: the position of the first one in the text.
        at: where they begin in the rows of the pass.
        rows: the rows of the pass that have them, one for each of the group's.
    """

    group: SequenceGroup
    ids: Sequence[int]
    start: int
    at: int
    rows: range

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def last(self) -> int:
        """The place of the last token in its row."""
        return self.at + len(self.ids) - 1

    @property
    def is_complete(self) -> bool:
        """True if the next token is chosen after this chunk."""
        return self.end >= len(self.group.prompt)


class Chunks:
    """The tokens of a pass: a keyword argument that the model's forward passes to its layers.

    Attributes:
        prefills: the parts of prompts.
        decodes: by their cache, the last tokens of texts, and prompts of one token.
        tokens: [2, n] row and place in the pass of the token of each row of these caches, one after the other. A row
            whose text has ended reads the first token, in vain.
        living: [n'] which of these are of texts that have not ended.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.prefills: list[Chunk] = []
        self.decodes: dict[KVCache, list[Chunk]] = {}
        for chunk in chunks:
            # The last token of a longer prompt may be read alone, and needs the bits that it has beside the others.
            if chunk.group.is_prefill and len(chunk.group.prompt) > 1:
                self.prefills.append(chunk)
            else:
                self.decodes.setdefault(chunk.group.cache, []).append(chunk)
        tokens = dict[int, tuple[int, int]]()
        before = 0  # rows of the caches that come first
        for cache, alike in self.decodes.items():
            for chunk in alike:
                for cache_row, row in zip(chunk.group.rows, chunk.rows, strict=True):
                    tokens[before + cache_row] = row, chunk.at
            before += cache.rows
        found = torch.tensor([tokens.get(n, (0, 0)) for n in range(before)], dtype=torch.long)
        self.tokens = found.view(-1, 2).T.to(device, non_blocking=True)
        self.living = torch.tensor([*tokens], dtype=torch.long).to(device, non_blocking=True)
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, chunk: Chunk, window: int | None, device: torch.device) -> Tensor:
        """The mask [t', T'] for a part of a prompt, True where visible; both dimensions are whole blocks."""
        key = chunk.start, chunk.end, window
        if key not in self._masks:
            # A kernel rounds blocks of one to three rows differently, so the tokens are padded to whole blocks.
            rows = torch.arange(chunk.start, chunk.start + whole_blocks(len(chunk.ids)), device=device)[:, None]
            columns = torch.arange(whole_blocks(chunk.end), device=device)
            seen = columns <= rows
            self._masks[key] = seen & (columns > rows - window) if window else seen
        return self._masks[key]


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    chunks: Chunks | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the tokens of each text to all of its columns, these tokens included.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H. They are written to the caches.
        chunks: the texts of the pass.
        scaling: the factor of the scores; None for 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, or uses attention sinks.
    """
    if chunks is None or s_aux is not None:
        raise TypeError("attention over a cache needs `chunks`, and supports no attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    new = torch.stack([key, value])
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    device = query.device.type
    found = query.new_zeros(query.transpose(1, 2).shape)
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NO_AUTOCAST:
        for chunk in chunks.prefills:
            rows, part = slice(chunk.rows.start, chunk.rows.stop), slice(chunk.at, chunk.at + len(chunk.ids))
            held = chunk.group.cache.update(layer, chunk.start, new[:, rows, :, part])
            mask = chunks.mask(chunk, sliding_window, query.device)
            k, v = held.narrow(3, 0, mask.shape[1])
            padded = F.pad(query[rows, :, part], (0, 0, 0, mask.shape[0] - len(chunk.ids)))
            own = _attend(padded, k, v, scale, softcap, mask).narrow(2, 0, len(chunk.ids))
            found[rows, part] = own.transpose(1, 2)
        if chunks.decodes:
            row, place = chunks.tokens
            sizes = [cache.rows for cache in chunks.decodes]
            queries = query[row, :, place].split(sizes)  # of each cache [C, H, D]
            added = new[:, row, :, place].split(sizes)  # and [C, 2, G, D]
            done = []
            for (cache, alike), q, kv in zip(chunks.decodes.items(), queries, added, strict=True):
                end = alike[0].end
                first = max(0, end - sliding_window) if sliding_window else 0
                held = cache.update(layer, end - 1, kv.transpose(0, 1).unsqueeze(3))
                k, v = held.narrow(3, first, end - first)
                # The heads of a group act as several queries.
                done.append(_attend(q.unflatten(1, (k.shape[1], -1)), k, v, scale, softcap, None).flatten(1, 2))
            found[row[chunks.living], place[chunks.living]] = torch.cat(done)[chunks.living]
    return found, None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, mask: Tensor | None) -> Tensor:
    """q [R, H, t, D], k and v [R, G, T, D], mask [t, T] or None -> [R, H, t, D]."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.mT * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


# No mask is registered beside it: Transformers then makes none.
AttentionInterface.register(CACHED_ATTENTION, cached_attention)
