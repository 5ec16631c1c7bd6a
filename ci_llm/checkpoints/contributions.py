"""The contribution of each process to one save: its vote whether it is due, and its part of the state.

A save costs one exchange of messages more than the votes on its step (due.py). It carries everything that the others
must know before process 0 may begin: whether a process has failed, whether gradients of an unfinished window wait on
any of them, and the parts of the state that each process has of its own. Nothing is confirmed after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ci_llm.checkpoints.due import Votes
from ci_llm.checkpoints.state_files import StateEntry, from_bytes, to_bytes
from ci_llm.distributed.side_channel import num_processes
from ci_llm.errors import CheckpointError, ForeignCheckpoint


@dataclass(frozen=True)
class EachProcess:
    """Stands in a state for what every process has of its own: generators, for instance.

    `save` collects it: the checkpoint holds {"process0": ..., "process1": ...} under that key. Restored into a state
    that has one there, it is again one with the value of this process.

    Args:
        value: what this process has: tensors, plain values, nested containers.
    """

    value: Any


@dataclass(frozen=True)
class Contribution:
    """The message of one process to the others before a save.

    Attributes:
        inside_window: whether gradients wait here for the next step of an optimizer.
        own: the values of `EachProcess` in the state, by key.
    """

    votes: Votes
    inside_window: bool
    own: Mapping[str, Any]

    def pack(self) -> bytes:
        """Raises CheckpointError: a value cannot be saved."""
        votes = list(map(int, self.votes))
        return to_bytes({"votes": votes, "inside_window": self.inside_window, "own": dict(self.own)})

    @classmethod
    def unpack_all(cls, messages: Sequence[bytes]) -> list[Contribution]:
        """The contributions of all processes, by index.

        Raises:
            CheckpointError: some have an `EachProcess` where others have none; on every process alike.
        """
        contents: list[Any] = [from_bytes(message) for message in messages]
        told = [cls(Votes(*each["votes"]), each["inside_window"], each["own"]) for each in contents]
        for key in dict.fromkeys(key for each in told for key in each.own):
            if without := [str(index) for index, each in enumerate(told) if key not in each.own]:
                raise CheckpointError(
                    f"an EachProcess is in the state of some processes only; process {', '.join(without)} has none",
                    where=key,
                    hint="give every process a value of its own under this key, or put a plain value there",
                )
        return told


def own_parts(state: Any) -> dict[str, Any]:
    """The values of `EachProcess` in a state, by key; nothing if it is not a state, which is refused elsewhere."""
    items = state.items() if isinstance(state, Mapping) else ()
    return {key: item.value for key, item in items if isinstance(item, EachProcess)}


def give_own_parts(state: dict[str, Any], objects: Any, index: int) -> None:
    """Keep of a restored state what this process had of its own, wherever `objects` hold an `EachProcess`.

    Raises:
        ForeignCheckpoint: it was collected on another number of processes, or was not collected.
    """
    here = {f"process{number}" for number in range(num_processes())}
    for key in own_parts(objects).keys() & state.keys():
        collected = state[key]
        if not isinstance(collected, dict) or collected.keys() != here:
            had = f"what {len(collected)} had" if isinstance(collected, dict) else f"a {type(collected).__name__}"
            raise ForeignCheckpoint(
                f"here {len(here)} processes have something of their own, and the checkpoint holds {had}",
                where=key,
                hint="restore without `into`, and give each process what it needs of it",
            )
        state[key] = EachProcess(collected[f"process{index}"])


def add_up(contributions: Sequence[Contribution]) -> Votes:
    """The votes of all processes."""
    return Votes(*map(sum, zip(*(each.votes for each in contributions), strict=True)))


def replace_entries(entries: list[StateEntry], collected: Sequence[StateEntry]) -> None:
    """Put what was collected from all processes in the place of what one of them has; new keys come first."""
    by_key = {entry.key: entry for entry in collected}
    entries[:] = [by_key.pop(entry.key, entry) for entry in entries]
    entries[:0] = by_key.values()
