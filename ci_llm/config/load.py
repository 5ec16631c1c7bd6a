"""The configuration of a run: one flat, frozen `Config`; command line over file over defaults."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from ci_llm.config.aliases import ALIASES, WORDS
from ci_llm.config.parsing import (
    PLACE,
    Entry,
    Scalar,
    Stands,
    UnreadableError,
    expected,
    hint,
    parts_of,
    read_arguments,
    read_value,
    takes_flag,
)
from ci_llm.config.precedence import in_words, settle
from ci_llm.config.schema import (
    AgentKeys,
    BaseModelKeys,
    ChangeKind,
    CheckpointKeys,
    DataKeys,
    DeclinedKeys,
    EvaluationKeys,
    InterruptionKeys,
    Keys,
    LogKeys,
    ObjectiveKeys,
    RecoveryKeys,
    TrainingKeys,
)
from ci_llm.config.validation import Clash, find_clashes, find_notices
from ci_llm.config.yaml_file import dump_value, dump_yaml, read_yaml
from ci_llm.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """A key that differs between two configurations, and what that means for resuming one with the other.

    `kind`: free (logging, saving, places), schedule (how long the run is) or sample-exact (other samples,
    maths or order). `keeps_bits` is false where the resumed run can at best be sample-exact, not bitwise.
    """

    key: str
    old: object
    new: object
    kind: ChangeKind
    keeps_bits: bool


class Config(
    DeclinedKeys,
    RecoveryKeys,
    InterruptionKeys,
    CheckpointKeys,
    LogKeys,
    EvaluationKeys,
    TrainingKeys,
    DataKeys,
    ObjectiveKeys,
    AgentKeys,
    BaseModelKeys,
):
    """All keys of a run. Pydantic collects the fields of bases from last to first, hence their order."""

    @model_validator(mode="after")
    def _refuse_clashes(self) -> Config:
        if clashes := find_clashes(self):
            raise ValueError("; ".join(clash.what for clash in clashes))
        return self

    @property
    def run_folder(self) -> Path:
        """`output_dir`, or its sub-folder `experiment_name`."""
        return Path(self.output_dir, self.experiment_name or "")

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data sets to train on, one by one."""
        return _one_by_one(self.dataset_name)

    @property
    def eval_dataset_names(self) -> tuple[str, ...]:
        """The data sets that only judge; empty where the training data has the rows for it."""
        return _one_by_one(self.eval_dataset_name) if self.eval_dataset_name else ()

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation so far is kept, however many newer ones there are."""
        return self.early_stopping_patience is not None or self.load_best_model_at_end

    def notices(self) -> list[str]:
        """What to tell once at the start: settings without effect, and doubtful ones."""
        return find_notices(self)

    def dump(self) -> str:
        """YAML of all values, in groups; `load_config` reads it back to an equal `Config`."""
        values = self.model_dump()
        return dump_yaml({title: {key: values[key] for key in keys} for title, keys in groups().items()})

    def diff(self, other: Config) -> list[Change]:
        """What `other` changes, seen from this configuration, in the order of the keys."""
        return [
            Change(key, getattr(self, key), getattr(other, key), **field.json_schema_extra)  # type: ignore[arg-type]
            for key, field in Config.model_fields.items()
            if getattr(self, key) != getattr(other, key)
        ]


def _one_by_one(names: str) -> tuple[str, ...]:
    """Names with commas between; a file or folder that is called so means itself."""
    if os.path.exists(os.path.expanduser(names)):
        return (names,)
    return tuple(name.strip() for name in names.split(",") if name.strip()) or (names,)


def groups() -> dict[str, list[str]]:
    """The keys below the title of their group, in order."""
    classes = [base for base in reversed(Config.__mro__) if issubclass(base, Keys) and base not in (Keys, Config)]
    return {str(base.__doc__): [key for key in Config.model_fields if key in base.__annotations__] for base in classes}


def describe_keys() -> str:
    """All keys for `--help`: group, key, default, what it is and in which unit."""
    defaults = Config().dump().splitlines()
    lines = [line if not line or line.startswith("#") else _describe(line) for line in defaults]
    return "\n".join(line.removeprefix("# ") for line in lines)


def keys_as_markdown() -> str:
    """All keys as tables, one for each group: key, default, what it is; other names of a key stand below its own."""
    parts = []
    for title, keys in groups().items():
        rows = [f"| {_named(key)} | `{dump_value(Config.model_fields[key].default)}` | {_told(key)} |" for key in keys]
        parts.append("\n".join([f"## {title}", "", "| key | default | what it is |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def _named(key: str) -> str:
    return "<br>".join([f"`{key}`", *(f"{alias}" for alias, meant in ALIASES.items() if meant == key)])


def _told(key: str) -> str:
    return str(Config.model_fields[key].description).replace("|", "or")


def _describe(dumped: str) -> str:
    key, _, default = dumped.partition(": ")
    head = f"  {key}={default}".replace('"', "")
    return textwrap.fill(
        str(Config.model_fields[key].description),
        width=110,
        initial_indent=f"{head:<44} ",
        subsequent_indent=" " * 45,
    )


# ---------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class _Problem:
    """One thing wrong with the configuration: the place, what it is, and the hint."""

    where: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.hint}"


@dataclass(frozen=True)
class Reading:
    """A configuration as it was read, and lines for people: which file, which overrides, what does not count."""

    config: Config
    lines: tuple[str, ...]


def load_config(path: str | Path | None, arguments: Sequence[str] = ()) -> Config:
    """The configuration of a run: `arguments` over the file over the defaults.

    Args:
        path: the YAML file, unless `arguments` name another by `--config FILE`; None: no file.
        arguments: `--any-key V`, `--any_key=V`, `any_key=V`, `--flag`; `--debug` is skipped.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    return read_config(path, arguments).config


def read_config(
    path: str | Path | None, arguments: Sequence[str] = (), launcher: Mapping[str, str] | None = None
) -> Reading:
    """As `load_config`, with words about where the values come from.

    Args:
        launcher: values that `accelerate launch` names, by key; they count where file and arguments are silent.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    typed, strays = read_arguments([word for word in arguments if word != "--debug"], _stands)
    problems = [_stray(word) for word in strays]
    for entry in (entry for entry in typed if entry.name == "config"):
        if isinstance(entry.raw, Scalar):
            path = entry.raw.text
        else:
            problems.append(_Problem(PLACE, "--config without a file", "write --config FILE"))
    written = [] if path is None else read_yaml(_read_file(Path(path)), str(path))
    places = (
        {key: Entry(key, Scalar(value), "accelerate launch") for key, value in (launcher or {}).items()},
        _by_key(written, problems, last_wins=False),
        _by_key([entry for entry in typed if entry.name != "config"], problems, last_wins=True),
    )
    config = _build(settle(*places), problems)
    return Reading(config, tuple(in_words(None if path is None else Path(path), *places)))


def words_without(arguments: Sequence[str], keys: Collection[str]) -> list[str]:
    """A command line without these keys, under whatever name they stand there."""
    parts = parts_of(arguments, _stands)
    return [word for words, entry in parts if entry is None or _canonical(entry.name) not in keys for word in words]


def parse_config(text: str, where: str) -> Config:
    """The configuration that `Config.dump()` wrote, perhaps by another version: keys of that version are left out.

    Raises:
        ConfigError: a value that this version does not take.
    """
    known = [entry for entry in read_yaml(text, where) if entry.name in Config.model_fields]
    problems: list[_Problem] = []
    return _build(_by_key(known, problems, last_wins=False), problems)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8 text", where=str(path), hint="save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"the configuration cannot be read: {reason}",
            where=str(path),
            hint="name an existing YAML file by --config FILE",
        ) from error


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _stands(name: str) -> Stands:
    field = Config.model_fields.get(_canonical(name))
    if field is not None and takes_flag(field):
        return "alone"
    return "either way" if "true" in WORDS.get(_canonical(name), {}) else "with a value"


def _by_key(entries: Iterable[Entry], problems: list[_Problem], *, last_wins: bool) -> dict[str, Entry]:
    """The entries of one source by canonical key; unknown keys and doubles are problems."""
    given: dict[str, Entry] = {}
    for entry in entries:
        key = _canonical(entry.name)
        first = given.get(key)
        if key not in Config.model_fields:
            problems.append(_unknown(entry))
        elif first is not None and not (last_wins and _same_name(first.name, entry.name)):
            problems.append(_double(key, first, entry))
        else:
            given[key] = entry
    return given


def _same_name(one: str, other: str) -> bool:
    return one.replace("-", "_") == other.replace("-", "_")


def _build(given: dict[str, Entry], problems: list[_Problem]) -> Config:
    """The Config of what was given, or one error with all problems; clashes are sought among sound values."""
    values: dict[str, Any] = {}
    for key, entry in given.items():
        try:
            values[key] = read_value(Config.model_fields[key], _in_other_words(key, entry).raw)
        except UnreadableError:
            problems.append(_misfit(key, entry))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        bad = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        problems += [_misfit(key, given[key]) for key in values if key in bad]
        config = Config.model_construct(**{key: value for key, value in values.items() if key not in bad})
    unsound = {key for key in given if key not in config.model_fields_set}
    problems += [_clash(clash, given) for clash in find_clashes(config) if not unsound & set(clash.keys)]
    if problems:
        raise _complaint(problems)
    return config


def _in_other_words(key: str, entry: Entry) -> Entry:
    words = {**WORDS.get(key, {}), **WORDS.get(entry.name.replace("-", "_"), {})}
    if isinstance(entry.raw, Scalar) and not entry.raw.quoted and entry.raw.text.lower() in words:
        return Entry(entry.name, Scalar(words[entry.raw.text.lower()]), entry.where)
    return entry


# --------------------------------------------------------------------------------------------------- problems


def _complaint(problems: list[_Problem]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0].what, where=problems[0].where, hint=problems[0].hint)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(
        f"{len(problems)} problems in the configuration:{lines}", hint="all keys: python train.py --help"
    )


def _misfit(key: str, entry: Entry) -> _Problem:
    field = Config.model_fields[key]
    what = f"{_shown(key, entry)} is {entry.raw}, but takes {expected(field)}"
    return _Problem(entry.where, what, hint(field, entry.raw) or f"the default is {dump_value(field.default)}")


def _shown(key: str, entry: Entry) -> str:
    return key if _same_name(key, entry.name) else f"{key} (written {entry.name})"


def _double(key: str, first: Entry, second: Entry) -> _Problem:
    names = key if first.name == second.name else f"{key} (as {first.name} and {second.name})"
    place = second.where if first.where == second.where else f"{first.where} and {second.where}"
    return _Problem(place, f"{names} is given twice", "keep one of them")


def _unknown(entry: Entry) -> _Problem:
    near = "--debug on the command line" if entry.name == "debug" else _nearest(entry.name.replace("-", "_"))
    hint = f"did you mean {near}?" if near else "all keys: python train.py --help"
    return _Problem(entry.where, f"{entry.name} is no key", hint)


def _nearest(name: str) -> str | None:
    """The key or alias most like `name`; `training.lr` is looked up as lr, `no_compile` as compile=false."""
    last = name.rpartition(".")[2]
    if last.startswith("no_") and _stands(last[3:]) == "alone":
        return f"{_canonical(last[3:])}=false"
    known = [*Config.model_fields, *ALIASES]
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = get_close_matches(last.lower(), by_lower, n=1, cutoff=0.6)
    return _with_alias(by_lower[close[0]]) if close else None


def _with_alias(name: str) -> str:
    return f"{name}, which is {ALIASES[name]}" if name in ALIASES else name


def _stray(word: str) -> _Problem:
    if word.endswith((".yaml", ".yml")):
        return _Problem(PLACE, f"{word!r} stands alone", f"write --config {word}")
    return _Problem(PLACE, f"{word!r} is neither a key nor a value", "write key=value, --key value or --flag")


def _clash(clash: Clash, given: dict[str, Entry]) -> _Problem:
    places = [given[key].where for key in clash.keys if key in given]
    return _Problem(" and ".join(dict.fromkeys(places)) or "defaults", clash.what, clash.hint)
