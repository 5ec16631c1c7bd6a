"""Keys and values of texts that are being continued, each text in columns of its own, and attention over them.

Position p of a text is column p of its `Columns`. Nothing is padded on the left and no text is as long as another, so
texts join and leave a pass at any time, and what one of them computes here does not depend on the others. A text has
memory for its own columns only, in blocks of `BLOCK`.

Legend: R rows of a pass (K agents, or 1), N its tokens, H heads, G key/value heads, T columns, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from ci_llm.lora.layer import compute_dtype

#: The name under which Transformers finds the attention of this module.
COLUMNS: Final = "ci_llm_columns"
#: What one AVX-512 register holds in fp32: sums over fewer columns are taken in another order.
BLOCK: Final = 16
_GROWTH: Final = 1.25


def whole_blocks(count: int) -> int:
    """The least multiple of `BLOCK` that is not below `count`."""
    return -(-count // BLOCK) * BLOCK


@dataclass
class Columns:
    """Keys and values of one text.

    Attributes:
        layers: by the number of the layer [2, R, G, T, D], keys first. R is 1 in layers that all agents share.
    """

    layers: dict[int, Tensor] = field(default_factory=dict)

    def extended(self, layer: int, start: int, key: Tensor, value: Tensor) -> Tensor:
        """Write columns from `start` on, [R, G, t, D] each, and return what the layer holds, at least to their end."""
        end, held = start + key.shape[2], self.layers.get(layer)
        if held is None or held.shape[3] < end:
            rows, groups, _, width = key.shape
            room = whole_blocks(max(end, int(held.shape[3] * _GROWTH) if held is not None else 0))
            grown = key.new_zeros(2, rows, groups, room, width)
            if held is not None:
                grown[:, :, :, :start] = held[:, :, :, :start]
            self.layers[layer] = held = grown
        held[0, :, :, start:end], held[1, :, :, start:end] = key, value
        return held

    def copied(self, count: int, agent: int | None = None) -> Columns:
        """The first `count` columns in memory of their own: those of all rows, or of one agent's."""

        def of(held: Tensor) -> Tensor:
            rows = slice(None) if agent is None or held.shape[1] == 1 else slice(agent, agent + 1)
            part = held[:, rows, :, :count]
            copy = part.new_zeros(*part.shape[:3], whole_blocks(count), part.shape[4])
            copy[:, :, :, :count] = part
            return copy

        return Columns({layer: of(held) for layer, held in self.layers.items()})

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(held.nbytes for held in self.layers.values())


@dataclass(frozen=True)
class Piece:
    """The tokens of one text in a pass.

    Attributes:
        columns: of the text; None: spare tokens, which nothing reads.
        start, end: positions of these tokens.
    """

    columns: Columns | None
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


class Pieces:
    """The tokens of a pass, text after text; a keyword argument of the model's forward, which the layers pass on."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.all = pieces
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, piece: Piece, window: int | None, device: torch.device) -> Tensor:
        """[t', T'] for several tokens of a prompt: True is visible. Both dimensions are whole blocks."""
        key = piece.start, piece.end, window
        if key not in self._masks:
            # A kernel rounds blocks of one to three rows differently, so the tokens are filled up to whole blocks.
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
    dropout: float = 0.0,
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
        scaling: of the scores; None: 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, or uses attention sinks.
    """
    if pieces is None or s_aux is not None:
        raise TypeError("attention over columns needs `pieces`, and supports no attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    found, at, layer = [], 0, int(module.layer_idx)  # type: ignore[arg-type]
    with torch.autocast(query.device.type, enabled=False):
        for piece in pieces.all:
            own, at = slice(at, at + piece.count), at + piece.count
            q = query[:, :, own]
            if piece.columns is None:
                found.append(torch.zeros_like(q).transpose(1, 2))
                continue
            held = piece.columns.extended(layer, piece.start, key[:, :, own], value[:, :, own])
            if piece.count == 1:
                first = max(0, piece.end - sliding_window) if sliding_window else 0
                k, v = held[:, :, :, first : piece.end]
                found.append(_one_token(q, k, v, scale, softcap).transpose(1, 2))
            else:
                mask = pieces.mask(piece, sliding_window, q.device)
                k, v = held[:, :, :, : mask.shape[1]]
                q = F.pad(q, (0, 0, 0, mask.shape[0] - piece.count))
                found.append(_attend(q, k, v, scale, softcap, mask)[:, :, : piece.count].transpose(1, 2))
    return torch.cat(found, dim=1) if len(found) > 1 else found[0], None


def _one_token(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One query [R, H, 1, D] over all of k and v [R, G, T, D]. The heads of a group are taken as so many queries."""
    grouped = q.reshape(*k.shape[:2], -1, q.shape[-1])
    return _attend(grouped, k, v, scale, softcap, None).reshape(q.shape)


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
