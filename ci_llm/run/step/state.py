"""The state of a run beside weights and moments: plain frozen values, the same on every process, in every checkpoint.

A step replaces them by new ones, and pure functions say how. So a resume builds the crowd of its checkpoint and makes
the changes of the crowd that follow at the same steps.

The response to an agent that is not finite escalates. It is left out of the step, and its learning rate is cut. After
`MAX_IN_A_ROW` nonfinite steps in a row it is rolled back to its last good snapshot. After as many more in the same
episode, the attempt ends. An agent with rows of its own keeps its rate until it is rolled back, because its rows, which
only it has read, are the more probable cause. If every agent is nonfinite in a step, the batch is the probable cause:
it is skipped for good. After `MAX_IN_A_ROW` such steps in a row the weights are, and the attempt ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Final

from pydantic import TypeAdapter

from ci_llm.core.evaluation_file import Best
from ci_llm.core.measures import METRICS
from ci_llm.core.run_folder import GOOD_AFTER_STEPS, BadBatch


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
        sign = 1 if METRICS[self.metric].greater else -1
        if math.isnan(value) or (best is not None and sign * value <= sign * best.value):
            return best
        return Best(step, value)

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


#: The smallest factor to which cuts reduce an agent's learning rate. Below it, an agent that is nonfinite now and then
#: would stop moving.
LEAST_LR_FACTOR: Final = 0.01


#: A nonfinite step divides the agent's learning rate by it, as in safe_train.py.
LR_DIVISOR: Final = 1.5
#: One or two nonfinite steps in a row are a bad batch; this many are not.
MAX_IN_A_ROW: Final = 5


@dataclass(frozen=True)
class AgentRecovery:
    """The recovery state of one agent.

    An episode lasts from a nonfinite step to `GOOD_AFTER_STEPS` finite ones in a row.

    Attributes:
        lr_factor: multiplies the agent's scheduled learning rate; nonfinite steps cut it.
        nonfinite_in_a_row: nonfinite steps without a finite one between them, since the last rollback.
        episode_start: steps taken before the first nonfinite step of the episode; None outside of one.
        finite_in_a_row: finite steps since the last nonfinite one of the episode.
        rolled_back: the agent was rolled back in this episode.
        rollbacks: rollbacks in the whole run.
    """

    lr_factor: float = 1.0
    nonfinite_in_a_row: int = 0
    episode_start: int | None = None
    finite_in_a_row: int = 0
    rolled_back: bool = False
    rollbacks: int = 0

    def after(self, step: int, nonfinite: bool, *, own_rows: bool = False) -> AgentRecovery:
        """The state after the 0-based `step`. The agent must not be exhausted.

        Args:
            own_rows: each agent has rows of its own in a step.
        """
        if nonfinite:
            return self._after_nonfinite_step(step, own_rows)
        if self.episode_start is None:
            return self
        finite = self.finite_in_a_row + 1
        if finite >= GOOD_AFTER_STEPS:
            return AgentRecovery(lr_factor=self.lr_factor, rollbacks=self.rollbacks)
        return replace(self, nonfinite_in_a_row=0, finite_in_a_row=finite)

    def _after_nonfinite_step(self, step: int, own_rows: bool) -> AgentRecovery:
        in_a_row = self.nonfinite_in_a_row + 1
        spared = own_rows and in_a_row < MAX_IN_A_ROW and not self.rolled_back
        worse = replace(
            self,
            lr_factor=self.lr_factor if spared else max(self.lr_factor / LR_DIVISOR, LEAST_LR_FACTOR),
            nonfinite_in_a_row=in_a_row,
            episode_start=step if self.episode_start is None else self.episode_start,
            finite_in_a_row=0,
        )
        if in_a_row < MAX_IN_A_ROW or self.rolled_back:
            return worse
        return replace(worse, nonfinite_in_a_row=0, rolled_back=True, rollbacks=self.rollbacks + 1)

    @property
    def is_exhausted(self) -> bool:
        """True if no response is left inside the run."""
        return self.rolled_back and self.nonfinite_in_a_row >= MAX_IN_A_ROW


@dataclass(frozen=True)
class RecoveryState:
    """What a run does differently because of faults. It is part of checkpoints, and never changes the configuration.

    Attributes:
        bad_batches: steps that are skipped without being computed, ascending.
        bad_batches_in_a_row: bad batches since the last other step. A step in which all agents overflow is another
            step: the loss scale is halved, so overflows stop by themselves.
        requested_lr_factor: multiplies the learning rate of every agent; the supervisor asks for it.
        micro_batch_size: the most rows per process and micro-step; None: as configured.
        parts_of_group: in how many parts the completions of a prompt take their passes.
        recompute: layers are recomputed in the backward pass, whatever is configured.
        pass_per_agent: every agent takes passes of its own, whatever is configured.
    """

    bad_batches: tuple[BadBatch, ...] = ()
    bad_batches_in_a_row: int = 0
    requested_lr_factor: float = 1.0
    micro_batch_size: int | None = None
    parts_of_group: int = 1
    recompute: bool = False
    pass_per_agent: bool = False

    def limit(self, batch_size: int) -> int:
        """Rows per process and micro-step where the configuration asks for `batch_size`."""
        return min(batch_size, self.micro_batch_size or batch_size)

    def is_bad_batch(self, step: int, rows: Callable[[int], Sequence[int]]) -> bool:
        """True if every agent was nonfinite at this step before, on the same rows.

        Args:
            rows: returns the rows of a step; called only if the step was bad, because it takes time.
        """
        known = [batch.rows for batch in self.bad_batches if batch.step == step]
        return bool(known) and tuple(rows(step)) in known

    def after_bad_batch(self, batch: BadBatch) -> RecoveryState:
        """The state after a step in which all agents were nonfinite."""
        return replace(self.with_batches([batch]), bad_batches_in_a_row=self.bad_batches_in_a_row + 1)

    def with_batches(self, batches: Sequence[BadBatch]) -> RecoveryState:
        """The state that skips these batches as well."""
        return replace(self, bad_batches=tuple(sorted({*self.bad_batches, *batches}, key=lambda b: (b.step, b.rows))))

    def without_batches_from(self, step: int) -> RecoveryState:
        """The state that no longer skips the batches of this step and of later ones."""
        return replace(self, bad_batches=tuple(batch for batch in self.bad_batches if batch.step < step))

    def with_requests(self, lr_factor: float, micro_batch_size: int | None) -> RecoveryState:
        """The state with the requests of the supervisor; a request never loosens a limit."""
        sizes = [size for size in (self.micro_batch_size, micro_batch_size) if size is not None]
        return replace(
            self,
            requested_lr_factor=min(self.requested_lr_factor, lr_factor),
            micro_batch_size=min(sizes, default=None),
        )


@dataclass(frozen=True)
class CrowdChange:
    """A request to stop an agent, as the run decided it. Two that are equal are one.

    Attributes:
        step: the optimizer steps taken when it acts, or when it was refused.
        agent: the number of the agent.
        id: the name of its file; empty in the state of a checkpoint, which holds only step and agent.
        refused: why it does not act; None if it acts.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # what is asked for beyond that is no request to stop

    step: int
    agent: int
    id: str = field(default="", compare=False)
    refused: str | None = None

    def __str__(self) -> str:
        return f"stop agent{self.agent}"


@dataclass(frozen=True)
class History:
    """How the crowd has changed, and will change.

    Attributes:
        since: the optimizer steps taken at the last change.
        agent_steps: the steps taken until then, counted for every agent that took them.
        planned: changes to come, in order.
        made: changes so far.
    """

    since: int = 0
    agent_steps: int = 0
    planned: tuple[CrowdChange, ...] = ()
    made: tuple[CrowdChange, ...] = ()


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
    def at_start(cls, count: int, **values: Any) -> TrainState:
        """The state of this number of agents, before the first step."""
        return cls(tuple(AgentState(number) for number in range(count)), **values)

    @property
    def numbers(self) -> list[int]:
        """The number of every agent."""
        return [agent.number for agent in self.agents]

    @property
    def names(self) -> list[str]:
        """The names of the agents, as metrics, the log and checkpoints have them."""
        return [agent.name for agent in self.agents]

    @property
    def dropped(self) -> tuple[int, ...]:
        """The places of agents that take no steps any more, because no response has helped them."""
        return tuple(k for k, agent in enumerate(self.agents) if agent.recovery.is_exhausted)

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

    def objection(self, change: CrowdChange) -> str | None:
        """Why a change that somebody asks for cannot be made; None if it can."""
        if later := [each.step for each in self.history.planned if each.step > change.step]:
            asked = f"an earlier attempt was asked for changes, the last after step {max(later)}"
            return f"agent{change.agent} stays: {asked}: ask again then"
        if change.agent not in self.numbers:
            return f"there is no agent{change.agent}: there are {', '.join(self.names)}"
        if {*self.numbers} <= {change.agent, *(self.numbers[place] for place in self.dropped)}:
            return f"agent{change.agent} is the only agent that trains"
        return None

    def with_planned(self, changes: Sequence[CrowdChange]) -> TrainState:
        """The state with more changes of the crowd to come. A known change counts once."""
        history = self.history
        new = [change for change in changes if change not in (*history.planned, *history.made)]
        planned = tuple(sorted((*history.planned, *new), key=lambda change: change.step))
        return replace(self, history=replace(history, planned=planned))

    def after_changes(self) -> TrainState:
        """The state after the changes of the crowd that are due; the search for its best step begins again."""
        history = self.history
        due = tuple(change for change in history.planned if change.step <= self.step)
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

    def with_metric(self, metric: str) -> TrainState:
        """The state of a run that searches for its best step by this metric. A new metric begins a new search."""
        if metric == self.validation.metric:
            return self
        return replace(
            self, validation=Validation(metric), agents=tuple(replace(each, best=None) for each in self.agents)
        )

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint."""
        values = asdict(self)
        for change in (*values["history"]["planned"], *values["history"]["made"]):
            del change["id"], change["refused"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """The inverse of `to_dict`, also after a way through JSON."""
        return TypeAdapter(cls).validate_python(values, extra="forbid")
