"""JSON files: a list of rows, or one row per line.

Each row is kept as JSON, so that every value keeps its own type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
from datasets import Dataset, Features, Value

from ci_llm.data.formats import FileFormat
from ci_llm.data.raw_rows import DECODER, JsonRows

#: Raise it when the same files give other rows than before: what is kept of them is then not found.
_VERSION: Final = 1
#: A row as JSON, and the columns that no row before it has, as a list in JSON.
_FEATURES: Final = Features({JsonRows.TEXT: Value("string"), "new": Value("string")})


def _read(files: Sequence[Path]) -> JsonRows:
    """The `json` builder of `datasets` takes the types of the first 10 MB for those of all rows: one number among later
    texts puts quotes around all of them, texts that look like dates become dates, and 4 beside 0.5 becomes 4.0."""
    stamps = tuple((str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    # Tuples: `datasets` takes each entry of a list for a shard.
    content = {"files": tuple(map(str, files)), "stamps": stamps, "version": _VERSION}
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
    for number, each in enumerate(value if isinstance(value, list) else [value]):
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


format = FileFormat((".json", ".jsonl", ".ndjson"), _read)
