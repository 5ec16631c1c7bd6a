"""JSON files: a list of rows, or one row per line.

The text of each row is kept, so that every value keeps its own type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]
from datasets import Dataset, Features, Value

from ci_llm.data.formats import FileFormat
from ci_llm.data.rows import DECODER, JsonRows, is_unicode

#: Raise it when the same files give other rows than before: what is kept of them is then not found.
_VERSION: Final = 1
#: A row as JSON, and the columns that no row before it has, as a list in JSON.
_FEATURES: Final = Features({JsonRows.TEXT: Value("string"), "new": Value("string")})
_SPACE: Final = re.compile(r"\s*")


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
        first = True
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if first and text and (text.startswith("[") or _is_incomplete(text)):
                lines.seek(0)
                yield from _rows_of_whole(lines.read(), file)
                return
            if text:
                first = False
                row = _decoded(line.rstrip("\r\n"), number, file)
                yield text, _checked(row, text, f"line {number} of {file.name}")


def _is_incomplete(text: str) -> bool:
    """True if a value begins in this line and continues in the next one."""
    try:
        DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    return False


def _rows_of_whole(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a list, or objects over several lines, one after the other; several lists are a row each."""
    rows = list(_objects(text, file))
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    for number, value in enumerate(rows):
        row = {"text": value} if isinstance(value, str) else {"messages": value} if isinstance(value, list) else value
        written = json.dumps(row, ensure_ascii=False)
        yield written, _checked(row, written, f"row {number} (counted from 0) of {file.name}")


def _objects(text: str, file: Path) -> Iterator[Any]:
    at = _end_of_space(text, 0)
    while at < len(text):
        try:
            value, at = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _broken(error, 1, file) from None
        yield value
        at = _end_of_space(text, at)


def _end_of_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing as well


def _decoded(text: str, number: int, file: Path) -> Any:
    """The value of a text that begins in line `number`."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _broken(error, number, file) from None


def _broken(error: json.JSONDecodeError, number: int, file: Path) -> ValueError:
    return ValueError(f"{error.msg}: line {number + error.lineno - 1}, column {error.colno} of {file.name}")


def _checked(row: Any, text: str, place: str) -> dict[str, Any]:
    """The row, if it is one and its text can be written as UTF-8."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with columns, found {text[:60]}: {place}")
    escaped = "\\ud" in text or "\\uD" in text  # perhaps one half of a character without the other
    if not is_unicode(row if escaped else text):
        raise ValueError(f"the text holds half a character, a lone surrogate: {place}")
    return row


format = FileFormat((".json", ".jsonl", ".ndjson"), _read)
