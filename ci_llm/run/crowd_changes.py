"""The crowd changes in the middle of a run: storage, optimizer and everything else that counts agents is made anew.

It happens between two optimizer steps, on every process alike and without communication. What an agent has reached
goes with it: weights, moments, its recovery, the snapshot of its last good state, the sums since the last line of
metrics. A copy of an agent begins with all of that except the sums, and one that joins begins anew. An agent that is
stopped leaves its adapter to the checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ci_llm.config import Config
from ci_llm.crowd.model import Crowd
from ci_llm.distributed.ballot import Verdict
from ci_llm.run.agent_settings import crowd_settings, objective_of, optimizer_groups, schedules
from ci_llm.run.context import Run
from ci_llm.run.crowd_requests import CrowdRequest, Decision, RecordFailure, decide, read_waiting
from ci_llm.run.loading import rows_and_plan
from ci_llm.run.members import CrowdChange, Members, OldPlaces, config_of
from ci_llm.run.resume import STOPPED
from ci_llm.run.setup import lengths_of, steps_of
from ci_llm.run.state import TrainState

logger = logging.getLogger(__name__)


def change_crowd(run: Run, verdict: Verdict) -> None:
    """Make the changes of the crowd that are due after the step just taken. A collective if one was asked for.

    After the last step nothing changes any more.
    """
    if run.is_finished:
        return
    if verdict.request:
        members = run.state.members or Members.configured(run.config)
        dropped = {members.agents[k].number for k in run.nonfinite.dropped(run.state.recovery)}
        take = partial(_take_requests, run.config, members, run.state.step, dropped, run.record_failure)
        if changes := run.processes.on_main(lambda: take() if run.manager.holds_lease() else []):
            run.state = replace(run.state, members=members.with_planned(changes))
    make_due_changes(run)


def make_due_changes(run: Run) -> None:
    """Make the changes that are planned for the steps taken."""
    before = run.state.members
    if before is None:
        return
    members, sources = before.after(run.state.step, run.config)
    if members is not before:
        steps = steps_of(run.config, lengths_of(run.checkpoint.rows), run.state.rows_per_step)
        run.total_steps = members.total_steps(run.config, steps)
        run.learning.total_steps = run.total_steps
        run.status.update(total_steps=run.total_steps)
        replace_crowd(run, members, sources)
        run.last_good.begin(run.state.step)  # of agents that have joined
        new = members.made[len(before.made) :]
        branched = any(change.verb == "branch" for change in new)
        run.batch_places = [
            k if branched or place is None else run.batch_places[place] for k, place in enumerate(sources)
        ]
        for change in new:
            logger.info(f"crowd     after step {run.state.step}: {change}; the crowd is {', '.join(members.folders)}")


def replace_crowd(run: Run, members: Members, sources: OldPlaces) -> None:
    """Give the run the crowd of these members."""
    run.manager.wait_until_copied()  # a save in flight still reads the storage that goes
    crowd, optimizer, config = run.crowd, run.optimizer, config_of(run.config, members)
    run.checkpoint.stopped.update(_adapters_of({*crowd.names} - {*members.folders}, crowd))
    moments = [optimizer.state.get(row, {}) for row in crowd.agents.rows]
    crowd.replace_agents(crowd_settings(run.config, members), sources, members.folders)
    crowd.common_start = crowd.common_start or members.common_start
    run.rows, run.plan = rows_and_plan(run.config, run.checkpoint.rows, members, run.state.rows_per_step)
    groups = optimizer_groups(config, crowd, run.rows)
    _fill(optimizer, groups, [{} if place is None else moments[place] for place in sources])
    run.objective = objective_of(config, crowd)
    run.eval_rows = run.eval_rows.of_copies(sources)
    run.evaluator.rows = run.eval_rows
    run.learning_rates = schedules(run.config, members, run.total_steps)
    run.max_grad_norms = [own.max_grad_norm for own in config.each_agent]
    run.last_good.replace_agents(crowd.agents.rows, sources)
    run.step_metrics.replace_agents(members.folders)
    run.learning.replace_agents(members.folders, sources)
    run.state = run.state.with_members(members, sources)


def return_to(run: Run, saved: TrainState) -> None:
    """Give the run the crowd, order and length that it had in a checkpoint, whose numbers are put in place next.

    Args:
        saved: the state in the checkpoint.
    """
    run.state = replace(run.state, rows_per_step=saved.rows_per_step)
    run.total_steps = steps_of(run.config, lengths_of(run.rows), saved.rows_per_step)
    run.rows, run.plan = rows_and_plan(run.config, run.rows, run.state.members, saved.rows_per_step)
    if (members := saved.members) is not None and not members.are_configured:
        run.total_steps = members.total_steps(run.config, run.total_steps)
        replace_crowd(run, members, members.origins_within(run.crowd.num_agents))
    run.learning_rates = schedules(run.config, members, run.total_steps)


def _fill(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, object]], moments: Sequence[dict[str, Tensor]]
) -> None:
    """Give the optimizer other parameters; it stays the same object, because hooks of others are on it."""
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for group, own in zip(groups, moments, strict=True):
        optimizer.add_param_group(group)
        (row,) = optimizer.param_groups[-1]["params"]
        if own:
            optimizer.state[row] = {name: tensor.clone() for name, tensor in own.items()}


def _adapters_of(leaving: Collection[str], crowd: Crowd) -> Iterator[tuple[str, Any]]:
    """The files of agents that leave. Checkpoints hold them from here on, as PEFT folders beside those of the crowd."""
    files = crowd.adapter_files() if leaving else {}
    for name in sorted(leaving):
        tensors = files[f"{name}/adapter_model"]
        yield f"{STOPPED}{name}/adapter_model", {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
        yield f"{STOPPED}{name}/adapter_config", files[f"{name}/adapter_config"]


def _take_requests(
    config: Config, members: Members, step: int, dropped: Collection[int], failure: RecordFailure
) -> list[CrowdChange]:
    """On the main process: decide about the requests in the run's folder. They wait while the disk takes no record.

    Args:
        step: optimizer steps taken.
        dropped: numbers of the agents that take no steps any more.
        failure: why they waited before, which is not told again.
    """
    folder, decisions = config.run_folder, []
    for request in read_waiting(folder):
        decision = _decision(request, members, step, dropped)
        if decision.refused is None:
            members, _ = members.with_planned([decision.change]).after(step, config)
        decisions.append(decision)
    try:
        decide(folder, decisions)  # before anything acts or is told
    except OSError as error:
        if failure.failed(error.strerror or str(error)):
            logger.warning(f"crowd     requests wait in {folder}: they cannot be put on record ({failure.reason})")
        return []
    failure.succeeded()
    for refused in decisions:
        if refused.refused is not None:
            logger.warning(f"crowd     the request to {refused.verb} agent{refused.agent}: {refused.refused}")
    return [decision.change for decision in decisions if decision.refused is None]


def _decision(request: CrowdRequest | Decision, members: Members, step: int, dropped: Collection[int]) -> Decision:
    if isinstance(request, Decision):
        return replace(request, step=step)
    change = CrowdChange(step, request.verb, request.agent, request.own)
    return Decision(request.id, step, request.verb, request.agent, request.own, members.objection(change, dropped))
