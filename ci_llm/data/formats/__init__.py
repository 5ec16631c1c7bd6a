"""The formats of data files: the ending of a file selects one.

To add one to those of this file, add a file `formats/<name>.py` that defines

    format = FileFormat(endings=(".ending",), read=...)

A file may also be compressed: `.gz`, `.bz2`, `.xz` and `.zst` are not counted as its ending.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import datasets
import fsspec  # type: ignore[import-untyped]
import pandas  # type: ignore[import-untyped]
from datasets import Dataset, Features, Value

from ci_llm.core.imports import load_plugin, plugin_names
from ci_llm.data.rows import DECODER, JsonRows

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


def _with_builder(builder: str, files: Sequence[Path], **options: Any) -> Dataset:
    """Read files with a builder of `datasets`; names that look like patterns are taken literally."""
    paths = [glob.escape(str(file)) for file in files]
    return datasets.load_dataset(builder, data_files=paths, split="train", **options)


def _read_csv(files: Sequence[Path]) -> Dataset:
    """Columns between commas, or what the ending or the header says. Every value is the text that is written."""
    separator = _separator(files[0])
    written: dict[str, Any] = {"sep": separator, "skipinitialspace": _has_spaces_behind(files[0], separator)}
    for file in files:
        header, row = _first_rows(file, separator, 2, spaced=_has_spaces_behind(file, separator))
        if len(row) > len(header):  # pandas would take the first value of every row for its name
            values = f"the first row has {len(row)} values, and the header {len(header)} columns"
            raise ValueError(f"{values} ({file.name})")
    columns = pandas.read_csv(files[0], nrows=0, **written).columns
    # Left to itself, pandas reads 007 as 7, 1.50 as 1.5, and the words None and NA as missing values.
    as_text = {"features": Features({name: Value("string") for name in columns}), "keep_default_na": False}
    return _with_builder("csv", files, na_values=[""], **written, **as_text)


def _separator(file: Path) -> str:
    """A comma, unless the ending or a header without commas says otherwise."""
    if ending_of(file) == ".tsv":
        return "\t"
    columns = {mark: len(_first_rows(file, mark, 1)[0]) for mark in (",", ";", "\t", "|")}
    return "," if columns[","] > 1 else max(columns, key=lambda mark: columns[mark])


def _has_spaces_behind(file: Path, separator: str) -> bool:
    """True if a space follows every separator of the header: then it belongs to no name, and to no value either."""
    others = _first_rows(file, separator, 1)[0][1:]
    return bool(others) and all(name.startswith(" ") for name in others)


def _first_rows(file: Path, separator: str, count: int, *, spaced: bool = False) -> list[list[str]]:
    """The first `count` rows, header first, [] for one that is not there; without blank lines, as pandas reads them.

    Args:
        spaced: see `_has_spaces_behind`.
    """
    limit = csv.field_size_limit(sys.maxsize)  # 131,072 characters by default; pandas has no limit
    try:
        with fsspec.open(
            str(file), "rt", encoding="utf-8-sig", errors="replace", compression="infer", newline=""
        ) as lines:
            rows = filter(None, csv.reader(lines, delimiter=separator, skipinitialspace=spaced))
            return [next(rows, []) for _ in range(count)]
    finally:
        csv.field_size_limit(limit)


#: A row as JSON, and the columns that no row before it has, as a list in JSON.
_FEATURES: Final = Features({JsonRows.TEXT: Value("string"), "new": Value("string")})


def _read_json(files: Sequence[Path]) -> JsonRows:
    """A list of rows, or one row per line, each kept as JSON, so that every value keeps its own type.

    The `json` builder of `datasets` takes the types of the first 10 MB for those of all rows: one number among later
    texts puts quotes around all of them, texts that look like dates become dates, and 4 beside 0.5 becomes 4.0.
    """
    stamps = tuple((str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    # Tuples: `datasets` takes each entry of a list for a shard.
    # Raise the version when the same files give other rows than before: what is kept of them is then not found.
    content = {"files": tuple(map(str, files)), "stamps": stamps, "version": 1}
    rows = Dataset.from_generator(_texts, features=_FEATURES, gen_kwargs=content)  # mapped, not held in memory
    new = rows.data.column("new").drop_null().to_pylist()
    return JsonRows(rows.select_columns([JsonRows.TEXT]), tuple(chain.from_iterable(map(json.loads, new))))


def _texts(files: Sequence[str], **_stamps: object) -> Iterator[dict[str, str | None]]:
    """The rows as `_FEATURES` has them."""
    known = set[str]()
    for text, row in chain.from_iterable(map(_rows, map(Path, files))):
        new = [name for name in row if name not in known]
        known.update(new)
        yield {JsonRows.TEXT: text, "new": json.dumps(new) if new else None}


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, as JSON and as it is. A text in a list is a row with a column `text`, a list one with `messages`.

    Raises:
        ValueError: the file is not UTF-8, is broken at a line and column, or holds something else than rows.
    """
    with fsspec.open(str(file), "rt", encoding="utf-8-sig", compression="infer") as lines:
        written = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        first = [*islice(written, 2)]
        if len(first) == 2 and _is_whole(first[0][1]):
            for number, line in chain(first, written):
                yield _row(_decoded(line.rstrip("\r\n"), number, file), f"line {number} of {file.name}")
            return
        lines.seek(0)
        value = _decoded(lines.read(), 1, file) if first else []
    listed = value if isinstance(value, list) else [value]
    for number, each in enumerate(listed):
        yield _row({"text": each} if isinstance(each, str) else each, f"row {number} (counted from 0) of {file.name}")


def _is_whole(line: str) -> bool:
    """True if a line is a value, or is broken; false if its value continues in the next one."""
    try:
        DECODER.decode(line)
    except json.JSONDecodeError as error:
        return error.pos < len(line.rstrip())
    return True


def _decoded(text: str, number: int, file: Path) -> Any:
    """The value of a text that begins in line `number`."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {number + error.lineno - 1}, column {error.colno} of {file.name}"
        raise ValueError(f"{error.msg}: {place}") from None


def _row(value: Any, place: str) -> tuple[str, dict[str, Any]]:
    """A row as JSON and as it is, if the value is one and its text can be written as UTF-8."""
    row = {"messages": value} if isinstance(value, list) else value
    text = json.dumps(row, ensure_ascii=False)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with columns, found {text[:60]}: {place}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the text holds half a character, a lone surrogate: {place}") from None
    return text, row


#: The formats of this file; of those that a builder of `datasets` reads as they are, a line of text is a row.
_BUILT: Final = {
    "arrow": FileFormat((".arrow",), partial(_with_builder, "arrow")),
    "csv": FileFormat((".csv", ".tsv"), _read_csv),
    "json": FileFormat((".json", ".jsonl", ".ndjson"), _read_json),
    "parquet": FileFormat((".parquet",), partial(_with_builder, "parquet")),
    "text": FileFormat((".txt",), partial(_with_builder, "text")),
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
