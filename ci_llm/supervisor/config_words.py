"""The words of a command that name its configuration: FILE, key=FILE, --key=FILE, and Hydra's --config-name NAME."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_NAME_OPTIONS: Final = ("--config-name", "-cn")
_SUFFIXES: Final = (".yaml", ".yml")


def with_file(words: Sequence[str], original: Path, other: Path) -> list[str]:
    """The words with another file of the same folder wherever they name the original."""
    return [_with_file(word, original, other) for word in words]


def with_name(words: Sequence[str], original: str, other: str) -> list[str]:
    """The words with another name wherever they name Hydra's primary configuration."""
    return list(_with_name(words, _bare(original), other))


def _with_file(word: str, original: Path, other: Path) -> str:
    key, equals, value = word.partition("=")
    for before, path in (("", word), (key + equals, value)):
        if path and os.path.abspath(path) == os.path.abspath(original):
            return before + os.path.join(os.path.dirname(path), other.name)
    return word


def _with_name(words: Sequence[str], original: str, other: str) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before in _NAME_OPTIONS and _bare(word) == original:
            yield other
        elif equals and option in _NAME_OPTIONS and _bare(value) == original:
            yield f"{option}={other}"
        else:
            yield word


def _bare(name: str) -> str:
    """Hydra takes a name with and without its suffix."""
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
