"""The crowd changes while a run trains: agents branch, join, stay alone, are stopped or cloned between two steps.

A change acts on every process alike and without communication. What an agent has reached goes with it: weights,
moments, its recovery, the snapshot of its last good state, the sums since the last line of metrics. A copy of an agent
begins with all of that except the sums, and one that joins starts fresh. An agent that is stopped leaves its adapter to
the checkpoints.

A decision is put on record before it acts, so that an attempt that resumes from an older checkpoint repeats it.
Requests wait until the disk takes the record. The decision of `crowd: auto` does not wait: where the disk refuses it,
such an attempt decides again, from the same numbers where it is bitwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.distributed.ballot import Verdict
from ci_llm.distributed.processes import Processes
from ci_llm.run.context import Run
from ci_llm.run.setup import lengths_of
from ci_llm.run.start.agent_settings import crowd_settings, objective_of, optimizer_groups, schedules
from ci_llm.run.start.loading import rows_and_plan, steps_of
from ci_llm.run.start.resume import STOPPED
from ci_llm.run.step.members import (
    CrowdChange,
    CrowdRequest,
    Members,
    OldPlaces,
    RecordFailure,
    config_of,
    decide,
    read_record,
    read_waiting,
)
from ci_llm.run.step.state import Choice, TrainState

logger = logging.getLogger(__name__)


#: The metric that the decision needs beside those of an evaluation, in nats per target token.
TRAINING_NLL: Final = "choice/training_nll"
#: An agent learns its rows by heart when its nll on them is below this share of that on new rows.
BY_HEART: Final = 0.5
_ID: Final = "crowd-auto"


def decide_crowd(
    config: Config,
    state: TrainState,
    metrics: Mapping[str, Any],
    processes: Processes,
    may_write: Callable[[], bool],
) -> TrainState:
    """The state with the decision of `crowd: auto`. A collective.

    One agent begins. An evaluation after an eighth of the agent-steps decides once: the agent stays alone and takes the
    steps of all, or the others join it. An agent that knows its training rows much better than new ones learns them by
    heart: more steps of its own would go into that, and a crowd averages it away. An agent that knows both about as
    well is still learning: more steps of one agent help more than more agents. An agent that stays alone has the bits
    of one that was alone from the start.

    Args:
        metrics: the numbers of the evaluation after the present step, by the names of metrics.jsonl.
        may_write: whether this attempt holds the run's folder.
    """
    members = state.members
    assert members is not None  # with `crowd: auto` a run begins with one agent
    choice = processes.on_main(partial(_decide_on_main, config, state.step, members, metrics, may_write))
    logger.info(f"crowd     {choice}")
    return state.with_choice(choice, members.with_planned([change_of(choice)]))


def choice_from_nll(step: int, training: float, validation: float) -> Choice:
    """The decision after `step` about an agent with these nll; if one is NaN, the others join."""
    return Choice(step, training, validation, alone=training >= BY_HEART * validation)


def change_of(choice: Choice) -> CrowdChange:
    """The change that follows from a choice. It acts after one more step, as requested changes do."""
    return CrowdChange(choice.step + 1, "stay_alone" if choice.alone else "join")


def _decide_on_main(
    config: Config, step: int, members: Members, metrics: Mapping[str, Any], may_write: Callable[[], bool]
) -> Choice:
    """On the main process: the decision of an earlier attempt, or a new one, which is recorded before it acts."""
    (name,) = members.folders
    choice = choice_from_nll(step, float(metrics[TRAINING_NLL]), float(metrics[f"eval/{name}/nll"]))
    change = change_of(choice)
    known = [each for each in read_record(config.run_folder) if each.id == _ID and each.step == change.step]
    if known:
        return replace(choice, alone=known[-1].verb == "stay_alone")
    try:
        if may_write():
            decide(config.run_folder, [CrowdRequest(_ID, change.step, change.verb, change.agent)])
    except OSError as error:
        logger.warning(f"crowd     what was decided cannot be put on record, the run continues: {error.strerror}")
    return choice


def change_crowd(run: Run, verdict: Verdict) -> None:
    """Make the changes of the crowd that are due after the step just taken; none after the last step.

    A collective if a change was asked for.
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
        planned, run.total_steps = run.total_steps, members.total_steps(run.config, steps)
        if run.total_steps != planned:
            agents = f"{len(members.folders)} of {run.config.num_agents} agents"
            logger.info(
                f"crowd     {agents} take the agent-steps of all: {run.total_steps} steps in place of {planned}"
            )
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
    """Replace the agents of the run by these members.

    Args:
        sources: see `OldPlaces`.
    """
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
    run.evaluator.rows, run.evaluator.objective = run.eval_rows, run.objective
    run.learning_rates = schedules(run.config, members, run.total_steps)
    run.max_grad_norms = [own.max_grad_norm for own in config.each_agent]
    run.last_good.replace_agents(crowd.agents.rows, sources)
    run.step_metrics.replace_agents(members.folders)
    run.learning.replace_agents(members.folders, sources)
    run.state = run.state.with_members(members, sources)


def return_to(run: Run, saved: TrainState) -> None:
    """Give the run the crowd, order and length of a checkpoint, before weights and moments are put in place.

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
    """Give the optimizer other parameters. It stays the same object, because it holds hooks of other parts."""
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for group, own in zip(groups, moments, strict=True):
        optimizer.add_param_group(group)
        (row,) = optimizer.param_groups[-1]["params"]
        if own:
            optimizer.state[row] = {name: tensor.clone() for name, tensor in own.items()}


def _adapters_of(leaving: Collection[str], crowd: Crowd) -> Iterator[tuple[str, Any]]:
    """The files of agents that leave. From here on checkpoints hold them as PEFT folders beside those of the crowd."""
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
        failure: why requests waited before; the same reason is not told again.
    """
    folder, decided = config.run_folder, []
    for waiting in read_waiting(folder):
        request = replace(waiting, step=step)
        if request.refused is None:
            request = replace(request, refused=members.objection(request.change, dropped))
        if request.refused is None:
            members, _ = members.with_planned([request.change]).after(step, config)
        decided.append(request)
    try:
        decide(folder, decided)  # before anything acts or is told
    except OSError as error:
        if failure.failed(error.strerror or str(error)):
            logger.warning(f"crowd     requests wait in {folder}: they cannot be put on record ({failure.reason})")
        return []
    failure.succeeded()
    for request in decided:
        if request.refused is not None:
            logger.warning(f"crowd     the request to {request.verb} agent{request.agent}: {request.refused}")
    return [request.change for request in decided if request.refused is None]
