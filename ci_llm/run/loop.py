"""The training loop: the page to read first.

One optimizer step goes one way: rows -> the frozen base, once for all agents -> summed losses -> backward, without
any communication -> ONE ballot -> ONE all-reduce of the flat gradient -> norms and clipping per agent -> the
optimizer moves -> the state advances. Reducing inside backward would leave the peers of a process that ran out of
memory waiting there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from ci_llm.ballot import Ballot, Verdict
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import Config
from ci_llm.crowd.answers import AnswerScores, Examination, examine
from ci_llm.crowd.base import Base
from ci_llm.crowd.evaluate import Scores, score
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.data.batches import Batch, pack, stream
from ci_llm.data.order import Plan, share
from ci_llm.data.tokens import TokenizedRows
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog
from ci_llm.processes import Processes
from ci_llm.rng import seed_everything
from ci_llm.run.state import TrainState
from ci_llm.status import RunStatus
from ci_llm.walltime import Pace

Batches: TypeAlias = Iterator[tuple[int, list[Batch]]]


@dataclass
class Run:
    """Everything a run needs, made once by `build.py`; `state` is the only thing that moves."""

    config: Config
    base: Base
    tokenizer_files: dict[str, bytes]
    crowd: Crowd
    objective: Objective
    optimizer: torch.optim.Optimizer
    rows: TokenizedRows
    eval_rows: TokenizedRows
    processes: Processes
    interrupts: Interrupts
    manager: CheckpointManager
    log: RunLog
    status: RunStatus
    state: TrainState
    plan: Plan
    total_steps: int
    learning_rate: Callable[[int], float]
    remembered_trackers: dict[str, str] = field(default_factory=dict)
    meter: Meter = field(default_factory=lambda: Meter())
    pace: Pace = field(default_factory=Pace)


@dataclass
class Sums:
    """What this process saw of one optimizer step; `sums` are added over all processes by the ballot."""

    targets: int
    sums: Tensor  # [K + 2]: cross-entropy per agent, diversity, packed tokens


def train(run: Run, batches: Batches, save: Callable[[Run], None]) -> str | None:
    """Train from where `run.state` stands to the last step.

    Args:
        batches: `steps(run)`.
        save: begins a checkpoint of the run; a collective.

    Returns:
        None at the last step, or the reason for which the run was asked to stop; either way that step is saved.
    """
    stop = evaluate_and_log(run) if _evaluation_missed(run) else None
    for step, micro_batches in batches if stop is None else ():
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
        if stop is None and _evaluation_due(run) and (stop := evaluate_and_log(run)) is not None:
            save(run)
        if stop is not None:
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


def evaluate_and_log(run: Run) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason if a stop was asked for meanwhile."""
    scores = evaluate(run)
    stop = run.processes.agree(Ballot(labelled_tokens=0, stop=run.interrupts.stop_reason)).stop
    if scores is not None:
        run.log.metrics(run.state.step, evaluation_metrics(scores))
    return stop


def evaluate(run: Run) -> Scores | None:
    """Scores over all processes, each of which takes its share of the rows; None if a stop was asked for."""
    shares = share(range(len(run.eval_rows)), run.processes.index, run.processes.count, 4 * run.config.batch_size)
    batches = (pack([run.eval_rows[i] for i in part], part) for part in shares)
    with run.processes.autocast():
        own = score(run.crowd, batches, run.config.aggregator, stop=lambda: run.interrupts.stop_reason is not None)
    parts = run.processes.gather_object(own)
    whole = [part for part in parts if part is not None]
    return Scores.joined(whole) if len(whole) == len(parts) else None


def examine_crowd(run: Run) -> AnswerScores | None:
    """Generated answers scored over all processes; None if the rows ask nothing, or a stop was asked for."""
    assert run.crowd.prompter is not None
    config, prompter = run.config, run.crowd.prompter
    asked = Examination.of(run.eval_rows, prompter, run.crowd, config.generation_eval_samples, config.max_seq_length)
    if not len(asked):
        return None
    with run.processes.autocast():
        own = examine(
            run.crowd,
            prompter,
            asked,
            share(range(len(asked)), run.processes.index, run.processes.count, config.batch_size),
            max_new_tokens=config.max_new_tokens_eval,
            aggregator=config.aggregator,
            stop=lambda: run.interrupts.stop_reason is not None,
        )
    parts = run.processes.gather_object(own)
    whole = [part for part in parts if part is not None]
    return AnswerScores.joined(whole) if len(whole) == len(parts) else None


def evaluation_metrics(scores: Scores) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows reproduced exactly."""
    metrics = {}
    names = [*(f"agent{k}" for k in range(len(scores.right) - 1)), "crowd"]
    for name, exact, nll in zip(names, scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics


def _evaluation_due(run: Run) -> bool:
    every, step = run.config.eval_steps, run.state.step
    return every is not None and step % every == 0 and step < run.total_steps


def _evaluation_missed(run: Run) -> bool:
    """Whether the attempt before ended between the step this one goes on from and the evaluation due there."""
    if run.state.step == 0 or not _evaluation_due(run):
        return False
    return not run.processes.broadcast_object(run.log.has_metric(run.state.step, "eval/crowd/nll"))


def _ballot(run: Run, step: int, sums: Sums) -> Ballot:
    wanted = run.interrupts.take_save_request()
    return Ballot(
        labelled_tokens=sums.targets,
        sums=sums.sums,
        stop=run.interrupts.stop_reason,
        save=wanted or (run.processes.is_main and run.manager.should_save(step + 1)),
    )


@dataclass
class Meter:
    """Speed since the last reading."""

    tokens: int = 0
    steps: int = 0
    since: float = field(default_factory=time.perf_counter)

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1

    def read(self) -> dict[str, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        rates = {"tokens_per_s": self.tokens / elapsed, "step_time_s": elapsed / max(self.steps, 1)}
        self.tokens, self.steps, self.since = 0, 0, now
        return rates
