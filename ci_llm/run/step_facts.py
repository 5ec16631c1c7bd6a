"""What an objective has to know of the whole step before the first backward pass: counts of it, and KTO's `kl`.

The counts follow from the plan, which every process can compute, and from the rows. `kl` needs passes of its own over
mismatched rows: the prompt of each row with the answer of the row before it in the step, whoever computes that one.
Their sums are added by a vote, which also says whether memory ran out on some process.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ci_llm.core.determinism import seed_everything
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.preferences import Preferences, StepFacts
from ci_llm.data.agent_rows import AgentRows
from ci_llm.data.batches import AgentBatches, Batch, MicroBatch, pack
from ci_llm.data.order import AgentPlans, Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit
from ci_llm.distributed.ballot import Ballot
from ci_llm.run.context import Run, TrainedObjective


def objective_of_step(
    run: Run, step: int, micro_batches: Sequence[MicroBatch]
) -> tuple[TrainedObjective | None, str | None]:
    """The objective with what it has to know of the step. A collective, if it needs mismatched rows.

    Args:
        micro_batches: of this process.

    Returns:
        the objective; or None where memory ran out on some process, and the message of this one's allocator.
    """
    objective = run.objective
    if not isinstance(objective, Preferences):
        return objective, None
    facts, needs = StepFacts(), objective.objective.needs
    if needs.nll != "none":
        shares = [_nll_share(rows, plan, step) for rows, plan in _each(run)]
        facts = StepFacts(tuple(shares * run.crowd.num_agents if len(shares) == 1 else shares))
    if not needs.mismatched:
        return replace(objective, facts=facts), None
    found, complaint = unless_out_of_memory(partial(_differences, run, step, micro_batches))
    agents = run.crowd.num_agents
    sums = [0.0] * agents if found is None else found
    verdict = run.processes.agree(Ballot(0, [False] * agents, sums, out_of_memory=found is None))
    if verdict.out_of_memory:
        return None, complaint
    counts = [plan.num_rows_of(step) for _, plan in _each(run)]
    kl = (torch.tensor(verdict.sums, dtype=torch.float64) / torch.tensor(counts)).clamp(min=0)
    return replace(objective, facts=replace(facts, kl=kl.to(run.crowd.device)[:, None])), None


def _each(run: Run) -> list[tuple[TokenizedRows, Plan]]:
    """Rows and order of every agent that has its own, or of all."""
    if isinstance(run.rows, AgentRows):
        assert isinstance(run.plan, AgentPlans)
        return [*zip(run.rows.each, run.plan.each, strict=True)]
    assert isinstance(run.plan, Plan)
    return [(run.rows, run.plan)]


def _nll_share(rows: TokenizedRows, plan: Plan, step: int) -> float:
    """See `Evidence.nll_share`."""
    units = [rows[number] for number in plan.rows(step)]
    return len(units) / sum(unit.num_learned for unit in units if isinstance(unit, Unit))


@torch.no_grad()
def _differences(run: Run, step: int, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """[K] fp64 by how much the agents find the mismatched rows of this process more probable than the base, summed."""
    crowd, limit = run.crowd, run.config.max_seq_length
    before = [_rows_before(plan, step) for _, plan in _each(run)]
    sums = torch.zeros(crowd.num_agents, dtype=torch.float64, device=crowd.device)
    crowd.train()
    crowd.agents.begin_step(step)
    for number, batch in enumerate(micro_batches):
        crowd.agents.begin_micro_step(step, run.processes.process_index, number)
        batches = batch.each if isinstance(batch, AgentBatches) else [batch]
        own = zip(batches, _each(run), before, strict=True)
        mixed = [part and _mismatched(part, rows, previous, limit) for part, (rows, _), previous in own]
        mixed_batch = AgentBatches(tuple(mixed)) if isinstance(batch, AgentBatches) else mixed[0]
        assert mixed_batch is not None
        for part in crowd.parts(mixed_batch.to(crowd.device)):
            run.heartbeat.tick()
            seed_everything(run.config.seed, "mismatched", step, run.processes.process_index, number)
            with part.reading(), run.processes.autocast():
                found: Any = crowd(part.rows)
                outputs = found.each if isinstance(part.rows, AgentBatches) else [found]
                rows_of = part.rows.each if isinstance(part.rows, AgentBatches) else [part.rows]
                for at, (output, rows) in enumerate(zip(outputs, rows_of, strict=True)):
                    if output is not None and rows is not None:
                        gained = output.log_probs.double().sum(1) - crowd.reference(rows).double().sum(1)
                        first = at if part.agent is None else part.agent
                        sums[first : first + len(gained)] += gained
    return sums


def _rows_before(plan: Plan, step: int) -> dict[int, int]:
    """Of each row of the step the one before it; of the first the last one, and of an only one another step's."""
    rows = plan.rows(step)
    last = rows[-1] if len(rows) > 1 else plan.rows(step - 1 if step else 1)[-1]
    return dict(zip(rows, [last, *rows[:-1]], strict=True))


def _mismatched(batch: Batch, rows: TokenizedRows, before: dict[int, int], limit: int) -> Batch:
    """The same prompts with the answers of the rows before them."""
    units = [rows[number].with_answer_of(rows[before[number]], limit) for number in batch.sample_ids]  # type: ignore[attr-defined]
    return pack(units, batch.sample_ids)
