"""The vote on a step: each process computes its gradients, and ONE ballot says what all have to know before any moves.

Backward communicates nothing, because a reduction there would leave the peers of a process that ran out of memory
waiting. Such a process says so in its ballot, and all repeat the step in smaller parts (out_of_memory.py). Where agents
draw completions, all processes know before the passes whether they could be rewarded.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.objective import GrpoObjective
from ci_llm.data.batches import MicroBatch
from ci_llm.distributed.ballot import Ballot, StepSums, Verdict
from ci_llm.run import gradients
from ci_llm.run.attempt import Attempt
from ci_llm.run.exactness import record_bits
from ci_llm.run.reporting import save_before_error
from ci_llm.run.step.out_of_memory import in_parts
from ci_llm.run.step.requests import is_waiting
from ci_llm.run.step.rollout import Rollout
from ci_llm.run.trainer import Trainer

logger = logging.getLogger(__name__)


def agree_on_gradients(trainer: Trainer, attempt: Attempt, step: int, micro_batches: list[MicroBatch]) -> Verdict:
    """Compute this process's gradients of the step and vote on them; repeat it in smaller parts where memory ran out.

    Raises:
        OutOfMemory: on every process, when the parts cannot be made smaller.
        RewardFailed: on every process, when a function could not reward completions; the step before is saved.
    """
    save_wanted = False
    rollout = None
    of_run = trainer.objective
    if isinstance(of_run, GrpoObjective):
        rollout = trainer.rollouts.of_step(of_run, step, micro_batches, trainer.training_rows)
        of_run = rollout.objective
        if rollout.failure is not None:
            save_before_error(trainer, attempt)
            raise rollout.failure
    while True:
        if rollout is None:
            parts = in_parts(trainer.training_rows, micro_batches, trainer.micro_batch_size)
        else:
            parts = rollout.parts(trainer.micro_batch_size, trainer.state.recovery.parts_of_group)
        objective, complaint = gradients.objective_of_step(trainer, step, parts, of_run)
        if objective is not None:
            scale = trainer.state.loss_scale
            computing = partial(gradients.compute_gradients, trainer, step, parts, objective, scale)
            computed, complaint = unless_out_of_memory(computing)
            save_wanted |= attempt.interrupts.take_save_request()
            verdict = trainer.processes.agree(_ballot(trainer, attempt, step, computed, save_wanted))
            if not verdict.out_of_memory:
                if rollout is not None:
                    _tell(trainer, attempt, step, rollout)
                return verdict
        one_pass = not trainer.crowd.storage.pass_per_agent
        trainer.state = trainer.memory.relieve(trainer.state, complaint)
        if one_pass and trainer.crowd.storage.pass_per_agent:
            record_bits(trainer, attempt)  # the steps have other bits from here on
        attempt.status.update(micro_batch_size=trainer.micro_batch_size)


def _tell(trainer: Trainer, attempt: Attempt, step: int, rollout: Rollout) -> None:
    """Keep the completions of a step where they are wanted, and show a few of them in every line of metrics."""
    if trainer.config.log_completions:
        trainer.rollouts.write(rollout, step, attempt.manager)
    if (step + 1) % trainer.config.logging_steps == 0 and trainer.processes.is_main_process:
        for line in rollout.lines():
            logger.info(line)


def _ballot(trainer: Trainer, attempt: Attempt, step: int, computed: Ballot | None, save_wanted: bool) -> Ballot:
    """What `compute_gradients` returns, with what is asked for here; None as `computed`: memory ran out."""
    agents, is_main = trainer.crowd.num_agents, trainer.processes.is_main_process
    size = StepSums.size(agents, metrics=len(trainer.objective.metric_names))
    return replace(
        computed or Ballot(0, [False] * agents, [0.0] * size, out_of_memory=True),
        stop=attempt.interrupts.stop_reason,
        save=save_wanted or (is_main and attempt.manager.should_save(step + 1)),
        request=is_main and is_waiting(trainer.config.run_folder),
    )
