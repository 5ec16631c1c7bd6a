"""The splits of a data set, by its name. The embedded rows need no `datasets`, which takes long to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ci_llm import embedded
from ci_llm.cluster.hub import may_be_on_hub
from ci_llm.data.rows import ListedRows
from ci_llm.errors import DataError

#: Rows by the name of their split: a `datasets.Dataset`, `MappedRows` or `ListedRows`.
Splits = Mapping[str, Any]

#: Names of splits to evaluate on, the first that exists is taken: whatever a run chooses by them, it leaves the test
#: rows for a last evaluation.
EVAL_SPLITS: Final = ("validation", "valid", "val", "dev", "eval", "test")


def open_splits(name: str, subset: str | None, unnamed: str, key: str = "dataset_name") -> Splits:
    """All splits of a data set.

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
    from ci_llm.data.mapped import mapped

    path = Path(os.path.expanduser(name))
    if is_on_hub(name):
        found = splits_on_hub(name, subset, f"{key}: {name} (nothing of this name at {path.absolute()} either)")
    else:
        found = splits_of_files(folder_of_subset(name, subset) or path, unnamed, key)
    return {split: mapped(data) for split, data in found.items()}


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
    """Whether `name` can only mean a data set of the hub: nothing here has it, and no file could."""
    from ci_llm.data.formats import find_format

    return may_be_on_hub(name) and find_format(Path(os.path.expanduser(name))) is None


def empty(where: str) -> DataError:
    """The error for a data set without a row."""
    return DataError("The data set is empty.", where=where, hint="give one with rows, or another split")
