"""What a forward pass casts once for all layers: the agents' weights, and an input that several layers read.

Legend: K agents, P parameters of one agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: that of autocast if it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Casts:
    """The casts of the forward pass that is under way; between passes it holds nothing.

    So no cast can be older than the weights. A layer that activation checkpointing computes again, in the backward
    pass, casts for itself, to the same bits.
    """

    def __init__(self) -> None:
        self._under_way = self._is_drawn = False
        self._weights: Tensor | None = None
        self._input: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def of_pass(self, weights: Tensor, drawn: Tensor | None, dtype: torch.dtype) -> Iterator[None]:
        """Make the weights [K, P] ready in `dtype` for the pass inside: those drawn for it, if there are any."""
        self._under_way, self._is_drawn = True, drawn is not None
        if drawn is not None or weights.dtype != dtype:
            self._weights = (weights if drawn is None else drawn).to(dtype)
        try:
            yield
        finally:
            self._under_way, self._weights, self._input = False, None, None

    def ready(self, view: Tensor, dtype: torch.dtype, *, is_drawn: bool) -> Tensor | None:
        """The numbers of `view`, a view of the weights, as the pass needs them; None if they were not made ready."""
        made = self._weights
        if made is None or made.dtype != dtype or self._is_drawn != is_drawn:
            return None
        return made.as_strided(view.size(), view.stride(), view.storage_offset())

    @torch.no_grad()
    def input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in `dtype`, without a gradient; layers that read the same tensor share one cast."""
        if self._input is not None and self._input[0] is x and self._input[1].dtype == dtype:
            return self._input[1]
        cast = x.to(dtype)
        if self._under_way:
            self._input = (x, cast)
        return cast
