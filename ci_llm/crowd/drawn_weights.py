"""What is drawn for the weights of a pass of training: DropConnect masks, and noise around them.

Neither is in the weights themselves, which a save may read at any moment. A pass takes `(weights + noise) * masks`.

Legend: K agents, P parameters of one agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.lora import LoraSettings


class DrawnWeights:
    """The masks and the noise in force; agents draw from generators of their own, keyed by seed, step and index.

    Args:
        weights: [K, P] those of the storage.
        sizes: [K] the trainable numbers of each agent; behind them a row is padding.
        on_new_memory: called when masks or noise have got other memory, before anything is drawn into it.

    Attributes:
        masks: [K, P] 0 where a weight is dropped, and 1 / (1 - share) elsewhere; None: no weight is dropped.
        noise: [K, P] what is added to the weights; None: nothing.
    """

    def __init__(
        self, settings: LoraSettings, weights: Tensor, sizes: Sequence[int], on_new_memory: Callable[[], None]
    ) -> None:
        self._settings, self._weights, self._sizes = settings, weights, sizes
        self._each, self._on_new_memory = settings.each(), on_new_memory
        self._masks_of_step = False
        self.masks: Tensor | None = None
        self.noise: Tensor | None = None

    def draw_masks(self, step: int) -> None:
        """Draw the DropConnect masks of a step, if there are any."""
        if not self._drops:
            return
        if self.masks is None or not self._masks_of_step:
            self.masks, self._masks_of_step = torch.ones_like(self._weights), True
            self._on_new_memory()
        for agent, row in zip(self._each, self._own(self.masks), strict=True):
            if agent.dropconnect:
                keep = 1 - agent.dropconnect
                generator = generator_for(agent.seed, "dropconnect", step, agent.index)
                row.copy_(torch.empty(row.shape).bernoulli_(keep, generator=generator) / keep, non_blocking=True)

    def draw_masks_of_pass(self) -> None:
        """Draw the masks of one pass from the global generator, as dropout does, unless those of a step are in force.

        They are in memory of their own, because the backward pass of an earlier pass may need the old ones.
        """
        if not self._drops or self._masks_of_step:
            return
        self.masks = torch.ones_like(self._weights)
        # Agents without settings of their own draw together, as they always did.
        own = self._own(self.masks) if self._settings.agents else [self.masks]
        for agent, part in zip(self._settings.kinds(), own, strict=True):
            part.bernoulli_(1 - agent.dropconnect).div_(1 - agent.dropconnect)
        self._on_new_memory()

    def draw_noise(self, step: int, spreads: Sequence[Tensor]) -> list[Tensor]:
        """Draw the Gaussian noise of a step.

        Args:
            spreads: [K] the standard deviations of every agent's numbers.

        Returns:
            [K] the noise of every agent.
        """
        if self.noise is None:
            self.noise = torch.zeros_like(self._weights)
            self._on_new_memory()
        rows = self._own(self.noise)
        for agent, row, spread in zip(self._each, rows, spreads, strict=True):
            generator = generator_for(agent.seed, "noise", step, agent.index, device=row.device)
            row.normal_(generator=generator).mul_(spread)
        return rows

    def applied(self) -> Tensor | None:
        """[K, P] the weights of the pass; None: as they are in the storage."""
        if self.masks is None and self.noise is None:
            return None
        found = self._weights if self.noise is None else self._weights + self.noise
        return found if self.masks is None else found * self.masks

    @property
    def _drops(self) -> bool:
        return any(agent.dropconnect for agent in self._each)

    def _own(self, storage: Tensor) -> list[Tensor]:
        return [row[:size] for row, size in zip(storage, self._sizes, strict=True)]
