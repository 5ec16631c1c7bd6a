"""The settings of an external script: read from every place where it reads them, and changed for its next attempt.

A script gets its configuration in one of three ways: in Hydra's (`SCRIPT --config-path DIR --config-name NAME`), as a
file behind `--config-flag`, or within a whole command, whose words that name the file are then exchanged.

An adjusted key is rewritten where it stands on the command line. Otherwise it is changed in a temporary copy of the
YAML or JSON file, which keeps every comment; the original is never changed. Where the script would not read the key
from that file, it is added at the end of the command line. So is a value that comes from a group file of Hydra: groups
are only looked up here, because Hydra composes them itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from ci_llm.core.durable import locked
from ci_llm.errors import ConfigError
from ci_llm.supervisor.options import Options

#: An anchor before a value stays when the value is replaced: aliases elsewhere in the file refer to it.
_ANCHOR: Final = re.compile(r"&\S+\s+")
_MARK: Final = "# made by safe_train.py for one attempt; it is removed afterwards\n"
#: Words of Hydra before the name of a group in the list of defaults.
_KEYWORDS: Final = re.compile(r"^(?:(?:override|optional)\s+)*/?")
_PACKAGE: Final = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Leaf:
    """A single value as written, and the characters `start` to `end` of the text at which it stands."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class ConfigText:
    """A YAML file: its text, its single values by dotted key, and Hydra's list of defaults.

    Attributes:
        defaults: (group, option) pairs; see `group_values`.
    """

    text: str
    leaves: Mapping[str, Leaf]
    defaults: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """The values by dotted key."""
        return {key: leaf.text for key, leaf in self.leaves.items()}

    def replaced(self, new: Mapping[str, str]) -> str:
        """Return the text with new values and every other character as it was. Unknown keys are ignored."""
        text = self.text
        spots = {self.leaves[key]: value for key, value in new.items() if key in self.leaves}
        # From the end to the beginning, so that the places of the values before stay right.
        for leaf, value in sorted(spots.items(), key=lambda spot: spot[0].start, reverse=True):
            text = text[: leaf.start] + value + text[leaf.end :]
        return text


def read_config(path: Path) -> ConfigText:
    """Read a YAML or JSON file. A file of another kind has no values that could be changed.

    Raises:
        ConfigError: the file cannot be read, or is not valid YAML.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # not read_text: it would change the line ends
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the configuration cannot be read: {reason}", where=str(path), hint="name an existing YAML file"
        ) from error
    if path.suffix not in (".yaml", ".yml", ".json"):
        return ConfigText(text, {})
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"not valid YAML: {error}", where=str(path), hint="correct it") from error
    if not isinstance(root, yaml.MappingNode):
        return ConfigText(text, {})
    return ConfigText(text, dict(_leaves(root, "", text)), tuple(_defaults(root)))


def in_yaml(number: float) -> str:
    """Write a number with eight digits, so that YAML 1.1 reads a number: 1e-05 is text there, 1.0e-05 is not."""
    text = repr(float(f"{number:.8g}"))
    return text if "." in text else text.replace("e", ".0e")


class TemporaryConfigs:
    """Copies of a configuration, next to it, named `<stem>_retry_<n>_<token>.yaml`.

    A copy lives until the next one is made, or until `close`. It is locked as long as its supervisor lives, so that
    `remove_abandoned` of a later supervisor removes only those that a killed one left.
    """

    def __init__(self, original: Path) -> None:
        self._original = original
        self._digest = _digest(original)
        self._copy = contextlib.ExitStack()  # its end removes the copy

    @property
    def original_is_unchanged(self) -> bool:
        """Whether the original holds the bytes that it held at the beginning."""
        return _digest(self._original) == self._digest

    def remove_abandoned(self) -> list[Path]:
        """Remove the copies that a killed supervisor left, and return their paths."""
        name = re.compile(
            rf"{re.escape(self._original.stem)}_retry_\d+_[0-9a-f]{{8}}{re.escape(self._original.suffix)}"
        )
        candidates = (path for path in self._original.parent.iterdir() if name.fullmatch(path.name))
        return sorted(path for path in candidates if _removed_if_abandoned(path))

    def create(self, retry: int, text: str) -> Path:
        """Write the copy of one attempt, with the permissions of the original.

        Raises:
            ConfigError: no file can be written next to the original.
        """
        self.close()
        token = secrets.token_hex(4)
        path = self._original.with_name(f"{self._original.stem}_retry_{retry}_{token}{self._original.suffix}")
        mark = _MARK if path.suffix != ".json" else ""
        try:
            mode = self._original.stat().st_mode & 0o777 | 0o600 if self._original.exists() else 0o600
            # O_EXCL: never over a file of the user. 0o600 in any case: this process must be able to write it.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
            self._copy.callback(path.unlink, missing_ok=True)
            self._copy.enter_context(locked(path, required=False))  # without locks nobody removes it but this one
            path.write_text((text if text.endswith("\n") else text + "\n") + mark, encoding="utf-8")
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no changed configuration can be written: {error.strerror}",
                where=str(path),
                hint="make the folder of the configuration writable",
            ) from error
        return path

    def close(self) -> None:
        """Remove the copy."""
        self._copy.close()


def _leaves(node: yaml.MappingNode, prefix: str, text: str) -> Iterator[tuple[str, Leaf]]:
    """Yield every single value below a mapping, those merged in by `<<` first: a later value of the same key wins."""
    own = sorted(node.value, key=lambda pair: pair[0].tag != "tag:yaml.org,2002:merge")
    for key, value in own:
        merged = key.tag == "tag:yaml.org,2002:merge"
        dotted = prefix if merged else f"{prefix}{getattr(key, 'value', '?')}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, dotted if merged else f"{dotted}.", text)
        elif isinstance(value, yaml.ScalarNode) and not merged:
            anchor = _ANCHOR.match(text, value.start_mark.index)
            yield dotted, Leaf(value.value, anchor.end() if anchor else value.start_mark.index, value.end_mark.index)


def _defaults(root: yaml.MappingNode) -> Iterator[tuple[str, str]]:
    """Yield (group, option) of every entry in Hydra's list of defaults; of `- group/option` the group is empty."""
    entries = next((value for key, value in root.value if getattr(key, "value", None) == "defaults"), None)
    for entry in entries.value if isinstance(entries, yaml.SequenceNode) else []:
        if isinstance(entry, yaml.ScalarNode):
            yield "", entry.value
        elif isinstance(entry, yaml.MappingNode):
            for key, value in entry.value:
                if isinstance(value, yaml.ScalarNode):
                    yield key.value, value.value


def _removed_if_abandoned(path: Path) -> bool:
    """Remove a copy, known by its last line, whose supervisor does not live any more; return whether it was one."""
    with contextlib.suppress(OSError), locked(path, wait=False):  # a living supervisor holds it, or there are no locks
        if path.suffix == ".json" or path.read_text(encoding="utf-8", errors="replace").endswith(_MARK):
            path.unlink()
            return True
    return False


def _digest(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None


def group_values(folder: Path, config: ConfigText, words: Sequence[str]) -> dict[str, str]:
    """Return the values, by dotted key, of the group files that the list of defaults and the command line choose.

    Args:
        folder: where Hydra searches for groups.
        words: the command line; `group=option` on it chooses too, and wins.
    """
    chosen = dict(_entry(group, option) for group, option in config.defaults if option != "_self_" and "@" not in group)
    chosen |= {one.key: one.value for one in overrides(words) if (folder / one.key / f"{one.value}.yaml").is_file()}
    values: dict[str, str] = {}
    for group, option in chosen.items():
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            config = read_config(path)
            prefix = _package(config.text, group)
            values |= {prefix + key: value for key, value in config.values.items()}
    return values


def _entry(group: str, option: str) -> tuple[str, str]:
    """Return (group, option) without Hydra's keywords; an option like `training/base` names both."""
    if not group:
        group, _, option = option.rpartition("/")
    return _KEYWORDS.sub("", group), option


def _package(text: str, group: str) -> str:
    """Return the dotted prefix of a group file's keys: from its `# @package` header, or the group's name."""
    header = _PACKAGE.search(text)
    package = header[1] if header else "_group_"
    if package == "_global_":
        return ""
    return package.replace("_group_", group.replace("/", ".")).removeprefix("_global_.") + "."


LEARNING_RATE_KEYS: Final = ("training.learning_rate", "learning_rate")
BATCH_SIZE_KEYS: Final = ("training.meta_batch_size", "training.batch_size", "batch_size")
#: Keys of this name shrink with the batch, wherever they stand, unless the user names others.
_SCALED_NAME: Final = "constant_product"
_SWEEPER: Final = "hydra.sweeper.params"
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
#: A rate that was rounded, or raised a little by a schedule, is still the one that was asked for.
_TOLERANCE: Final = 1.2


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
    """Whether two keys mean the same: argparse makes `batch_size` of `--batch-size`."""
    return one.lstrip("-").replace("-", "_") == other.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Settings:
    """Values by dotted key, as text, from every place that a script reads.

    Attributes:
        line: the command line.
        in_files: the values of the configuration file, and of the group files that Hydra adds to it.
    """

    line: Sequence[str]
    in_files: Mapping[str, str]

    def value(self, key: str | None) -> str | None:
        """Return the value in force. The command line wins over a sweep, a sweep over the files."""
        if key is None:
            return None
        found = (value_of(self.line, key), self.swept(key), self.in_files.get(key))
        return next((value for value in found if value is not None), None)

    def swept(self, key: str) -> str | None:
        """Return what Hydra's sweeper sets the key to in a multirun, or None."""
        if not self._is_multirun():
            return None
        # Either as a mapping in one word, `hydra.sweeper.params={lr:1e-3}`, or by its dotted key.
        dotted = f"{_SWEEPER}.{key}"
        in_braces = re.search(rf"[{{,]\s*{re.escape(key)}\s*:([^,}}]+)", value_of(self.line, _SWEEPER) or "")
        on_line = in_braces[1].strip() if in_braces else value_of(self.line, dotted)
        return on_line or self.in_files.get(dotted)

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
        known = dict.fromkeys([*self.in_files, *(one.key for one in overrides(self.line))])
        return [key for key in known if key.rpartition(".")[2] == _SCALED_NAME and not key.startswith("hydra.")]

    def _require(self, key: str, option: str) -> str:
        if number(self.value(key)) is None:
            swept = self.swept(key)
            raise ConfigError(
                f"{key} has no value that is a number" + (f": Hydra sweeps over {swept}" if swept else ""),
                where=f"{option} {key}",
                hint=f"write the value to start from: {key}=VALUE, --{key} VALUE, or in the configuration",
            )
        return key

    def _is_multirun(self) -> bool:
        if {"-m", "--multirun"} & set(self.line):
            return True
        return (value_of(self.line, "hydra.mode") or self.in_files.get("hydra.mode", "")).upper() == "MULTIRUN"


class CutCheck:
    """Checks whether the learning rate that the attempts print follows the one that they were given.

    A schedule keeps the printed rate below the given one. Some scripts count in another unit (per sample, or times the
    number of processes): their first printed rate is above the given one. Of those only a rate that stays exactly the
    same after a cut shows that the cut did not arrive.

    Args:
        given: the rate of the first attempt; None if it is unknown.
    """

    def __init__(self, given: float | None) -> None:
        self._first_given = given
        self._first_printed: str | None = None

    def doubt(self, given: float | None, printed: str | None) -> str | None:
        """Return why an attempt did not train with the rate it was given, or None if nothing speaks against it.

        Args:
            given: the rate of this attempt.
            printed: the last rate in its output.
        """
        if given is None or printed is None or self._first_given is None:
            return None
        first = self._first_printed = self._first_printed or printed
        if given == self._first_given:
            return None
        # Compared with a tolerance in the same unit; in another one only digits that did not change prove something.
        same_unit = float(first) <= _TOLERANCE * self._first_given
        too_high = float(printed) > _TOLERANCE * given if same_unit else printed == first
        return f"it printed learning rate {printed}, and {given:.3g} was asked for" if too_high else None


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


_NAME_OPTIONS: Final = ("--config-name", "-cn")
_SUFFIXES: Final = (".yaml", ".yml")


class ScriptCommand:
    """The command of the next attempt, and the values of the settings in it.

    Args:
        options: the options of the supervisor; they name the script, its configuration and its words.
        resume_words: see `resume_words`.

    Attributes:
        original: the configuration file; None for a command that has none.
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
        self.original = _find_config(options)
        self._config = read_config(self.original) if self.original else ConfigText("", {})
        self._copies = TemporaryConfigs(self.original) if self.original else None
        self._config_in_use = self.original
        self._adjusted: dict[str, str] = {}
        self._in_files = {**self._read_groups(), **self._config.values}

    @property
    def settings(self) -> Settings:
        """The values as the user gave them, before any adjustment."""
        return Settings(self._line, self._in_files)

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
        return [] if self._options.command else [sys.executable, str(self._options.train_script)]

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
            return {}  # the script does not use Hydra
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

    def exchanged(word: str) -> str:
        key, equals, value = word.partition("=")
        for before, path in (("", word), (key + equals, value)):
            if path and os.path.abspath(path) == os.path.abspath(original):
                return before + os.path.join(os.path.dirname(path), other.name)
        return word

    return [exchanged(word) for word in words]


def with_name(words: Sequence[str], original: str, other: str) -> list[str]:
    """Exchange the name of Hydra's primary configuration: in --config-name NAME and --config-name=NAME."""

    def is_original(name: str) -> bool:
        return _without_suffix(name) == _without_suffix(original)

    changed = list(words)
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        option, equals, value = word.partition("=")
        if before in _NAME_OPTIONS and is_original(word):
            changed[place] = other
        elif equals and option in _NAME_OPTIONS and is_original(value):
            changed[place] = f"{option}={other}"
    return changed


def _without_suffix(name: str) -> str:
    """Hydra takes a name with its suffix and without it."""
    return re.sub(r"\.ya?ml$", "", name)


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
