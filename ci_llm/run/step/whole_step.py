"""The facts of a whole step that an objective needs before the first backward pass: counts, and KTO's `kl`.

The counts follow from the plan, which every process can compute, and from the rows. `kl` needs passes of its own over
mismatched rows: the prompt of each row with the answer of the row before it in the step, whichever process has that
row. A vote adds up their sums, and tells whether memory ran out on some process.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ci_llm.core.determinism import seed_everything
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.preferences import Preferences, StepFacts, TrainedObjective
from ci_llm.data.agent_rows import AgentRows, TrainingRows
from ci_llm.data.batches import AgentBatches, Batch, MicroBatch, pack
from ci_llm.data.order import AgentPlans, Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.processes import Processes


@dataclass(frozen=True)
class WholeStep:
    """An optimizer step of all processes.

    Args:
        step: its number.
        micro_batches: the micro-batches of this process.
        rows, plan: rows and order of all agents, or of each.
        limit: `max_seq_length`.
        seed: the seed of random numbers.
        tick: called before every pass, as a sign of life.
    """

    step: int
    micro_batches: Sequence[MicroBatch]
    crowd: Crowd
    processes: Processes
    rows: TrainingRows
    plan: Plan | AgentPlans
    limit: int
    seed: int
    tick: Callable[[], object]

    def objective(self, objective: TrainedObjective) -> tuple[TrainedObjective | None, str | None]:
        """The objective with the facts of the step. A collective, if it needs mismatched rows.

        Returns:
            (the objective, None); or (None, the message of this process's allocator) if memory ran out on any process.
        """
        if not isinstance(objective, Preferences):
            return objective, None
        facts, needs, agents = StepFacts(), objective.objective.needs, self.crowd.num_agents
        if needs.nll != "none":
            shares = [_nll_share(rows, plan, self.step) for rows, plan in self._each]
            facts = StepFacts(tuple(shares * agents if len(shares) == 1 else shares))
        if not needs.mismatched:
            return replace(objective, facts=facts), None
        found, complaint = unless_out_of_memory(self._differences)
        sums = [0.0] * agents if found is None else found
        verdict = self.processes.agree(Ballot(0, [False] * agents, sums, out_of_memory=found is None))
        if verdict.out_of_memory:
            return None, complaint
        counts = torch.tensor([plan.num_rows_of(self.step) for _, plan in self._each])
        kl = (torch.tensor(verdict.sums, dtype=torch.float64) / counts).clamp(min=0)
        return replace(objective, facts=replace(facts, kl=kl.to(self.crowd.device)[:, None])), None

    @property
    def _each(self) -> list[tuple[TokenizedRows, Plan]]:
        """Rows and order of every agent that has its own, or of all."""
        if isinstance(self.rows, AgentRows):
            assert isinstance(self.plan, AgentPlans)
            return [*zip(self.rows.each, self.plan.each, strict=True)]
        assert isinstance(self.plan, Plan)
        return [(self.rows, self.plan)]

    @torch.no_grad()
    def _differences(self) -> Tensor:
        """[K] fp64 log-probability of this process's mismatched rows by the agents minus that by the base, summed."""
        crowd = self.crowd
        before = [_rows_before(plan, self.step) for _, plan in self._each]
        sums = torch.zeros(crowd.num_agents, dtype=torch.float64, device=crowd.device)
        crowd.train()
        crowd.agents.begin_step(self.step)
        for number, batch in enumerate(self.micro_batches):
            crowd.agents.begin_micro_step(self.step, self.processes.process_index, number)
            own = zip(_agents_of(batch), self._each, before, strict=True)
            mixed = tuple(part and _mismatched(part, rows, earlier, self.limit) for part, (rows, _), earlier in own)
            together: Any = AgentBatches(mixed) if isinstance(batch, AgentBatches) else mixed[0]
            for part in crowd.parts(together.to(crowd.device)):
                self.tick()
                seed_everything(self.seed, "mismatched", self.step, self.processes.process_index, number)
                with part.reading(), self.processes.autocast():
                    self._add(sums, part.rows, part.agent)
        return sums

    def _add(self, sums: Tensor, rows: Any, agent: int | None) -> None:
        """Add the differences of one pass, for one agent or for all."""
        found: Any = self.crowd(rows)
        outputs = found.each if isinstance(rows, AgentBatches) else [found]
        for place, (output, own) in enumerate(zip(outputs, _agents_of(rows), strict=True)):
            if output is not None and own is not None:
                first = place if agent is None else agent
                alone = first if isinstance(rows, AgentBatches) else agent
                gained = output.log_probs.double().sum(1) - self.crowd.reference(own, alone).double().sum(1)
                sums[first : first + len(gained)] += gained


def _agents_of(batch: MicroBatch) -> Sequence[Batch | None]:
    """The micro-batch of every agent that has its own, or of all."""
    return batch.each if isinstance(batch, AgentBatches) else [batch]


def _nll_share(rows: TokenizedRows, plan: Plan, step: int) -> float:
    """See `Evidence.nll_share`."""
    units = [_unit(rows, number) for number in plan.rows(step)]
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
