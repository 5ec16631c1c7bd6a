"""The reading of a configuration: the command line over the file over the launcher over the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.config import parsing
from ci_llm.config.agents import take_own_entries
from ci_llm.config.config import Config, entries_of
from ci_llm.config.foreign import FIELDS, flag_form, key_of
from ci_llm.config.problems import Problem, by_key, expanded, strays_of
from ci_llm.config.schema import FOUND
from ci_llm.config.yaml_file import read_yaml
from ci_llm.errors import ConfigError

IN_CALL: Final = "train(...)"
#: The key of a file whose value is a mapping of keys.
TOY: Final = "toy"


@dataclass(frozen=True)
class Reading:
    """A configuration, and lines for people: which file, which overrides, what has no effect."""

    config: Config
    lines: tuple[str, ...]


def default_file(name: str = "configs.yaml") -> Path | None:
    """The file that is read if none is named: that of the current folder, else that of this project.

    A checkout has it at its root. An installed package brings configs.yaml and configs/ along in the folder shipped.
    """
    checkout = Path(__file__).parents[2]
    is_checkout = (checkout / "pyproject.toml").is_file()  # and not the folder of somebody's installed packages
    folders = [Path(), checkout if is_checkout else Path(__file__).with_name("shipped")]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def load_config(path: str | Path | None, arguments: Sequence[str] = ()) -> Config:
    """The configuration of a run: `arguments` over the file over the defaults.

    Args:
        path: the YAML file, unless `arguments` name another by `--config FILE`; None: no file.
        arguments: `--any-key V`, `--any_key=V`, `any_key=V`, `--flag`; `--debug` is skipped.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.

    Examples:
        >>> ci_llm.load_config(None, ["--lr", "1e-3", "num_agents=8"]).num_agents
        8
    """
    return read_config(path, arguments).config


def read_config(
    path: str | Path | None, arguments: Sequence[str] = (), launcher: Mapping[str, str] | None = None
) -> Reading:
    """As `load_config`, with lines that say where the values come from.

    Args:
        launcher: values of `accelerate launch`, by key; they count if neither file nor arguments have the key.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    problems: list[Problem] = []
    file, typed = read_sources(path, arguments, problems)
    return build_reading(file, typed, launcher or {}, problems)


@dataclass(frozen=True)
class FileEntries:
    """The entries of a file, or of what stands in its place, and those of its section `toy:`.

    The latter count where base and rows are the embedded ones, below every other source. `name` is for people.
    """

    name: str
    entries: list[parsing.Entry]
    toy: Sequence[parsing.Entry] = ()


def read_sources(
    path: str | Path | None, arguments: Sequence[str], problems: list[Problem]
) -> tuple[FileEntries, list[parsing.Entry]]:
    """The entries of the file and those of the command line; for the arguments see `read_config`."""
    parts = [*parsing.parts_of([word for word in arguments if word != "--debug"], flag_form)]
    problems += strays_of([word for words, entry in parts if entry is None for word in words])
    typed = expanded((entry for _, entry in parts if entry is not None), problems)
    for entry in (entry for entry in typed if entry.name == "config"):
        if isinstance(entry.raw, parsing.Scalar):
            path = entry.raw.text
            if path.startswith("configs/"):  # which an installed package brings along
                path = default_file(path) or path
        else:
            problems.append(Problem(parsing.COMMAND_LINE, "--config without a file", "write --config FILE"))
    return read_file(path, problems), [entry for entry in typed if entry.name != "config"]


def read_file(path: str | os.PathLike[str] | None, problems: list[Problem]) -> FileEntries:
    """The entries of a file that a person wrote; none without a file."""
    if path is None:
        return FileEntries("no file: there is no configs.yaml here", [])
    written = expanded(read_yaml(_read_text(Path(path)), os.fspath(path)), problems)
    toy: list[parsing.Entry] = []
    for section in (entry for entry in written if entry.name == TOY):
        if isinstance(section.raw, parsing.Mapped):
            toy += section.raw.entries
        else:
            what = f"{TOY} is {section.raw}, but takes a mapping"
            problems.append(Problem(section.where, what, "write key: value in it"))
    return FileEntries(str(path), [entry for entry in written if entry.name != TOY], toy)


def given_in_call(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None, problems: list[Problem]
) -> FileEntries:
    """The entries of what a call in Python is given: a YAML file, a mapping, what a Config was given, or nothing."""
    if config is None or isinstance(config, Mapping | Config):
        if isinstance(config, Config):
            config = {**config.model_dump(include=config.model_fields_set - {*FOUND}), **config.without_effect}
        return FileEntries("no file", entries_of(config or {}, IN_CALL))
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"a {type(config).__name__} is not a configuration",
            where=IN_CALL,
            hint="give a YAML file, a mapping of keys, a Config or nothing, and keys as keywords: learning_rate=1e-3",
        )
    return read_file(config, problems)


def build_reading(
    file: FileEntries,
    typed: Sequence[parsing.Entry],
    launcher: Mapping[str, str],
    problems: list[Problem],
    check: Callable[[Config], Iterable[Problem]] = lambda _: (),
) -> Reading:
    """The configuration of these entries.

    Args:
        check: what else is wrong with it, for a command that takes fewer configurations than a run.

    Raises:
        ConfigError: everything that is wrong, at once, with the `problems` found before.
    """
    sources = (
        by_key(entries_of(launcher, "accelerate launch"), problems, last_wins=False),
        by_key(file.entries, problems, last_wins=False),
        by_key(typed, problems, last_wins=True),
    )
    lines = [*parsing.describe_sources(file.name, *sources)]
    own = take_own_entries(sources, problems)
    toy = by_key(file.toy, problems, last_wins=False)
    config = Config.of_entries(parsing.merge_sources(*sources), own, problems, check)
    if config.is_toy:
        config = Config.of_entries(parsing.merge_sources(toy, *sources), own, problems, check)
    config.allow_imports()
    return Reading(config, (*lines, *own.lines))


def read_call(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    launcher: Mapping[str, str] | None = None,
) -> Reading:
    """The configuration of a call in Python: `overrides` over `config` over the launcher over the defaults.

    Args:
        config: a YAML file, a mapping, or what a Config was given; None: no file.
        launcher: as for `read_config`.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    problems: list[Problem] = []
    file = given_in_call(config, problems)
    read = build_reading(file, entries_of(overrides, IN_CALL), launcher or {}, problems)
    if isinstance(config, Config) and config.trial_steps is not None:  # of a sweep that a program leads
        return replace(read, config=read.config.of_trials(config.trial_steps, {}))
    return read


def parse_config(text: str, where: str) -> Config:
    """The configuration that `Config.dump()` wrote; what it names is not imported, and unknown keys are left out.

    Raises:
        ConfigError: a value that this version does not take.
    """
    known = [entry for entry in read_yaml(text, where) if entry.name in FIELDS]
    problems: list[Problem] = []
    given = by_key((entry for entry in known if entry.name not in FOUND), problems, last_wins=False)
    given |= {entry.name: entry for entry in known if entry.name in FOUND}
    return Config.of_entries(given, take_own_entries([given], problems), problems)


def arguments_without(arguments: Sequence[str], keys: Collection[str]) -> list[str]:
    """A command line without the words for these keys, under whatever name they stand there."""
    parts = parsing.parts_of(arguments, flag_form)
    return [word for words, entry in parts if entry is None or key_of(entry) not in keys for word in words]


def as_typed(value: object) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, list):  # one value for each agent
        return f"[{','.join(f'[{as_typed(each)}]' if isinstance(each, tuple) else as_typed(each) for each in value)}]"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8 text", where=str(path), hint="save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        otherwise = "name an existing YAML file"
        raise ConfigError(
            f"the configuration cannot be read: {reason}",
            where=str(path),
            hint=parsing.hint_for_missing(path, otherwise) if isinstance(error, FileNotFoundError) else otherwise,
        ) from error
