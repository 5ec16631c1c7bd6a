"""Rows that a call in Python gives become files in a cache, by the digest of what they hold: any later start reads the
same rows, that of a shell too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from datasets import Dataset, DatasetDict

from ci_llm.core.durable import locked, make_folders, new_folder
from ci_llm.core.remote import cache_folder
from ci_llm.data.files import without_bars
from ci_llm.errors import DataError, first_line

_KINDS: Final = (
    "give a list of dicts, a datasets.Dataset or DatasetDict, a pandas or Polars frame, an iterable of dicts,"
    " a function that makes one of these, or a path"
)


def kept_rows(given: Any, argument: str) -> str:
    """The path under which these rows are kept, for `dataset_name`; the same rows have the same path.

    Args:
        given: see `_KINDS`; a path is not taken here.
        argument: that gave the rows, for messages.

    Raises:
        DataError: there is no row, one is no row, or the cache's disk refuses them.
    """
    given = _of_frame(given() if callable(given) else given, argument)
    if isinstance(given, Dataset | DatasetDict):
        parts = given if isinstance(given, DatasetDict) else {"": given}
        content = json.dumps([[name, part._fingerprint] for name, part in parts.items()]).encode()
        write, file, again = given.save_to_disk, "", False
        count = sum(map(len, parts.values()))
    elif isinstance(given, Mapping | str | bytes) or not isinstance(given, Iterable):
        raise _refused(argument, f"it is a {type(given).__name__}", _KINDS)
    else:
        lines = [*_lines(given, argument)]
        content, count, again = b"".join(lines), len(lines), iter(given) is given
        write, file = lambda folder: (folder / "rows.jsonl").write_bytes(content), "rows.jsonl"
    if not count:
        once = "a generator gives its rows once: give the function that makes it, or a list"
        raise _refused(argument, "there is no row", once if again else "give at least one row")
    return str(_kept(xxhash.xxh3_128_hexdigest(content), write) / file)


def _of_frame(given: Any, argument: str) -> Any:
    """A frame as a data set; anything else as it is. Neither library is loaded for it."""
    library = type(given).__module__.partition(".")[0]
    try:
        if library == "polars":
            return Dataset.from_polars(given.collect() if hasattr(given, "collect") else given)
        return Dataset.from_pandas(given, preserve_index=False) if library == "pandas" else given
    except (pa.ArrowException, TypeError, AttributeError) as error:
        one_type = "give a frame whose columns hold values of one type each, or give its rows as a list of dicts"
        raise _refused(argument, f"its columns cannot be read: {first_line(error)}", one_type) from error


def _lines(rows: Iterable[Any], argument: str) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise _refused(argument, f"row {number} is a {type(row).__name__} and no dict", _KINDS)
        try:
            yield json.dumps(dict(row), default=_plain).encode() + b"\n"
        except (TypeError, ValueError, AttributeError) as error:
            plain = "a row holds texts, numbers, dates, lists and dicts: leave other columns out"
            raise _refused(argument, f"row {number} cannot be kept: {first_line(error)}", plain) from error


def _plain(value: Any) -> Any:
    """A number or an array of NumPy, or a date, as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else value.isoformat()


def _kept(digest: str, write: Callable[[Path], object]) -> Path:
    """The folder of this digest, written if it is missing; of several processes one writes."""
    folder = cache_folder("rows") / digest
    try:
        make_folders(folder.parent)
        with locked(folder.parent / "lock", create=True, required=False), without_bars():
            if not folder.is_dir():
                with new_folder(folder) as draft:
                    write(draft)
    except OSError as error:
        room = "set CI_LLM_CACHE to a folder with space and the right to write"
        raise DataError(f"the rows cannot be kept: {first_line(error)}", where=str(folder), hint=room) from error
    return folder


def _refused(argument: str, what: str, hint: str) -> DataError:
    return DataError(f"{argument}= cannot be used: {what}", where=f"train({argument}=...)", hint=hint)
