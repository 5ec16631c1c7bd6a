"""The settings of the adapters: number and shape of the agents, in PEFT's words.

Rank-stabilised scaling: Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ci_llm.base.targets import Layers
from ci_llm.config.own_keys import from_plain, to_plain
from ci_llm.errors import BadInput


@dataclass(frozen=True)
class AgentLora:
    """The settings of one agent: its own, and the common ones for the rest.

    Attributes:
        seed, index: the key of everything random of the agent. An agent with its own seed has index 0 wherever it
            stands. The others have the common seed and their place as index, unless their entry names another index.
    """

    rank: int
    alpha: float
    dropout: float
    dropconnect: float
    target_modules: str | tuple[str, ...]
    layers: Layers
    use_rslora: bool
    seed: int
    index: int

    @property
    def scaling(self) -> float:
        """The factor of B A: alpha / r, or alpha / √r with `use_rslora`."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class LoraSettings:
    """Number and shape of the agents; the words are PEFT's.

    Args:
        num_agents: K; set to the number of `agents` if these are given.
        rank: r of each adapter.
        alpha: see `AgentLora.scaling`.
        dropout: probability of dropping an input of an adapter.
        dropconnect: probability of dropping a weight of an adapter.
        target_modules: "all-linear", a regular expression, or suffixes of module names.
        layers: "all", "upper_half", or numbers of the layers in which these modules are adapted.
        use_rslora: see `AgentLora.scaling`.
        initialize_adapters_rand: every agent draws its own start; otherwise all start as agent 0.
        seed: the seed of the starts and of the DropConnect masks.
        outputs: how many numbers each agent's head computes for a row; 0 for agents that predict tokens.
        agents: for each agent its own settings: any of rank, alpha, dropout, dropconnect, target_modules, layers,
            use_rslora, seed, index. Every agent then draws its dropout from its own generator.

    Raises:
        ConfigError: a value cannot be used.

    Examples:
        >>> settings = ci_llm.LoraSettings(num_agents=2, rank=4, alpha=8)
        >>> settings.num_agents, [agent.scaling for agent in settings.each()]
        (2, [2.0, 2.0])
    """

    num_agents: int = 4
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    dropconnect: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    layers: Layers = "all"
    use_rslora: bool = False
    initialize_adapters_rand: bool = True
    seed: int = 42
    outputs: int = 0
    agents: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.agents:
            object.__setattr__(self, "num_agents", len(self.agents))
        odd = sorted({key for own in self.agents for key in own} - OWN)
        if odd:
            raise BadInput(
                f"an agent has no {odd[0]} of its own",
                where="LoraSettings(agents=...)",
                hint=f"{', '.join(sorted(OWN))}",
            )

    def of(self, agent: int) -> AgentLora:
        """The settings of one agent."""
        own = self.agents[agent] if self.agents else {}
        values = {key: own.get(key, getattr(self, key)) for key in OWN - {"index"}}
        return AgentLora(**values, index=own.get("index", 0 if "seed" in own else agent))

    def each(self) -> list[AgentLora]:
        """The settings of every agent."""
        return [self.of(k) for k in range(self.num_agents)]

    def common_or_list(self, key: str) -> Any:
        """The agents' value of `key` for messages: one value if all agents have it, or else the list."""
        values = [getattr(agent, key) for agent in self.each()]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        return values[0] if all(value == values[0] for value in values) else values

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values for ci_llm_meta_config.json; `agents` is left out if it is empty."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "agents"}
        values = {name: value for name, value in values.items() if name != "outputs" or value}
        own = {"agents": [to_plain(agent) for agent in self.agents]} if self.agents else {}
        return to_plain(values) | own

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoraSettings:
        """The inverse of `to_dict`."""
        agents = tuple(from_plain(agent) for agent in values.get("agents", ()))
        return cls(**{**from_plain(values), "agents": agents})


#: The settings that an agent may have of its own.
OWN: Final = frozenset(field.name for field in fields(AgentLora))
#: A key of the configuration that an agent may have of its own -> its name here.
FIELD_OF_KEY: Final = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "dropconnect_p": "dropconnect",
    "lora_target_modules": "target_modules",
    "agent_layers": "layers",
    "use_rslora": "use_rslora",
    "seed": "seed",
}
