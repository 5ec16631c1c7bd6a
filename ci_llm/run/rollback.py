"""The last good state of every agent, in memory: weights and moments, copied every few steps while they are finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.run.members import OldPlaces

#: Steps between two copies. A copy costs as much as the optimizer's step; a rollback loses at most this many steps.
EVERY_STEPS: Final = 20


@dataclass
class _Snapshot:
    """One agent's state after `step` steps; no moments before the optimizer's first step."""

    step: int
    weights: Tensor
    moments: dict[str, Tensor]


class LastGood:
    """The snapshot to which each agent can be rolled back. It lies on the device: a copy waits for no transfer.

    Args:
        rows: [P] parameters, one per agent.
        optimizer: its state of a row holds the agent's moments.
    """

    def __init__(self, rows: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._rows, self._optimizer = rows, optimizer
        self._snapshots: dict[int, _Snapshot] = {}

    def replace_agents(self, rows: Sequence[nn.Parameter], sources: OldPlaces) -> None:
        """Go on with the rows of a crowd that has changed."""
        before, self._rows = self._snapshots, rows
        known = {k: before[source] for k, source in enumerate(sources) if source is not None and source in before}
        self._snapshots = {
            k: _Snapshot(s.step, s.weights.clone(), {name: tensor.clone() for name, tensor in s.moments.items()})
            for k, s in known.items()
        }

    def keep(self, agent: int, step: int) -> None:
        """Copy the agent as it is after `step` steps, over the copy before."""
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
        """Give the agent the weights and moments of its snapshot; returns the number of steps it had taken then."""
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

    def load(self, agents: Iterable[int], saved: Mapping[str, Any], *, with_moments: bool = True) -> None:
        """The inverse of `state_of`; without moments if they are those of another optimizer."""
        for k in agents:
            row, state = self._rows[k], saved[f"agent{k}"]
            found = state["moments"] if with_moments else {}
            moments = placed(found, row, self._optimizer)
            self._snapshots[k] = _Snapshot(state["step"], state["weights"].to(row), moments)


def placed(moments: Mapping[str, Tensor], row: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An agent's saved moments where the optimizer keeps those of the weights `row`.

    The step counter stays an fp32 scalar, on the CPU unless the optimizer is fused, as in torch's `load_state_dict`: a
    plain AdamW reads its number in every step, which would wait for a GPU.
    """
    on_device = optimizer.defaults.get("fused")
    return {
        name: tensor.to(row) if name != "step" else tensor.to(row.device if on_device else "cpu")
        for name, tensor in moments.items()
    }
