"""The training loop: one optimizer step of all agents, from the rows of a batch to the weights after it. Read it first.

`setup.py` builds the `Run`, and `job.py` hands it to `train` together with the batches of `steps`, for which Accelerate
prepares the crowd, its optimizer and the loader. Every step goes the same way, on all processes alike:

1. An objective of pairs or rated rows learns what it has to know of the whole step (step/whole_step.py).
2. `compute_gradients`: each process runs its micro-batches through the frozen base, forward and backward. A micro-batch
   takes one pass for all agents, or with `pass_per_agent` one pass for each, which gives an agent the bits that it has
   alone. Losses are summed, so that the gradients of all passes add up. Under `no_sync` no process sends anything here.
3. `agree_on_gradients`: ONE ballot. It adds up losses and targets, and tells all processes which agents are not finite,
   whether memory ran out, and whether somebody wants to stop, to save or to change the crowd.
4. `apply_gradients`: ONE all-reduce of the flat gradient. Each agent's part becomes a mean over its targets and is
   clipped by its norm. The optimizer moves the agents that are finite, and leaves out the others (step/nonfinite.py).
5. The state advances. Then come, where they are due: a change of the crowd, a checkpoint, an evaluation.

Backward communicates nothing, because a reduction there would leave the peers of a process that ran out of memory
waiting. Such a process says so in its ballot, and all repeat the step in smaller parts (step/out_of_memory.py).

Legend: K agents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import model_has_dtensor
from torch import Tensor
from torch.optim import Optimizer

from ci_llm.core.determinism import seed_everything
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import StepLoss
from ci_llm.crowd.preferences import TrainedObjective
from ci_llm.data.batches import MicroBatch, of_agents
from ci_llm.data.loader import any_number_of_workers, loader_of
from ci_llm.distributed.ballot import Ballot, StepSums, Verdict
from ci_llm.distributed.processes import peer_errors
from ci_llm.run.context import Prepared, Run
from ci_llm.run.crowd_changes import change_crowd
from ci_llm.run.step import evaluation
from ci_llm.run.step.members import is_waiting
from ci_llm.run.step.nonfinite import Findings, findings_of, nonfinite_here, recovery_metrics
from ci_llm.run.step.out_of_memory import in_parts

logger = logging.getLogger(__name__)

Batches: TypeAlias = Iterator[tuple[int, list[MicroBatch]]]


@dataclass
class Sums:
    """The sums of one optimizer step on this process; the ballot adds them over all processes."""

    num_targets: int
    sums: Tensor  # see `StepSums`
    nonfinite: Tensor  # [K] bool: whether an agent's loss or gradient is not finite here


def train(run: Run, batches: Batches) -> str | None:
    """Train from where `run.state` stands to the last step, or until patience with the evaluations has run out.

    Args:
        batches: `steps(run)`.

    Returns:
        None at the last step, or the reason for which the run was asked to stop; either way that step is saved.
    """
    run.last_good.begin(run.state.step)
    run.step_metrics.restart_clock()
    stop = evaluate(run) if run.evaluation_missed else None
    for step, micro_batches in batches if stop is None and not run.is_finished else ():
        run.pace.begin_step()
        known_bad = run.state.recovery.is_bad_batch(step, run.courses.rows_of_step)
        verdict = agree_on_gradients(run, step, [] if known_bad else micro_batches)
        dropped = run.nonfinite.dropped(run.state.recovery)
        own = run.courses.are_own
        findings = findings_of(verdict, run.state.loss_scale, known_bad=known_bad, dropped=dropped, own_rows=own)
        norms = apply_gradients(run, step, verdict, findings.left_out)
        num_rows = run.courses.num_rows_of(step)
        run.state = run.state.advance(num_rows, findings.tokens, findings.left_out, findings.overflowed)
        run.state = run.nonfinite.respond(run.state, run.courses.rows_of_step, findings)
        run.status.update(step=run.state.step)
        run.pace.end_step(run.manager.last_result)
        run.heartbeat.tick()
        run.call_event("on_step_end")
        report(run, verdict, findings, norms)
        settings = run.crowd.settings
        change_crowd(run, verdict)
        if run.crowd.settings is not settings:
            accelerator, loader = run.processes.accelerator, run.prepared.loader
            run.prepared = prepared(run.prepared, accelerator, run.crowd, run.optimizer, loader)
            run.measure(compute_gradients)
        stop = verdict.stop or (run.stop_vote.reason() if run.votes_after_steps else None)
        if stop or verdict.save or run.state.step == run.total_steps:
            save(run)
        if stop is None and run.evaluation_due:
            stop = evaluate(run)
            if (stop or run.is_at_best or run.is_finished) and not verdict.save:
                save(run)
        if stop is not None or run.is_finished:
            break
    return stop


def steps(run: Run) -> Batches:
    """(step, this process's micro-batches), from where the state stands to the end of the run."""
    accelerator, workers = run.processes.accelerator, run.config.num_workers
    span = range(
        run.state.step - run.state.step % run.courses.steps_per_epoch, run.total_steps
    )  # from an epoch's start
    with any_number_of_workers():
        loader, sampler = loader_of(
            run.courses, span, run.processes.num_processes, run.micro_batch_size, num_workers=workers
        )
        run.prepared = prepared(run.prepared, accelerator, run.crowd, run.optimizer, loader)
        batches = iter(accelerator.skip_first_batches(run.prepared.loader, sampler.before(run.state.step)))
        batches = chain([*islice(batches, 1)] if workers else [], batches)  # starts them, before the run has threads
    run.batch_places = [*range(run.crowd.num_agents)]

    def of_step(step: int) -> tuple[int, list[MicroBatch]]:
        dealt = [batch for batch in islice(batches, sampler.micro_steps(step)) if batch]
        return step, of_agents(dealt, run.batch_places)

    # One at a time, when it is asked for: the crowd may change between two steps.
    return map(of_step, range(run.state.step, run.total_steps))


def prepared(before: Prepared, accelerator: Accelerator, crowd: Crowd, optimizer: Optimizer, loader: Any) -> Prepared:
    """Let Accelerate prepare crowd, optimizer and loader: again after each change of the crowd. A collective.

    On several processes DistributedDataParallel wraps the crowd, without the frozen base, which each has loaded. Where
    each process holds a part of the base the crowd stays as it is: its gradients are reduced in the same way.

    Args:
        before: what was prepared last, which the accelerator forgets.
    """
    accelerator.unwrap_model(before.model, keep_fp32_wrapper=False)
    accelerator.free_memory()
    tensors = *crowd.named_parameters(), *crowd.named_buffers()
    ignored: Any = [name for name, tensor in tensors if not tensor.requires_grad]
    crowd._ddp_params_and_buffers_to_ignore = ignored
    with peer_errors():
        if model_has_dtensor(crowd):  # DDP refuses a base that is spread over the processes
            model = accelerator.prepare_model(crowd, evaluation_mode=True)
            return Prepared(model, *accelerator.prepare(optimizer, loader))
        return Prepared(*accelerator.prepare(crowd, optimizer, loader))


def agree_on_gradients(run: Run, step: int, micro_batches: list[MicroBatch]) -> Verdict:
    """Compute this process's gradients of the step and vote on them; repeat it in smaller parts where memory ran out.

    Raises:
        OutOfMemory: on every process, when the parts cannot be made smaller.
    """
    save_wanted = False
    while True:
        parts = in_parts(run.courses, micro_batches, run.micro_batch_size)
        objective, complaint = run.whole_step(step, parts).objective(run.objective)
        if objective is not None:
            sums, complaint = unless_out_of_memory(partial(compute_gradients, run, step, parts, objective))
            save_wanted |= run.interrupts.take_save_request()
            verdict = run.processes.agree(_ballot(run, step, sums, save_wanted))
            if not verdict.out_of_memory:
                return verdict
        one_pass = not run.crowd.storage.pass_per_agent
        run.state = run.memory.relieve(run.state, complaint)
        if one_pass and run.crowd.storage.pass_per_agent:
            run.measure(compute_gradients)  # the steps have other bits from here on
        run.status.update(micro_batch_size=run.micro_batch_size)


def compute_gradients(
    run: Run, step: int, micro_batches: list[MicroBatch], of_step: TrainedObjective | None = None
) -> Sums:
    """Forward and backward of every micro-batch; gradients of summed losses add up in the crowd's storage.

    Args:
        of_step: the objective with what it has to know of the step; None if it has to know nothing.
    """
    objective, accelerator, model = of_step or run.objective, run.processes.accelerator, run.prepared.model
    crowd, num_agents = run.crowd, run.crowd.num_agents
    model.train()
    crowd.storage.begin_step(step)
    sums = torch.zeros(_num_sums(num_agents, objective), dtype=torch.float64, device=crowd.device)
    for number, batch in enumerate(micro_batches):
        crowd.storage.begin_micro_step(step, run.processes.process_index, number)
        losses = list[StepLoss]()
        for rows in crowd.parts([own.to(crowd.device) for own in batch]):
            run.heartbeat.tick()
            # Keyed, not sequential: what is drawn here depends on nothing that happened before, so a resume draws the
            # same, and so does an agent that is alone.
            seed_everything(run.config.seed, "micro-step", step, run.processes.process_index, number)
            with accelerator.no_sync(model):
                with accelerator.autocast():
                    found = [objective(output, step) for output in model(rows)]
                total = found[0].total if len(found) == 1 else torch.stack([loss.total for loss in found]).sum()
                accelerator.backward(total if run.state.loss_scale is None else total * run.state.loss_scale)
            losses += found
        loss, tokens = objective.together(losses, num_agents, step), sum(own.batch.num_tokens for own in batch)
        sums += StepSums.pack(loss.task, loss.targets, loss.diversity, tokens, loss.metrics)
    counted = sum(objective.count(own.batch) for batch in micro_batches for own in batch)
    return Sums(counted, sums, nonfinite_here(crowd.storage.gradients, sums[:num_agents]))


def apply_gradients(run: Run, step: int, verdict: Verdict, left_out: Sequence[int]) -> Tensor:
    """Reduce, take the mean over an agent's targets of the step, clip each; the optimizer moves those not left out.

    Returns:
        [K] the gradient norm of every agent before clipping, on the device, which is not waited for.
    """
    storage = run.crowd.storage
    for part in storage.gradients_to_add:
        run.processes.reduce_flat_(part)
    scale, targets = run.state.loss_scale or 1.0, targets_of(verdict, run.crowd.num_agents)
    if len({*targets}) == 1:
        storage.gradients.div_(max(targets[0], 1) * scale)
    else:
        for gradient, count in zip(storage.gradients, targets, strict=True):
            gradient.div_(max(count, 1) * scale)
    agents = run.crowd.agents
    norms = storage.clip([agent.training.max_grad_norm for agent in agents])
    storage.leave_out(left_out)
    optimizer = run.prepared.optimizer
    for agent, group in zip(agents, optimizer.param_groups, strict=True):
        group["lr"] = agent.training.learning_rate(step) * run.state.recovery.lr_factor(agent.place)
    optimizer.step()
    return norms


def report(run: Run, verdict: Verdict, findings: Findings, norms: Tensor) -> None:
    """Show how far the run is; write a line of metrics every `logging_steps`, with means since the line before."""
    targets, step = targets_of(verdict, run.crowd.num_agents), run.state.step
    sums = StepSums.unpack(verdict.sums, run.crowd.num_agents)
    losses = [total / max(count, 1) for total, count in zip(sums.losses, targets, strict=True)]
    run.step_metrics.count(findings.tokens)
    run.status.update(agent_steps=run.state.agent_steps)
    logger.debug("step %d: losses %s, %d tokens, left out %s", step, losses, findings.tokens, findings.left_out)
    run.log.progress(run.position([] if findings.bad_batch else losses))
    run.log.report_save(run.manager.last_result)
    if not findings.bad_batch:  # else nothing was trained on
        run.learning.count(losses)
        totals = (*sums.losses, sums.diversity)
        run.step_metrics.add((*targets, verdict.num_targets), totals, norms, findings.left_out)
        run.step_metrics.add_named(run.objective.metric_names, sums.metrics, findings.left_out)
    if step % run.config.logging_steps and step != run.total_steps:
        return
    metrics: dict[str, Any] = {
        "epoch": run.courses.epoch(step),
        "agent_steps": run.state.agent_steps,
        "train/learning_rate": run.last_learning_rate,
        **run.step_metrics.means(),
    }
    if run.present_config.agents:
        for agent in run.crowd.agents:
            rate = agent.training.learning_rate(step - 1) * run.state.recovery.lr_factor(agent.place)
            metrics[f"train/{agent.name}/learning_rate"] = rate
    if run.courses.are_own:
        epochs = zip(run.crowd.agents, run.courses.epochs(step), strict=True)
        metrics |= {f"train/{agent.name}/epoch": epoch for agent, epoch in epochs}
    if not findings.bad_batch:
        run.learning.look(norms.tolist())
    run.learning.report(run.status, run.present_config.learning_rates)
    metrics |= recovery_metrics(run.state, run.config.batch_size)
    metrics |= memory_in_use(run.crowd.device) | run.step_metrics.speed() | run.mirror.metrics()
    run.log.metrics(step, metrics)
    run.step_metrics.restart()
    run.call_event("on_log", logs=metrics)


def evaluate(run: Run) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason of a stop that was asked for meanwhile."""
    with run.step_metrics.paused():
        scores = run.evaluator.scores(run.state.step, run.micro_batch_size)
    if scores is not None:
        metrics = evaluation.evaluation_metrics(scores, run.state.names)
        run.log.metrics(run.state.step, metrics)
        note_evaluation(run, metrics)
        run.last_scores = scores
        line = evaluation.describe_scores(run.state.step, scores, run.evaluator.judged_by)
        logger.info(f"{line}{run.state.best_note}")
        with run.step_metrics.paused():
            example = run.evaluator.example(run.state.step)
        if example is not None:
            logger.info(evaluation.describe_example(example, run.evaluator.judged_by))
        run.call_event("on_evaluate", metrics=metrics)
        if run.is_finished:
            logger.info(f"early stopping after step {run.state.step}: {run.state.validation.described()}")
    return run.stop_vote.reason()


def save(run: Run) -> None:
    """Begin a checkpoint of where the run stands. A collective."""
    logger.debug("step %d: save begins; the one before: %s", run.state.step, run.manager.last_result)
    with run.heartbeat.resting():  # a slow disk is no hang
        run.manager.save(
            run.state.step,
            run.contents(),
            force=True,
            info=run.info,
            keep={*evaluation.kept_steps(run.config, run.state.validation), *run.mirror.sending},
        )
    run.call_event("on_save")


def note_evaluation(run: Run, metrics: Mapping[str, Any]) -> None:
    """Decide by the evaluation after the present step which step is best. A collective."""
    validation = evaluation.validation_after(run.state, metrics, run.processes)
    run.state = replace(run.state, validation=validation)
    run.status.update(best_step=validation.best_step)


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes of this process: resident, and on a GPU the peak that its tensors reached."""
    figures = {"memory/resident_bytes": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        figures["memory/cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def targets_of(verdict: Verdict, agents: int) -> list[int]:
    """[K] the targets of each of K agents in a step, over all processes."""
    return [*StepSums.unpack(verdict.sums, agents).targets]


def _num_sums(agents: int, objective: TrainedObjective) -> int:
    """The length of `Sums.sums`."""
    return StepSums.size(agents, metrics=len(objective.metric_names))


def _ballot(run: Run, step: int, sums: Sums | None, save_wanted: bool) -> Ballot:
    """The ballot of this process about the step; None as sums: it ran out of memory."""
    agents = run.crowd.num_agents
    return Ballot(
        num_targets=sums.num_targets if sums else 0,
        nonfinite=sums.nonfinite if sums else [False] * agents,
        sums=sums.sums if sums else [0.0] * _num_sums(agents, run.objective),
        out_of_memory=sums is None,
        stop=run.interrupts.stop_reason,
        save=save_wanted or (run.processes.is_main_process and run.manager.should_save(step + 1)),
        request=run.processes.is_main_process and is_waiting(run.config.run_folder),
    )
