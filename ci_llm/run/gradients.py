"""The gradients of one optimizer step: how they are computed on this process, then added up, clipped and applied.

Before the passes an objective of pairs or rated rows learns counts and KTO's `kl`. The counts follow from the plan,
which every process can compute, and from the rows. `kl` needs passes of its own over mismatched rows: the prompt of
each row with the answer of the row before it in the step, whichever process has that row. A vote adds up their sums,
and tells whether memory ran out on some process.

Losses are summed, so that the gradients of all passes add up. `compute_gradients` sends nothing: under `no_sync` a
process that runs out of memory leaves nobody waiting. After the ballot of the step `apply_gradients` makes one
all-reduce of the flat gradient, or one for each agent. Each agent's part becomes a mean over its targets, and is
clipped by its norm. The optimizer moves the agents that are finite, and leaves out the others.

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
from ci_llm.crowd.objective import Preferences, StepLoss, TrainedObjective
from ci_llm.data.agent_rows import OrderedRows, once_each
from ci_llm.data.batches import Batch, MicroBatch, Owned, pack
from ci_llm.data.order import Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit
from ci_llm.distributed.ballot import Ballot, StepSums, Verdict
from ci_llm.run.optimizer import set_rates
from ci_llm.run.step.nonfinite import nonfinite_here
from ci_llm.run.trainer import Trainer


def compute_gradients(
    trainer: Trainer,
    step: int,
    micro_batches: Sequence[MicroBatch],
    objective: TrainedObjective,
    loss_scale: float | None,
) -> Ballot:
    """Forward and backward of every micro-batch; the gradients add up in the crowd's storage.

    Args:
        micro_batches: those of this process.
        objective: that of the run, with the facts of the step.
        loss_scale: the factor on fp16 losses; None in every other precision.

    Returns:
        the ballot of this process, with its sums and the agents that are not finite here.
    """
    accelerator, model, crowd = trainer.processes.accelerator, trainer.prepared.model, trainer.crowd
    process = accelerator.process_index
    counted = 0
    model.train()
    crowd.storage.begin_step(step)
    size = StepSums.size(crowd.num_agents, metrics=len(objective.metric_names))
    sums = torch.zeros(size, dtype=torch.float64, device=crowd.device)
    for number, batch in enumerate(micro_batches):
        crowd.storage.begin_micro_step(step, process, number)
        losses = list[StepLoss]()
        for rows in crowd.passes_of([own.to(crowd.device) for own in batch]):
            trainer.heartbeat.tick()
            # Keyed, not sequential: what is drawn here depends on nothing that happened before, so a resume draws
            # the same, and so does an agent that is alone.
            seed_everything(trainer.config.seed, "micro-step", step, process, number)
            with accelerator.no_sync(model):
                with accelerator.autocast():
                    found = [objective(output, step) for output in model(rows)]
                total = found[0].total if len(found) == 1 else torch.stack([loss.total for loss in found]).sum()
                accelerator.backward(total if loss_scale is None else total * loss_scale)
            losses += found
        loss = objective.together(losses, crowd.num_agents, step)
        tokens = sum(own.batch.num_tokens for own in batch)
        sums += StepSums.pack(loss.task, loss.targets, loss.diversity, tokens, loss.metrics)
        counted += sum(objective.count(own.batch) for own in batch)
    return Ballot(counted, nonfinite_here(crowd.storage.gradients, sums[: crowd.num_agents]), sums)


def apply_gradients(trainer: Trainer, step: int, verdict: Verdict, left_out: Sequence[int]) -> Tensor:
    """Reduce, take the mean over an agent's targets of the step, clip each; the optimizer moves those not left out.

    Returns:
        [K] the gradient norm of every agent before clipping, on the device, which is not waited for.
    """
    agents, storage, state = trainer.crowd.agents, trainer.crowd.storage, trainer.state
    for part in storage.gradients_to_add:
        trainer.processes.reduce_flat_(part)
    scale = state.loss_scale or 1.0
    targets = StepSums.unpack(verdict.sums, len(agents)).targets
    if len({*targets}) == 1:
        storage.gradients.div_(max(targets[0], 1) * scale)
    else:
        for gradient, count in zip(storage.gradients, targets, strict=True):
            gradient.div_(max(count, 1) * scale)
    norms = storage.clip([agent.training.max_grad_norm for agent in agents])
    storage.leave_out(left_out)
    set_rates(trainer.prepared.optimizer, [agent.learning_rate(step, state.lr_factor(agent.place)) for agent in agents])
    trainer.prepared.optimizer.step()
    return norms


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
    needs = objective.objective.needs
    training_rows = trainer.training_rows
    if needs.nll != "none":
        shares = once_each(training_rows.each, lambda ordered: _nll_share(ordered, step))
        objective = replace(objective, nll_shares=tuple(shares))
    if not needs.mismatched:
        return objective, None
    found, complaint = unless_out_of_memory(partial(_differences, trainer, step, micro_batches))
    agents = trainer.crowd.num_agents
    sums = [0.0] * agents if found is None else found
    verdict = trainer.processes.agree(Ballot(0, [False] * agents, sums, out_of_memory=found is None))
    if verdict.out_of_memory:
        return None, complaint
    counts = torch.tensor([ordered.plan.num_rows_of(step) for ordered in training_rows.each])
    kl = (torch.tensor(verdict.sums, dtype=torch.float64) / counts).clamp(min=0)
    return replace(objective, kl=kl.to(trainer.crowd.device)[:, None]), None


@torch.no_grad()
def _differences(trainer: Trainer, step: int, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """[K] fp64 log-probability of this process's mismatched rows by the agents minus that by the base, summed."""
    crowd, each, process = trainer.crowd, trainer.training_rows.each, trainer.processes.process_index
    limit, seed = trainer.config.max_seq_length, trainer.config.seed
    before = once_each(each, lambda ordered: _rows_before(ordered.plan, step))
    sums = torch.zeros(crowd.num_agents, dtype=torch.float64, device=crowd.device)
    crowd.train()
    crowd.storage.begin_step(step)
    for number, batch in enumerate(micro_batches):
        crowd.storage.begin_micro_step(step, process, number)
        mixed = []
        for agents, own in batch:
            rows = _mismatched(own, each[agents[0]].rows, before[agents[0]], limit)
            mixed.append(Owned(agents, rows.to(crowd.device)))
        for part in crowd.passes_of(mixed):
            trainer.heartbeat.tick()
            seed_everything(seed, "mismatched", step, process, number)
            with trainer.processes.autocast():
                for output in crowd(part):
                    wanted = crowd.reference(output.agents, output.batch).double().sum(1)
                    gained = output.log_probs.double().sum(1) - wanted
                    for place, agent in enumerate(output.agents):
                        sums[agent] += gained[place]
    return sums


def _nll_share(ordered: OrderedRows, step: int) -> float:
    """See `Evidence.nll_share`."""
    units = [_unit(ordered.rows, number) for number in ordered.plan.rows(step)]
    return len(units) / sum(unit.num_learned for unit in units)


def _rows_before(plan: Plan, step: int) -> dict[int, int]:
    """The row before each row of the step. The first row gets the last; in a step of one row, a row of another step."""
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
