"""What is drawn for the weights of a pass of training: DropConnect masks, and noise around them.

Neither is in the weights themselves, which a save may read at any moment. A pass takes `(weights + noise) * masks`.

Legend: K agents, P parameters of one agent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.lora import LoraSettings


class DrawnWeights:
    """The masks and the noise in force; agents draw from generators of their own, keyed by seed, step and index.

    Args:
        weights: [K, P] those of the storage.
        sizes: [K] the trainable numbers of each agent; behind them a row is padding.

    Attributes:
        masks: [K, P] 0 where a weight is dropped, and 1 / (1 - share) elsewhere; None: no weight is dropped.
        noise: [K, P] what is added to the weights; None: nothing.
    """

    def __init__(self, settings: LoraSettings, weights: Tensor, sizes: Sequence[int]) -> None:
        self._settings, self._weights, self._sizes = settings, weights, sizes
        self._each = settings.each()
        self._masks_of_step = False
        self.masks: Tensor | None = None
        self.noise: Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether an agent has DropConnect."""
        return any(agent.dropconnect for agent in self._each)

    def rows(self, storage: Tensor) -> list[Tensor]:
        """The rows of `storage` [K, P] without their padding."""
        return [row[:size] for row, size in zip(storage, self._sizes, strict=True)]

    def draw_masks(self, step: int) -> bool:
        """Draw the masks of a step; returns whether their memory is another than before."""
        fresh = not self._masks_of_step
        if self.masks is None or fresh:
            self.masks, self._masks_of_step = torch.ones_like(self._weights), True
        for agent, row in zip(self._each, self.rows(self.masks), strict=True):
            if agent.dropconnect:
                keep = 1 - agent.dropconnect
                generator = generator_for(agent.seed, "dropconnect", step, agent.index)
                row.copy_(torch.empty(row.shape).bernoulli_(keep, generator=generator) / keep)
        return fresh

    def draw_masks_of_pass(self) -> bool:
        """Draw the masks of one pass from the global generator, as dropout does, unless those of a step are in force.

        Returns:
            whether they were drawn, in memory of their own: the backward pass of an earlier pass may need the old ones.
        """
        if not self.drops or self._masks_of_step:
            return False
        self.masks = torch.ones_like(self._weights)
        # Agents without settings of their own draw together, as they always did.
        own = self.rows(self.masks) if self._settings.agents else [self.masks]
        for agent, part in zip(self._settings.kinds(), own, strict=True):
            part.bernoulli_(1 - agent.dropconnect).div_(1 - agent.dropconnect)
        return True

    def draw_noise(self, step: int, spreads: Sequence[Tensor]) -> bool:
        """Draw the Gaussian noise of a step; returns whether its memory is another than before.

        Args:
            spreads: [K] the standard deviations of every agent's numbers.
        """
        fresh = self.noise is None
        if self.noise is None:
            self.noise = torch.zeros_like(self._weights)
        for agent, row, spread in zip(self._each, self.rows(self.noise), spreads, strict=True):
            generator = generator_for(agent.seed, "noise", step, agent.index)
            row.copy_(torch.empty(row.shape, dtype=row.dtype).normal_(generator=generator)).mul_(spread)
        return fresh

    def applied(self) -> Tensor | None:
        """[K, P] the weights of the pass; None: as they are in the storage."""
        if self.masks is None and self.noise is None:
            return None
        found = self._weights if self.noise is None else self._weights + self.noise
        return found if self.masks is None else found * self.masks
