"""What follows from who is in the crowd: the shapes of the adapters, objective, optimizer groups, schedules, rows.

A run needs it at its start, and again whenever its crowd changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ci_llm.config import Config
from ci_llm.config.own_keys import OWN_KEYS, SHAPE_KEYS
from ci_llm.crowd.lora import AgentLora, LoraSettings
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.crowd.schedules import factor
from ci_llm.data.agent_rows import AgentRows, TrainingRows
from ci_llm.data.order import AgentPlans, Plan
from ci_llm.errors import ModelError
from ci_llm.run.members import Members, config_of
from ci_llm.run.state import TrainState


def lora_settings(config: Config) -> LoraSettings:
    """What the configuration says about an agent."""
    return LoraSettings(
        num_agents=config.num_agents,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        dropconnect=config.dropconnect_p,
        target_modules=config.lora_target_modules,
        layers=config.agent_layers,
        use_rslora=config.use_rslora,
        initialize_adapters_rand=config.initialize_adapters_rand,
        seed=config.seed,
        agents=tuple({_LORA[key]: value for key, value in own.items() if key in _LORA} for own in config.agents),
    )


#: A key that an agent may have of its own -> its name in `LoraSettings`.
_LORA: Final = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "dropconnect_p": "dropconnect",
    "lora_target_modules": "target_modules",
    "agent_layers": "layers",
    "use_rslora": "use_rslora",
    "seed": "seed",
}
#: Of these, what gives an adapter its shape and scale.
SHAPE: Final = {key: _LORA[key] for key in SHAPE_KEYS}


def crowd_settings(config: Config, members: Members) -> LoraSettings:
    """What the configuration says about these members."""
    settings = lora_settings(config_of(config, members))
    entries = zip(settings.agents, members.agents, strict=True)
    return replace(settings, agents=tuple({**own, "index": member.index} for own, member in entries))


def objective_of(config: Config, crowd: Crowd) -> Objective:
    """The objective of these agents."""
    drawn = [own.row_weights == "bootstrap" for own in config.each_agent]
    keys = [(agent.seed, agent.index) if draws else None for draws, agent in zip(drawn, crowd.agents.each, strict=True)]
    return Objective(
        config.diversity,
        config.lambda_sw,
        config.swd_num_projections,
        config.swd_representation,
        config.seed,
        bootstrap=tuple(keys) if any(drawn) else (),
    )


def optimizer_groups(config: Config, crowd: Crowd) -> list[dict[str, Any]]:
    """AdamW's parameter groups, one per agent."""
    return [
        {"params": [row], "lr": own.learning_rate, "weight_decay": own.weight_decay}
        for row, own in zip(crowd.agents.rows, config.each_agent, strict=True)
    ]


def schedules(config: Config, members: Members | None, total_steps: int) -> list[Callable[[int], float]]:
    """`schedule` of every agent in the crowd as it stands."""
    now = config_of(config, members)
    count = partial(members.schedule_step, config) if members else _as_it_is
    if not now.agents:
        return [schedule(now, total_steps, count)] * now.num_agents
    return [schedule(own, total_steps, count) for own in now.each_agent]


def _as_it_is(step: int) -> int:
    return step


def schedule(config: Config, total_steps: int, count: Callable[[int], int] = _as_it_is) -> Callable[[int], float]:
    """Learning rate of 0-based step s, as a pure function.

    With `schedule_steps` it is that of a run of so many steps, wherever this one ends; later steps have its last rate.

    Args:
        count: from optimizer steps to steps of the schedule.
    """
    total = count(config.schedule_steps or total_steps)
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(count(step), total))


def require_distinct_branches(config: Config) -> None:
    """Refuse branches that would stay equal, because nothing of their training differs.

    Raises:
        ModelError: some would.
    """
    if (members := Members.first(config, 2)) is None:
        return
    members, _ = members.after(config.num_agents, config)
    settings, agents = config_of(config, members).each_agent, crowd_settings(config, members).each()
    kinds = {
        (training_of(own, agent), (agent.seed, agent.index) if agent.dropout or agent.dropconnect else None)
        for own, agent in zip(settings, agents, strict=True)
    }
    if len(kinds) < len(agents):
        raise ModelError(
            "some branches would stay equal to the last bit: nothing of their training differs",
            where="branch_at, agents",
            hint="leave row_weights and data_seed out of their entries, or give each a learning_rate of its own",
        )


def training_of(own: Config, agent: AgentLora) -> tuple[Hashable, ...]:
    """What tells this agent's training from that of another with the same start."""
    drawn = (agent.seed, agent.index) if own.row_weights == "bootstrap" else None
    return (drawn, *(getattr(own, key) for key in OWN_KEYS if key != "seed"))


def rows_and_plan(
    config: Config, rows: TrainingRows, members: Members | None, rows_per_step: int
) -> tuple[TrainingRows, Plan | AgentPlans]:
    """The rows that the members train on, and their order.

    Args:
        rows: with which the run begins; those of every agent, if agents of the configuration have their own.
        rows_per_step: of all agents, or of each.
    """
    now = config_of(config, members)
    if isinstance(rows, AgentRows):
        origins = [each.origin for each in members.agents] if members else [*range(len(rows.each))]
        each = tuple(rows.each[origin] for origin in origins)
    elif now.has_own_rows:
        each = (rows,) * now.num_agents
    else:
        return rows, Plan(len(rows), rows_per_step, now.data_seeds[0])
    plans = zip(each, now.data_seeds, strict=True)
    return AgentRows(each), AgentPlans(tuple(Plan(len(own), rows_per_step, seed) for own, seed in plans))


def stretches(
    config: Config, rows: TrainingRows, state: TrainState, total_steps: int
) -> list[tuple[TrainingRows, Plan | AgentPlans, int, int]]:
    """(rows, order, first step, end) of what is left of a run: up to where its crowd branches, and from there on.

    Both are known when an attempt begins, so that the loader workers of both are forked then. As long as one agent may
    go on alone, the end is that of its steps.

    Args:
        rows: see `rows_and_plan`.
    """
    members, branch = state.members, None
    if members is not None:
        branch = next((change.step for change in members.planned if change.verb == "branch"), None)
    now = rows_and_plan(config, rows, members, state.rows_per_step)
    if members is None or branch is None:
        may_grow = config.crowd == "auto" and (state.choice is None or state.choice.agent is not None)
        alone = members is not None and len(members.agents) == 1
        return [(*now, state.step, total_steps * (config.num_agents if may_grow and not alone else 1))]
    later, _ = members.after(branch, config)
    branched = rows_and_plan(config, rows, later, state.rows_per_step)
    return [(*now, state.step, branch), (*branched, branch, total_steps)]
