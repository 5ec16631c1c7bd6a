"""The training loop: one optimizer step of all agents, from the rows of a batch to the weights after it. Read it first.

`trainer.py` builds the `Trainer`, and `job.py` hands it to `train` with the `Attempt` and the batches of `steps`.
Every step goes the same way, on all processes alike:

1. Agents that learn by rewards draw their completions (step/rollout.py).
2. `compute_gradients`: each process runs its micro-batches through the frozen base, forward and backward. A micro-batch
   takes one pass for all agents, or with `pass_per_agent` one pass for each, which gives an agent the bits that it has
   alone. Before, an objective of pairs or rated rows learns what it has to know of the whole step.
3. `agree_on_gradients`: ONE ballot. It adds up losses and targets, and tells all processes which agents are not finite,
   whether memory ran out, and whether somebody wants to stop, to save or to change the crowd (agreement.py).
4. `apply_gradients`: one all-reduce. Each agent's gradient becomes a mean over its targets and is clipped by its norm.
   The optimizer (optimizer.py) moves the agents that are finite, and leaves out the others.
5. The state advances, and step/nonfinite.py responds to numbers that are not finite. Then come, where they are due: a
   change of the crowd, a checkpoint, an evaluation.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TypeAlias

from ci_llm.data.batches import MicroBatch, select_agents
from ci_llm.data.loader import any_number_of_workers, loader_of
from ci_llm.run.agreement import agree_on_gradients
from ci_llm.run.attempt import Attempt
from ci_llm.run.crowd_changes import change_crowd
from ci_llm.run.evaluation import evaluate
from ci_llm.run.gradients import apply_gradients
from ci_llm.run.reporting import call_event, report, save
from ci_llm.run.step.nonfinite import findings_of
from ci_llm.run.trainer import Trainer

Batches: TypeAlias = Iterator[tuple[int, list[MicroBatch]]]


def train(trainer: Trainer, attempt: Attempt, batches: Batches) -> str | None:
    """Train from where `trainer.state` stands to the last step, or until patience with the evaluations has run out.

    Args:
        batches: `steps(trainer)`.

    Returns:
        None at the last step, or the reason for which the run was asked to stop; either way that step is saved.
    """
    trainer.nonfinite.last_good.begin(trainer.state.step)
    trainer.metrics.restart_clock()
    stop = evaluate(trainer, attempt) if trainer.evaluation_missed else None
    if stop is not None or trainer.is_finished:
        return stop
    for step, micro_batches in batches:
        attempt.pace.begin_step()
        known_bad = trainer.state.recovery.is_bad_batch(step, trainer.training_rows.rows_of_step)
        verdict = agree_on_gradients(trainer, attempt, step, [] if known_bad else micro_batches)
        findings = findings_of(verdict, trainer.state, known_bad=known_bad)
        norms = apply_gradients(trainer, step, verdict, findings.left_out)
        num_rows = trainer.training_rows.num_rows_of(step)
        state = trainer.state.advance(num_rows, findings.tokens, findings.left_out, findings.overflowed)
        trainer.state = trainer.nonfinite.respond(state, trainer.training_rows, findings)
        attempt.status.update(step=trainer.state.step)
        attempt.pace.end_step(attempt.manager.last_result)
        trainer.heartbeat.tick()
        call_event(trainer, attempt, "on_step_end")
        report(trainer, attempt, verdict, findings, norms)
        change_crowd(trainer, attempt, verdict)
        stop = verdict.stop or (trainer.evaluator.stop_reason() if attempt.callbacks.may_stop else None)
        if stop or verdict.save or trainer.state.step == trainer.total_steps:
            save(trainer, attempt)
        if stop is None and trainer.evaluation_due:
            stop = evaluate(trainer, attempt)
            is_best = trainer.state.step in trainer.kept_steps
            if (stop or is_best or trainer.is_finished) and not verdict.save:
                save(trainer, attempt)
        if stop is not None or trainer.is_finished:
            break
    return stop


def steps(trainer: Trainer) -> Batches:
    """(step, this process's micro-batches), from where the state stands to the end of the run."""
    rows, step, accelerator = trainer.training_rows, trainer.state.step, trainer.processes.accelerator
    span = range(step - step % rows.steps_per_epoch, trainer.total_steps)  # from an epoch's start
    count, size, workers = trainer.processes.num_processes, trainer.micro_batch_size, trainer.config.num_workers
    with any_number_of_workers():
        loader, sampler = loader_of(rows, span, count, size, num_workers=workers)
        trainer.prepare(loader)
        batches = iter(accelerator.skip_first_batches(trainer.prepared.loader, sampler.before(step)))
        batches = chain([*islice(batches, 1)] if workers else [], batches)  # starts them, before the run has threads
    numbers = trainer.state.numbers  # of the agents in these batches

    def of_step(step: int) -> tuple[int, list[MicroBatch]]:
        dealt = [batch for batch in islice(batches, sampler.micro_steps(step)) if batch]
        return step, select_agents(dealt, [numbers.index(number) for number in trainer.state.numbers])

    # One at a time, when it is asked for: the crowd may change between two steps.
    return map(of_step, range(step, trainer.total_steps))
