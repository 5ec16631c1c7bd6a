"""The cache of keys and values of texts that a decoder writes, and attention over them.

Position p of a text is column p of its `Columns`. Texts that follow one prompt grow in step: they lie in the rows of
the same `Columns`, and one call attends for all of them, as it would for each. Texts of different lengths need no
padding, so they join and leave a pass at any time, and their numbers here do not depend on other texts.

Legend: R rows of a pass (K agents, or 1), N its tokens, n texts with one new token each, or R times as many, H heads, G
key/value heads, T columns in blocks of `BLOCK`, C rows of columns, D width of a head.
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

from ci_llm.lora.reading import compute_dtype

#: The name under which Transformers finds the attention of this module.
COLUMNS: Final = "ci_llm_columns"
#: How many fp32 numbers one AVX-512 register holds: sums over fewer columns have another order.
BLOCK: Final = 16
_GROWTH: Final = 1.25
_PLAIN: Final = nullcontext()


def whole_blocks(count: int) -> int:
    """The least multiple of `BLOCK` that is not below `count`."""
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False)
class Columns:
    """The keys and values of texts of equal length.

    Attributes:
        rows: C. A text has one row, or one for each agent.
        layers: for each layer number [2, C, G, T, D], keys first.
    """

    rows: int
    layers: dict[int, Tensor] = field(default_factory=dict)

    def extended(self, layer: int, start: int, new: Tensor) -> Tensor:
        """Write columns [2, C, G, t, D] from `start` on, and return all columns of the layer."""
        _, rows, groups, count, width = new.shape
        end, held = start + count, self.layers.get(layer)
        if held is None or held.shape[3] < end:
            room = whole_blocks(max(end, int(held.shape[3] * _GROWTH) if held is not None else 0))
            grown = new.new_zeros(2, rows, groups, room, width)
            if held is not None:
                grown[:, :, :, :start] = held[:, :, :, :start]
            self.layers[layer] = held = grown
        held.narrow(3, start, count).copy_(new)
        return held

    def copied(self, rows: Sequence[int], count: int | None = None) -> Columns:
        """A copy of the first `count` columns of these rows, or of all; a row may be named several times."""
        copies, places = {}, dict[torch.device, Tensor]()  # the host waits once for each device
        for layer, held in self.layers.items():
            if held.device not in places:
                places[held.device] = torch.tensor(rows, device=held.device)
            part = held[:, :, :, :count].index_select(1, places[held.device])
            copies[layer] = F.pad(part, (0, 0, 0, -part.shape[3] % BLOCK))
        return Columns(len(rows), copies)


@dataclass(frozen=True)
class Piece:
    """The tokens of one text in a pass.

    Attributes:
        columns: where the text lies.
        own: the rows of the columns that it has.
        start, end: the positions of these tokens in the text.
        at: where they begin in the rows of the pass.
        rows: the rows of the pass that have them, one for each of `own`.
    """

    columns: Columns
    own: Sequence[int]
    start: int
    end: int
    at: int
    rows: range

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def last(self) -> int:
        """The place of the last token in its row."""
        return self.at + self.count - 1


class Pieces:
    """The tokens of a pass: a keyword argument that the model's forward passes to its layers.

    Attributes:
        long: the pieces of several tokens, which are parts of prompts.
        together: by their columns, the pieces of one token.
        tokens: [2, n] row and place in the pass of the token of each row of these columns, one after the other. A row
            whose text has ended reads the first token, in vain.
        going_on: [n'] which of these are of texts that have not ended.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.long = [piece for piece in pieces if piece.count > 1]
        self.together: dict[Columns, list[Piece]] = {}
        for piece in pieces:
            if piece.count == 1:
                self.together.setdefault(piece.columns, []).append(piece)
        tokens, before = dict[int, tuple[int, int]](), 0
        for columns, alike in self.together.items():
            tokens |= {before + own: (row, p.at) for p in alike for own, row in zip(p.own, p.rows, strict=True)}
            before += columns.rows
        found = torch.tensor([tokens.get(n, (0, 0)) for n in range(before)], dtype=torch.long)
        self.tokens = found.view(-1, 2).T.to(device, non_blocking=True)
        self.going_on = torch.tensor([*tokens], dtype=torch.long).to(device, non_blocking=True)
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, piece: Piece, window: int | None, device: torch.device) -> Tensor:
        """The mask [t', T'] for several tokens of a prompt, True where visible; both dimensions are whole blocks."""
        key = piece.start, piece.end, window
        if key not in self._masks:
            # A kernel rounds blocks of one to three rows differently, so the tokens are padded to whole blocks.
            rows = torch.arange(piece.start, piece.start + whole_blocks(piece.count), device=device)[:, None]
            columns = torch.arange(whole_blocks(piece.end), device=device)
            seen = columns <= rows
            self._masks[key] = seen & (columns > rows - window) if window else seen
        return self._masks[key]


def column_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pieces: Pieces | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the tokens of each text to all of its columns, these tokens included.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H. They are written to the columns.
        pieces: the texts of the pass.
        scaling: the factor of the scores; None for 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, or uses attention sinks.
    """
    if pieces is None or s_aux is not None:
        raise TypeError("attention over columns needs `pieces`, and supports no attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    new, layer = torch.stack([key, value]), int(module.layer_idx)  # type: ignore[arg-type]
    found = query.new_zeros(query.transpose(1, 2).shape)
    with torch.autocast(query.device.type, enabled=False) if torch.is_autocast_enabled(query.device.type) else _PLAIN:
        for piece in pieces.long:
            part = slice(piece.rows.start, piece.rows.stop), slice(None), slice(piece.at, piece.at + piece.count)
            held = piece.columns.extended(layer, piece.start, new[(slice(None), *part)])
            mask = pieces.mask(piece, sliding_window, query.device)
            k, v = held.narrow(3, 0, mask.shape[1])
            padded = F.pad(query[part], (0, 0, 0, mask.shape[0] - piece.count))
            own = _attend(padded, k, v, scale, softcap, mask).narrow(2, 0, piece.count)
            found[part[0], part[2]] = own.transpose(1, 2)
        if not pieces.together:
            return found, None
        (rows, places), sizes, done = pieces.tokens, [columns.rows for columns in pieces.together], []
        # For each of the columns [C, H, D] and [2, C, G, D].
        each = zip(query[rows, :, places].split(sizes), new[:, rows, :, places].split(sizes), strict=True)
        for (columns, alike), (q, added) in zip(pieces.together.items(), each, strict=True):
            end = alike[0].end
            first = max(0, end - sliding_window) if sliding_window else 0
            held = columns.extended(layer, end - 1, added.transpose(0, 1).unsqueeze(3))
            k, v = held.narrow(3, first, end - first)
            # The heads of a group act as so many queries.
            done.append(_attend(q.unflatten(1, (k.shape[1], -1)), k, v, scale, softcap, None).flatten(1, 2))
        found[rows[pieces.going_on], places[pieces.going_on]] = torch.cat(done)[pieces.going_on]
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
AttentionInterface.register(COLUMNS, column_attention)
