"""Which rows are evaluated: those of the run's own evaluation, those of another split, or those of another data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.manifest import read_file, read_manifest
from ci_llm.config import Config, load_config, parse_config
from ci_llm.data.rows import Rows
from ci_llm.data.sources import load_rows
from ci_llm.errors import BadInput, ConfigError, DataError

#: Keys of the configuration that may be changed for an evaluation.
KEYS: Final = (
    "aggregator",
    "dirichlet_alpha_aggregator",
    "max_new_tokens_eval",
    "max_seq_length",
    "prompt_column",
    "answer_column",
    "text_column",
    "messages_column",
    "dataset_subset",
)
_COLUMNS: Final = tuple(key for key in KEYS if key.endswith("_column"))
_CONFIG: Final = "config.yaml"


@dataclass(frozen=True)
class Choice:
    """What a user says about the rows.

    Attributes:
        data: `embedded`, a hub id, a file, a glob or a folder; None for the rows that the run was evaluated on.
        split: of the data set.
        max_samples: take at most so many rows, evenly spread.
        keys: of the configuration, changed for this evaluation.
    """

    data: str | None
    split: str | None
    max_samples: int | None
    keys: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether these are the rows of the run's own evaluation, as its configuration chooses them."""
        return self.data is None and self.split is None and self.max_samples is None


def read_keys(words: Sequence[str]) -> dict[str, Any]:
    """The `key=value` words of a command line, as values of the configuration.

    Raises:
        ConfigError: one is no key, has another type, or has nothing to do with an evaluation.
    """
    given = load_config(None, words)
    if strange := sorted(given.model_fields_set - {*KEYS}):
        raise ConfigError(
            f"{', '.join(strange)} cannot be changed for an evaluation",
            where="command line",
            hint=f"these can: {', '.join(KEYS)}",
        )
    return {key: getattr(given, key) for key in given.model_fields_set}


def read_run_config(checkpoint: Path) -> Config | None:
    """The configuration in a checkpoint; None for one that has none, as that of imported adapters.

    Raises:
        DamagedCheckpoint: it differs from its digest in the manifest.
    """
    record = read_manifest(checkpoint).files.get(_CONFIG)
    if record is None:
        return None
    return parse_config(read_file(checkpoint, _CONFIG, record).decode(), str(checkpoint / _CONFIG))


def open_rows(config: Config | None, choice: Choice, where: str) -> tuple[Config, Rows]:
    """The rows to evaluate on, and the configuration by which they are read and answered.

    Args:
        config: of the run; None if it has none.
        where: the run, for messages.

    Raises:
        DataError: there is no such data set or split, or it has no columns that can be used.
        BadInput: no rows are named, and the run has none of its own.
    """
    if config is None and choice.data is None:
        raise BadInput(
            "this checkpoint was not trained here: it does not say which rows it is evaluated on",
            where=where,
            hint="name a data set by --data",
        )
    wanted = (config or Config()).model_copy(update=_changes(choice))
    try:
        return wanted, _loaded(wanted, choice)
    except DataError as error:
        raise DataError(error.what, where=_as_options(error.where), hint=_as_options(error.hint)) from error


def _changes(choice: Choice) -> dict[str, Any]:
    changes = dict(choice.keys)
    if choice.data is not None:
        changes = {"eval_dataset_name": choice.data, "eval_split": None, "eval_samples": None} | changes
        changes.setdefault("dataset_subset", None)  # that of the run is a part of another data set
    if choice.split is not None:
        changes |= {"eval_split": choice.split, "val_set_size": None, "eval_samples": None}
    if choice.max_samples is not None:
        changes["eval_samples"] = choice.max_samples
    return changes


def _loaded(config: Config, choice: Choice) -> Rows:
    """By the columns that the run names, where the data has them; else by those that are found."""
    named = [key for key in _COLUMNS if getattr(config, key) is not None]
    try:
        return load_rows(config, "eval")
    except DataError:
        if choice.data is None or not named or {*named} & {*choice.keys}:
            raise
        return load_rows(config.model_copy(update=dict.fromkeys(named)), "eval")


def _as_options(text: str | None) -> str | None:
    """A message about keys of the configuration, in the words of this command."""
    return text and text.replace("eval_dataset_name", "--data").replace("eval_split", "--split")
