"""The command of an external script, with adjusted settings at the place where the script reads them.

A script gets its configuration in one of three ways: in Hydra's (`SCRIPT --config-path DIR --config-name NAME`), as a
file behind `--config-flag`, or within a whole command, whose words that name the file are then exchanged.

An adjusted key is rewritten where it stands on the command line. Otherwise it is changed in a copy of the file, or, if
the script would not read it from there, added at the end of the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ci_llm.errors import ConfigError
from ci_llm.supervisor.options import Options
from ci_llm.supervisor.script_config import ConfigText, TemporaryConfigs, group_values, read_config
from ci_llm.supervisor.script_settings import Settings, overrides, rewritten, same_key

_NAME_OPTIONS: Final = ("--config-name", "-cn")
_SUFFIXES: Final = (".yaml", ".yml")


class ScriptCommand:
    """The command of the next attempt, and the values of the settings in it.

    Args:
        options: of the supervisor; they name the script, its configuration and its words.
        resume_words: see `resume_words`.

    Attributes:
        original: the configuration file; None for a command that has none.
        resume_words: what the command gets in addition, so that the script resumes from a checkpoint.

    Raises:
        ConfigError: the script or its configuration cannot be found or read.
    """

    def __init__(self, options: Options, resume_words: Sequence[str]) -> None:
        if not options.command and not options.script.is_file():
            raise ConfigError(
                "there is no such training script",
                where=str(options.script),
                hint="name one by --train-script FILE, or give the whole command after --",
            )
        self._options = options
        self.resume_words = list(resume_words)
        self.original = _find_config(options)
        self._config = read_config(self.original) if self.original else ConfigText("", {})
        self._copies = TemporaryConfigs(self.original) if self.original else None
        self._config_in_use = self.original
        self._adjusted: dict[str, str] = {}
        self._in_groups = self._read_groups()

    @property
    def settings(self) -> Settings:
        """The values as the user gave them, before any adjustment."""
        return Settings(self._line, self._config.values, self._in_groups)

    def value(self, key: str | None) -> str | None:
        """Return the value with which the next attempt runs, or None if it is unknown."""
        return self._adjusted.get(key or "") or self.settings.value(key)

    def words(self) -> list[str]:
        """Return the whole command."""
        line = rewritten(self._line, self._adjusted) + self._added_overrides()
        if self._config_in_use is None or self.original is None:
            return self._start() + line
        if self._options.command:
            return self._with_config(line, self._config_in_use)
        if self._options.config_flag:
            return [*self._start(), self._options.config_flag, str(self._config_in_use), *line]
        folder = str(self._hydra_folder().absolute())
        return [*self._start(), "--config-path", folder, "--config-name", self._hydra_name(self._config_in_use), *line]

    def adjust(self, new: Mapping[str, str], retry: int) -> None:
        """Give the next attempts new values.

        Args:
            new: values by key.
            retry: the number of the next retry, for the name of the copy.
        """
        self._adjusted |= new
        in_copy = {key: value for key, value in self._adjusted.items() if self._is_read_from_copy(key)}
        if new and in_copy and self._copies is not None:
            self._config_in_use = self._copies.create(retry, self._config.replaced(in_copy))

    def remove_abandoned(self) -> list[Path]:
        """Remove the copies that a killed supervisor left, and return their paths."""
        return self._copies.remove_abandoned() if self._copies else []

    def close(self) -> list[str]:
        """Remove the copy, and return a line about the original for people."""
        if self._copies is None:
            return []
        self._copies.close()
        if self._copies.original_is_unchanged:
            return [f"original unchanged: {self.original}"]
        return [f"original changed meanwhile, but not by this program: {self.original}"]

    @property
    def _line(self) -> list[str]:
        return [*self._options.command, *self._options.words, *self.resume_words]

    def _start(self) -> list[str]:
        return [] if self._options.command else [sys.executable, str(self._options.script)]

    def _added_overrides(self) -> list[str]:
        """The adjusted keys that stand neither on the command line nor in the copy of the configuration."""
        on_line = [one.key for one in overrides(self._line)]
        dashes = "--" if self._options.override_style == "argparse" else ""
        return [
            f"{dashes}{key}={value}"
            for key, value in self._adjusted.items()
            if not self._is_read_from_copy(key) and not any(same_key(key, known) for known in on_line)
        ]

    def _is_read_from_copy(self, key: str) -> bool:
        """Whether the script reads the key from the file that it is given, and no sweep overrules the file."""
        return key in self._config.leaves and self._hands_over_config() and self.settings.swept(key) is None

    def _hands_over_config(self) -> bool:
        """Whether another file of the same folder can take the place of the original in the command."""
        if self.original is None or not self._options.command:
            return self.original is not None
        elsewhere = self.original.with_name(f"other_{self.original.name}")
        return self._with_config(self._line, elsewhere) != self._line

    def _with_config(self, line: list[str], path: Path) -> list[str]:
        """The line with another file wherever it names the original."""
        assert self.original is not None
        line = with_file(line, self.original, path)
        if self._options.folder_and_name is None:
            return line
        return with_name(line, self._hydra_name(self.original), self._hydra_name(path))

    def _read_groups(self) -> dict[str, str]:
        names_config = not self._options.command or self._options.folder_and_name is not None
        if self.original is None or self._options.config_flag or not names_config:
            return {}  # the script is none of Hydra's
        return group_values(self._hydra_folder(), self._config, self._line)

    def _hydra_folder(self) -> Path:
        """The folder that Hydra searches: the given one, or that of the file."""
        assert self.original is not None
        given = self._options.folder_and_name
        return given[0] if given else self.original.parent

    def _hydra_name(self, path: Path) -> str:
        return path.relative_to(self._hydra_folder()).with_suffix("").as_posix()


def with_file(words: Sequence[str], original: Path, other: Path) -> list[str]:
    """Exchange the original for another file of its folder: in FILE, key=FILE and --key=FILE."""
    return [_with_file(word, original, other) for word in words]


def with_name(words: Sequence[str], original: str, other: str) -> list[str]:
    """Exchange the name of Hydra's primary configuration: in --config-name NAME and --config-name=NAME."""
    return list(_with_name(words, _without_suffix(original), other))


def _with_file(word: str, original: Path, other: Path) -> str:
    key, equals, value = word.partition("=")
    for before, path in (("", word), (key + equals, value)):
        if path and os.path.abspath(path) == os.path.abspath(original):
            return before + os.path.join(os.path.dirname(path), other.name)
    return word


def _with_name(words: Sequence[str], original: str, other: str) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before in _NAME_OPTIONS and _without_suffix(word) == original:
            yield other
        elif equals and option in _NAME_OPTIONS and _without_suffix(value) == original:
            yield f"{option}={other}"
        else:
            yield word


def _without_suffix(name: str) -> str:
    """Hydra takes a name with its suffix and without it."""
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


def _find_config(options: Options) -> Path | None:
    """The configuration that the options name, or the one that Hydra's scripts have by default."""
    if options.config is not None:
        path = options.config
    elif options.folder_and_name is not None:
        path = Path(*options.folder_and_name)
        path = path if path.suffix in _SUFFIXES else path.with_name(f"{path.name}.yaml")
    elif options.command:
        return None
    else:
        path = Path("configs", "config.yaml")
    if not path.is_file():
        raise ConfigError(
            f"the configuration{'' if options.command else f' of {options.script}'} cannot be found",
            where=str(path),
            hint="--config-path DIR --config-name NAME, or --config FILE; a command without one: -- python fit.py ...",
        )
    return path
