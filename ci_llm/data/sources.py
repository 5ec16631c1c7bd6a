"""Where the data is: embedded, on the hub, a file, a glob or a folder; which split trains, which judges."""

from __future__ import annotations

import glob
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError

from ci_llm import embedded
from ci_llm.cluster.hub import may_be_on_hub
from ci_llm.config import Config
from ci_llm.data.rows import FORMS, Rows, find_form
from ci_llm.errors import DataError

Splits = dict[str, Dataset]

#: Names of splits to evaluate on, the first that exists is taken.
EVAL_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")

#: Without such a split every tenth row is held out, at most this many. The number must not follow
#: `eval_samples`, which may change between two attempts of a run: the training rows would change with it.
HELD_OUT_AT_MOST = 400

#: Readers of `datasets`, by the ending of the file.
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
KINDS = "json, jsonl, csv, parquet, arrow or txt"


def load_rows(config: Config, split: Literal["train", "eval"]) -> Rows:
    """The rows to train on, or the rows to evaluate on, with their columns recognised.

    Evaluation takes `eval_split`; by default test or validation, where the data set has one; else a part of
    the training rows that training leaves out, the same part on every call.

    Raises:
        DataError: there is no such data set or split, it is empty, or no column can be used.
    """
    splits = _open(config)
    training = _split(splits, config.dataset_split, "dataset_split", config)
    judged = config.eval_split or next((n for n in EVAL_SPLITS if n in splits and n != config.dataset_split), None)
    if split == "train":
        return _training_rows(config, training, hold_out=judged is None)
    if judged is None:
        return _held_out_rows(config, training)
    rows = _rows(config, _split(splits, judged, "eval_split", config), judged, config.eval_samples)
    return rows if judged != config.dataset_split else _trained_on(config, rows, len(training))


def recognised(data: Any, where: str, description: Sequence[str] = ()) -> Rows:
    """The rows of a data set of the `datasets` library, for callers that have one in hand.

    Raises:
        DataError: it is a stream, it is empty, or no column can be used.
    """
    if isinstance(data, datasets.IterableDataset):
        raise DataError(
            "A streaming data set cannot be trained on: which rows come next depends on shards and a shuffle "
            "buffer, so an interrupted run could not go on exactly.",
            where=where,
            hint="load it without streaming=True",
        )
    if not len(data):
        raise _empty(where)
    form = find_form(data.column_names)
    if form is None:
        raise DataError(
            f"The data set has no columns that can be used; it has: {', '.join(data.column_names)}.",
            where=where,
            hint="rename its columns to one of: " + "; ".join(", ".join(form.columns) for form in FORMS),
        )
    found = [name for name in form.columns + form.optional if name in data.column_names]
    lines = (f"{len(data)} rows of {form.name} from {where}", *description)
    return Rows(data.select_columns(found), form, where, lines)


def _training_rows(config: Config, training: Dataset, *, hold_out: bool) -> Rows:
    total = len(training)
    held_out = set(_spread(total, _held_out(total))) if hold_out else set()
    if held_out:
        training = training.select([row for row in range(total) if row not in held_out])
    limit = config.max_train_samples
    if limit is not None and limit < len(training):
        training = training.select(range(limit))
    left = f"the first {len(training)} of {total} rows" if limit else f"{len(training)} of {total} rows"
    said = [f"training on {left}"] if len(training) < total else []
    if config.dataset_subset and not _is_on_hub(config.dataset_name, Path(os.path.expanduser(config.dataset_name))):
        said.append(f"dataset_subset {config.dataset_subset} names a part of a hub data set and is not used here")
    if held_out:
        said.append(f"no split to evaluate on: {len(held_out)} rows are held out for it, evenly spread")
    return recognised(training, _where(config, config.dataset_split), said)


def _held_out_rows(config: Config, training: Dataset) -> Rows:
    total = len(training)
    if total == 1:
        return _trained_on(config, recognised(training, _where(config, config.dataset_split)), total)
    held_out = training.select(_spread(total, _held_out(total)))
    return _rows(config, held_out, f"{config.dataset_split}, held out", config.eval_samples)


def _rows(config: Config, data: Dataset, split: str, limit: int | None) -> Rows:
    total = len(data)
    if limit is None or limit >= total:
        return recognised(data, _where(config, split))
    said = [f"{limit} of {total} rows, evenly spread (eval_samples)"]
    return recognised(data.select(_spread(total, limit)), _where(config, split), said)


def _trained_on(config: Config, rows: Rows, total: int) -> Rows:
    """Rows to evaluate on that are `len(rows)` out of `total`, evenly spread, of the split that is trained on."""
    limit = total if config.max_train_samples is None else config.max_train_samples
    count = sum(number < limit for number in _spread(total, len(rows)))
    said = f"{count} of the {len(rows)} rows to evaluate on are rows to train on: scores show what is remembered"
    return replace(rows, num_trained_on=count, description=(*rows.description, *([said] if count else [])))


def _held_out(total: int) -> int:
    return min(HELD_OUT_AT_MOST, max(1, total // 10)) if total > 1 else 0


def _spread(total: int, count: int) -> list[int]:
    """`count` different rows out of `total`, evenly spread: files are often sorted."""
    return [number * total // count for number in range(count)]


def _where(config: Config, split: str) -> str:
    return f"{config.dataset_name}, split {split}"


def _split(splits: Splits, name: str, key: str, config: Config) -> Dataset:
    if name in splits:
        return splits[name]
    raise DataError(
        f"The data set has no split {name!r}; it has: {', '.join(splits) or 'none'}.",
        where=f"{config.dataset_name}, {key}",
        hint=f"set {key} to one of them" + (", and max_train_samples for fewer rows" if "[" in name else ""),
    )


def _open(config: Config) -> Splits:
    """All splits by name; a source that names none has one, called `dataset_split`."""
    name = config.dataset_name
    path = Path(os.path.expanduser(name))
    if _is_on_hub(name, path):
        return _from_hub(name, config.dataset_subset, path)
    if name == "embedded":
        names = ("train", "validation", "test")
        return {split: Dataset.from_list(embedded.rows(split)) for split in names}
    if os.path.isdir(path):
        return _from_folder(path, config.dataset_split)
    return {config.dataset_split: _from_files(_matching(path), str(path))}


def _is_on_hub(name: str, path: Path) -> bool:
    """Whether `name` can only mean a data set of the hub: nothing here has it, and no file could."""
    return may_be_on_hub(name) and _builder(path) is None


def _from_hub(name: str, subset: str | None, path: Path) -> Splits:
    try:
        with _bars_on_a_terminal_only():
            return dict(datasets.load_dataset(name, subset))
    except Exception as error:  # whatever stands between here and the hub; a dropped line is no OSError
        raise DataError(
            f"The data set {name!r} cannot be loaded from the hub: {_reason(error)}.",
            where=f"dataset_name: {name} (nothing of this name at {path.absolute()} either)",
            hint="check the name, dataset_subset and the network, or give a file, a glob, or a folder",
        ) from error


def _from_folder(path: Path, unnamed: str) -> Splits:
    """A folder of `save_to_disk`, or of data files of one kind, whose names may begin with their split."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, unnamed)
    files = sorted(file for file in path.iterdir() if file.is_file() and _builder(file))
    if not files:
        raise DataError(
            f"The folder holds no data: neither one of save_to_disk nor {KINDS} files.",
            where=str(path),
            hint="give the folder that holds dataset_dict.json or state.json, or the file itself",
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        stem = re.split(r"[-_.]", file.name)[0]
        by_split.setdefault(stem if stem in ("train", *EVAL_SPLITS) else unnamed, []).append(file)
    return {split: _from_files(group, str(path)) for split, group in by_split.items()}


def _saved(path: Path, unnamed: str) -> Splits:
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"The saved data set cannot be opened: {_reason(error)}.",
            where=str(path),
            hint="save it again with save_to_disk",
        ) from error
    return dict(saved) if isinstance(saved, DatasetDict) else {unnamed: saved}


def _matching(path: Path) -> list[Path]:
    # A file may have a name like a pattern, data[1].jsonl, and then means itself.
    by_pattern = glob.has_magic(str(path)) and not path.is_file()
    names = glob.glob(str(path), recursive=True) if by_pattern else [str(path)]
    files = sorted(file for file in map(Path, names) if os.path.isfile(file))
    if not files:
        raise DataError(
            "the data set does not exist",
            where=f"dataset_name: {path.absolute()}",
            hint="check the path; it is relative to the folder the run is started in",
        )
    return files


def _from_files(files: list[Path], where: str) -> Dataset:
    builders = {_builder(file) for file in files}
    builder = builders.pop()
    if builders or builder is None:
        names = ", ".join(sorted({file.name for file in files})[:5])
        raise DataError(
            f"The files are not of one kind that can be read: {names}.",
            where=where,
            hint=f"give {KINDS} files, all of one kind",
        )
    if not any(file.stat().st_size for file in files):
        raise _empty(where)
    try:
        with _bars_on_a_terminal_only():
            return datasets.load_dataset(builder, data_files=[glob.escape(str(file)) for file in files], split="train")
    except (DatasetsError, OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        if "corresponds to no data" in str(error):  # how `datasets` says that a file holds no row
            raise _empty(where) from error
        raise DataError(
            f"The data set cannot be read as {builder}: {_reason(error)}.",
            where=where,
            hint="repair the file; each row must have the same columns with values of the same type",
        ) from error


def _empty(where: str) -> DataError:
    return DataError("The data set is empty.", where=where, hint="give one with rows, or another split")


def _builder(file: Path) -> str | None:
    endings = [ending for ending in file.suffixes if ending not in COMPRESSED]
    return BUILDERS.get(endings[-1].lower()) if endings else None


def _reason(error: BaseException) -> str:
    """What the deepest cause says, in one line: what wraps it says only that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split()).rstrip(".!") or type(error).__name__
    return said if len(said) <= 300 else f"{said[:300]} ..."


@contextmanager
def _bars_on_a_terminal_only() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    if sys.stderr.isatty() or not shown:
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
