"""The configuration files of an external script: YAML or JSON, Hydra's groups, and temporary copies with other values.

A value is changed in a copy that keeps every comment, never in the original. Hydra composes its groups itself: a value
that comes from a group file is only looked up here, and changed by an override on the command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from ci_llm.core.locks import locked
from ci_llm.errors import ConfigError
from ci_llm.supervisor.script_settings import overrides

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
        ConfigError: the file cannot be read, or is no valid YAML.
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
