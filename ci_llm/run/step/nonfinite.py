"""The response to numbers that are not finite: agents are left out of a step or rolled back, batches are skipped.

The ballot of the step carries the findings of every process, before the gradients are added up. So the check needs no
extra wait for the device, and every process responds alike. state.py decides by pure functions; this file acts.

A rollback gives an agent its last good snapshot: its weights and moments, as they were at most 20 steps before. A
checkpoint is a snapshot as well, so a rollback leads to the same step before and after a resume.

Legend: K agents, P numbers of an agent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.core.run_folder import BadBatch, write_skipped_batches
from ci_llm.data.agent_rows import TrainingRows
from ci_llm.distributed.ballot import StepSums, Verdict
from ci_llm.errors import NonFinite
from ci_llm.run.optimizer import moments_of, placed, put_moments
from ci_llm.run.step.state import MAX_IN_A_ROW, AgentRecovery, AgentState, RecoveryState, TrainState

logger = logging.getLogger(__name__)

#: A gradient with this norm or a larger one counts as not finite. Below this bound, even the squared norm of the sum
#: over 10,000 processes fits into fp32: if no process calls an agent nonfinite, its reduced norm is finite as well.
HUGE: Final = 1e15


@dataclass(frozen=True)
class Findings:
    """The findings of all processes about one step.

    Attributes:
        left_out: agents that do not move in this step.
        nonfinite: the agents among them that were not finite and count for the policy.
        overflowed: those for which the fp16 loss scale was too large; a smaller scale mends that.
        bad_batch: every agent was nonfinite in this step, now or in an earlier attempt.
        tokens: packed tokens, of all processes, on which at least one agent was trained.
    """

    left_out: tuple[int, ...]
    nonfinite: tuple[int, ...]
    overflowed: tuple[int, ...]
    bad_batch: bool
    tokens: int


def nonfinite_here(gradients: Tensor, losses: Tensor) -> Tensor:
    """[K] true where an agent's gradient [K, P] or loss [K] is not finite on this process, left on the device."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
    return torch.logical_not((norms < HUGE) & losses.isfinite())


def findings_of(verdict: Verdict, state: TrainState, *, known_bad: bool = False) -> Findings:
    """The findings in the verdict on a step. Agents that are dropped are ignored.

    Args:
        state: the state before the step.
        known_bad: the step was found bad before, so that nothing was computed in it.
    """
    everybody = tuple(range(len(verdict.nonfinite)))
    dropped = state.dropped
    judged = tuple(k for k in everybody if k not in dropped)
    if known_bad:
        return Findings(everybody, judged, (), bad_batch=True, tokens=0)
    sums = StepSums.unpack(verdict.sums, len(everybody))
    left_out = tuple(k for k in everybody if verdict.nonfinite[k] or k in dropped)
    scaled = (state.loss_scale or 1.0) > 1.0
    # Under a loss scale a gradient may overflow although its agent is fine. The scale does not touch the loss.
    nonfinite = tuple(k for k in judged if verdict.nonfinite[k] and not (scaled and math.isfinite(sums.losses[k])))
    overflowed = tuple(k for k in left_out if k in judged and k not in nonfinite)
    bad = nonfinite == judged
    return Findings(left_out, nonfinite, overflowed, bad, 0 if bad else sums.tokens)


#: Steps between two copies, beside those of saves. A copy costs as much as the optimizer's step.
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
        optimizer: holds the moments of the agents.
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
        moments = moments_of(self._optimizer, row)
        old = self._snapshots.get(agent)
        if old is None or old.moments.keys() != moments.keys():
            self._snapshots[agent] = _Snapshot(step, row.detach().clone(), _copies(moments))
            return
        old.step = step
        # Into the memory it has: a new allocation every 20 steps would fragment a GPU's.
        old.weights.copy_(row.detach())
        for name, tensor in moments.items():
            old.moments[name].copy_(tensor)

    def begin(self, step: int) -> None:
        """Copy every agent that has no snapshot, so that a rollback is possible from the first step on."""
        for agent in range(len(self._rows)):
            if agent not in self._snapshots:
                self.keep(agent, step)

    def roll_back(self, agent: int) -> int:
        """Give the agent the weights and moments of its snapshot; returns the step of the snapshot."""
        kept = self._snapshots[agent]
        row = self._rows[agent]
        row.data.copy_(kept.weights)
        put_moments(self._optimizer, row, _copies(kept.moments))
        return kept.step

    def state_of(self, agents: Iterable[int]) -> dict[str, Any]:
        """The snapshots of these agents, for a checkpoint."""
        snapshots = {f"agent{k}": self._snapshots[k] for k in agents}
        return {name: {"step": s.step, "weights": s.weights, "moments": s.moments} for name, s in snapshots.items()}

    def load(self, agents: Iterable[int], saved: Mapping[str, Any]) -> None:
        """The inverse of `state_of`."""
        for k in agents:
            row = self._rows[k]
            state = saved[f"agent{k}"]
            moments = placed(state["moments"], row, self._optimizer)
            self._snapshots[k] = _Snapshot(state["step"], state["weights"].to(row), moments)


def _copies(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in moments.items()}


@dataclass(frozen=True)
class NonFiniteResponse:
    """Acts on the findings of a step, after the optimizer has moved.

    Attributes:
        last_good: the snapshots for rollbacks.
        run_folder: the folder of skipped_batches.json.
        may_write: true while this process may write files of the run.
        drops_agents: an agent that no response helps is dropped, as long as another one is left.
    """

    last_good: LastGood
    run_folder: Path
    may_write: Callable[[], bool]
    drops_agents: bool

    def respond(self, state: TrainState, training_rows: TrainingRows, findings: Findings) -> TrainState:
        """Cut learning rates, roll agents back, record bad batches, keep good snapshots.

        Args:
            state: the state after the step.
            training_rows: those of the agents.

        Returns:
            the state with the new recovery state.

        Raises:
            NonFinite: no response is left inside the run. The weights are those of the last good steps.
        """
        step = state.step - 1
        before = [agent.recovery for agent in state.agents]
        if findings.bad_batch:
            return replace(state, recovery=self._skip(state, BadBatch(step, tuple(training_rows.rows_of_step(step)))))
        ignored = (*findings.overflowed, *state.dropped)  # the step says nothing about them
        after = [
            each if k in ignored else each.after(step, k in findings.nonfinite, own_rows=training_rows.are_own)
            for k, each in enumerate(before)
        ]
        agents = tuple(replace(own, recovery=found) for own, found in zip(state.agents, after, strict=True))
        state = replace(state, agents=agents, recovery=replace(state.recovery, bad_batches_in_a_row=0))
        for k in findings.nonfinite:
            logger.warning(_account(state.names[k], step, before[k], after[k]))
            if after[k].rollbacks > before[k].rollbacks:
                kept = self.last_good.roll_back(k)
                logger.warning(f"{state.names[k]}    rolled back to its weights and moments of step {kept}")
        exhausted = [agents[k] for k in findings.nonfinite if after[k].is_exhausted]
        if exhausted:
            if not self.drops_agents or len(state.dropped) == len(agents):
                raise _exhausted(exhausted)
            logger.warning(f"{', '.join(agent.name for agent in exhausted)}    dropped; the others train on")
        for k in range(len(agents)):
            # An agent that was left out has no new state that proved to be finite.
            if state.step % EVERY_STEPS == 0 and k not in findings.left_out:
                self.last_good.keep(k, state.step)
        return state

    def _skip(self, state: TrainState, batch: BadBatch) -> RecoveryState:
        is_new = batch not in state.recovery.bad_batches
        after = state.recovery.after_bad_batch(batch)
        if is_new:
            shown = f"step {batch.step + 1} is finite for no agent: skipped for good, rows {_short(batch.rows)}"
            logger.warning(f"batch     {shown}")
        in_a_row = after.bad_batches_in_a_row
        if in_a_row < MAX_IN_A_ROW:
            if is_new:
                self._record(after)
            return after
        first = state.step - in_a_row
        # The rows do not cause this many in a row: the weights do, and later attempts try the batches.
        self._record(after.without_batches_from(first))
        raise NonFinite(
            f"no agent had a finite step {in_a_row} times in a row, from step {first + 1} on",
            where=f"step {first} was the last finite one",
            hint=_HINT,
            step=first,
        )

    def _record(self, recovery: RecoveryState) -> None:
        """Write the skipped batches for later attempts, which may resume from a checkpoint before this step."""
        if self.may_write():
            write_skipped_batches(self.run_folder, recovery.bad_batches)


def _account(name: str, step: int, before: AgentRecovery, after: AgentRecovery) -> str:
    cut = f", learning rate x {before.lr_factor:.3g} -> x {after.lr_factor:.3g}"
    cut = "" if after.lr_factor == before.lr_factor else cut
    return f"{name}    not finite in step {step + 1}, {before.nonfinite_in_a_row + 1} in a row: left out{cut}"


def _exhausted(agents: Sequence[AgentState]) -> NonFinite:
    since = min(agent.recovery.episode_start or 0 for agent in agents)
    names = ", ".join(agent.name for agent in agents)
    rates = ", ".join(f"{agent.recovery.lr_factor:.3g}" for agent in agents)
    return NonFinite(
        f"{names}: from step {since + 1} on not finite {MAX_IN_A_ROW} times in a row, rolled back, and as often"
        f" once more, at {rates} of the learning rate",
        where=f"step {since} was the last step before",
        hint=_HINT,
        step=since,
    )


_HINT: Final = (
    "python safe_train.py goes back to an older checkpoint with a smaller learning rate by itself;"
    " by hand: a smaller learning_rate, max_grad_norm=1.0, mixed_precision=no, a look at the rows"
)


def _short(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown} and {len(rows) - 8} more" if len(rows) > 8 else shown


def recovery_metrics(state: TrainState, batch_size: int) -> dict[str, float]:
    """The counts of skips, cuts and rollbacks so far, for the metrics; empty in a run without faults.

    Args:
        batch_size: as configured.
    """
    recovery = state.recovery
    metrics = dict[str, float]()
    for agent in state.agents:
        if agent.skipped:
            metrics[f"train/{agent.name}/skipped_steps"] = agent.skipped
        if agent.recovery != AgentRecovery():
            metrics[f"train/{agent.name}/learning_rate_share"] = agent.recovery.lr_factor
            metrics[f"train/{agent.name}/set_backs"] = agent.recovery.rollbacks
    if skipped_batches := sum(batch.step < state.step for batch in recovery.bad_batches):
        metrics["train/skipped_batches"] = skipped_batches
    if recovery.micro_batch_size is not None:
        metrics["train/micro_batch_size"] = recovery.limit(batch_size)
    return metrics
