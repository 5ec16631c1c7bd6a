"""The guard before the optimizer: who is sick, who is left out, who is set back, which batch is skipped for good.

Sickness is voted in the step's ballot, before the gradients are added up: it costs no wait for the device of its own,
and every process draws the same conclusion. What follows is computed in `health.py`; here it is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.core.durable import read_json, write_json
from ci_llm.distributed.ballot import Verdict
from ci_llm.errors import CheckpointError, NonFinite
from ci_llm.run.context import Run
from ci_llm.run.nonfinite_policy import BadBatch, Health, RecoveryState

#: Beyond this norm a gradient counts as not finite: added up over 10,000 processes and squared it still fits into fp32,
#: so that an agent whom nobody calls sick has a finite norm after the reduction, and nobody has to look again.
HUGE: Final = 1e15
RECORD_NAME: Final = "skipped_batches.json"


@dataclass(frozen=True)
class Findings:
    """What the processes have found about one step together.

    Attributes:
        left_out: agents that do not move in this step.
        sick: those of them with whom something is wrong; an overflow of fp16 is cured by its loss scale.
        bad_batch: the step made every agent sick, now or in an earlier attempt.
        tokens: packed tokens, of all processes, that somebody was trained on.
    """

    left_out: tuple[int, ...]
    sick: tuple[int, ...]
    bad_batch: bool
    tokens: int

    @property
    def overflowed(self) -> tuple[int, ...]:
        """Agents that are left out and not sick: the loss scale was too large for them."""
        return tuple(k for k in self.left_out if k not in self.sick)


def sick_here(gradients: Tensor, losses: Tensor) -> Tensor:
    """[K] whether an agent's gradient [K, P] or loss [K] is not finite on this process; nothing waits for it."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
    return torch.logical_not((norms < HUGE) & losses.isfinite())


def examine(run: Run, step: int, verdict: Verdict) -> Findings:
    """What the verdict on the 0-based `step` means."""
    everybody = tuple(range(run.crowd.num_agents))
    if is_known(run, step):
        return Findings(everybody, everybody, bad_batch=True, tokens=0)
    left_out = tuple(k for k in everybody if verdict.nonfinite[k])
    scaled = (run.state.loss_scale or 1.0) > 1.0
    sick = tuple(k for k in left_out if not scaled or not math.isfinite(verdict.sums[k]))
    bad = sick == everybody
    return Findings(left_out, sick, bad_batch=bad, tokens=0 if bad else int(verdict.sums[-1]))


def is_known(run: Run, step: int) -> bool:
    """Whether the rows of this step made every agent sick before, so that nobody looks at them again."""
    healing = run.state.healing
    return bool(healing.bad_batches) and healing.knows(step, run.plan.rows(step))


def treat(run: Run, step: int, findings: Findings) -> None:
    """Carry out what follows, after the step: cut rates, set agents back, record bad batches, keep good states.

    Raises:
        NonFinite: nothing more can be done inside the run. The weights are those of the last good steps.
    """
    if findings.bad_batch:
        _skip(run, BadBatch(step, tuple(run.plan.rows(step))))
        return
    before = run.state.healing
    after = before.after(step, findings.sick, run.bounds, findings.overflowed)
    run.state = replace(run.state, healing=after)
    for k in findings.sick:
        run.log.say(_story(k, step, before.agents[k], after.agents[k]))
        if after.agents[k].set_backs > before.agents[k].set_backs:
            run.log.say(f"agent{k}    set back to its weights and moments of step {run.last_good.set_back(k)}")
    if incurable := [k for k in findings.sick if after.agents[k].is_incurable(run.bounds)]:
        raise _incurable(run, incurable)
    run.last_good.keep_where_due(run.state.step, [k for k in range(len(after.agents)) if k not in findings.left_out])


def _story(k: int, step: int, before: Health, after: Health) -> str:
    cut = f"learning rate x {before.rate_share:.3g} -> x {after.rate_share:.3g}"
    return f"agent{k}    not finite in step {step + 1}, {before.sick_in_a_row + 1} in a row: left out, {cut}"


def _skip(run: Run, batch: BadBatch) -> None:
    news = batch not in run.state.healing.bad_batches
    run.state = replace(run.state, healing=run.state.healing.after_bad_batch(batch))
    if news:
        run.log.say(
            f"batch     step {batch.step + 1} is finite for no agent: skipped for good, rows {_short(batch.rows)}"
        )
    in_a_row, bound = run.state.healing.bad_in_a_row, run.config.max_consecutive_nonfinite
    if in_a_row < bound:
        if news:
            _write_record(run, run.state.healing)
        return
    first = run.state.step - in_a_row
    # So many in a row are no accident of the rows: the weights are to blame, and the batches get another chance.
    _write_record(run, run.state.healing.without_batches_from(first))
    raise NonFinite(
        f"no agent had a finite step {in_a_row} times in a row, from step {first + 1} on",
        where=f"step {first} was the last finite one",
        hint=_CURE,
        step=first,
    )


def _incurable(run: Run, agents: Sequence[int]) -> NonFinite:
    healing, bound = run.state.healing, run.config.max_consecutive_nonfinite
    since = min(healing.agents[k].trouble_since or 0 for k in agents)
    names = ", ".join(f"agent{k}" for k in agents)
    rates = ", ".join(f"{healing.agents[k].rate_share:.3g}" for k in agents)
    return NonFinite(
        f"{names}: from step {since + 1} on not finite {bound} times in a row, set back, and as often once more,"
        f" at {rates} of the learning rate",
        where=f"step {since} was the last step before",
        hint=_CURE,
        step=since,
    )


_CURE: Final = (
    "python safe_train.py goes back to an older checkpoint with a smaller learning rate by itself;"
    " by hand: a smaller learning_rate, max_grad_norm=1.0, mixed_precision=no, a look at the rows"
)


def _short(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown} and {len(rows) - 8} more" if len(rows) > 8 else shown


# ----------------------------------------------------------------------------------------------- over attempts


def read_record(run_folder: Path) -> list[BadBatch]:
    """The batches that earlier attempts have skipped, whichever checkpoint a run goes on from.

    Raises:
        CheckpointError: the file is not of this program.
    """
    path = run_folder / RECORD_NAME
    try:
        value: Any = read_json(path)
        return [BadBatch(int(batch["step"]), tuple(batch["rows"])) for batch in value]
    except FileNotFoundError:
        return []
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"no record of skipped batches: {error}", where=str(path), hint="move it away") from error


def _write_record(run: Run, healing: RecoveryState) -> None:
    """Tell later attempts at once: one that is killed before the next checkpoint would look at the batch again."""
    if not (run.processes.is_main and run.manager.holds_lease()):
        return
    batches: list[Mapping[str, Any]] = healing.to_dict()["bad_batches"]
    try:
        write_json(run.config.run_folder / RECORD_NAME, batches)
    except OSError as error:
        run.log.say(f"{RECORD_NAME} cannot be written, the run goes on: {error}")


def guard_state(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps besides the state: the good snapshots of agents that are in trouble right now.

    An agent that is well is its own good snapshot: with its older one every checkpoint would be twice as large.
    """
    return {f"agent{k}": run.last_good.state_of(k) for k in _in_trouble(run)}


def restore_guard(run: Run, saved: Mapping[str, Any]) -> None:
    """The inverse of `guard_state`."""
    for k in _in_trouble(run):
        run.last_good.load(k, saved[f"agent{k}"])


def _in_trouble(run: Run) -> Iterator[int]:
    return (k for k, health in enumerate(run.state.healing.agents) if health.trouble_since is not None)


def health_metrics(run: Run) -> dict[str, float]:
    """What the guard did so far, for the metrics; nothing in a healthy run."""
    healing, metrics = run.state.healing, dict[str, float]()
    for k, (skipped, health) in enumerate(zip(run.state.skipped, healing.agents, strict=True)):
        if skipped:
            metrics[f"train/agent{k}/skipped_steps"] = skipped
        if health != Health():
            metrics[f"train/agent{k}/learning_rate_share"] = health.rate_share
            metrics[f"train/agent{k}/set_backs"] = health.set_backs
    if skipped_batches := sum(batch.step < run.state.step for batch in healing.bad_batches):
        metrics["train/skipped_batches"] = skipped_batches
    if healing.micro_batch_size is not None:
        metrics["train/micro_batch_size"] = run.micro_batch_size
    return metrics
