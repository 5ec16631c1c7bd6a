"""The keys that agents may have of their own, as each agent has them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pydantic import PrivateAttr

from ci_llm.config import schema
from ci_llm.config.auto import AUTO as AUTO
from ci_llm.config.auto import EMBEDDED, stands_for
from ci_llm.config.parsing import STRONGER

#: The keys for which an agent may have a value of its own, beside `name`.
OWN_KEYS: Final = tuple(key for key, _ in sorted(schema.with_trait("own").items(), key=lambda own: own[1]))
#: The own keys that give an adapter its shape and scale: a copy of an agent has the same values.
SHAPE_KEYS: Final = tuple(key for key in OWN_KEYS if key in schema.with_trait("shape"))
#: Which rows an agent trains on.
ROWS_KEYS: Final = tuple(schema.with_trait("rows"))
NAME: Final = "name"


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


def _one_by_one(names: str) -> tuple[str, ...]:
    """Names with commas between; a file or folder that is called so means itself."""
    if os.path.exists(os.path.expanduser(names)):
        return (names,)
    return tuple(name.strip() for name in names.split(",") if name.strip()) or (names,)


class KeysOfEach(schema.AllKeys):
    """All keys of a run, for all agents together and as each agent has them."""

    _without_effect: dict[str, object] = PrivateAttr(default_factory=dict)
    _reasons: dict[str, str] = PrivateAttr(default_factory=dict)
    _trial_steps: int | None = PrivateAttr(None)

    @property
    def without_effect(self) -> Mapping[str, object]:
        """Options that were given and have no effect here, by name; `notices` says why. No key, and never dumped."""
        return self._without_effect

    @property
    def trial_steps(self) -> int | None:
        """Optimizer steps of a whole trial, where the agents are trials of a sweep. No key, and never dumped."""
        return self._trial_steps

    def is_open(self, key: str) -> bool:
        """True if a key still says auto: the rows decide, or nothing can."""
        return bool(getattr(self, key) == AUTO)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data sets of `dataset_name`, one by one."""
        return _one_by_one(self.dataset_name)

    @property
    def task(self) -> str:
        """What is trained on, in words: `dataset_name`, that of every agent where they differ."""
        return ",".join(dict.fromkeys(own.dataset_name for own in self.rows_of_each))

    @property
    def all_dataset_names(self) -> tuple[str, ...]:
        """The data sets that any agent trains on, one by one."""
        return tuple(dict.fromkeys(name for own in self.rows_of_each for name in own.dataset_names))

    @property
    def is_toy(self) -> bool:
        """True if base and rows are the embedded ones."""
        return {self.model_name, *self.all_dataset_names} == {EMBEDDED}

    @property
    def eval_dataset_names(self) -> tuple[str, ...]:
        """The data sets of `eval_dataset_name`; empty where the training data has the rows to evaluate on."""
        return _one_by_one(self.eval_dataset_name) if self.eval_dataset_name else ()

    def of_agent(self, agent: int) -> Self:
        """The configuration with which this agent would train alone, apart from what keys its random numbers."""
        own = self.agents[agent] if self.agents else {}
        changed = {key: value for key, value in overriding(own).items() if key != NAME}
        if open_keys := [key for key, value in changed.items() if value == AUTO]:
            known = stands_for(self)
            changed |= {key: known[key][0] for key in open_keys}
        return self.model_copy(update={**changed, "agents": (), "num_agents": 1})

    def settled_agents(self, by: Self) -> dict[str, Any]:
        """The change of `agents` that puts the values of `by` where one of them says auto; none if none does."""
        settled = []
        for k, own in enumerate(self.agents):
            decided = (by if k < by.num_agents else self).of_agent(k)
            is_open = {key for key, value in own.items() if value == AUTO and key != NAME}
            settled.append({key: getattr(decided, key) if key in is_open else value for key, value in own.items()})
        return {"agents": tuple(settled)} if self.agents else {}

    @property
    def each_agent(self) -> list[Self]:
        """`of_agent` of every agent."""
        return [self.of_agent(k) for k in range(self.num_agents)]

    @property
    def rows_of_each(self) -> list[Self]:
        """Per agent the configuration of the rows that it trains on: the common one with its own data sets."""
        mappings: Sequence[Mapping[str, Any]] = self.agents or [{}] * self.num_agents
        own = [{key: agent[key] for key in ROWS_KEYS if key in agent} for agent in mappings]
        return [self.model_copy(update={**changed, "agents": ()}) for changed in own]

    @property
    def evaluated_on(self) -> list[tuple[str, ...]]:
        """The identity of each agent's rows to evaluate on: agents with equal ones have the same rows."""
        if self.eval_dataset_names:
            return [self.eval_dataset_names] * self.num_agents
        return [(own.dataset_name, own.dataset_subset or "", own.dataset_split) for own in self.rows_of_each]

    @property
    def has_own_rows(self) -> bool:
        """True if agents train on different rows."""
        return len({tuple(getattr(own, key) for key in ROWS_KEYS) for own in self.rows_of_each}) > 1

    @property
    def learning_rates(self) -> str:
        """The learning rates of the agents in words: `0.001`, or `0.001, 0.002` where they differ."""
        return ", ".join(dict.fromkeys(f"{own.learning_rate:g}" for own in self.each_agent))

    @property
    def agent_names(self) -> list[str]:
        """The name of every agent: its own, or agent0, agent1, ..."""
        return names_of(self.agents or [{}] * self.num_agents)
