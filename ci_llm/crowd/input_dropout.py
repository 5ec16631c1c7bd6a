"""Dropout of the adapters' inputs: drawn together for all agents, or by each agent for itself.

Legend: K agents, N rows of activations per agent, in features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ci_llm.core.determinism import generator_for


class InputDropout:
    """Drops inputs of the adapters with a probability per agent.

    Args:
        shares: [K] the probability of dropping an input; one for all without `keys`.
        keys: [K] what keys an agent's own draws; None: one draw from the global generator serves all agents.

    Attributes:
        micro_step: what keys the draws besides, set before each forward pass of a training run; None in loops that do
            not say it: all draws then come from the global generator.
    """

    def __init__(self, shares: Sequence[float], keys: Sequence[tuple[int, int]] | None) -> None:
        self._shares, self._keys = list(shares), keys
        self.micro_step: tuple[int, ...] | None = None

    def apply(self, rows: Tensor, layer: str, first: int, spans: Sequence[slice] | None = None) -> Tensor:
        """The rows after dropout.

        Args:
            rows: [n, N, in], the rows of n agents.
            layer: name of the layer; with step and agent it keys the draw, so that activation checkpointing draws the
                same when it computes the layer again.
            first: index of the first of these agents.
            spans: [K] the tokens of each agent in `rows` [1, N, in], if agents have rows of their own.
        """
        if self._keys is None:
            return nn.functional.dropout(rows, self._shares[0])
        if spans is not None:
            given = rows.detach()[0]
            return rows * torch.cat([self._mask(given[span], layer, k) for k, span in enumerate(spans)])
        return rows * torch.stack([self._mask(own, layer, k) for k, own in enumerate(rows.detach(), first)])

    def _mask(self, like: Tensor, layer: str, agent: int) -> Tensor:
        """0 where an input [N, in] is dropped, and 1 / (1 - share) elsewhere."""
        if not self._shares[agent]:
            return torch.ones_like(like)
        assert self._keys is not None
        seed, index = self._keys[agent]
        own = None
        if self.micro_step is not None:
            own = generator_for(seed, "dropout", *self.micro_step, layer, index, device=like.device)
        keep = 1 - self._shares[agent]
        return torch.empty_like(like).bernoulli_(keep, generator=own).div_(keep)
