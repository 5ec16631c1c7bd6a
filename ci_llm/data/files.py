"""A data set opened with `datasets`: from the hub, a file, a glob, a folder, or rows that a call in Python gives.

Its splits are read in bounded memory. Rows of a call become files in a cache, by the digest of what they hold: any
later start reads the same rows, that of a shell too.
"""

from __future__ import annotations

import csv
import errno
import glob
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import datasets
import xxhash
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError
from huggingface_hub.constants import HF_HOME

from ci_llm.config.parsing import hint_for_missing
from ci_llm.core.durable import locked, make_folders, new_folder
from ci_llm.core.remote import cache_folder
from ci_llm.data.formats import find_format, format_named, known_endings
from ci_llm.data.rows import EVAL_SPLITS, JsonRows, empty
from ci_llm.errors import DataError, first_line

#: Error numbers of a disk that is full, missing or not writable.
_OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
#: Files of `save_to_disk` and of the hub that hold no rows.
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
#: Words for splits that `datasets` knows in names of files and folders, beside the names of splits themselves.
_WORDS_FOR_SPLITS = {"training": "train", "testing": "test", "evaluation": "test"}


def splits_of_files(path: Path, unnamed: str, key: str) -> dict[str, Dataset | JsonRows]:
    """The splits of a folder, a glob or a file; see `open_splits`."""
    if os.path.isdir(path):
        return _from_folder(path, unnamed)
    return _unwrapped(_from_files(_matching(path, key), str(path)), unnamed)


def _unwrapped(data: Dataset | JsonRows, unnamed: str) -> dict[str, Dataset | JsonRows]:
    """The splits of a file that is one JSON object: lists of rows by the name of their split, or below `data`, where
    numbers and texts beside it, such as a version, are left aside."""
    lists: Mapping[str, Any] = data[0] if len(data) == 1 else {}
    if "data" in lists:
        lists = {name: value for name, value in lists.items() if isinstance(value, list | dict)}
    are_splits = lists.keys() <= {unnamed, "train", *EVAL_SPLITS} or lists.keys() == {"data"}
    are_rows = all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in lists.values())
    if not (lists and are_splits and are_rows):
        return {unnamed: data}
    return {unnamed if name == "data" else name: _in_memory(rows) for name, rows in lists.items()}


def _in_memory(rows: Sequence[Mapping[str, Any]]) -> JsonRows:
    texts = Dataset.from_dict({JsonRows.TEXT: [json.dumps(row) for row in rows]})
    return JsonRows(texts, tuple(dict.fromkeys(chain.from_iterable(rows))))


def splits_on_hub(name: str, subset: str | None, where: str) -> dict[str, Dataset]:
    """The splits of a data set of the hub; see `open_splits`."""
    try:
        with _quiet():
            return dict(datasets.load_dataset(name, subset))
    except Exception as error:  # of the hub's client and all below it: a dropped connection is not an OSError
        if _is_of_a_disk(error):
            raise _not_kept(error, "HF_HOME", HF_HOME) from error
        what = f"The data set {name!r} cannot be loaded from the hub: {_reason(error)}."
        ways = "check the name, dataset_subset and the network, or give a file, a glob, or a folder"
        raise DataError(what, where=where, hint=hint_for_missing(Path(name), ways)) from error


def _from_folder(path: Path, unnamed: str) -> dict[str, Dataset | JsonRows]:
    """A folder of `save_to_disk`, or of data files of one kind, perhaps in folders of their own."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, unnamed)
    files = _data_files(path, path.iterdir()) or _data_files(path, path.rglob("*"))
    if not files:
        raise DataError(
            f"The folder holds no data: neither one of save_to_disk nor {known_endings()} files.",
            where=str(path),
            hint="give the folder that holds dataset_dict.json or state.json, or the file itself",
        )
    by_split: dict[str, list[Path]] = {}
    for file, split in zip(files, _splits_of([file.relative_to(path) for file in files], unnamed), strict=True):
        by_split.setdefault(split, []).append(file)
    return {split: _from_files(group, str(path)) for split, group in by_split.items()}


def _data_files(folder: Path, found: Iterator[Path]) -> list[Path]:
    """The files that may hold rows, in order; hidden ones are left aside."""
    shown = (file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    return sorted(file for file in shown if file.is_file() and find_format(file) and file.name not in _NO_ROWS)


def _splits_of(files: Sequence[Path], unnamed: str) -> list[str]:
    """The split of each file: what its name begins with, the folder that it lies in, else any word of its name.

    A word inside a name counts only where it leaves rows to train on: `contest_test.jsonl` alone is not a test split.
    """
    names = (unnamed, "train", *EVAL_SPLITS)
    words = [[*re.split(r"[-_.]", file.name)[:1], *file.parent.parts] for file in files]
    inside = [[*near, *re.split(r"[-_.]", file.name)] for near, file in zip(words, files, strict=True)]
    found, wider = ([_first_split(each, names) for each in way] for way in (words, inside))
    if None not in wider and unnamed in wider:
        found = wider
    return [split or unnamed for split in found]


def _first_split(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The first split that a word means, in any case and with a number behind it, as `datasets` reads names."""
    plain = [word.lower().strip("0123456789 ") for word in words]
    meant = zip(words, plain, (_WORDS_FOR_SPLITS.get(word, "") for word in plain), strict=True)
    return next((split for split in chain.from_iterable(meant) if split in names), None)


def _saved(path: Path, unnamed: str) -> dict[str, Dataset]:
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        what = f"The saved data set cannot be opened: {_reason(error)}."
        raise DataError(what, where=str(path), hint="save it again with save_to_disk") from error
    return dict(saved) if isinstance(saved, DatasetDict) else {unnamed: saved}


def _matching(path: Path, key: str) -> list[Path]:
    # A file may have a name like a pattern, data[1].jsonl, and then means itself.
    by_pattern = glob.has_magic(str(path)) and not path.is_file()
    names = glob.glob(str(path), recursive=True) if by_pattern else [str(path)]
    files = sorted(file for file in map(Path, names) if os.path.isfile(file))
    if not files:
        raise DataError(
            "the data set does not exist",
            where=f"{key}: {path.absolute()}",
            hint=hint_for_missing(path, "check the path; it is relative to the current folder"),
        )
    return files


def _from_files(files: list[Path], where: str) -> Dataset | JsonRows:
    kinds = {find_format(file): file.name for file in reversed(files)}
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind is None:
        names = ", ".join(sorted(kinds.values()))
        what = f"No format of data has the ending of {names}."
        what = f"The files are not of one kind that can be read: {names}." if len(kinds) > 1 else what
        raise DataError(what, where=where, hint=f"give {known_endings()} files, all of one kind")
    if not any(file.stat().st_size for file in files):
        raise empty(where)
    try:
        with _quiet(errors=True):
            return format_named(kind).read(files)
    except (DatasetsError, OSError, ValueError, EOFError, csv.Error, zlib.error, lzma.LZMAError) as error:
        if "corresponds to no data" in str(error):  # how `datasets` says that a file holds no row
            raise empty(where) from error
        if _is_of_a_disk(error) and not any(str(file) in str(_innermost(error)) for file in files):
            raise _not_kept(error, "HF_DATASETS_CACHE", str(datasets.config.HF_DATASETS_CACHE)) from error
        typed = kind in ("arrow", "parquet")
        same = "; each row must have the same columns with values of the same type" if typed else ""
        raise DataError(
            f"The data set cannot be read as {kind}: {_reason(error)}.",
            where=where,
            hint="save it as UTF-8" if isinstance(_innermost(error), UnicodeDecodeError) else f"repair the file{same}",
        ) from error


def _is_of_a_disk(error: BaseException) -> bool:
    cause = _innermost(error)
    return isinstance(cause, OSError) and cause.errno in _OF_A_DISK


def _not_kept(error: BaseException, variable: str, folder: str) -> DataError:
    return DataError(
        f"The rows cannot be kept in the cache of datasets: {_reason(error)}.",
        where=f"{variable}: {folder}",
        hint=f"make the folder writable and free some space on its disk, or set {variable} to another folder",
    )


def _innermost(error: BaseException) -> BaseException:
    """The first cause: the outer errors only say that something failed."""
    return error if error.__cause__ is None else _innermost(error.__cause__)


def _reason(error: BaseException) -> str:
    """The message of the innermost cause, in one line."""
    innermost = _innermost(error)
    text = " ".join(str(innermost).split()).rstrip(".!") or type(innermost).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."


@contextmanager
def _quiet(*, errors: bool = False) -> Iterator[None]:
    """Without the progress bars of `datasets`, but on a terminal.

    Args:
        errors: without its lines about a file that it cannot read, too: its error becomes one of ours.
    """
    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    if errors:
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


_KINDS: Final = (
    "give a list of dicts, a datasets.Dataset or DatasetDict, a pandas or Polars frame, an iterable of dicts,"
    " a function that makes one of these, or a path"
)


#: The file of rows in a folder of the cache.
_ROWS: Final = "rows.jsonl"


def kept_rows(given: Any, argument: str) -> str:
    """The path under which these rows are kept, for `dataset_name`; the same rows have the same path.

    Args:
        given: see `_KINDS`; a path is not taken here.
        argument: that gave the rows, for messages.

    Raises:
        DataError: there is no row, one is not a row, or the cache's disk refuses them.
    """
    given = _without_frame(given() if callable(given) else given)
    if isinstance(given, Dataset | DatasetDict):
        parts = given if isinstance(given, DatasetDict) else {"": given}
        if not any(map(len, parts.values())):
            raise _refused(argument, "there is no row", "give at least one row")
        content = json.dumps([[name, part._fingerprint] for name, part in parts.items()]).encode()
        return str(_kept(content, given.save_to_disk))
    if isinstance(given, Mapping | str | bytes) or not isinstance(given, Iterable):
        raise _refused(argument, f"its type is {type(given).__name__}", _KINDS)
    content = b"".join(_lines(given, argument))
    if not content:
        once = "a generator gives its rows once: give the function that makes it, or a list"
        raise _refused(argument, "there is no row", once if iter(given) is given else "give at least one row")
    return str(_kept(content, lambda folder: (folder / _ROWS).write_bytes(content)) / _ROWS)


def _without_frame(given: Any) -> Any:
    """The rows of a frame, for which neither library is loaded; anything else as it is."""
    given = given.collect() if hasattr(given, "collect") else given  # a lazy one of Polars
    if hasattr(given, "to_dicts"):  # of Polars
        return given.to_dicts()
    if hasattr(given, "iterrows"):  # of pandas
        return given.astype(object).where(given.notna(), None).to_dict("records")
    return given


def _lines(rows: Iterable[Any], argument: str) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise _refused(argument, f"row {number} is a {type(row).__name__}, not a dict", _KINDS)
        try:
            yield json.dumps(dict(row), default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            plain = "a row holds texts, numbers, dates, lists and dicts: leave other columns out"
            raise _refused(argument, f"row {number} cannot be kept: {first_line(error)}", plain) from error


def _plain(value: Any) -> Any:
    """A number or an array of NumPy, or a date, as JSON has it."""
    if not (hasattr(value, "tolist") or hasattr(value, "isoformat")):
        raise TypeError(f"it holds a {type(value).__name__}")
    return value.tolist() if hasattr(value, "tolist") else value.isoformat()


def _kept(content: bytes, write: Callable[[Path], object]) -> Path:
    """The folder of the digest of this content, written if it is missing; of several processes one writes."""
    folder = cache_folder("rows") / xxhash.xxh3_128_hexdigest(content)
    try:
        make_folders(folder.parent)
        with locked(folder.parent / "lock", create=True, required=False), _quiet():
            if not folder.is_dir():
                with new_folder(folder) as draft:
                    write(draft)
    except OSError as error:
        room = "set CI_LLM_CACHE to a folder with space and the right to write"
        raise DataError(f"the rows cannot be kept: {first_line(error)}", where=str(folder), hint=room) from error
    return folder


def _refused(argument: str, what: str, hint: str) -> DataError:
    return DataError(f"{argument}= cannot be used: {what}", where=f"train({argument}=...)", hint=hint)
