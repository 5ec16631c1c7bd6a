"""The last good state of every agent, in memory: weights and moments, copied every few steps while it is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

#: Steps between two copies. A copy costs what the optimizer's step costs; what is lost is at most so many steps.
EVERY_STEPS: Final = 20


@dataclass
class _Kept:
    """One agent's state after so many steps; no moments before the optimizer's first step."""

    step: int
    weights: Tensor
    moments: dict[str, Tensor]


class LastGood:
    """Where each agent can be set back to. On the device, so that neither way waits for it.

    Args:
        rows: [P] parameters, one per agent.
        optimizer: whose state of a row are its moments.
    """

    def __init__(self, rows: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._rows, self._optimizer = rows, optimizer
        self._kept: dict[int, _Kept] = {}

    def keep(self, agent: int, step: int) -> None:
        """Copy the agent as it is after `step` steps, over the copy before."""
        row = self._rows[agent]
        weights, moments = row.detach(), self._optimizer.state.get(row, {})
        old = self._kept.get(agent)
        if old is None or old.moments.keys() != moments.keys():
            copies = {name: tensor.clone() for name, tensor in moments.items()}
            self._kept[agent] = _Kept(step, weights.clone(), copies)
            return
        old.step = step
        old.weights.copy_(weights)
        for name, tensor in moments.items():
            old.moments[name].copy_(tensor)

    def begin(self, step: int) -> None:
        """Copy every agent of which there is no copy: an attempt can be set back to its start at least."""
        for agent in range(len(self._rows)):
            if agent not in self._kept:
                self.keep(agent, step)

    def keep_where_due(self, step: int, well: Sequence[int]) -> None:
        """Copy these agents if it is time."""
        for agent in well if step % EVERY_STEPS == 0 else ():
            self.keep(agent, step)

    def set_back(self, agent: int) -> int:
        """Make the agent what it was; returns the number of steps it had taken then."""
        kept, row = self._kept[agent], self._rows[agent]
        row.data.copy_(kept.weights)
        self._optimizer.state.pop(row, None)
        if kept.moments:
            self._optimizer.state[row] = {name: tensor.clone() for name, tensor in kept.moments.items()}
        return kept.step

    def state_of(self, agent: int) -> dict[str, Any]:
        """The copy of one agent, for a checkpoint."""
        kept = self._kept[agent]
        return {"step": kept.step, "weights": kept.weights, "moments": kept.moments}

    def load(self, agent: int, state: Mapping[str, Any]) -> None:
        """The inverse of `state_of`."""
        row = self._rows[agent]
        moments = {name: t.to(row.device) if name == "step" else t.to(row) for name, t in state["moments"].items()}
        self._kept[agent] = _Kept(state["step"], state["weights"].to(row), moments)
