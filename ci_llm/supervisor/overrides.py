"""Keys on a command line, in the forms that training scripts know: a=1, +a=1, ++a=1, --a=1 and --a 1."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ASSIGNMENT: Final = re.compile(r"(\+{0,2}|--)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_OPTION: Final = re.compile(r"--([A-Za-z_][\w./-]*)")


@dataclass(frozen=True)
class Override:
    """A key with its value on a command line.

    Attributes:
        position: of the word that holds the value.
        before: what stands before the value in that word.
    """

    key: str
    value: str
    position: int
    before: str


def overrides(words: Sequence[str]) -> Iterator[Override]:
    """All keys with a value, in their order."""
    for position, word in enumerate(words):
        if match := _ASSIGNMENT.fullmatch(word):
            yield Override(match[2], match[3], position, word[: match.start(3)])
        elif (match := _OPTION.fullmatch(word)) and position + 1 < len(words):
            value = words[position + 1]
            if not value.startswith("--"):
                yield Override(match[1], value, position + 1, "")


def value_of(words: Sequence[str], key: str) -> str | None:
    """The value of a key on a command line, where the last one wins; None if it is not there."""
    return next((one.value for one in reversed(list(overrides(words))) if same_key(one.key, key)), None)


def rewritten(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    """The command line with new values for keys that stand on it; the others stay as they are."""
    changed = list(words)
    for one in overrides(words):
        for key, value in new.items():
            if same_key(one.key, key):
                changed[one.position] = one.before + value
    return changed


def same_key(one: str, other: str) -> bool:
    """`--batch-size` is `batch_size`."""
    return one.lstrip("-").replace("-", "_") == other.lstrip("-").replace("-", "_")
