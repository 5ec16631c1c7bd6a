"""The keys that agents may have of their own, and why all others are the same for all agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ci_llm.config.parsing import STRONGER
from ci_llm.config.schema import AgentKeys, BaseModelKeys, DataKeys, EvaluationKeys, Keys, ObjectiveKeys, TrainingKeys

#: Which rows an agent trains on.
ROWS_KEYS: Final = ("dataset_name", "dataset_subset", "dataset_split", "max_train_samples")
#: Which rows it takes, and in which order.
ORDER_KEYS: Final = (*ROWS_KEYS, "data_seed")
#: What an agent may have of its own, beside `name`.
OWN_KEYS: Final = (
    *("learning_rate", "lr_scheduler_type", "num_warmup_steps", "num_warmup_steps_ratio", "weight_decay"),
    *("max_grad_norm", "lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "agent_layers"),
    *("lora_dropout", "dropconnect_p", "seed", "row_weights"),
    *ORDER_KEYS,
)
NAME: Final = "name"
#: Those that say which shape and scale its adapter has: a copy of an agent has the same.
SHAPE_KEYS: Final = ("lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "agent_layers")

_WHY_COMMON: Final[Mapping[str, str]] = {
    "num_agents": "it is the length of the list",
    "initialize_adapters_rand": "an agent's own start is keyed by its seed",
    "init_from": "it names the folder of all adapters, one for each agent",
    "max_seq_length": "one length bounds the rows of all agents",
    "batch_size": "all agents take the same number of rows in one pass",
    "global_batch_size": "all agents take the same number of rows in one pass",
    "dataset_weights": "give an agent a data set of its own by dataset_name",
    "max_train_steps": "all agents take their steps together",
    "epochs": "all agents take their steps together",
}
_WHY_GROUP: Final[Mapping[type[Keys], str]] = {
    BaseModelKeys: "one frozen base carries all agents",
    AgentKeys: "it is about all agents together",
    ObjectiveKeys: "it is about all agents together",
    DataKeys: "the data of all agents are read alike",
    TrainingKeys: "all agents take their steps together, with one optimizer",
    EvaluationKeys: "all agents are evaluated together",
}


def why_common(key: str) -> str:
    """Why a key is the same for all agents."""
    of_group = (why for group, why in _WHY_GROUP.items() if key in group.__annotations__)
    return _WHY_COMMON.get(key) or next(of_group, "a run has one of it")


def names_of(agents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of every agent: its own, or agent0, agent1, ..."""
    return [str(agent.get(NAME) or f"agent{k}") for k, agent in enumerate(agents)]


def to_plain(own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them: with lists in place of tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}


def from_plain(own: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_plain`."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}


def overriding(own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that an agent's own settings change, with those that they set aside: a ratio sets aside a number."""
    aside = {strong: None for strong, weak in STRONGER.items() if weak in own and strong not in own}
    return {**{key: value for key, value in aside.items() if key in OWN_KEYS}, **own}
