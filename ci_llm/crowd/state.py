"""The state of a crowd in a checkpoint: what it is, what must be the same for it to fit, and its way back.

The checkpoints of a run and what the hooks of Accelerate write hold it alike (`checkpoint_step_<N>/`, `ci_llm/`). What
they hold beside it, such as moments and the position in the data, is that of their loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ci_llm.config.own_keys import SHAPE_KEYS
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import META
from ci_llm.lora.settings import FIELD_OF_KEY, LoraSettings


def state_of(crowd: Crowd, fingerprint: str, **facts: Any) -> dict[str, Any]:
    """Every agent in PEFT's layout, and the description of the crowd under META.

    Args:
        fingerprint: the fingerprint of the base, see `fingerprint_of`.
        facts: further facts for the description.
    """
    return {**crowd.adapter_files(), META: crowd.meta(fingerprint) | facts}


def shape_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The number and the shapes of the agents of a state, by the names of keys: a crowd takes no state of others."""
    lora = LoraSettings.from_dict(state[META]["lora"])
    return {
        "num_agents": state[META]["num_agents"],
        **{key: lora.common_or_list(FIELD_OF_KEY[key]) for key in SHAPE_KEYS},
    }


def load_state(crowd: Crowd, state: Mapping[str, Any], where: str) -> None:
    """Give the agents their weights.

    Args:
        where: the checkpoint, for the error.

    Raises:
        ForeignCheckpoint: names or shapes of tensors differ.
    """
    for agent in crowd.agents:
        agent.load_state_dict(state[f"{agent.name}/adapter_model"], where)
