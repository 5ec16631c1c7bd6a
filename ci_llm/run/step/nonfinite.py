"""The response to numbers that are not finite: agents are left out of a step or rolled back, batches are skipped.

The ballot of the step carries the findings of every process, before the gradients are added up. So the check needs no
extra wait for the device, and every process responds alike. state.py decides by pure functions; this file acts.

A rollback gives an agent its last good snapshot (last_good.py).

Legend: K agents, P numbers of an agent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ci_llm.core.run_folder import BadBatch, write_skipped_batches
from ci_llm.data.agent_rows import Courses
from ci_llm.distributed.ballot import StepSums, Verdict
from ci_llm.errors import NonFinite
from ci_llm.run.step.last_good import LastGood
from ci_llm.run.step.state import AgentRecovery, AgentState, Bounds, RecoveryState, TrainState

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
        bad_batch: every agent was nonfinite in this step, now or in an earlier attempt.
        tokens: packed tokens, of all processes, on which at least one agent was trained.
        dropped: agents that are left out of every step.
    """

    left_out: tuple[int, ...]
    nonfinite: tuple[int, ...]
    bad_batch: bool
    tokens: int
    dropped: Sequence[int] = ()

    @property
    def overflowed(self) -> tuple[int, ...]:
        """Agents for which the fp16 loss scale was too large; a smaller scale mends that."""
        return tuple(k for k in self.left_out if k not in self.nonfinite and k not in self.dropped)


def nonfinite_here(gradients: Tensor, losses: Tensor) -> Tensor:
    """[K] true where an agent's gradient [K, P] or loss [K] is not finite on this process, left on the device."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
    return torch.logical_not((norms < HUGE) & losses.isfinite())


def findings_of(
    verdict: Verdict,
    loss_scale: float | None,
    *,
    known_bad: bool = False,
    dropped: Sequence[int] = (),
) -> Findings:
    """The findings in the verdict on a step.

    Args:
        loss_scale: the factor on fp16 losses; None in every other precision.
        known_bad: the step was found bad before, so that nothing was computed in it.
        dropped: agents that are left out of every step; the others are judged as if they were alone.
    """
    everybody = tuple(range(len(verdict.nonfinite)))
    judged = tuple(k for k in everybody if k not in dropped)
    if known_bad:
        return Findings(everybody, judged, bad_batch=True, tokens=0, dropped=dropped)
    sums = StepSums.unpack(verdict.sums, len(everybody))
    left_out = tuple(k for k in everybody if verdict.nonfinite[k] or k in dropped)
    scaled = (loss_scale or 1.0) > 1.0
    # Under a loss scale a gradient may overflow although its agent is fine. The scale does not touch the loss.
    nonfinite = tuple(k for k in judged if verdict.nonfinite[k] and not (scaled and math.isfinite(sums.losses[k])))
    bad = nonfinite == judged
    return Findings(left_out, nonfinite, bad, 0 if bad else sums.tokens, dropped)


class NonFiniteResponse:
    """Acts on the findings of a step, after the optimizer has moved.

    Args:
        bounds: the limits of the responses.
        last_good: the snapshots for rollbacks.
        run_folder: the folder of skipped_batches.json.
        may_write: true while this process may write files of the run.
        drops_agents: an agent that no response helps is dropped, as long as another one is left.
    """

    def __init__(
        self,
        bounds: Bounds,
        last_good: LastGood,
        run_folder: Path,
        may_write: Callable[[], bool],
        *,
        drops_agents: bool = False,
    ) -> None:
        self._bounds, self._last_good = bounds, last_good
        self._run_folder, self._may_write = run_folder, may_write
        self._drops_agents = drops_agents

    def dropped(self, state: TrainState) -> tuple[int, ...]:
        """The agents that take no steps any more."""
        return tuple(k for k, agent in enumerate(state.agents) if agent.recovery.is_exhausted(self._bounds))

    def respond(self, state: TrainState, courses: Courses, findings: Findings) -> TrainState:
        """Cut learning rates, roll agents back, record bad batches, keep good snapshots.

        Args:
            state: the state after the step.
            courses: the rows of the agents.

        Returns:
            the state with the new recovery state.

        Raises:
            NonFinite: no response is left inside the run. The weights are those of the last good steps.
        """
        step, before = state.step - 1, [agent.recovery for agent in state.agents]
        if findings.bad_batch:
            return replace(state, recovery=self._skip(state, BadBatch(step, tuple(courses.rows_of_step(step)))))
        bounds, ignored = replace(self._bounds, own_rows=courses.are_own), (*findings.overflowed, *findings.dropped)
        # The step says nothing about agents that overflowed or are dropped.
        after = [
            each if k in ignored else each.after(step, k in findings.nonfinite, bounds) for k, each in enumerate(before)
        ]
        agents = tuple(replace(own, recovery=found) for own, found in zip(state.agents, after, strict=True))
        state = replace(state, agents=agents, recovery=state.recovery.after_other_step())
        for k in findings.nonfinite:
            logger.warning(_account(state.names[k], step, before[k], after[k]))
            if after[k].rollbacks > before[k].rollbacks:
                kept = self._last_good.roll_back(k)
                logger.warning(f"{state.names[k]}    rolled back to its weights and moments of step {kept}")
        exhausted = [agents[k] for k in findings.nonfinite if after[k].is_exhausted(self._bounds)]
        if exhausted:
            if not self._drops_agents or len(self.dropped(state)) == len(agents):
                raise _exhausted(exhausted, self._bounds)
            logger.warning(f"{', '.join(agent.name for agent in exhausted)}    dropped; the others train on")
        # An agent that was left out has no new state that proved to be finite.
        moved = [k for k in range(len(agents)) if k not in findings.left_out]
        self._last_good.keep_if_due(state.step, moved)
        return state

    def _skip(self, state: TrainState, batch: BadBatch) -> RecoveryState:
        is_new = batch not in state.recovery.bad_batches
        after = state.recovery.after_bad_batch(batch)
        if is_new:
            shown = f"step {batch.step + 1} is finite for no agent: skipped for good, rows {_short(batch.rows)}"
            logger.warning(f"batch     {shown}")
        in_a_row = after.bad_batches_in_a_row
        if in_a_row < self._bounds.max_in_a_row:
            if is_new:
                self._record(after)
            return after
        first = state.step - in_a_row
        # The rows are not the cause of so many in a row: the weights are, and later attempts try the batches.
        self._record(after.without_batches_from(first))
        raise NonFinite(
            f"no agent had a finite step {in_a_row} times in a row, from step {first + 1} on",
            where=f"step {first} was the last finite one",
            hint=_HINT,
            step=first,
        )

    def _record(self, recovery: RecoveryState) -> None:
        """Write the skipped batches for later attempts, which may resume from a checkpoint before this step."""
        if self._may_write():
            write_skipped_batches(self._run_folder, recovery.bad_batches)


def _account(name: str, step: int, before: AgentRecovery, after: AgentRecovery) -> str:
    cut = f", learning rate x {before.lr_factor:.3g} -> x {after.lr_factor:.3g}"
    cut = "" if after.lr_factor == before.lr_factor else cut
    return f"{name}    not finite in step {step + 1}, {before.nonfinite_in_a_row + 1} in a row: left out{cut}"


def _exhausted(agents: Sequence[AgentState], bounds: Bounds) -> NonFinite:
    since = min(agent.recovery.episode_start or 0 for agent in agents)
    names = ", ".join(agent.name for agent in agents)
    rates = ", ".join(f"{agent.recovery.lr_factor:.3g}" for agent in agents)
    return NonFinite(
        f"{names}: from step {since + 1} on not finite {bounds.max_in_a_row} times in a row, rolled back, and as often"
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
    recovery, metrics = state.recovery, dict[str, float]()
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
