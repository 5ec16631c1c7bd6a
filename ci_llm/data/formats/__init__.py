"""The formats of data files; the ending of a file selects one.

The formats that a builder of `datasets` reads are in this file, each of the others in a module of this package. To add
one, add a file `formats/<name>.py` that defines

    format = FileFormat(endings=(".ending",), read=...)

A file may also be compressed: `.gz`, `.bz2`, `.xz` and `.zst` are not counted as its ending.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import datasets
from datasets import Dataset

from ci_llm.core.imports import load_plugin, plugin_names
from ci_llm.data.raw_rows import JsonRows

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


#: The formats whose rows a builder of `datasets` takes as they are. A line of a text file is a row.
_BUILT: Final = {
    "arrow": FileFormat((".arrow",), partial(with_builder, "arrow")),
    "parquet": FileFormat((".parquet",), partial(with_builder, "parquet")),
    "text": FileFormat((".txt",), partial(with_builder, "text")),
}


def find_format(file: Path) -> str | None:
    """The name of the format of a file, by its ending; None if there is none."""
    return _names().get(ending_of(file))


def format_named(name: str) -> FileFormat:
    """The format of this name."""
    found: FileFormat = _BUILT.get(name) or load_plugin(__name__, name, "format")
    return found


def known_endings() -> str:
    """All endings without their dots, for error messages."""
    *others, last = (end[1:] for end in _names())
    return f"{', '.join(others)} or {last}"


@cache
def _names() -> dict[str, str]:
    """The format of each ending; cached, because a folder may hold many thousand files."""
    names = sorted([*_BUILT, *plugin_names(__name__)], key=lambda name: (name != "json", name))
    return {end: name for name in names for end in format_named(name).endings}


def ending_of(file: Path) -> str:
    """The last ending that is not that of a compression, in lower case; empty if there is none."""
    return next((end.lower() for end in reversed(file.suffixes) if end not in COMPRESSED), "")
