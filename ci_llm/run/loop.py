"""The training loop: the page to read first.

One optimizer step goes one way: rows -> the frozen base, once for all agents -> summed losses -> backward, without
any communication -> ONE ballot -> ONE all-reduce of the flat gradient -> norms and clipping per agent -> the
optimizer moves -> the state advances. Reducing inside backward would leave the peers of a process that ran out of
memory waiting there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from ci_llm.ballot import Ballot, Verdict
from ci_llm.data.batches import Batch, stream
from ci_llm.rng import seed_everything
from ci_llm.run.best import is_best, is_over
from ci_llm.run.judge import evaluate_and_log, evaluation_due, evaluation_missed
from ci_llm.run.run import Run

Batches: TypeAlias = Iterator[tuple[int, list[Batch]]]


@dataclass
class Sums:
    """What this process saw of one optimizer step; `sums` are added over all processes by the ballot."""

    targets: int
    sums: Tensor  # [K + 2]: cross-entropy per agent, diversity, packed tokens


def train(run: Run, batches: Batches, save: Callable[[Run], None]) -> str | None:
    """Train from where `run.state` stands to the last step, or until patience with the evaluations is over.

    Args:
        batches: `steps(run)`.
        save: begins a checkpoint of the run; a collective.

    Returns:
        None at the last step, or the reason for which the run was asked to stop; either way that step is saved.
    """
    stop = evaluate_and_log(run) if evaluation_missed(run) else None
    for step, micro_batches in batches if stop is None and not is_over(run) else ():
        run.interrupts.plan = f"saving step {step + 1}"
        run.pace.begin_step()
        sums = compute_gradients(run, step, micro_batches)
        verdict = run.processes.agree(_ballot(run, step, sums))
        norms, sick = apply_gradients(run, step, verdict)
        run.state = run.state.advance(len(run.plan.rows(step)), int(verdict.sums[-1]), sick)
        run.status.step = run.state.step
        run.pace.end_step(run.manager.last_result)
        report(run, verdict, norms)
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
        micro_batch_size=run.config.batch_size,
        num_workers=run.config.num_workers,
        pin_memory=run.crowd.device.type == "cuda",
    )


def compute_gradients(run: Run, step: int, micro_batches: list[Batch]) -> Sums:
    """Forward and backward of every micro-batch; gradients of summed losses add up in the crowd's storage."""
    run.crowd.train()
    run.crowd.agents.begin_step(step)
    sums = torch.zeros(run.crowd.num_agents + 2, dtype=torch.float64, device=run.crowd.device)
    for number, batch in enumerate(micro_batches):
        # Keyed, not sequential: what is drawn here depends on nothing that happened before.
        seed_everything(run.config.seed, "micro-step", step, run.processes.index, number)
        batch = batch.to(run.crowd.device)
        with run.processes.autocast():
            loss = run.objective(run.crowd(batch), batch, step)
        (loss.total * (run.state.loss_scale or 1.0)).backward()
        sums += torch.cat([loss.task, loss.diversity[None], loss.task.new_tensor([batch.num_tokens])])
    return Sums(sum(batch.num_targets for batch in micro_batches), sums)


def apply_gradients(run: Run, step: int, verdict: Verdict) -> tuple[list[float], list[int]]:
    """Reduce, take the mean over all targets of the step, clip each agent, and let the optimizer move.

    Returns:
        the gradient norm of every agent before clipping, and the agents that were left out because theirs is not
        finite: equal on every process, because the reduced gradient is.
    """
    agents = run.crowd.agents
    run.processes.reduce_flat_(agents.gradients)
    agents.gradients.div_(max(verdict.labelled_tokens, 1) * (run.state.loss_scale or 1.0))
    norms = agents.gradients.norm(dim=1).tolist()
    sick = agents.clip(norms, run.config.max_grad_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = run.learning_rate(step)
    run.optimizer.step()
    return norms, sick


def report(run: Run, verdict: Verdict, norms: list[float]) -> None:
    """Show how far the run is; one metrics line per `logging_steps`, and at the last step."""
    *totals, tokens = verdict.sums
    *losses, diversity = (total / max(verdict.labelled_tokens, 1) for total in totals)
    step = run.state.step
    run.meter.count(int(tokens))
    run.log.progress(step, run.total_steps, losses)
    if step % run.config.logging_steps and step != run.total_steps:
        return
    metrics: dict[str, Any] = {
        "epoch": run.plan.epoch(step),
        "train/task_loss": sum(losses) / len(losses),
        "train/diversity": diversity,
        "train/learning_rate": run.learning_rate(step - 1),
    }
    for k, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        metrics[f"train/agent{k}/loss"] = loss
        metrics[f"train/agent{k}/grad_norm"] = norm
        if run.state.skipped[k]:
            metrics[f"train/agent{k}/skipped_steps"] = run.state.skipped[k]
    if run.config.log_memory_usage:
        metrics |= memory_in_use(run.crowd.device)
    run.log.metrics(step, metrics | run.meter.read())


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes of this process: resident, and on a GPU the peak that its tensors reached."""
    figures = {"memory/resident_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        figures["memory/cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def _ballot(run: Run, step: int, sums: Sums) -> Ballot:
    wanted = run.interrupts.take_save_request()
    return Ballot(
        labelled_tokens=sums.targets,
        sums=sums.sums,
        stop=run.interrupts.stop_reason,
        save=wanted or (run.processes.is_main and run.manager.should_save(step + 1)),
    )
