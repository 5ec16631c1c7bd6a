"""The rows to train on and the rows to evaluate on: splits, held-out rows, several data sets with weights."""

from __future__ import annotations

import os
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ci_llm.config import Config
from ci_llm.config.own_keys import ROWS_KEYS
from ci_llm.data.columns import NamedColumns, form_of_columns, shown
from ci_llm.data.mixture import mix
from ci_llm.data.rows import Rows
from ci_llm.data.splits import Splits, empty, eval_splits, folder_of_subset, is_on_hub, open_splits
from ci_llm.errors import DataError

#: Without a split to evaluate on, every tenth row is held out, at most this many. The number must not depend on
#: `eval_samples`, which may change between two attempts of a run: the training rows would change with it.
HELD_OUT_AT_MOST = 400


def load_rows(config: Config, split: Literal["train", "eval"]) -> Rows:
    """The rows to train on, or the rows to evaluate on, with their columns recognised; those of all agents together.

    Evaluation takes `eval_dataset_name` or `eval_split`. By default it takes the split validation or test if there
    is one, and otherwise rows that training leaves out, the same rows on every call.

    Raises:
        DataError: there is no such data set or split, it is empty, or no column can be used.
    """
    each = load_rows_of_each(config, split)
    if split == "train":
        return _joined([*{id(rows): rows for rows in each}.values()], config)
    sets: dict[Hashable, Rows] = {}  # agents with other parts of one data set are evaluated on the same rows
    for own, rows in zip(config.evaluated_on, each, strict=True):
        if own not in sets or rows.num_trained_on > sets[own].num_trained_on:  # of equal ones the most trained on
            sets[own] = rows
    return _joined([*sets.values()], config)


def load_rows_of_each(config: Config, split: Literal["train", "eval"]) -> list[Rows]:
    """The rows of every agent; those of agents that share a data set are one object.

    `eval_dataset_name` is the same for all agents. Without it an agent is evaluated on rows of its own data set.

    Raises:
        DataError: see `load_rows`.
    """
    if split == "eval" and config.eval_dataset_names:
        return [
            _joined([_validation_rows(config, name) for name in config.eval_dataset_names], config)
        ] * config.num_agents
    known: dict[Hashable, Rows] = {}
    each = [(tuple(getattr(own, key) for key in ROWS_KEYS), own) for own in config.rows_of_each]
    for key, own in each:
        if key not in known:
            known[key] = _rows_of(own, split)
    return [known[key] for key, _ in each]


def _rows_of(config: Config, split: Literal["train", "eval"]) -> Rows:
    """The rows of a configuration without own data sets of agents."""
    if split == "eval":
        return _joined([_evaluation_rows(config, name) for name in config.dataset_names], config)
    parts = [_training_rows(config, name) for name in config.dataset_names]
    return parts[0] if len(parts) == 1 else mix(parts, config.dataset_weights, config.seed)


def _joined(parts: Sequence[Rows], config: Config) -> Rows:
    return parts[0] if len(parts) == 1 else mix(parts, None, config.seed)


def recognised(
    data: Any,
    where: str,
    description: Sequence[str] = (),
    *,
    named: NamedColumns | None = None,
    numbers: Sequence[int] | None = None,
) -> Rows:
    """The rows of a data set of the `datasets` library that is open already.

    Args:
        named: the columns that the configuration names.
        numbers: of the rows in their source, where they are a part of it.

    Raises:
        DataError: it is a stream, it is empty, or no column can be used.
    """
    if not hasattr(data, "__len__"):
        raise DataError(
            "A streaming data set cannot be trained on: which rows come next depends on shards and a shuffle "
            "buffer, so an interrupted run could not go on exactly.",
            where=where,
            hint="load it without streaming=True",
        )
    if not len(data):
        raise empty(where)
    form = form_of_columns(data.column_names, named or NamedColumns(), where)
    unused = [column for column in data.column_names if column not in form.columns.values()]
    left = [f"columns that are not used: {shown(unused)}"] if unused else []
    lines = (f"{len(data)} rows of {form.name} from {where}", *left, *description)
    return Rows(data.select_columns(list(form.columns.values())), form, where, lines, numbers)


def _training_rows(config: Config, name: str) -> Rows:
    splits = open_splits(name, config.dataset_subset, config.dataset_split)
    training = _split(splits, config.dataset_split, "dataset_split", name)
    total = len(training)
    held_out = _held_out(config, splits, name)
    left_out = set(held_out)
    kept = array("q", (row for row in range(total) if row not in left_out))
    numbers = kept[: config.max_train_samples]
    notes = []
    if len(numbers) < total:
        first = "the first " if len(numbers) < len(kept) else ""
        notes.append(f"training on {first}{len(numbers)} of {total} rows")
    if config.dataset_subset and not is_on_hub(name) and not folder_of_subset(name, config.dataset_subset):
        notes.append(f"dataset_subset {config.dataset_subset} names a part of a hub data set and is not used here")
    if held_out:
        reason = "val_set_size" if config.val_set_size else "no split to evaluate on"
        notes.append(f"{reason}: {len(held_out)} rows are held out for it, evenly spread")
    return _selected(config, training, _where(name, config.dataset_split), numbers, notes)


def _evaluation_rows(config: Config, name: str) -> Rows:
    """The rows to evaluate on of a data set that is also trained on: a split, or the held-out rows."""
    splits = open_splits(name, config.dataset_subset, config.dataset_split)
    training = _split(splits, config.dataset_split, "dataset_split", name)
    if held_out := _held_out(config, splits, name):
        where = f"{_where(name, config.dataset_split)}, held out"
        return _selected(config, training, where, *_thinned(config, training, where, held_out))
    split = _eval_split(config, splits, name) or config.dataset_split
    return _whole_split(config, splits, name, split, [config] if split == config.dataset_split else [])


def _validation_rows(config: Config, name: str) -> Rows:
    """The rows of a data set of `eval_dataset_name`."""
    splits = open_splits(name, config.dataset_subset, config.dataset_split, "eval_dataset_name")
    known = [config.eval_split] if config.eval_split else [*eval_splits(name), config.dataset_split, *splits]
    split = next((each for each in known if each in splits), known[0])
    place = _place(name)
    trained = [
        own for own in config.rows_of_each if split == own.dataset_split and place in map(_place, own.dataset_names)
    ]
    return _whole_split(config, splits, name, split, trained)


def _place(name: str) -> str:
    """The same for all ways to write the path of one file or folder; of a name of the hub, some path as well."""
    return os.path.realpath(os.path.expanduser(name))


def _whole_split(config: Config, splits: Splits, name: str, split: str, trained: Sequence[Config]) -> Rows:
    """Rows of a split to evaluate on, of which nothing is held out.

    Args:
        trained: the configurations by which the same split is trained on.
    """
    data = _split(splits, split, "eval_split", name)
    numbers, notes = _thinned(config, data, _where(name, split), range(len(data)))
    limits = [len(data) if own.max_train_samples is None else own.max_train_samples for own in trained]
    count = sum(number < max(limits, default=0) for number in numbers)
    rows = replace(_selected(config, data, _where(name, split), numbers, notes), are_of_test=split == "test")
    return rows.evaluated_although_trained_on(count)


def _eval_split(config: Config, splits: Splits, name: str) -> str | None:
    """The split to evaluate on; None: rows of the training split are held out."""
    if config.val_set_size:
        return None
    usual = (split for split in eval_splits(name) if split in splits and split != config.dataset_split)
    return config.eval_split or next(usual, None)


def _held_out(config: Config, splits: Splits, name: str) -> list[int]:
    """Numbers of the rows that training leaves out, evenly spread over the training split.

    If an answer is missing in every one of them, as where each tenth row is empty, only rows with one are counted.
    """
    if config.eval_dataset_names or _eval_split(config, splits, name) is not None:
        return []
    data = splits[config.dataset_split]
    numbers = _spread(len(data), _num_held_out(config, len(data), name))
    if numbers:
        rows = _selected(config, data, _where(name, config.dataset_split), range(len(data)), ())
        if all(rows[number] is None for number in numbers):
            usable = [number for number, row in enumerate(rows) if row is not None]
            numbers = [usable[at] for at in _spread(len(usable), _num_held_out(config, len(usable), name))]
    return numbers


def _num_held_out(config: Config, total: int, name: str) -> int:
    """How many of so many rows are held out."""
    size = config.val_set_size
    if not total:
        return 0
    if size is None:
        count = min(HELD_OUT_AT_MOST, max(1, total // 10)) if total > 1 else 0
    else:
        count = int(size) if size >= 1 else round(size * total) or int(size > 0)
    if count >= total > 1 or (count and total == 1):
        raise DataError(
            f"val_set_size {size:g} leaves no row to train on: there are {total}.",
            where=_where(name, config.dataset_split),
            hint="make it smaller, or name other rows to evaluate on by eval_dataset_name",
        )
    return count


def _spread_evenly(config: Config, rows: Sequence[int]) -> tuple[Sequence[int], list[str]]:
    """At most `eval_samples` of the rows, evenly spread, and a note about it; several data sets share that number."""
    total, limit = len(rows), config.eval_samples
    if limit is not None:
        limit = -(-limit // len(config.eval_dataset_names or config.dataset_names))
    if limit is None or limit >= total:
        return rows, []
    note = f"{limit} of {total} rows, evenly spread"
    return [rows[number] for number in _spread(total, limit)], [note]


def _thinned(config: Config, data: Any, where: str, wanted: Sequence[int]) -> tuple[Sequence[int], list[str]]:
    """At most `eval_samples` of the wanted rows, as by `_spread_evenly`.

    If an answer is missing in every one of them, they are spread over the wanted rows that have one.
    """
    numbers, notes = _spread_evenly(config, wanted)
    if not notes:
        return numbers, notes
    rows = _selected(config, data, where, range(len(data)), ())
    if any(rows[number] is not None for number in numbers):
        return numbers, notes
    usable = [number for number in wanted if rows[number] is not None]
    if not usable:
        return numbers, notes
    chosen, _ = _spread_evenly(config, usable)
    return chosen, [f"{len(chosen)} of {len(wanted)} rows, evenly spread over the {len(usable)} that have an answer"]


def _selected(config: Config, data: Any, where: str, numbers: Sequence[int], notes: Sequence[str]) -> Rows:
    named = NamedColumns(config.prompt_column, config.answer_column, config.text_column, config.messages_column)
    if len(numbers) == len(data):
        return recognised(data, where, notes, named=named)
    return recognised(data.select(numbers), where, notes, named=named, numbers=numbers)


def _spread(total: int, count: int) -> list[int]:
    """`count` different rows out of `total`, evenly spread: files are often sorted."""
    return [number * total // count for number in range(count)]


def _where(name: str, split: str) -> str:
    return f"{name}, split {split}"


def _split(splits: Splits, name: str, key: str, source: str) -> Any:
    if name in splits:
        return splits[name]
    raise DataError(
        f"The data set has no split {name!r}; it has: {', '.join(splits) or 'none'}.",
        where=f"{source}, {key}",
        hint=f"set {key} to one of them",
    )
