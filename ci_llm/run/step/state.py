"""The state of a run beside weights and moments: plain frozen values, and the snapshots for a rollback.

A step replaces the plain values by new ones. They are the same on every process, and checkpoints hold them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.core.evaluation_file import Best, BestSteps
from ci_llm.core.measures import METRICS
from ci_llm.run.step.members import CrowdChange, History
from ci_llm.run.step.nonfinite_policy import AgentRecovery, RecoveryState


@dataclass(frozen=True)
class Validation:
    """The results of the evaluations so far: a part of the state of a run, the same on every process.

    Attributes:
        metric: what is compared: "nll" or "exact_match".
        step: the step of the last evaluation; 0: there was none.
        crowd: the best of the crowd; None before there is one.
        without_better: evaluations in a row in which the crowd did not get better.
    """

    metric: str = "nll"
    step: int = 0
    crowd: Best | None = None
    without_better: int = 0

    def after(self, step: int, crowd: float) -> Validation:
        """The state with the evaluation after `step`. Every gain makes a new best and resets the count."""
        best = self.better(step, crowd, self.crowd)
        without = 0 if best is not self.crowd else self.without_better + 1
        return replace(self, step=step, crowd=best, without_better=without)

    def better(self, step: int, value: float, best: Best | None) -> Best | None:
        """The better of a new value and the best so far. NaN is never better, and an equal value is not."""
        if math.isnan(value) or (best is not None and not self._leads(value, best.value)):
            return best
        return Best(step, value)

    def _leads(self, value: float, other: float) -> bool:
        return value > other if METRICS[self.metric].greater else value < other

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Validation:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "crowd": Best.from_dict(values["crowd"])})


@dataclass(frozen=True)
class AgentState:
    """What a run knows of one agent, beside its weights and moments.

    Attributes:
        number: its place in the configuration, which names it for good.
        skipped: the steps in which it was left out because its gradient was not finite.
        recovery: what the run does differently for it.
        best: its best evaluation in the present crowd; None before there is one.
    """

    number: int
    skipped: int = 0
    recovery: AgentRecovery = field(default_factory=AgentRecovery)
    best: Best | None = None

    @property
    def name(self) -> str:
        """The name of the agent in metrics, in the log and in checkpoints."""
        return f"agent{self.number}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AgentState:
        """The inverse of `dataclasses.asdict`."""
        recovery, best = AgentRecovery(**values["recovery"]), Best.from_dict(values["best"])
        return cls(**{**values, "recovery": recovery, "best": best})


@dataclass(frozen=True)
class TrainState:
    """The position of a run.

    Attributes:
        agents: the agents that stand in the crowd now, in its order, which is that of their numbers.
        step: optimizer steps taken; the next one is number `step`.
        samples_seen: rows consumed by all processes.
        tokens_seen: packed tokens consumed by all processes.
        rows_per_step: rows of one optimizer step over all processes, fixed at step 1 for the whole run.
        recovery: what the run does differently because of faults.
        loss_scale: the factor on fp16 losses; None in every other precision.
        clean_steps: steps since the last overflow or the last growth of the loss scale.
        validation: what the evaluations have shown so far.
        history: how the crowd has changed, and will change.
    """

    agents: tuple[AgentState, ...] = ()
    step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    rows_per_step: int = 0
    recovery: RecoveryState = field(default_factory=RecoveryState)
    loss_scale: float | None = None
    clean_steps: int = 0
    validation: Validation = field(default_factory=Validation)
    history: History = field(default_factory=History)

    @classmethod
    def of_agents(cls, count: int, **values: Any) -> TrainState:
        """The state of so many agents."""
        return cls(tuple(AgentState(number) for number in range(count)), **values)

    @property
    def numbers(self) -> list[int]:
        """The number of every agent."""
        return [agent.number for agent in self.agents]

    @property
    def names(self) -> list[str]:
        """The names of the agents, as metrics, the log and checkpoints have them."""
        return [agent.name for agent in self.agents]

    def lr_factor(self, agent: int) -> float:
        """The factor on the scheduled learning rate of an agent; exactly 1 in a run without faults."""
        return self.recovery.requested_lr_factor * self.agents[agent].recovery.lr_factor

    @property
    def best_note(self) -> str:
        """The end of the line about an evaluation if this step is the best one; else empty."""
        if self.validation.best_step != self.step:
            return ""
        return "; best of this crowd" if self.history.made else "; best yet"

    @property
    def agent_steps(self) -> int:
        """Optimizer steps taken, counted for every agent that took them: they compare runs of different crowds."""
        return self.history.agent_steps + (self.step - self.history.since) * len(self.agents)

    def objection(self, change: CrowdChange, dropped: Collection[int] = ()) -> str | None:
        """Why a change that somebody asks for cannot be made; None if it can.

        Args:
            dropped: numbers of the agents that take no steps any more.
        """
        if later := [each.step for each in self.history.planned if each.step > change.step]:
            return f"an earlier attempt was asked for changes, the last after step {max(later)}: ask again then"
        if change.agent not in self.numbers:
            return f"there is no agent{change.agent}: there are {', '.join(self.names)}"
        if {*self.numbers} <= {change.agent, *dropped}:
            return f"agent{change.agent} is the only agent that trains"
        return None

    def with_planned(self, changes: Sequence[CrowdChange]) -> TrainState:
        """The state with more changes of the crowd to come."""
        return replace(self, history=self.history.with_planned(changes))

    def after_changes(self) -> TrainState:
        """The state after the changes of the crowd that are due; the search for its best step begins again."""
        due, history = self.history.due(self.step), self.history
        if not due:
            return self
        stopped = {change.agent for change in due}
        return replace(
            self,
            agents=tuple(replace(each, best=None) for each in self.agents if each.number not in stopped),
            history=History(self.step, self.agent_steps, history.planned[len(due) :], (*history.made, *due)),
            validation=Validation(self.validation.metric, self.validation.step),
        )

    def advance(self, samples: int, tokens: int, left_out: Sequence[int], overflowed: Sequence[int] = ()) -> TrainState:
        """The state after one optimizer step over `samples` rows.

        Args:
            left_out: agents that did not move.
            overflowed: the agents among them for which the loss scale was too large.
        """
        moved = replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + tokens,
            agents=tuple(replace(each, skipped=each.skipped + (k in left_out)) for k, each in enumerate(self.agents)),
        )
        return moved if self.loss_scale is None else moved._rescaled(self.loss_scale, overflow=bool(overflowed))

    def _rescaled(self, scale: float, overflow: bool) -> TrainState:
        """The state with the next loss scale: halved on overflow, doubled after 2000 clean steps, as by GradScaler."""
        if overflow:
            return replace(self, loss_scale=scale / 2, clean_steps=0)
        if self.clean_steps + 1 >= 2000:
            return replace(self, loss_scale=scale * 2, clean_steps=0)
        return replace(self, clean_steps=self.clean_steps + 1)

    def evaluated(self, crowd: float, agents: Sequence[float]) -> TrainState:
        """The state with the evaluation after the present step; an evaluation counts once."""
        if self.validation.step == self.step:
            return self
        better = self.validation.better
        return replace(
            self,
            validation=self.validation.after(self.step, crowd),
            agents=tuple(
                replace(each, best=better(self.step, value, each.best))
                for each, value in zip(self.agents, agents, strict=True)
            ),
        )

    def judged_by(self, metric: str) -> TrainState:
        """The state of a run that searches for its best step by this metric; by another one than before, anew."""
        if metric == self.validation.metric:
            return self
        return replace(
            self, validation=Validation(metric), agents=tuple(replace(each, best=None) for each in self.agents)
        )

    @property
    def best_steps(self) -> BestSteps:
        """The best evaluations of the crowd and of each agent."""
        return BestSteps(self.validation.metric, self.validation.crowd, tuple(each.best for each in self.agents))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        rebuilt = {
            "agents": tuple(AgentState.from_dict(each) for each in values["agents"]),
            "recovery": RecoveryState.from_dict(values["recovery"]),
            "validation": Validation.from_dict(values["validation"]),
            "history": History.from_dict(values["history"]),
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
