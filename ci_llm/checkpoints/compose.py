"""A state composed of members of several checkpoints: everything that each member has of its own goes with it.

A member is what a checkpoint numbers: with `agent3` go the files `agent3/...`, the entries `agent3` of its trees, and
the fourth value of each list that has one value per member.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.errors import ForeignCheckpoint

_NUMBERED: Final = re.compile(r"agent(\d+)(/.*)?")


@dataclass(frozen=True)
class CheckpointMember:
    """One member of a checkpoint that was read and verified."""

    checkpoint: Checkpoint
    number: int


def compose(members: Sequence[CheckpointMember], lists: Collection[str] = ()) -> dict[str, Any]:
    """The state in which these are all the members, numbered anew in their order; the rest is the first one's.

    Args:
        lists: where plain values have one value per member: a key of the state and those below it, joined by dots. One
            value that is no list holds for every member of its checkpoint; an empty list stays empty.

    Returns:
        a new state; its tensors are those of the checkpoints.

    Raises:
        ForeignCheckpoint: the checkpoints are of different steps, or a member is not in its checkpoint.
    """
    _require_one_step(members)
    state: dict[str, Any] = {}
    for key, value in members[0].checkpoint.state.items():
        if _NUMBERED.fullmatch(key) is None:
            state[key] = _picked(key, value, [(one.checkpoint.state.get(key), one.number) for one in members], lists)
    for place, one in enumerate(members):
        state |= _files_of(one, place)
    return state


def _files_of(member: CheckpointMember, place: int) -> dict[str, Any]:
    """What a checkpoint holds of one member, under its new number. Bytes are copies of common files."""
    old, new = f"agent{member.number}/", f"agent{place}/"
    found = {
        new + key.removeprefix(old): value
        for key, value in member.checkpoint.state.items()
        if key.startswith(old) and not isinstance(value, bytes)
    }
    if not found:
        raise ForeignCheckpoint(f"there is no agent{member.number}", where=str(member.checkpoint.folder))
    return found


def _picked(path: str, first: Any, sources: Sequence[tuple[Any, int]], lists: Collection[str]) -> Any:
    """The value at a path of the new state: of every member its own, and else what the first one has.

    Args:
        sources: of every member the value at this path, and its number there.
    """
    if path in lists and (first or not isinstance(first, list | tuple)):
        return [value[number] if isinstance(value, list | tuple) else value for value, number in sources]
    if not isinstance(first, Mapping):
        return first
    result = {
        key: _picked(f"{path}.{key}", value, [(_below(source, key), number) for source, number in sources], lists)
        for key, value in first.items()
        if not _is_member(key)
    }
    for place, (source, number) in enumerate(sources):
        if isinstance(source, Mapping) and f"agent{number}" in source:
            result[f"agent{place}"] = source[f"agent{number}"]
    return result


def _below(source: Any, key: Any) -> Any:
    return source.get(key) if isinstance(source, Mapping) else None


def _is_member(key: object) -> bool:
    return isinstance(key, str) and _NUMBERED.fullmatch(key) is not None


def _require_one_step(members: Sequence[CheckpointMember]) -> None:
    steps = {one.checkpoint.manifest.step for one in members}
    if len(steps) > 1:
        folders = ", ".join(dict.fromkeys(str(one.checkpoint.folder) for one in members))
        raise ForeignCheckpoint(
            f"agents of different steps cannot train together: {', '.join(map(str, sorted(steps)))}", where=folders
        )
