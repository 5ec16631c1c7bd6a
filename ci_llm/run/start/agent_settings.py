"""What each agent is, by the configuration: its adapter, objective, rows and training; and what checkpoints say of it.

A run needs them at its start, and again whenever its crowd changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ci_llm import objectives
from ci_llm.agents.agent import Agent, Training, schedule
from ci_llm.config import Config
from ci_llm.config.own_keys import NAME, OWN_KEYS, to_plain
from ci_llm.crowd.crowd import Crowd, state_of
from ci_llm.crowd.given_path import META
from ci_llm.crowd.importing import fingerprint_of_start
from ci_llm.data.agent_rows import OrderedRows, fingerprint_of
from ci_llm.data.order import Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.lora.settings import FIELD_OF_KEY, AgentLora, LoraSettings
from ci_llm.run.start.loading import Loaded


def lora_settings(config: Config) -> LoraSettings:
    """The adapters of all agents that the configuration names."""
    each = zip(config.agents, config.each_agent, strict=False)  # without `agents` nobody has own ones
    own = [{FIELD_OF_KEY[key]: getattr(agent, key) for key in said if key in FIELD_OF_KEY} for said, agent in each]
    return LoraSettings(
        num_agents=config.num_agents,
        initialize_adapters_rand=config.initialize_adapters_rand,
        outputs=objectives.head_size(config),
        agents=tuple(own),
        **{field: getattr(config, key) for key, field in FIELD_OF_KEY.items()},
    )


def crowd_settings(config: Config, numbers: Sequence[int]) -> LoraSettings:
    """The adapters of the agents with these numbers."""
    settings = lora_settings(config_of(config, numbers))
    # What keys the draws of an agent, together with its seed.
    indices = [0 if config.agents and "seed" in config.agents[number] else number for number in numbers]
    own = settings.agents or ({},) * len(indices)
    entries = zip(own, indices, strict=True)
    return replace(settings, agents=tuple({**mine, "index": index} for mine, index in entries))


def assign_training(
    agents: Sequence[Agent], config: Config, rows: Sequence[TokenizedRows], rows_per_step: int, total_steps: int
) -> None:
    """Tell every agent how and on what it trains.

    Args:
        config: the configuration whose agents these are.
        rows: the rows of each agent; agents that share a data set have one object.
        rows_per_step: the rows that each agent reads in a step.
    """
    known: dict[int, OrderedRows] = {}
    for agent, own, mine in zip(agents, config.each_agent, rows, strict=True):
        ordered = known.setdefault(id(mine), OrderedRows(mine, Plan(len(mine), rows_per_step, config.seed)))
        agent.training = Training(schedule(own, total_steps), own.weight_decay, own.max_grad_norm, ordered)


def training_of(own: Config, agent: AgentLora) -> tuple[Hashable, ...]:
    """A key of the training of an agent: agents with the same start and key stay equal."""
    draws = agent.dropout or agent.dropconnect or own.row_weights == "bootstrap"
    drawn = (agent.seed, agent.index) if draws else None
    return (drawn, *(getattr(own, key) for key in OWN_KEYS if key != "seed"))


def config_of(config: Config, numbers: Sequence[int]) -> Config:
    """The configuration with only the agents of these numbers."""
    if [*numbers] == [*range(config.num_agents)]:
        return config
    entries = config.agents or ({},) * config.num_agents
    own = tuple({NAME: f"agent{number}", **entries[number]} for number in numbers)
    return config.model_copy(update={"agents": own, "num_agents": len(own)})


@dataclass(frozen=True)
class Description:
    """What all checkpoints of the present crowd hold alike.

    Attributes:
        files: by their names: the configuration, the tokenizer, what the agents are.
        stopped: by their names the files of agents that have left it.
        fingerprints: those that must be the same for a run to be the same run.
    """

    files: dict[str, Any]
    stopped: dict[str, Any]
    fingerprints: dict[str, str]


def describe(
    config: Config, numbers: Sequence[int], loaded: Loaded, crowd: Crowd, stopped: Mapping[str, Any]
) -> Description:
    """The description of a crowd, in which the agents with these numbers stand."""
    base, present = loaded.base, config_of(config, numbers)
    each = zip(present.agent_names, present.each_agent, strict=True)
    own = [{NAME: name, **to_plain({key: getattr(agent, key) for key in OWN_KEYS})} for name, agent in each]
    settings = {"agents": own} if present.agents else {}
    state = state_of(crowd, base.fingerprint, **settings)
    files = {
        # The tensors of agents move to new memory whenever the crowd is prepared: a save looks for them itself.
        **{name: value for name, value in state.items() if name == META or name.endswith("/adapter_config")},
        "config.yaml": config.dump().encode(),
        **{f"tokenizer/{name}": data for name, data in loaded.tokenizer_files.items()},
    }
    prints = {"base": base.fingerprint, "base_rounded": base.rounded_fingerprint, "data": fingerprint_of(loaded.rows)}
    return Description(files, {**stopped}, prints | fingerprint_of_start(crowd))
