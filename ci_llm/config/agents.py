"""The settings of single agents: `agents:`, a list of mappings, or for one key a list with a value per agent.

Both forms become one list of entries per agent. Of two sources the stronger one decides key by key: a value for all
agents on the command line sets aside what the file says of single agents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ci_llm.config.foreign import FIELDS
from ci_llm.config.own_keys import NAME, OWN_KEYS, names_of
from ci_llm.config.parsing import Entry, Items, Mapped, Raw, Scalar, lists_values
from ci_llm.config.problems import Problem, by_key, given_twice, sound_values
from ci_llm.config.yaml_file import read_flow

_NAMES: Final = re.compile(r"[\w.:+-][\w .:+-]{0,59}")


_NOBODY: Final = Entry("agents", Items(()), "")


@dataclass
class OwnEntries:
    """The entries of single agents, from all sources.

    Attributes:
        entries: one mapping per agent; empty where no source says anything.
        decided_by: the entry from which their number follows.
        lines: for people: what a stronger source has set aside.
    """

    entries: list[dict[str, Entry]] = field(default_factory=list)
    decided_by: Entry = _NOBODY
    lines: list[str] = field(default_factory=list)


def take_own_entries(sources: Sequence[dict[str, Entry]], problems: list[Problem]) -> OwnEntries:
    """Move what is about single agents out of the sources, which come from the weakest to the strongest.

    `num_agents` of the strongest source that has it then is the number of agents, or a problem is added.
    """
    own = OwnEntries()
    for number, source in enumerate(sources):
        found = {key: _values_of(key, source[key]) for key in OWN_KEYS if key in source}
        lists = {key: values for key, values in found.items() if values}
        listed = source.pop("agents", None)
        for key in found:
            if listed is None and key not in lists:
                _set_aside(own, key, source[key])
        if listed is not None:
            _take_mappings(own, listed, problems)
        for key, values in lists.items():
            _take_list(own, source.pop(key), key, values, listed, problems)
        if listed is not None or lists:
            for weaker in sources[:number]:
                weaker.pop("num_agents", None)
    _require_same_number(own, sources, problems)
    return own


def _set_aside(own: OwnEntries, key: str, by: Entry) -> None:
    for old in (agent.pop(key) for agent in own.entries if key in agent):
        own.lines.append(f"{key} of an agent ({old.where}) is set aside: {by.where} says {by.raw} for all")


def _values_of(key: str, entry: Entry) -> tuple[Raw, ...]:
    """The values of a list with one value per agent; none if the entry is one value for all."""
    raw = read_flow(entry.raw)
    return raw.values if isinstance(raw, Items) and lists_values(FIELDS[key], raw) else ()


def _take_mappings(own: OwnEntries, listed: Entry, problems: list[Problem]) -> None:
    raw = Items(()) if listed.is_null else read_flow(listed.raw)
    if not isinstance(raw, Items) or not all(isinstance(value, Mapped) for value in raw.values):
        what = f"agents is {raw}, but takes a list of mappings, one for each agent"
        problems.append(Problem(listed.where, what, "write agents: [{learning_rate: 1e-3}, {learning_rate: 2e-3}]"))
        return
    mappings = [value for value in raw.values if isinstance(value, Mapped)]
    own.entries = [_entries_of(mapping, listed, problems) for mapping in mappings]
    own.decided_by = listed


def _entries_of(mapping: Mapped, listed: Entry, problems: list[Problem]) -> dict[str, Entry]:
    """The entries of one mapping, by key; those that no agent can have are problems."""
    entries = [replace(entry, where=entry.where or listed.where) for entry in mapping.entries]
    names = [entry for entry in entries if entry.name == NAME]
    if len(names) > 1:
        problems.append(given_twice(NAME, names[0], names[1]))
    given = by_key((entry for entry in entries if entry.name != NAME), problems, last_wins=False)
    for key in [key for key in given if key not in OWN_KEYS]:
        what = f"{key} cannot differ between agents"
        problems.append(Problem(given.pop(key).where, what, "write it once for all, outside of `agents:`"))
    return ({NAME: names[0]} if names else {}) | given


def _take_list(
    own: OwnEntries, entry: Entry, key: str, values: tuple[Raw, ...], listed: Entry | None, problems: list[Problem]
) -> None:
    if not own.entries:
        own.entries = [{} for _ in values]
        own.decided_by = entry
    if len(values) != len(own.entries):
        other = own.decided_by
        what = f"{key} has {len(values)} values, and {other.name} ({other.where}) has {len(own.entries)}"
        problems.append(Problem(entry.where, what, "give one value for each agent, or one value for all"))
        return
    for agent, value in zip(own.entries, values, strict=True):
        if listed is not None and key in agent:
            problems.append(given_twice(key, agent[key], entry))
            return
        agent[key] = Entry(entry.name, value, entry.where)


def _require_same_number(own: OwnEntries, sources: Sequence[dict[str, Entry]], problems: list[Problem]) -> None:
    if not own.entries:
        return
    declared = next((source["num_agents"] for source in reversed(sources) if "num_agents" in source), None)
    for source in sources:
        source.pop("num_agents", None)
    there, by = len(own.entries), own.decided_by
    if declared is not None and str(declared.raw).strip("'") != str(there):
        what = f"num_agents is {declared.raw}, but {by.name} ({by.where}) has {there} agents"
        problems.append(Problem(declared.where, what, f"leave num_agents out, or write num_agents={there}"))


def own_values(own: OwnEntries, problems: list[Problem]) -> dict[str, Any]:
    """`num_agents`, and `agents` with the validated values of each by key; nothing where no source says anything."""
    if not own.entries:
        return {}
    agents = []
    for entries in map(dict, own.entries):
        named = entries.pop(NAME, None)
        values = sound_values(entries, problems)
        agent: dict[str, Any] = {} if named is None else {NAME: _name(named, problems)}
        agents.append(agent | {key: values[key] for key in OWN_KEYS if key in values})
    names = names_of(agents)
    for name in sorted({name for name in names if names.count(name) > 1}):
        what = f"{names.count(name)} agents are called {name}"
        problems.append(Problem(own.decided_by.where, what, "give each a name of its own"))
    return {"num_agents": len(agents), "agents": tuple(agents) if any(agents) else ()}


def _name(entry: Entry, problems: list[Problem]) -> str:
    text = entry.raw.text if isinstance(entry.raw, Scalar) else ""
    if not _NAMES.fullmatch(text):
        what = f"name is {entry.raw}, but takes letters, digits, spaces and . : + - _, 60 at most"
        problems.append(Problem(entry.where, what, "write name: small, for instance"))
    return text
