"""The rows of a configuration, to train on or to evaluate on: splits or held-out rows of one data set or several."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ci_llm import embedded
from ci_llm.config import Config
from ci_llm.config.own_keys import ROWS_KEYS
from ci_llm.core.quantities import count
from ci_llm.core.remote import may_be_on_hub
from ci_llm.data.columns import form_of_columns, shown
from ci_llm.data.order import permute
from ci_llm.data.rows import EVAL_SPLITS, ListedRows, Row, Rows, empty, preferred
from ci_llm.errors import DataError

if TYPE_CHECKING:
    from ci_llm.objectives import RowKind

#: Rows by the name of their split: a `datasets.Dataset`, `JsonRows` or `ListedRows`.
Splits = Mapping[str, Any]


def open_splits(name: str, subset: str | None, unnamed: str, key: str = "dataset_name") -> Splits:
    """All splits of a data set. The embedded rows need no `datasets`, which takes long to load.

    Args:
        name: `embedded`, a hub id, a file, a glob or a folder.
        subset: the configuration of a hub data set, or of a copy of one with a folder for each.
        unnamed: what the only split of a source without named splits is called.
        key: the key of the configuration that holds the name, for error messages.

    Raises:
        DataError: there is no such data set, it cannot be read, or it is empty.
    """
    if name == "embedded":
        return {split: ListedRows(embedded.rows(split)) for split in ("train", "validation", "test")}
    from ci_llm.data.files import splits_of_files, splits_on_hub

    path = Path(os.path.expanduser(name))
    if is_on_hub(name):
        return splits_on_hub(name, subset, f"{key}: {name} (nothing of this name at {path.absolute()} either)")
    return splits_of_files(folder_of_subset(name, subset) or path, unnamed, key)


def folder_of_subset(name: str, subset: str | None) -> Path | None:
    """The folder of a configuration in a local copy of a data set of the hub; None where there is none."""
    folder = Path(os.path.expanduser(name), subset) if subset else None
    return folder if folder and folder.is_dir() else None


def eval_splits(name: str) -> tuple[str, ...]:
    """Names of the splits of a data set to evaluate on, the first that exists is taken.

    The embedded rows have both kinds, and by default nothing is chosen by them: the published scores are on test rows.
    """
    return ("test", *EVAL_SPLITS) if name == "embedded" else EVAL_SPLITS


def is_on_hub(name: str) -> bool:
    """True if `name` can only mean a data set of the hub: nothing here has it, and no file could."""
    from ci_llm.data.formats import find_format

    return may_be_on_hub(name) and find_format(Path(os.path.expanduser(name))) is None


@dataclass(frozen=True)
class _ConcatenatedRows(Rows):
    """The rows of several data sets, one after the other, each read by its own data set.

    Attributes:
        raw: the data sets; `numbers` are counted through all of them.
    """

    raw: tuple[Rows, ...]

    def __len__(self) -> int:
        return self._ends[-1] if self.numbers is None else len(self.numbers)

    def __iter__(self) -> Iterator[Row | None]:
        every = chain.from_iterable(self.raw) if self.numbers is None else map(self.__getitem__, range(len(self)))
        return map(preferred, every) if self.are_answers else every

    def __getitem__(self, number: int) -> Row | None:
        part, row = self._locate(number)
        return preferred(part[row]) if self.are_answers else part[row]

    def select(self, chosen: Sequence[int]) -> Rows:
        return replace(self, numbers=self._numbers_of(chosen))

    def place(self, number: int) -> str:
        part, row = self._locate(number)
        return part.place(row)

    def cells(self, number: int) -> tuple[Any, str]:
        part, row = self._locate(number)
        return part.cells(row)

    @property
    def column_sets(self) -> list[Sequence[str]]:
        return [columns for part in self.raw for columns in part.column_sets]

    def _locate(self, number: int) -> tuple[Rows, int]:
        """The data set of a row, and its number there."""
        number = number if self.numbers is None else self.numbers[number]
        part = bisect_right(self._ends, number)
        return self.raw[part], number - self._ends[part] + len(self.raw[part])

    @cached_property
    def _ends(self) -> list[int]:
        return [*accumulate(map(len, self.raw))]


def join(parts: Sequence[Rows]) -> Rows:
    """One data set, or several as one, in the order of `parts`, with every row of each.

    Raises:
        DataError: the data sets hold rows of different kinds.
    """
    if len(parts) == 1:
        return parts[0]
    where = ", ".join(part.where for part in parts)
    if len({part.form.kind for part in parts}) > 1:
        raise DataError(
            "Some of these data sets hold single rows, and others pairs or rated ones: an objective takes one kind.",
            where=where,
            hint="train on one kind at a time: init_from begins where another run ended",
        )
    told = f"{sum(map(len, parts))} rows of {len(parts)} data sets, one after the other"
    lines = (told, *(line for part in parts for line in part.description))
    are_of_test = any(part.are_of_test for part in parts)
    rows = _ConcatenatedRows((*parts,), parts[0].form, where, lines, are_of_test=are_of_test)
    return rows.evaluated_although_trained_on(sum(part.num_trained_on for part in parts))


def joined_sizes(rows: Rows) -> list[int]:
    """The number of rows of each data set in what `join` returned; one number for other rows."""
    return [*map(len, rows.raw)] if isinstance(rows, _ConcatenatedRows) else [len(rows)]


#: Without a split to evaluate on, a tenth of the rows is held out, at most this many. The number must not depend on
#: `eval_samples`, which may change between two attempts of a run: the training rows would change with it.
HELD_OUT_AT_MOST = 400


#: Rows to train on; to evaluate on: answers, whatever is trained, but for heads; or as they are trained on.
Part = Literal["train", "eval", "preferences"]


def load_rows(config: Config, split: Part) -> Rows:
    """The rows to train on, or the rows to evaluate on, with their columns recognised; those of all agents together.

    Evaluation takes `eval_dataset_name` or `eval_split`. By default it takes the split validation or test if there
    is one, and otherwise rows that training leaves out, the same rows on every call.

    Raises:
        DataError: there is no such data set or split, it is empty, or no column can be used.

    Examples:
        >>> rows = ci_llm.load_rows(ci_llm.Config(max_train_samples=20, eval_samples=9), "train")
        >>> len(rows), rows.form.name
        (20, 'question + answer')
    """
    each = load_rows_of_each(config, split)
    if split == "train":
        return join([*{id(rows): rows for rows in each}.values()])
    sets: dict[Hashable, Rows] = {}  # agents with other parts of one data set are evaluated on the same rows
    for own, rows in zip(config.evaluated_on, each, strict=True):
        if own not in sets or rows.num_trained_on > sets[own].num_trained_on:  # of equal ones the most trained on
            sets[own] = rows
    return join([*sets.values()])


def load_rows_of_each(config: Config, split: Part) -> list[Rows]:
    """The rows of every agent; those of agents that share a data set are one object.

    `eval_dataset_name` is the same for all agents. Without it an agent is evaluated on rows of its own data set.

    Raises:
        DataError: see `load_rows`.
    """
    if split != "train" and config.eval_dataset_names:
        names = config.eval_dataset_names
        found = join([_DataSet.opened(config, name, "eval_dataset_name").validation() for name in names])
        return [replace(found, are_answers=_are_answers(config, split))] * config.num_agents
    known: dict[Hashable, Rows] = {}
    each = [(tuple(getattr(own, key) for key in ROWS_KEYS), own) for own in config.rows_of_each]
    for key, own in each:
        if key not in known:
            opened = [_DataSet.opened(own, name) for name in own.dataset_names]
            parts = [data.training() if split == "train" else data.evaluation() for data in opened]
            known[key] = replace(join(parts), are_answers=_are_answers(own, split))
    return [known[key] for key, _ in each]


def recognised(
    data: Any,
    where: str,
    description: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    numbers: Sequence[int] | None = None,
    wanted: RowKind | None = "single",
) -> Rows:
    """The canonical rows of an open data set of the `datasets` library.

    Args:
        named: the columns that the configuration names, by their part.
        numbers: the numbers of the rows in their source, where they are a part of it.
        wanted: see `form_of_columns`.

    Raises:
        DataError: it is empty, or no column can be used.
    """
    if not len(data):
        raise empty(where)
    form = form_of_columns(data.column_names, named or {}, where, wanted)
    unused = [column for column in data.column_names if column not in form.columns.values()]
    whose = "columns for rewards" if form.kind == "prompts" else "columns that are not used"
    left = [f"{whose}: {shown(unused)}"] if unused else []
    read = data.column_names if form.kind == "prompts" else (*form.columns.values(), *form.beside)
    told = (f"{count(len(data), 'row')} of {form.name} from {where}", *left, *description)
    return Rows(data.select_columns([*dict.fromkeys(read)]), form, where, told, numbers)


@dataclass(frozen=True)
class _DataSet:
    """A data set as a configuration reads it: its splits, and which of their rows are for what."""

    config: Config
    name: str
    splits: Splits

    @classmethod
    def opened(cls, config: Config, name: str, key: str = "dataset_name") -> _DataSet:
        """The data set of this name, which stands under `key`."""
        return cls(config, name, open_splits(name, config.dataset_subset, config.dataset_split, key))

    def training(self) -> Rows:
        """The rows to train on."""
        config, name = self.config, self.name
        rows = self._split(config.dataset_split, "dataset_split")
        held_out = self._held_out()
        left_out = set(held_out)
        kept = array("q", (row for row in range(len(rows)) if row not in left_out))
        numbers = kept[: config.max_train_samples]
        notes = []
        if len(numbers) < len(rows):
            first = "the first " if len(numbers) < len(kept) else ""
            notes.append(f"training on {first}{len(numbers)} of {len(rows)} rows")
        if config.dataset_subset and not is_on_hub(name) and not folder_of_subset(name, config.dataset_subset):
            notes.append(f"dataset_subset {config.dataset_subset} names a part of a hub data set and is not used here")
        if held_out:
            reason = "val_set_size" if config.val_set_size else "no split to evaluate on"
            notes.append(f"{reason}: {len(held_out)} rows are held out for it, {self._how}")
        return self._selected(rows, self._where(config.dataset_split), numbers, notes)

    def evaluation(self) -> Rows:
        """The rows to evaluate on where this data set is also trained on: a split, or the held-out rows."""
        training = self.config.dataset_split
        rows = self._split(training, "dataset_split")
        if held_out := self._held_out():
            return self._selected(rows, f"{self._where(training)}, held out", *self._at_most(held_out))
        split = self._eval_split or training
        return self._whole_split(split, [self.config] if split == training else [])

    def validation(self) -> Rows:
        """The rows to evaluate on where this is a data set of `eval_dataset_name`."""
        config, place = self.config, _place(self.name)
        usual = [*eval_splits(self.name), config.dataset_split, *self.splits]
        known = [config.eval_split] if config.eval_split else usual
        split = next((each for each in known if each in self.splits), known[0])
        alike = (own for own in config.rows_of_each if split == own.dataset_split)
        return self._whole_split(split, [own for own in alike if place in map(_place, own.dataset_names)])

    def _whole_split(self, split: str, trained: Sequence[Config]) -> Rows:
        """Rows of a split to evaluate on, of which nothing is held out.

        Args:
            trained: the configurations by which the same split is trained on.
        """
        data = self._split(split, "eval_split")
        numbers, notes = self._at_most(range(len(data)))
        limits = [len(data) if own.max_train_samples is None else own.max_train_samples for own in trained]
        count = sum(number < max(limits, default=0) for number in numbers)
        rows = replace(self._selected(data, self._where(split), numbers, notes), are_of_test=split == "test")
        return rows.evaluated_although_trained_on(count)

    @property
    def _eval_split(self) -> str | None:
        """The split to evaluate on; None: rows of the training split are held out."""
        config = self.config
        if config.val_set_size:
            return None
        usual = (each for each in eval_splits(self.name) if each in self.splits and each != config.dataset_split)
        return config.eval_split or next(usual, None)

    def _held_out(self) -> list[int]:
        """Numbers of the rows that training leaves out, in order."""
        if self.config.eval_dataset_names or self._eval_split is not None:
            return []
        total, size = len(self.splits[self.config.dataset_split]), self.config.val_set_size
        if size is None or not total:
            return self._taken(total, min(HELD_OUT_AT_MOST, max(1, total // 10)) if total > 1 else 0)
        count = int(size) if size >= 1 else round(size * total) or int(size > 0)
        if count >= total:
            raise DataError(
                f"val_set_size {size:g} leaves no row to train on: there are {total}.",
                where=self._where(self.config.dataset_split),
                hint="make it smaller, or name other rows to evaluate on by eval_dataset_name",
            )
        return self._taken(total, count)

    def _at_most(self, rows: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """At most `eval_samples` of the rows, and a note about it; several data sets share that number."""
        total, limit = len(rows), self.config.eval_samples
        if limit is not None:
            limit = -(-limit // len(self.config.eval_dataset_names or self.config.dataset_names))
        if limit is None or limit >= total:
            return rows, []
        return [rows[number] for number in self._taken(total, limit)], [f"{limit} of {total} rows, {self._how}"]

    def _selected(self, data: Any, where: str, numbers: Sequence[int], notes: Sequence[str]) -> Rows:
        config = self.config
        answer = "label" if config.text_column else "answer"
        columns = {"prompt": config.prompt_column, answer: config.answer_column, "text": config.text_column}
        named = {part: name for part, name in columns.items() if name is not None}
        some, own = (data, None) if len(numbers) == len(data) else (data.select(numbers), numbers)
        return recognised(some, where, notes, named=named, numbers=own, wanted=row_kind(config))

    def _taken(self, total: int, count: int) -> list[int]:
        """`count` different rows out of `total`, in order. Files are often sorted, or alike in every tenth row."""
        if self._evenly:
            return [number * total // count for number in range(count)]
        return sorted(permute(at, total, seed=self.config.seed, epoch=_DRAW) for at in range(count))

    @property
    def _evenly(self) -> bool:
        """True if rows are taken evenly: the embedded ones, which have no order that could repeat."""
        return self.name == "embedded"

    @property
    def _how(self) -> str:
        return "evenly spread" if self._evenly else f"drawn by seed {self.config.seed}"

    def _where(self, split: str) -> str:
        return f"{self.name}, split {split}"

    def _split(self, name: str, key: str) -> Any:
        if name in self.splits:
            return self.splits[name]
        what = f"The data set has no split {name!r}; it has: {', '.join(self.splits) or 'none'}."
        raise DataError(what, where=f"{self.name}, {key}", hint=f"set {key} to one of them")


def _place(name: str) -> str:
    """One path for all ways to write that of a file or folder; for a name of the hub, some path as well."""
    return os.path.realpath(os.path.expanduser(name))


#: The epoch of the permutation by which rows are drawn; no epoch of a training has this number.
_DRAW: Final = -1


def row_kind(config: Config) -> RowKind | None:
    """The kind of rows that the objective takes; None where it is auto, and the columns decide.

    Raises:
        BadInput: there is no such objective, or its settings do not fit together.
    """
    if config.objective in ("auto", "sft"):
        return None if config.objective == "auto" else "single"
    from ci_llm.objectives import objective_of  # with torch, which other rows do not need

    return objective_of(config.objective, [config]).needs.rows


def _are_answers(config: Config, split: Part) -> bool:
    """True if answers alone are evaluated: heads are scored by pairs and labels, and rewards judge prompts."""
    if split != "eval" or config.objective in ("auto", "sft"):
        return split == "eval"
    from ci_llm.objectives import head_size  # with torch, as above

    return not head_size(config) and row_kind(config) != "prompts"
