"""The state of a run beside weights and moments: plain frozen values, and the snapshots for a rollback.

A step replaces the plain values by new ones. They are the same on every process, and checkpoints hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.core.scores import METRICS
from ci_llm.run.step.members import Members
from ci_llm.run.step.nonfinite_policy import RecoveryState


@dataclass(frozen=True)
class Best:
    """The best value of the crowd or of one agent, and the optimizer step after which it was measured."""

    step: int
    value: float


@dataclass(frozen=True)
class Validation:
    """The results of the evaluations so far: a part of the state of a run, the same on every process.

    Attributes:
        metric: what is compared: "nll" or "exact_match".
        step: the step of the last evaluation; 0: there was none.
        crowd, agents: the best of the crowd, and of each agent alone; None before there is one.
        without_better: evaluations in a row in which the crowd did not get better.
    """

    metric: str = "nll"
    step: int = 0
    crowd: Best | None = None
    agents: tuple[Best | None, ...] = ()
    without_better: int = 0

    def after(self, step: int, crowd: float, agents: Sequence[float]) -> Validation:
        """The state with the evaluation after `step`.

        Every gain makes a new best and resets the count. NaN is never better.
        """
        lead = self._lead(crowd, self.crowd)
        known = self.agents or (None,) * len(agents)
        return Validation(
            metric=self.metric,
            step=step,
            crowd=Best(step, crowd) if lead > 0 else self.crowd,
            agents=tuple(
                Best(step, value) if self._lead(value, best) > 0 else best
                for value, best in zip(agents, known, strict=True)
            ),
            without_better=0 if lead > 0 else self.without_better + 1,
        )

    def _lead(self, value: float, best: Best | None) -> float:
        """By how much `value` is better than the best so far; infinite for the first number, NaN for NaN."""
        if best is None:
            return value if math.isnan(value) else math.inf
        return value - best.value if METRICS[self.metric].greater else best.value - value

    @property
    def best_step(self) -> int | None:
        """The step after which the crowd was best; None before its first evaluation."""
        return self.crowd.step if self.crowd else None

    def described(self) -> str:
        """The state in words."""
        if self.crowd is None:
            return f"no evaluation has given the crowd a {self.metric} yet"
        later = f", no gain in the last {self.without_better} evaluation(s)" if self.without_better else ""
        return f"best crowd by {self.metric} {self.crowd.value:.4f} after step {self.crowd.step}{later}"

    def record(self) -> dict[str, Any]:
        """`best` of evaluation.json."""
        return {
            "metric": self.metric,
            "crowd": self.crowd and asdict(self.crowd),
            "agents": [best and asdict(best) for best in self.agents],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Validation:
        """The inverse of `dataclasses.asdict`."""
        agents = tuple(_best(best) for best in values["agents"])
        return cls(**{**values, "crowd": _best(values["crowd"]), "agents": agents})


def _best(values: Mapping[str, Any] | None) -> Best | None:
    return None if values is None else Best(**values)


@dataclass(frozen=True)
class TrainState:
    """The position of a run.

    Attributes:
        step: optimizer steps taken; the next one is number `step`.
        samples_seen: rows consumed by all processes.
        tokens_seen: packed tokens consumed by all processes.
        rows_per_step: rows of one optimizer step over all processes, fixed at step 1 for the whole run.
        skipped: per agent, the number of steps in which it was left out because its gradient was not finite.
        recovery: what the run does differently because of faults.
        loss_scale: the factor on fp16 losses; None in every other precision.
        clean_steps: steps since the last overflow or the last growth of the loss scale.
        validation: what the evaluations have shown so far.
        members: the members of the crowd; None: the agents of the configuration, from the first step on.
    """

    step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    rows_per_step: int = 0
    skipped: tuple[int, ...] = ()
    recovery: RecoveryState = field(default_factory=RecoveryState)
    loss_scale: float | None = None
    clean_steps: int = 0
    validation: Validation = field(default_factory=Validation)
    members: Members | None = None

    @property
    def names(self) -> list[str]:
        """The names of the agents, as metrics, the log and checkpoints have them."""
        return self.members.folders if self.members else [f"agent{k}" for k in range(len(self.skipped))]

    @property
    def best_note(self) -> str:
        """The end of the line about an evaluation if this step is the best one; else empty."""
        if self.validation.best_step != self.step:
            return ""
        return "; best of this crowd" if self.members and self.members.made else "; best yet"

    @property
    def agent_steps(self) -> int:
        """Optimizer steps taken, counted for every agent that took them: they compare runs of different crowds."""
        return self.members.agent_steps_at(self.step) if self.members else self.step * len(self.skipped)

    def with_members(self, members: Members, kept: Sequence[int]) -> TrainState:
        """The state of a crowd from which agents have left; the search for its best step begins again.

        Args:
            kept: the places of those that stay.
        """
        return replace(
            self,
            members=members,
            skipped=tuple(self.skipped[place] for place in kept),
            recovery=replace(self.recovery, agents=tuple(self.recovery.agents[place] for place in kept)),
            validation=Validation(self.validation.metric, self.validation.step),
        )

    def advance(self, samples: int, tokens: int, left_out: Sequence[int], overflowed: Sequence[int] = ()) -> TrainState:
        """The state after one optimizer step over `samples` rows.

        Args:
            left_out: agents that did not move.
            overflowed: the agents among them for which the loss scale was too large.
        """
        skipped = tuple(n + (k in left_out) for k, n in enumerate(self.skipped))
        moved = replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + tokens,
            skipped=skipped,
        )
        return moved if self.loss_scale is None else moved._rescaled(self.loss_scale, overflow=bool(overflowed))

    def _rescaled(self, scale: float, overflow: bool) -> TrainState:
        """The state with the next loss scale: halved on overflow, doubled after 2000 clean steps, as by GradScaler."""
        if overflow:
            return replace(self, loss_scale=scale / 2, clean_steps=0)
        if self.clean_steps + 1 >= 2000:
            return replace(self, loss_scale=scale * 2, clean_steps=0)
        return replace(self, clean_steps=self.clean_steps + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the keys of train_state.json."""
        members = self.members and self.members.to_dict()
        return asdict(self) | {"skipped": [*self.skipped], "recovery": self.recovery.to_dict(), "members": members}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """The inverse of `to_dict`."""
        rebuilt = {
            "skipped": tuple(values["skipped"]),
            "recovery": RecoveryState.from_dict(values["recovery"]),
            "validation": Validation.from_dict(values["validation"]),
            "members": values["members"] and Members.from_dict(values["members"]),
        }
        return cls(**{**values, **rebuilt})


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
