"""The formats of data files, one per module of this package; the ending of a file selects it.

To add one, add a file `formats/<name>.py` that defines

    format = FileFormat(endings=(".ending",), read=...)

A file may also be compressed: `.gz`, `.bz2`, `.xz` and `.zst` are not counted as its ending.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from ci_llm.core.imports import load_plugin, plugin_names
from ci_llm.data.rows import JsonRows

COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}


@dataclass(frozen=True)
class FileFormat:
    """How files of one kind are read.

    Attributes:
        endings: in lower case, with the dot.
        read: all rows of the files, in their order. What it raises is reported with the name of the file.
    """

    endings: tuple[str, ...]
    read: Callable[[Sequence[Path]], Dataset | JsonRows]


def with_builder(builder: str, files: Sequence[Path], **options: Any) -> Dataset:
    """Read files with a builder of `datasets`; names that look like patterns are taken literally."""
    paths = [glob.escape(str(file)) for file in files]
    return datasets.load_dataset(builder, data_files=paths, split="train", **options)


def find_format(file: Path) -> str | None:
    """The name of the format of a file, by its ending; None if there is none."""
    return _names().get(ending_of(file))


def format_named(name: str) -> FileFormat:
    """The format that the module `name` defines."""
    found: FileFormat = load_plugin(__name__, name, "format")
    return found


def known_endings() -> str:
    """All endings without their dots, for error messages."""
    *others, last = (end[1:] for end in _names())
    return f"{', '.join(others)} or {last}"


@cache
def _names() -> dict[str, str]:
    """The format of each ending; cached, because a folder may hold many thousand files."""
    return {end: name for name in plugin_names(__name__, first="json") for end in format_named(name).endings}


def ending_of(file: Path) -> str:
    """The last ending that is none of a compression, in lower case; empty if there is none."""
    return next((end.lower() for end in reversed(file.suffixes) if end not in COMPRESSED), "")
