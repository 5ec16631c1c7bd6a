"""What all adapted layers of a base share in a pass: whose tokens they read, cast numbers, and the dropout of inputs.

Legend: K agents, P parameters of one agent, N tokens, in features of an input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from ci_llm.core.determinism import generator_for
from ci_llm.lora.settings import LoraSettings


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: autocast's if it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@dataclass
class Reading:
    """Whose tokens the inputs of all layers hold, one owner after the other. Without owners the base reads alone.

    Attributes:
        agents: the owners; at rest all agents of the crowd.
        sizes: how many tokens each owner has; None: all have equally many.
        in_storage: true if all parameters' gradients are views of the storage, as `begin_step` leaves them.
        by_onednn: true if passes without gradients compute products with frozen weights by oneDNN; see `product`.
        reordered: weights for passes without gradients, by layer; see `ReorderedWeights` in onednn.py.
        numbers: [K, P] the numbers of the adapters, in place of the crowd's weights; None: the weights.
    """

    agents: tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    in_storage: bool = False
    by_onednn: bool = False
    reordered: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    numbers: Tensor | None = None

    @contextmanager
    def of(self, agents: Sequence[int], sizes: Sequence[int] | None = None) -> Iterator[None]:
        """Read tokens of these agents inside. A backward pass that recomputes layers reads them again."""
        before = self.agents, self.sizes
        self.agents, self.sizes = tuple(agents), None if sizes is None else tuple(sizes)
        try:
            yield
        finally:
            self.agents, self.sizes = before

    def owners(self) -> Iterator[tuple[int, slice]]:
        """Yield each owner that has tokens, with their place, of owners with `sizes`."""
        sizes = self.sizes or ()
        for agent, size, end in zip(self.agents, sizes, accumulate(sizes), strict=True):
            if size:
                yield agent, slice(end - size, end)


class Casts:
    """The casts of the current forward pass; empty between passes, so that no cast is older than the weights.

    A layer that activation checkpointing recomputes in the backward pass casts for itself, to the same bits.
    """

    def __init__(self) -> None:
        self._under_way = self._is_drawn = False
        self._weights: Tensor | None = None
        self._start = 0  # where the weights begin in the storage
        self._input: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def of_pass(self, weights: Tensor, drawn: Tensor | None, dtype: torch.dtype) -> Iterator[None]:
        """Cast the weights to `dtype` for the pass inside.

        Args:
            weights: [K, P] or [1, P] the rows of the agents in the pass, views of the storage.
            drawn: a copy of these rows with masks applied, which is cast instead; None if there are none.
        """
        self._under_way, self._is_drawn, self._start = True, drawn is not None, int(weights.storage_offset())
        if drawn is not None or weights.dtype != dtype:
            self._weights = (weights if drawn is None else drawn).to(dtype)
        try:
            yield
        finally:
            self._under_way, self._weights, self._input = False, None, None

    def ready(self, view: Tensor, dtype: torch.dtype, *, is_drawn: bool) -> Tensor | None:
        """The cast of `view`, a view of the weights; None if there is none of this dtype and kind."""
        made = self._weights
        if made is None or made.dtype != dtype or self._is_drawn != is_drawn:
            return None
        return made.as_strided(view.size(), view.stride(), view.storage_offset() - self._start)

    @torch.no_grad()
    def input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast `x` to `dtype`, without a gradient; layers that read the same tensor share one cast."""
        if self._input is not None and self._input[0] is x and self._input[1].dtype == dtype:
            return self._input[1]
        cast = x.to(dtype)
        if self._under_way:
            self._input = (x, cast)
        return cast


class InputDropout:
    """Dropout of the adapters' inputs, with a probability per agent.

    Agents with settings of their own draw for themselves. Others draw together in a pass of all agents, from the global
    generator. In a pass of one agent, the agent always draws for itself, as it does alone.

    Args:
        settings: the agents' dropout, seeds and indices.

    Attributes:
        micro_step: the key of the micro-step, which a training run sets before each forward pass. Without it (None)
            all draws come from the global generator.
    """

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self.micro_step: tuple[int, ...] | None = None

    def apply(self, rows: Tensor, layer: str, owners: Sequence[tuple[int, int]], reading: Reading) -> Tensor:
        """The rows [N, in] after dropout.

        Args:
            layer: the name of the layer. With step and agent it keys the draw, so that a layer recomputed by activation
                checkpointing draws the same.
            owners: the agents whose rows they are, one after the other, each with its number of rows.
            reading: whose tokens the input of the layer holds.
        """
        if not self._settings.agents and len(reading.agents) > 1 and reading.sizes is None:
            return nn.functional.dropout(rows, self._settings.dropout)
        each = rows.detach().split([size for _, size in owners])
        masks = [self._mask(own, layer, agent) for (agent, _), own in zip(owners, each, strict=True)]
        return rows * (masks[0] if len(masks) == 1 else torch.cat(masks))

    def _mask(self, like: Tensor, layer: str, agent: int) -> Tensor:
        """0 where an input [N, in] is dropped, and 1 / (1 - share) elsewhere."""
        own = self._settings.of(agent)
        generator = None
        if self.micro_step is not None:
            generator = generator_for(own.seed, "dropout", *self.micro_step, layer, own.index, device=like.device)
        keep = 1 - own.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=generator).div_(keep)
