"""The configuration of other people's scripts: YAML files, overrides on a command line, Hydra's config groups.

A value is changed in a copy that keeps every comment, never in place. Hydra composes its groups itself; here they are
only looked up, and an override changes what was found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from ci_llm.errors import ConfigError

_ANCHOR: Final = re.compile(r"&\S+\s+")  # it stays where it is: aliases need it
_MARK: Final = "# made by safe_train.py for one attempt; it is removed afterwards\n"


@dataclass(frozen=True)
class Leaf:
    """A value as written, and where it stands in the text: characters `start` to `end`."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class ConfigText:
    """A YAML file as its text, with the single values in it by dotted key, and Hydra's list of defaults."""

    text: str
    leaves: Mapping[str, Leaf]
    defaults: tuple[tuple[str, str], ...] = ()

    def replaced(self, new: Mapping[str, str]) -> str:
        """The text with other values, every other character as it was. Keys that are not in it are left out."""
        text = self.text
        spots = {self.leaves[key]: value for key, value in new.items() if key in self.leaves}
        for leaf, value in sorted(spots.items(), key=lambda spot: spot[0].start, reverse=True):
            text = text[: leaf.start] + value + text[leaf.end :]
        return text


def read_config(path: Path) -> ConfigText:
    """The values of a YAML or JSON file; a file of another kind has none that could be changed.

    Raises:
        ConfigError: it cannot be read, or is no YAML.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # line ends stay what they are
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
    """Eight digits of it, as every program reads them: 1e-05 is text in YAML 1.1, 1.0e-05 is not."""
    text = repr(float(f"{number:.8g}"))
    return text if "." in text else text.replace("e", ".0e")


class TemporaryConfigs:
    """Copies next to an original, named `<stem>_retry_<n>_<token>.yaml`; gone at the end, or at the next start.

    Each is locked as long as its supervisor lives, so that a later one knows which were left by a dead one.
    """

    def __init__(self, original: Path) -> None:
        self._original = original
        self._locks: dict[Path, int] = {}

    def sweep(self) -> list[Path]:
        """Remove what a supervisor left that was killed; returns what it was."""
        name = re.compile(rf"{re.escape(self._original.stem)}_retry_\d+_[0-9a-f]+{re.escape(self._original.suffix)}")
        candidates = (path for path in self._original.parent.iterdir() if name.fullmatch(path.name))
        return sorted(path for path in candidates if _removed_if_abandoned(path))

    def create(self, retry: int, text: str) -> Path:
        """Write the configuration of one attempt, for nobody's eyes that may not see the original.

        Raises:
            ConfigError: there can be no file next to the original.
        """
        self.close()
        token = secrets.token_hex(4)
        path = self._original.with_name(f"{self._original.stem}_retry_{retry}_{token}{self._original.suffix}")
        mark = _MARK if path.suffix != ".json" else ""
        try:
            mode = self._original.stat().st_mode & 0o777 | 0o600 if self._original.exists() else 0o600
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            self._locks[path] = lock
            with contextlib.suppress(OSError):  # a filesystem without locks: then nobody sweeps it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            with open(lock, "wb", closefd=False) as file:
                file.write((text if text.endswith("\n") else text + "\n").encode() + mark.encode())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no changed configuration can be written: {error.strerror}",
                where=str(path),
                hint="make the folder of the configuration writable",
            ) from error
        return path

    def close(self) -> None:
        """Remove what was created."""
        for path, lock in self._locks.items():
            path.unlink(missing_ok=True)
            os.close(lock)
        self._locks.clear()


def _leaves(node: yaml.MappingNode, prefix: str, text: str) -> Iterator[tuple[str, Leaf]]:
    """Every single value below a mapping; what is merged in by `<<` comes first, so that own values win."""
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
    """(group, option) of every entry of Hydra's defaults list; `- group/option` has no group of its own."""
    entries = next((value for key, value in root.value if getattr(key, "value", None) == "defaults"), None)
    for entry in entries.value if isinstance(entries, yaml.SequenceNode) else []:
        if isinstance(entry, yaml.ScalarNode):
            yield "", entry.value
        elif isinstance(entry, yaml.MappingNode):
            for key, value in entry.value:
                if isinstance(value, yaml.ScalarNode):
                    yield key.value, value.value


def _removed_if_abandoned(path: Path) -> bool:
    """Remove a file that bears our mark and whose supervisor does not live any more."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix != ".json" and not text.endswith(_MARK):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # locked by a living supervisor, or by nobody we could ask
        return False
    finally:
        os.close(handle)
    return True


# ---------------------------------------------------------------------------------------------------- overrides


_ASSIGNMENT: Final = re.compile(r"(\+{0,2}|--)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_OPTION: Final = re.compile(r"--([A-Za-z_][\w./-]*)")


@dataclass(frozen=True)
class Override:
    """A key with its value on a command line.

    Attributes:
        position: of the word that holds the value.
        before: what stands before the value in that word.
    """

    key: str
    value: str
    position: int
    before: str


def overrides(words: Sequence[str]) -> Iterator[Override]:
    """All keys with a value, in their order."""
    for position, word in enumerate(words):
        if match := _ASSIGNMENT.fullmatch(word):
            yield Override(match[2], match[3], position, word[: match.start(3)])
        elif (match := _OPTION.fullmatch(word)) and position + 1 < len(words):
            value = words[position + 1]
            if not value.startswith("--"):
                yield Override(match[1], value, position + 1, "")


def value_of(words: Sequence[str], key: str) -> str | None:
    """The value of a key on a command line, where the last one wins; None if it is not there."""
    return next((one.value for one in reversed(list(overrides(words))) if same_key(one.key, key)), None)


def rewritten(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    """The command line with new values for keys that stand on it; the others stay as they are."""
    changed = list(words)
    for one in overrides(words):
        for key, value in new.items():
            if same_key(one.key, key):
                changed[one.position] = one.before + value
    return changed


def same_key(one: str, other: str) -> bool:
    """`--batch-size` is `batch_size`."""
    return one.lstrip("-").replace("-", "_") == other.lstrip("-").replace("-", "_")


# ---------------------------------------------------------------------------------------------------- hydra groups


_KEYWORDS: Final = re.compile(r"^(?:(?:override|optional)\s+)*/?")
_PACKAGE: Final = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


def group_values(folder: Path, config: ConfigText, words: Sequence[str]) -> dict[str, str]:
    """Values by dotted key from the group files that the defaults list and the command line choose, the last wins."""
    chosen = dict(_entry(group, option) for group, option in config.defaults if option != "_self_" and "@" not in group)
    chosen |= {one.key: one.value for one in overrides(words) if (folder / one.key / f"{one.value}.yaml").is_file()}
    values: dict[str, str] = {}
    for group, option in chosen.items():
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            text = read_config(path)
            prefix = _package(text.text, group)
            values |= {prefix + key: leaf.text for key, leaf in text.leaves.items()}
    return values


def _entry(group: str, option: str) -> tuple[str, str]:
    """(group, option) without keywords; `training/base` names both at once. (With a package of its own, `a@b: c`, it
    is left alone.)"""
    if not group:
        group, _, option = option.rpartition("/")
    return _KEYWORDS.sub("", group), option


def _package(text: str, group: str) -> str:
    """The dotted prefix under which Hydra puts a group file: its header's, or its group's."""
    header = _PACKAGE.search(text)
    package = header[1] if header else "_group_"
    if package == "_global_":
        return ""
    return package.replace("_group_", group.replace("/", ".")).removeprefix("_global_.") + "."
