"""The settings of an external script: read from every place where it reads them, and changed for its next attempt.

A script gets its configuration in one of three ways: in Hydra's (`SCRIPT --config-path DIR --config-name NAME`), as a
file behind `--config-flag`, or within a whole command, whose words that name the file are then exchanged.

An adjusted key is rewritten where it stands on the command line. Otherwise it is changed in a temporary copy of the
YAML or JSON file, which keeps every comment; the original is never changed. Where the script would not read the key
from that file, it is added at the end of the command line: so is what Hydra composes from its groups.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ci_llm.errors import ConfigError
from ci_llm.supervisor.options import Options

_SUFFIXES: Final = (".yaml", ".yml")


class ConfigFile:
    """The configuration file of a script, and its changed copy, next to it: `<stem>_retry_<n>_<token>.yaml`.

    A copy lives until the next one is made, or until `close`. One that a killed supervisor left stays there.

    Attributes:
        values: its single values, as text, by dotted key; a file of another kind than YAML and JSON has none.

    Raises:
        ConfigError: the file cannot be read, or is not valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy = contextlib.ExitStack()  # its end removes the copy
        try:
            self._text = path.read_text(encoding="utf-8-sig")
            self.values = _flat(self._tree())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"the configuration cannot be read: {reason}", where=str(path), hint="name an existing YAML file"
            ) from error
        except (YAMLError, ValueError, RecursionError) as error:
            kind = "JSON" if path.suffix == ".json" else "YAML"
            raise ConfigError(f"not valid {kind}: {error}", where=str(path), hint="correct it") from error

    def _tree(self) -> Any:
        if self.path.suffix == ".json":
            return json.loads(self._text)
        return _yaml().load(self._text) if self.path.suffix in _SUFFIXES else None

    def changed(self, new: Mapping[str, float]) -> str:
        """Return the text with new values of known keys, and the comments of the original."""
        tree, numbers = self._tree(), {key: _yaml().load(in_yaml(value)) for key, value in new.items()}
        for dotted, place, key, old in list(_leaves(tree)):
            if dotted in new:
                place[key] = numbers[dotted]
                is_anchored = hasattr(old, "anchor") and old.anchor.value is not None
                for _, other, alias, value in list(_leaves(tree)) if is_anchored else ():
                    if value is old:  # its aliases follow
                        other[alias] = numbers[dotted]
        if self.path.suffix == ".json":
            return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
        text = io.StringIO()
        _yaml().dump(tree, text)
        return text.getvalue()

    def copy(self, retry: int, new: Mapping[str, float]) -> Path:
        """Write the copy of one attempt, with the permissions of the original.

        Raises:
            ConfigError: no file can be written next to the original.
        """
        self.remove_copy()
        stem, folder = f"{self.path.stem}_retry_{retry}_", self.path.parent
        try:
            handle, name = mkstemp(self.path.suffix, stem, folder)  # never over a file of the user
            os.close(handle)
            path = folder / Path(name).name  # relative, as the user has written it
            self._copy.callback(path.unlink, missing_ok=True)
            path.chmod(self.path.stat().st_mode & 0o777 | 0o600)  # this process must be able to write it
            path.write_text(self.changed(new), encoding="utf-8")
        except OSError as error:
            self.remove_copy()
            raise ConfigError(
                f"no changed configuration can be written: {error.strerror}",
                where=str(self.path),
                hint="make the folder of the configuration writable",
            ) from error
        return path

    def remove_copy(self) -> None:
        self._copy.close()


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = yaml.allow_duplicate_keys = True
    yaml.width = sys.maxsize  # no line is folded
    return yaml


def in_yaml(number: float) -> str:
    """Write a number with eight digits, so that YAML 1.1 reads a number: 1e-05 is text there, 1.0e-05 is not."""
    if isinstance(number, int):
        return str(number)
    text = repr(float(f"{number:.8g}"))
    return text if "." in text else text.replace("e", ".0e")


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (dotted key, mapping, key in it, value) of every single value."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", tree, key, value


def _flat(tree: Any) -> dict[str, str]:
    return {dotted: str(value) for dotted, _, _, value in _leaves(tree)}


def composed(folder: Path, name: str, words: Sequence[str]) -> dict[str, str]:
    """Return the values, by dotted key, that Hydra composes from a primary configuration, groups and a command line.

    They are empty without Hydra, and where the script registers parts of its configuration itself.
    """
    try:
        hydra, omegaconf = importlib.import_module("hydra"), importlib.import_module("omegaconf")
        given = [word for word in words if "=" in word and not word.startswith("-")]
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            found = hydra.compose(name, given)
        return _flat(omegaconf.OmegaConf.to_container(found, enum_to_str=True))
    except Exception:  # noqa: BLE001 - what is wrong with the configuration, the script itself will say
        return {}


LEARNING_RATE_KEYS: Final = ("training.learning_rate", "learning_rate")
BATCH_SIZE_KEYS: Final = ("training.meta_batch_size", "training.batch_size", "batch_size")
#: Keys of this name shrink with the batch, wherever they stand, unless the user names others.
_SCALED_NAME: Final = "constant_product"
_ASSIGNMENT: Final = re.compile(r"(\+{0,2}|--)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_OPTION: Final = re.compile(r"--([A-Za-z_][\w./-]*)")
#: Names of secrets: HF_TOKEN, apiKey, --password, auth.secret. A count of tokens, a tokenizer and an author are none.
_SECRET: Final = (
    r"[\w./@-]*?(?:(?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))(?:api|access|auth|secret|private)?"
    r"(?:token|keys?|pass(?:word|wd|phrase)s?|pwd|secrets?|credentials?|auth|authorization|bearer)(?![a-z])[\w.-]*"
)
#: What is secret inside a word, as in `bash -c "fit --key x"`, JSON, a header, and a URL with a password.
_INSIDE: Final = re.compile(
    rf"(?i)((?:--?{_SECRET}\s+|{_SECRET}[\"']?\s*[:=]\s*[\"']?)(?:bearer\s+|basic\s+)?|://(?=[^/\s@]*:[^/\s]*@))"
    r"(?![-*])[^\s,;&}\]\"'@]+"
)


@dataclass(frozen=True)
class Override:
    """A key with its value on a command line: `a.b=1`, `+a.b=1`, `--a=1` or `--a 1`.

    Attributes:
        position: index of the word that holds the value.
        before: the text before the value in that word.
    """

    key: str
    value: str
    position: int
    before: str


def overrides(words: Sequence[str]) -> Iterator[Override]:
    """Yield all keys with a value, in the order of the command line."""
    for position, word in enumerate(words):
        if match := _ASSIGNMENT.fullmatch(word):
            yield Override(match[2], match[3], position, word[: match.start(3)])
        elif (match := _OPTION.fullmatch(word)) and position + 1 < len(words):
            value = words[position + 1]
            if not value.startswith("--"):
                yield Override(match[1], value, position + 1, "")


def value_of(words: Sequence[str], key: str) -> str | None:
    """Return the value of a key on a command line, or None. The last one counts."""
    return next((one.value for one in reversed(list(overrides(words))) if same_key(one.key, key)), None)


def rewritten(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    """Return the command line with new values for those keys that stand on it."""
    changed = list(words)
    for one in overrides(words):
        for key, value in new.items():
            if same_key(one.key, key):
                changed[one.position] = one.before + value
    return changed


def shown(words: Sequence[str]) -> str:
    """A command line for people, without the values of what is secret by its name, and without passwords in URLs."""
    hidden = list(words)
    for one in overrides(words):
        if re.fullmatch(_SECRET, one.key, re.IGNORECASE):
            hidden[one.position] = f"{one.before}***"
    return shlex.join(_INSIDE.sub(r"\1***", word) for word in hidden)


def same_key(one: str, other: str) -> bool:
    """True if two keys mean the same: argparse makes `batch_size` of `--batch-size`."""
    return one.lstrip("-").replace("-", "_") == other.lstrip("-").replace("-", "_")


def number(text: str | None) -> float | None:
    """Return a positive number; None for everything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def integer(text: str | None) -> int | None:
    """Return a positive whole number; None for everything else."""
    value = number(text)
    return int(value) if value is not None and value == int(value) else None


class ScriptCommand:
    """The command of the next attempt, and the values of the settings in it.

    Args:
        options: the options of the supervisor; they name the script, its configuration and its words.
        resume_words: see `resume_words`.

    Attributes:
        config: the configuration file; None for a command that has none.
        resume_words: what the command gets in addition, so that the script resumes from a checkpoint.

    Raises:
        ConfigError: the script or its configuration cannot be found or read.
    """

    def __init__(self, options: Options, resume_words: Sequence[str]) -> None:
        if not options.command and not options.train_script.is_file():
            raise ConfigError(
                "there is no such training script",
                where=str(options.train_script),
                hint="name one by --train-script FILE, or give the whole command after --",
            )
        self._options = options
        self.resume_words = list(resume_words)
        path = self._path_in_use = _find_config(options)
        self.config = ConfigFile(path) if path else None
        self._adjusted: dict[str, float] = {}
        self._in_files = dict(self.config.values) if self.config else {}
        if path and not options.config_flag and (options.folder_and_name or not options.command):
            self._in_files |= composed(self._hydra_folder(path), self._hydra_name(path), self._line)

    def value(self, key: str | None) -> str | None:
        """Return the value with which the next attempt runs, or None if it is unknown; the command line wins."""
        if key is None:
            return None
        if key in self._adjusted:
            return in_yaml(self._adjusted[key])
        typed = value_of(self._line, key)
        return self._in_files.get(key) if typed is None else typed

    def find_key(self, named: str | None, option: str, usual: Iterable[str]) -> str | None:
        """Return the key that the user named, or the first usual one whose value is a number.

        Args:
            option: the option that names the key, for the error.

        Raises:
            ConfigError: the named key has no number to start from.
        """
        if named is None:
            return next((key for key in usual if number(self.value(key)) is not None), None)
        return self._require(named, option)

    def find_scaled_keys(self, named: Sequence[str]) -> list[str]:
        """Return the keys that shrink with the batch: those that the user named, or the usual ones.

        Raises:
            ConfigError: a named key has no number to start from.
        """
        if named:
            return [self._require(key, "--scale-with-batch") for key in named]
        known = dict.fromkeys([*self._in_files, *(one.key for one in overrides(self._line))])
        return [key for key in known if key.rpartition(".")[2] == _SCALED_NAME and not key.startswith("hydra.")]

    def words(self) -> list[str]:
        """Return the whole command."""
        line = rewritten(self._line, {key: in_yaml(value) for key, value in self._adjusted.items()})
        line += self._added_overrides()
        if self.config is None or self._path_in_use is None:
            return self._start() + line
        if self._options.command:
            return with_file(line, self.config.path, self._path_in_use)
        if self._options.config_flag:
            return [*self._start(), self._options.config_flag, str(self._path_in_use), *line]
        folder = self._hydra_folder(self.config.path).absolute()
        name = self._hydra_name(self._path_in_use)
        return [*self._start(), "--config-path", str(folder), "--config-name", name, *line]

    def adjust(self, new: Mapping[str, float], retry: int) -> None:
        """Give the next attempts new values.

        Args:
            new: values by key.
            retry: the number of the next retry, for the name of the copy.
        """
        self._adjusted |= new
        in_copy = {key: value for key, value in self._adjusted.items() if self._is_read_from_copy(key)}
        if new and in_copy and self.config is not None:
            self._path_in_use = self.config.copy(retry, in_copy)

    def _require(self, key: str, option: str) -> str:
        if number(self.value(key)) is None:
            raise ConfigError(
                f"{key} has no value that is a number",
                where=f"{option} {key}",
                hint=f"write the value to start from: {key}=VALUE, --{key} VALUE, or in the configuration",
            )
        return key

    @property
    def _line(self) -> list[str]:
        return [*self._options.command, *self._options.words, *self.resume_words]

    def _start(self) -> list[str]:
        return [] if self._options.command else [sys.executable, str(self._options.train_script)]

    def _added_overrides(self) -> list[str]:
        """The adjusted keys that stand neither on the command line nor in the copy of the configuration."""
        on_line = [one.key for one in overrides(self._line)]
        return [
            f"{key}={in_yaml(value)}"
            for key, value in self._adjusted.items()
            if not self._is_read_from_copy(key) and not any(same_key(key, known) for known in on_line)
        ]

    def _is_read_from_copy(self, key: str) -> bool:
        """True if the script reads the key from the file that it is given."""
        if self.config is None or key not in self.config.values:
            return False
        elsewhere = self.config.path.with_name(f"other_{self.config.path.name}")
        return not self._options.command or with_file(self._line, self.config.path, elsewhere) != self._line

    def _hydra_folder(self, path: Path) -> Path:
        """The folder that Hydra searches: the given one, or the folder of the file."""
        given = self._options.folder_and_name
        return given[0] if given else path.parent

    def _hydra_name(self, path: Path) -> str:
        return path.relative_to(self._hydra_folder(path)).with_suffix("").as_posix()


def with_file(words: Sequence[str], original: Path, other: Path) -> list[str]:
    """Exchange the original for another file of its folder: in FILE, key=FILE and --key=FILE."""

    def exchanged(word: str) -> str:
        key, equals, value = word.partition("=")
        for before, path in (("", word), (key + equals, value)):
            if path and os.path.abspath(path) == os.path.abspath(original):
                return before + os.path.join(os.path.dirname(path), other.name)
        return word

    return [exchanged(word) for word in words]


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
            f"the configuration{'' if options.command else f' of {options.train_script}'} cannot be found",
            where=str(path),
            hint="--config-path DIR --config-name NAME, or --config FILE; a command without one: -- python fit.py ...",
        )
    return path
