"""Rows that a call in Python gives become files in a cache, by the digest of what they hold: any later start reads the
same rows, that of a shell too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from datasets import Dataset, DatasetDict

from ci_llm.core.durable import locked, make_folders, new_folder
from ci_llm.core.remote import cache_folder
from ci_llm.data.files import without_bars
from ci_llm.errors import DataError, first_line

_SHOWN_AS_TEXT: Final = (date, time, Decimal, UUID, PurePath)
_KINDS: Final = (
    "a list of dicts, a datasets.Dataset or DatasetDict, a pandas or Polars frame, an iterable of dicts,"
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
    if callable(given):
        given = given()
    given = _of_frame(given, argument)
    try:
        if isinstance(given, Dataset | DatasetDict):
            return str(_kept_tables(given, argument))
        if isinstance(given, Mapping | str | bytes) or not isinstance(given, Iterable):
            raise _refused(argument, f"it is a {type(given).__name__}", f"give {_KINDS}")
        return str(_kept_lines(given, argument))
    except OSError as error:
        raise DataError(
            f"the rows of {argument}= cannot be kept: {first_line(error)}",
            where=str(cache_folder("rows")),
            hint="set CI_LLM_CACHE to a folder with space and the right to write",
        ) from error


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


def _kept_tables(data: Dataset | DatasetDict, argument: str) -> Path:
    parts = data if isinstance(data, DatasetDict) else {"": data}
    if not any(map(len, parts.values())):
        raise _empty(argument, "give at least one row")
    digest = xxhash.xxh3_128_hexdigest(json.dumps([[name, part._fingerprint] for name, part in parts.items()]).encode())
    return _kept(digest, data.save_to_disk)


def _kept_lines(rows: Iterable[Any], argument: str) -> Path:
    with TemporaryFile() as spool:  # rows that are made one by one need not fit into memory
        digest = xxhash.xxh3_128()
        for line in _lines(rows, argument):
            digest.update(line)
            spool.write(line)
        if not spool.tell():
            again = "a generator gives its rows once: give the function that makes it, or a list"
            raise _empty(argument, again if iter(rows) is rows else "give at least one row")

        def write(folder: Path) -> None:
            spool.seek(0)
            with (folder / "rows.jsonl").open("wb") as file:
                shutil.copyfileobj(spool, file)

        return _kept(digest.hexdigest(), write) / "rows.jsonl"


def _lines(rows: Iterable[Any], argument: str) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise _refused(argument, f"row {number} is a {type(row).__name__} and no dict", f"give {_KINDS}")
        try:
            yield json.dumps(dict(row), default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            plain = "a row holds texts, numbers, lists and dicts: leave other columns out"
            raise _refused(argument, f"row {number} cannot be kept: {first_line(error)}", plain) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, _SHOWN_AS_TEXT):
        return str(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _kept(digest: str, write: Callable[[Path], object]) -> Path:
    """The folder of this digest, written if it is missing; of several processes one writes."""
    folder = cache_folder("rows") / digest
    if not folder.is_dir():
        make_folders(folder.parent)
        with locked(folder.parent / "lock", create=True, required=False), without_bars():
            if not folder.is_dir():
                with new_folder(folder) as draft:
                    write(draft)
    return folder


def _empty(argument: str, hint: str) -> DataError:
    return _refused(argument, "there is no row", hint)


def _refused(argument: str, what: str, hint: str) -> DataError:
    return DataError(f"{argument}= cannot be used: {what}", where=f"train({argument}=...)", hint=hint)
