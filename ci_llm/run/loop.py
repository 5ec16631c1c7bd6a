"""The training loop: the page to read first.

One optimizer step goes one way: rows -> the frozen base, once for all agents -> summed losses -> backward, without
any communication -> ONE ballot -> ONE all-reduce of the flat gradient -> norms and clipping per agent -> the
optimizer moves -> the state advances. Reducing inside backward would leave the peers of a process that ran out of
memory waiting there: so it votes, and all do the step again in smaller parts. Who is sick is voted as well, and left
out before the optimizer moves (guard.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from ci_llm.core.determinism import seed_everything
from ci_llm.data.batches import Batch, stream
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.run.context import Run
from ci_llm.run.evaluation import evaluate_and_log, evaluation_due, evaluation_missed, is_best, is_over
from ci_llm.run.nonfinite import Findings, examine, health_metrics, is_known, sick_here, treat
from ci_llm.run.out_of_memory import in_parts, relieve, unless_out_of_memory

Batches: TypeAlias = Iterator[tuple[int, list[Batch]]]


@dataclass
class Sums:
    """What this process saw of one optimizer step; the ballot adds it over all processes."""

    targets: int
    sums: Tensor  # [K + 2]: cross-entropy per agent, diversity, packed tokens
    sick: Tensor  # [K] bool: whose loss or gradient is not finite here


def train(run: Run, batches: Batches, save: Callable[[Run], None]) -> str | None:
    """Train from where `run.state` stands to the last step, or until patience with the evaluations is over.

    Args:
        batches: `steps(run)`.
        save: begins a checkpoint of the run; a collective.

    Returns:
        None at the last step, or the reason for which the run was asked to stop; either way that step is saved.
    """
    run.last_good.begin(run.state.step)
    stop = evaluate_and_log(run) if evaluation_missed(run) else None
    for step, micro_batches in batches if stop is None and not is_over(run) else ():
        run.pace.begin_step()
        verdict = agree_on_gradients(run, step, micro_batches)
        findings = examine(run, step, verdict)
        norms = apply_gradients(run, step, verdict, findings.left_out)
        rows = len(run.plan.rows(step))
        run.state = run.state.advance(rows, findings.tokens, findings.left_out, findings.overflowed)
        treat(run, step, findings)
        run.status.step = run.state.step
        run.pace.end_step(run.manager.last_result)
        run.heartbeat.tick()
        report(run, verdict, findings, norms)
        stop = verdict.stop
        if stop or verdict.save or run.state.step == run.total_steps:
            save(run)
        if stop is None and evaluation_due(run):
            stop = evaluate_and_log(run)
            if (stop or is_best(run) or is_over(run)) and not verdict.save:
                save(run)
        if stop is not None or is_over(run):
            break
    return stop


def steps(run: Run) -> Batches:
    """(step, this process's micro-batches), from where the state stands to the end of the run."""
    return stream(
        run.rows,
        run.plan,
        run.state.step,
        run.total_steps,
        process_index=run.processes.index,
        num_processes=run.processes.count,
        micro_batch_size=run.micro_batch_size,
        num_workers=run.config.num_workers,
        pin_memory=run.crowd.device.type == "cuda",
    )


def agree_on_gradients(run: Run, step: int, micro_batches: list[Batch]) -> Verdict:
    """Compute this process's gradients of the step and vote on them; again, in smaller parts, where memory ran out.

    Raises:
        OutOfMemory: on every process, when the parts cannot be made smaller.
    """
    wanted = [] if is_known(run, step) else micro_batches
    save_wanted = False
    while True:
        parts = in_parts(run, wanted)
        sums, complaint = unless_out_of_memory(partial(compute_gradients, run, step, parts))
        save_wanted |= run.interrupts.take_save_request()
        verdict = run.processes.agree(_ballot(run, step, sums, save_wanted))
        if not verdict.out_of_memory:
            return verdict
        relieve(run, complaint)


def compute_gradients(run: Run, step: int, micro_batches: list[Batch]) -> Sums:
    """Forward and backward of every micro-batch; gradients of summed losses add up in the crowd's storage."""
    run.crowd.train()
    run.crowd.agents.begin_step(step)
    sums = torch.zeros(run.crowd.num_agents + 2, dtype=torch.float64, device=run.crowd.device)
    for number, batch in enumerate(micro_batches):
        run.heartbeat.tick()
        # Keyed, not sequential: what is drawn here depends on nothing that happened before.
        seed_everything(run.config.seed, "micro-step", step, run.processes.index, number)
        batch = batch.to(run.crowd.device)
        with run.processes.autocast():
            loss = run.objective(run.crowd(batch), batch, step)
        (loss.total * (run.state.loss_scale or 1.0)).backward()
        sums += torch.cat([loss.task, loss.diversity[None], loss.task.new_full((1,), batch.num_tokens)])
    sick = sick_here(run.crowd.agents.gradients, sums[: run.crowd.num_agents])
    return Sums(sum(batch.num_targets for batch in micro_batches), sums, sick)


def apply_gradients(run: Run, step: int, verdict: Verdict, left_out: Sequence[int]) -> Tensor:
    """Reduce, take the mean over all targets of the step, clip each agent; the optimizer moves those not left out.

    Returns:
        [K] the gradient norm of every agent before clipping, on the device: nobody has waited for it.
    """
    agents = run.crowd.agents
    run.processes.reduce_flat_(agents.gradients)
    agents.gradients.div_(max(verdict.labelled_tokens, 1) * (run.state.loss_scale or 1.0))
    norms = agents.clip(run.config.max_grad_norm)
    agents.leave_out(left_out)
    for k, group in enumerate(run.optimizer.param_groups):
        group["lr"] = run.learning_rate(step) * run.state.healing.rate(k)
    run.optimizer.step()
    return norms


def report(run: Run, verdict: Verdict, findings: Findings, norms: Tensor) -> None:
    """Show how far the run is; one metrics line per `logging_steps`, and at the last step."""
    *losses, diversity = (total / max(verdict.labelled_tokens, 1) for total in verdict.sums[:-1])
    step = run.state.step
    run.meter.count(findings.tokens)
    run.log.progress(step, run.total_steps, [] if findings.bad_batch else losses)
    if step % run.config.logging_steps and step != run.total_steps:
        return
    metrics: dict[str, Any] = {
        "epoch": run.plan.epoch(step),
        "train/learning_rate": run.learning_rate(step - 1) * run.state.healing.rate_factor,
    }
    if not findings.bad_batch:  # else nothing was trained on
        finite = [loss for loss in losses if math.isfinite(loss)] or losses
        metrics |= {"train/task_loss": sum(finite) / len(finite), "train/diversity": diversity}
        for k, (loss, norm) in enumerate(zip(losses, norms.tolist(), strict=True)):
            metrics |= {f"train/agent{k}/loss": loss, f"train/agent{k}/grad_norm": norm}
    metrics |= health_metrics(run)
    if run.config.log_memory_usage:
        metrics |= memory_in_use(run.crowd.device)
    run.log.metrics(step, metrics | run.meter.read())


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes of this process: resident, and on a GPU the peak that its tensors reached."""
    figures = {"memory/resident_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        figures["memory/cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def _ballot(run: Run, step: int, sums: Sums | None, save_wanted: bool) -> Ballot:
    """What this process says about the step; with no sums, that it ran out of memory."""
    agents = run.crowd.num_agents
    return Ballot(
        labelled_tokens=sums.targets if sums else 0,
        nonfinite=sums.sick if sums else [False] * agents,
        sums=sums.sums if sums else [0.0] * (agents + 2),
        out_of_memory=sums is None,
        stop=run.interrupts.stop_reason,
        save=save_wanted or (run.processes.is_main and run.manager.should_save(step + 1)),
    )
