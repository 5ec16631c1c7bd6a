"""The command line as entries: `--any-key V`, `--any_key=V`, `any_key=V`, and `--flag` alone for true."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ci_llm.config.values import TRUTH_WORDS, Entry, Odd, Raw, Scalar

PLACE = "command line"
NO_VALUE = Odd("without a value")
Stands = Literal["alone", "either way", "with a value"]
_ASSIGNMENT = re.compile(r"(?:--)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z_][\w.-]*)")


def read_arguments(arguments: Sequence[str], stands: Callable[[str], Stands]) -> tuple[list[Entry], list[str]]:
    """Splits a command line into entries, in order, and the words that are neither a key nor a value of one.

    Args:
        arguments: the words after the program's name.
        stands: how `--key` stands: alone (true, unless a word of truth follows), with a value, or either way.
    """
    entries: list[Entry] = []
    strays: list[str] = []
    for words, entry in parts_of(arguments, stands):
        if entry is None:
            strays += words
        else:
            entries.append(entry)
    return entries, strays


def parts_of(arguments: Sequence[str], stands: Callable[[str], Stands]) -> Iterator[tuple[list[str], Entry | None]]:
    """The words of each entry with the entry; None for a word that belongs to none."""
    words = list(arguments)
    while words:
        before, word = list(words), words.pop(0)
        entry = None
        if match := _ASSIGNMENT.fullmatch(word):
            entry = Entry(match[1], Scalar(match[2]) if match[2] else NO_VALUE, PLACE)
        elif match := _OPTION.fullmatch(word):
            entry = Entry(match[1], _take_value(stands(match[1]), words), PLACE)
        yield before[: len(before) - len(words)], entry


def _take_value(stands: Stands, words: list[str]) -> Raw:
    follows = bool(words) and not words[0].startswith("--") and not _ASSIGNMENT.fullmatch(words[0])
    if stands == "alone":
        follows = follows and words[0].lower() in {*TRUTH_WORDS, "auto"}
    if follows:
        return Scalar(words.pop(0))
    return NO_VALUE if stands == "with a value" else Scalar("true")
