"""The settings of each agent, from the configuration: the shape of its adapter, objective, optimizer, schedule.

A run needs them at its start, and again whenever its crowd changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ci_llm import objectives
from ci_llm.config import Config
from ci_llm.config.own_keys import OWN_KEYS
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.crowd.preferences import Preferences, TrainedObjective
from ci_llm.data.agent_rows import AgentRows, TrainingRows
from ci_llm.errors import ModelError
from ci_llm.lora.layer import FIELD_OF_KEY, AgentLora, LoraSettings
from ci_llm.lora.optimizer import Ivon, factor
from ci_llm.run.step.members import Members, config_of


def lora_settings(config: Config) -> LoraSettings:
    """The shapes of the agents, as the configuration has them."""
    own = [{FIELD_OF_KEY[key]: agent[key] for key in agent if key in FIELD_OF_KEY} for agent in config.agents]
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
        outputs=objectives.head_size(config),
        agents=tuple(own),
    )


def crowd_settings(config: Config, members: Members) -> LoraSettings:
    """The shapes of these members, as the configuration has them."""
    settings = lora_settings(config_of(config, members))
    entries = zip(settings.agents, members.agents, strict=True)
    return replace(settings, agents=tuple({**own, "index": member.index} for own, member in entries))


def objective_of(config: Config, crowd: Crowd) -> TrainedObjective:
    """The objective of the agents of `config`."""
    drawn = [own.row_weights == "bootstrap" for own in config.each_agent]
    keys = [(agent.seed, agent.index) if draws else None for draws, agent in zip(drawn, crowd.agents.each, strict=True)]
    bootstrap = tuple(keys) if any(drawn) else ()
    if config.objective != objectives.SFT:
        found = objectives.objective_of(config.objective, config.each_agent, crowd.device)
        return Preferences(found, crowd, bootstrap)
    return Objective(
        config.diversity,
        config.lambda_sw,
        config.swd_num_projections,
        config.swd_representation,
        config.seed,
        bootstrap=bootstrap,
    )


def optimizer_of(config: Config, crowd: Crowd, rows: TrainingRows) -> torch.optim.Optimizer:
    """The optimizer of the agents of `config`."""
    groups = optimizer_groups(config, crowd, rows)
    if config.optimizer == "ivon":
        return Ivon(groups, config.ivon_hess_init)
    betas, fused = (config.adam_beta1, config.adam_beta2), config.fused_optimizer
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=fused)


#: The most trained parameters per example of IVON. With more of them, its noise drowns what the base knows.
NUMBERS_PER_EXAMPLE: Final = 50


def optimizer_groups(config: Config, crowd: Crowd, rows: TrainingRows) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one per agent."""
    groups: list[dict[str, Any]] = [
        {"params": [row], "lr": own.learning_rate, "weight_decay": own.weight_decay}
        for row, own in zip(crowd.agents.rows, config.each_agent, strict=True)
    ]
    if config.optimizer == "ivon":
        each = rows.each if isinstance(rows, AgentRows) else [rows] * crowd.num_agents
        for group, own_rows in zip(groups, each, strict=True):
            group["ess"] = config.ivon_ess
            examples = len(own_rows) if objectives.head_size(config) else own_rows.num_targets
            if config.ivon_ess is None or config.is_open("ivon_ess"):
                (row,) = group["params"]
                least = row.numel() // NUMBERS_PER_EXAMPLE if config.is_open("ivon_ess") else 0
                group["ess"] = max(examples, least)
    return groups


def schedules(config: Config, members: Members | None, total_steps: int) -> list[Callable[[int], float]]:
    """The schedule of every agent that stands in the crowd."""
    now = config_of(config, members)
    count = partial(members.schedule_step, config) if members else _as_it_is
    if not now.agents:
        return [schedule(now, total_steps, count)] * now.num_agents
    return [schedule(own, total_steps, count) for own in now.each_agent]


def _as_it_is(step: int) -> int:
    return step


def schedule(config: Config, total_steps: int, count: Callable[[int], int] = _as_it_is) -> Callable[[int], float]:
    """The learning rate as a pure function of the 0-based step.

    With `schedule_steps` it is the rate of a run of that many steps, wherever this run ends; later steps have the last
    rate.

    Args:
        count: converts optimizer steps to steps of the schedule.
    """
    total = count(config.schedule_steps or total_steps)
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(count(step), total))


def require_distinct_branches(config: Config) -> None:
    """Refuse branches that would stay equal, because nothing of their training differs.

    Raises:
        ModelError: some branches would stay equal.
    """
    if config.branch_at is None:
        return
    members = Members.first(config, 2)
    assert members is not None
    members, _ = members.after(config.num_agents, config)
    settings, agents = config_of(config, members).each_agent, crowd_settings(config, members).each()
    kinds = {training_of(own, agent) for own, agent in zip(settings, agents, strict=True)}
    if len(kinds) < len(agents):
        raise ModelError(
            "some branches would stay equal to the last bit: nothing of their training differs",
            where="branch_at, agents",
            hint="leave row_weights and data_seed out of their entries, or give each a learning_rate of its own",
        )


def training_of(own: Config, agent: AgentLora) -> tuple[Hashable, ...]:
    """A key of the training of an agent: agents with the same start and key stay equal."""
    draws = agent.dropout or agent.dropconnect or own.row_weights == "bootstrap" or own.optimizer == "ivon"
    drawn = (agent.seed, agent.index) if draws else None
    return (drawn, *(getattr(own, key) for key in OWN_KEYS if key != "seed"))
