"""The facts of a whole step that an objective needs before the first backward pass: counts, and KTO's `kl`.

The counts follow from the plan, which every process can compute, and from the rows. `kl` needs passes of its own over
mismatched rows: the prompt of each row with the answer of the row before it in the step, whichever process has that
row. A vote adds up their sums, and tells whether memory ran out on some process.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ci_llm.core.determinism import seed_everything
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.objective import Preferences, StepFacts, TrainedObjective
from ci_llm.data.agent_rows import Course, once_each
from ci_llm.data.batches import Batch, MicroBatch, Owned, pack
from ci_llm.data.order import Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit
from ci_llm.distributed.ballot import Ballot
from ci_llm.run.trainer import Trainer


def objective_of_step(
    trainer: Trainer, step: int, micro_batches: Sequence[MicroBatch], objective: TrainedObjective
) -> tuple[TrainedObjective | None, str | None]:
    """The objective with the facts of the step. A collective, if it needs mismatched rows.

    Args:
        micro_batches: those of this process.

    Returns:
        (the objective, None); or (None, the message of this process's allocator) if memory ran out on any process.
    """
    if not isinstance(objective, Preferences):
        return objective, None
    facts, needs, courses = StepFacts(), objective.objective.needs, trainer.courses
    if needs.nll != "none":
        facts = StepFacts(tuple(once_each(courses.each, lambda course: _nll_share(course, step))))
    if not needs.mismatched:
        return replace(objective, facts=facts), None
    found, complaint = unless_out_of_memory(partial(_differences, trainer, step, micro_batches))
    agents = trainer.crowd.num_agents
    sums = [0.0] * agents if found is None else found
    verdict = trainer.processes.agree(Ballot(0, [False] * agents, sums, out_of_memory=found is None))
    if verdict.out_of_memory:
        return None, complaint
    counts = torch.tensor([course.plan.num_rows_of(step) for course in courses.each])
    kl = (torch.tensor(verdict.sums, dtype=torch.float64) / counts).clamp(min=0)
    return replace(objective, facts=replace(facts, kl=kl.to(trainer.crowd.device)[:, None])), None


@torch.no_grad()
def _differences(trainer: Trainer, step: int, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """[K] fp64 log-probability of this process's mismatched rows by the agents minus that by the base, summed."""
    crowd, courses, config, process = trainer.crowd, trainer.courses, trainer.config, trainer.processes.process_index
    before = once_each(courses.each, lambda course: _rows_before(course.plan, step))
    sums = torch.zeros(crowd.num_agents, dtype=torch.float64, device=crowd.device)
    crowd.train()
    crowd.storage.begin_step(step)
    for number, batch in enumerate(micro_batches):
        crowd.storage.begin_micro_step(step, process, number)
        mixed = []
        for agents, own in batch:
            rows = _mismatched(own, courses.each[agents[0]].rows, before[agents[0]], config.max_seq_length)
            mixed.append(Owned(agents, rows.to(crowd.device)))
        for part in crowd.parts(mixed):
            trainer.heartbeat.tick()
            seed_everything(config.seed, "mismatched", step, process, number)
            with trainer.processes.autocast():
                for output in crowd(part):
                    wanted = crowd.reference(output.agents, output.batch).double().sum(1)
                    gained = output.log_probs.double().sum(1) - wanted
                    for place, agent in enumerate(output.agents):
                        sums[agent] += gained[place]
    return sums


def _nll_share(course: Course, step: int) -> float:
    """See `Evidence.nll_share`."""
    units = [_unit(course.rows, number) for number in course.plan.rows(step)]
    return len(units) / sum(unit.num_learned for unit in units)


def _rows_before(plan: Plan, step: int) -> dict[int, int]:
    """The row before each row of the step: the last one before the first; one of another step before a single row."""
    rows = plan.rows(step)
    other_step = step - 1 if step else 1
    last = rows[-1] if len(rows) > 1 else plan.rows(other_step)[-1]
    return dict(zip(rows, [last, *rows[:-1]], strict=True))


def _mismatched(batch: Batch, rows: TokenizedRows, before: dict[int, int], limit: int) -> Batch:
    """The prompts with the answers of the rows before them."""
    numbers = batch.sample_ids
    return pack([_unit(rows, one).with_answer_of(_unit(rows, before[one]), limit) for one in numbers], numbers)


def _unit(rows: TokenizedRows, number: int) -> Unit:
    unit = rows[number]
    assert isinstance(unit, Unit)
    return unit
