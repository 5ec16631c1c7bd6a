"""The last good state of each agent: weights and moments, to which an agent that is not finite is rolled back.

Legend: P numbers of an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

#: Steps between two copies, and so the most that a rollback loses. A copy costs as much as the optimizer's step.
EVERY_STEPS: Final = 20


@dataclass
class _Snapshot:
    """The state of one agent after `step` steps; it has no moments before the optimizer's first step."""

    step: int
    weights: Tensor
    moments: dict[str, Tensor]


class LastGood:
    """The snapshots to which agents can be rolled back: weights and moments, copied every few steps while finite.

    They lie in the memory of the device, so that a copy waits for no transfer.

    Args:
        rows: the weights, a parameter [P] for each agent.
        optimizer: holds the moments of an agent as its state of that parameter.
    """

    def __init__(self, rows: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._rows, self._optimizer = rows, optimizer
        self._snapshots: dict[int, _Snapshot] = {}

    def keep_agents(self, rows: Sequence[nn.Parameter], kept: Sequence[int]) -> None:
        """Continue with the agents at these places, whose weights are `rows` now."""
        self._rows = rows
        self._snapshots = {k: self._snapshots[place] for k, place in enumerate(kept) if place in self._snapshots}

    def keep(self, agent: int, step: int) -> None:
        """Copy the agent as it is after `step` steps, into the place of the copy before."""
        row = self._rows[agent]
        weights, moments = row.detach(), self._optimizer.state.get(row, {})
        old = self._snapshots.get(agent)
        if old is None or old.moments.keys() != moments.keys():
            copies = {name: tensor.clone() for name, tensor in moments.items()}
            self._snapshots[agent] = _Snapshot(step, weights.clone(), copies)
            return
        old.step = step
        old.weights.copy_(weights)  # into the memory it has: a new allocation every 20 steps would fragment a GPU's
        for name, tensor in moments.items():
            old.moments[name].copy_(tensor)

    def begin(self, step: int) -> None:
        """Copy every agent that has no snapshot, so that a rollback is possible from the first step on."""
        for agent in range(len(self._rows)):
            if agent not in self._snapshots:
                self.keep(agent, step)

    def keep_if_due(self, step: int, finite: Iterable[int]) -> None:
        """Copy these agents if `step` is one for copies."""
        for agent in finite if step % EVERY_STEPS == 0 else ():
            self.keep(agent, step)

    def roll_back(self, agent: int) -> int:
        """Give the agent the weights and moments of its snapshot; returns the step of the snapshot."""
        kept, row = self._snapshots[agent], self._rows[agent]
        row.data.copy_(kept.weights)
        self._optimizer.state.pop(row, None)
        if kept.moments:
            self._optimizer.state[row] = {name: tensor.clone() for name, tensor in kept.moments.items()}
        return kept.step

    def state_of(self, agents: Iterable[int]) -> dict[str, Any]:
        """The snapshots of these agents, for a checkpoint."""
        snapshots = {f"agent{k}": self._snapshots[k] for k in agents}
        return {name: {"step": s.step, "weights": s.weights, "moments": s.moments} for name, s in snapshots.items()}

    def load(self, agents: Iterable[int], saved: Mapping[str, Any]) -> None:
        """The inverse of `state_of`."""
        for k in agents:
            row, state = self._rows[k], saved[f"agent{k}"]
            moments = placed(state["moments"], row, self._optimizer)
            self._snapshots[k] = _Snapshot(state["step"], state["weights"].to(row), moments)


def placed(moments: Mapping[str, Tensor], row: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The saved moments of an agent, with the dtype and device of its weights `row`.

    The step counter stays an fp32 scalar. As in torch's `load_state_dict` it is on the CPU unless the optimizer is
    fused: a plain AdamW reads it in every step, which would wait for a GPU.
    """
    place_of_step = row.device if optimizer.defaults.get("fused") else torch.device("cpu")
    return {name: tensor.to(place_of_step) if name == "step" else tensor.to(row) for name, tensor in moments.items()}
