"""Attention over packed rows: the tokens of a row attend to their own row only.

It is registered with Transformers' attention interface under the name `PACKED`, so that no model code is changed.

Legend: R rows of the batch (the K agents), H heads, G key/value heads, N packed tokens, T tokens of one packed row,
D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from ci_llm.crowd.casting import compute_dtype

PACKED = "ci_llm_packed"
EXPLICIT_UP_TO = 320  # on a CPU the fused kernel's backward is slower than the explicit form up to about here


class Segments:
    """Where the packed rows begin and end, and the masks for their lengths, each made once per pass.

    Args:
        bounds: 0 and the end of every row, in packed tokens.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.lengths = [end - start for start, end in pairwise(bounds)]
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, length: int, window: int | None, like: Tensor) -> Tensor:
        """Additive causal mask [T, T]; with a window, a position attends to itself and `window - 1` before it."""
        key = (length, window, like.dtype, like.device)
        if key not in self._masks:
            mask = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device)
            visible = torch.ones_like(mask, dtype=torch.bool).tril()
            if window is not None:
                visible = visible.triu(1 - window)
            self._masks[key] = mask.masked_fill(visible, 0.0)
        return self._masks[key]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H.
        segments: the packed rows; a keyword argument of the model's forward, which the layers pass on.
        scaling: of the scores; None: 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, limits attention by its mask alone, or uses attention
            sinks; the trial at the start then takes the padded route.
    """
    if segments is None or s_aux is not None:  # without rows or with sinks the result would silently be wrong
        raise TypeError("packed attention needs `segments` from the model's forward, and supports no attention sinks")
    if not sliding_window and _needs_window(module):  # the rows of the trial may be shorter than the window
        raise TypeError(f"{type(module).__name__} has its window in a mask, and packed attention makes no masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Cast before the rows are taken apart, and not by autocast for every product of every row.
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return _by_rows(query, key, value, segments, scale, dropout, sliding_window, softcap), None


def _needs_window(module: torch.nn.Module) -> bool:
    """Whether this layer attends to a window or a chunk only, by its configuration."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and number is not None:
        return "sliding" in kinds[number] or "chunked" in kinds[number]
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True) is not False


def _by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """[R, N, H, D]: every packed row by itself."""
    parts = []
    for q, k, v in zip(*(x.split(segments.lengths, dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        window = sliding_window if sliding_window and sliding_window < length else None  # else it hides nothing
        explicit = softcap or (length <= EXPLICIT_UP_TO and not q.is_cuda)
        attend = _explicit if explicit else _fused
        mask = segments.mask(length, window, q) if explicit or window else None
        parts.append(attend(q, k, v, mask, scale, dropout, softcap).transpose(1, 2))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """One packed row by PyTorch's kernel: q [R, H, T, D], k and v [R, G, T, D] -> [R, H, T, D]."""
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """The same by matrix products, which also allows a soft cap, and is faster for short rows on a CPU."""
    assert mask is not None
    rows, heads, length, width = q.shape
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    flat = (rows * heads, length, width)
    q, k, v = q.reshape(flat), k.reshape(flat), v.reshape(flat)
    if softcap:
        scores = softcap * torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scale / softcap)) + mask
    else:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    # Its sums are in fp32 for 16 bits as well, and what it returns is all that the backward pass needs.
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return torch.bmm(weights, v).view(rows, heads, length, width)


# No mask is registered beside it: Transformers then makes none, and does not ask the device where rows begin.
AttentionInterface.register(PACKED, packed_attention)
