"""Hydra's config groups, as far as needed to know the value of a key: the files that a config and its overrides choose.

Hydra composes; this only looks values up, and whatever is found here is changed by an override, which always wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ci_llm.supervisor.configs import ConfigText, read_config
from ci_llm.supervisor.overrides import overrides

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
