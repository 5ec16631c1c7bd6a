"""YAML with line numbers: a text becomes entries `key, value as written, line`, and values become YAML again.

The text is composed to nodes and never constructed to objects. So PyYAML's guesses (`no` is False, `1e-4` is text,
`11:55:00` is 42900, `0123` is 83) and its tags have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ci_llm.config.parsing import Entry, Items, Mapped, Raw, Scalar, Unusable
from ci_llm.errors import ConfigError

_HINT = "write one `key: value` per line, with a space after the colon and none before the key"
#: Lists and mappings in one another: `toy: {agents: [{lora_target_modules: [q_proj]}]}`.
DEEPEST = 4
_PLAIN_NAMES = ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value")
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in _PLAIN_NAMES)


def read_yaml(text: str, name: str) -> list[Entry]:
    """The entries of a flat YAML mapping in their order, duplicates included.

    Args:
        text: the YAML document; empty means no entries.
        name: what to call it in messages.

    Raises:
        ConfigError: the text is not YAML, or not a mapping.
    """
    root = _compose(text, name)
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the configuration is not a list of `key: value` lines", where=_place(name, root), hint=_HINT)
    return _entries(root, name)


def read_flow(raw: Raw) -> Raw:
    """The list or mapping that text means in YAML's short form, `[1, 2]` or `{a: 1}`, as on a command line.

    Any other value is returned as it is.
    """
    if not isinstance(raw, Scalar) or raw.quoted or not raw.text.strip().startswith(("[", "{")):
        return raw
    try:
        node = _compose(raw.text, "")
    except ConfigError:
        return raw
    return raw if node is None else _raw(node, "")


def read_texts(path: Path) -> dict[str, Any]:
    """A file of this package, in which every value is text, a list or a mapping: `no` is "no", and 32 is "32"."""
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # libyaml's is twenty times faster
    texts: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return texts


def dump_yaml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """YAML of plain values, one comment per section; strings are quoted, so that none reads as another type."""
    return "\n".join(
        f"# {title}\n" + "".join(f"{key}: {dump_value(value)}\n" for key, value in values.items())
        for title, values in sections.items()
    )


def dump_value(value: object) -> str:
    """One value as YAML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(dump_value, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)  # JSON is YAML, but for 1e-05, which YAML 1.1 reads as text
    if not isinstance(value, float):
        return text
    return text.removesuffix(".0") if "." in text else text.replace("e", ".0e")


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or error.context or "unreadable"
        hint = "write spaces in place of the tab" if "\\t" in problem else _HINT
        raise ConfigError(f"not valid YAML: {problem}", where=f"{name}:{line}", hint=hint) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"not a text file: {error.reason}", where=f"{name}:{line}", hint="save the file as UTF-8 text"
        ) from error
    except RecursionError as error:
        raise ConfigError("the YAML is nested too deeply", where=name, hint=_HINT) from error


def _entries(node: yaml.MappingNode, name: str, depth: int = 0) -> list[Entry]:
    keys = ((key.value if isinstance(key, yaml.ScalarNode) else "?", key, value) for key, value in node.value)
    return [Entry(text, _raw(value, name, depth), _place(name, key)) for text, key, value in keys]


def _raw(node: yaml.Node, name: str, depth: int = 0) -> Raw:
    """A value as it is written. The depth is bounded, because an alias may name what it stands in."""
    if node.tag not in _PLAIN_TAGS:
        return Unusable(f"the YAML tag {node.tag}")
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, quoted=node.style is not None)
    if depth == DEEPEST:
        return Unusable("nested too deeply")
    if isinstance(node, yaml.MappingNode):
        return Mapped(tuple(_entries(node, name, depth + 1)))
    return Items(tuple(_raw(child, name, depth + 1) for child in node.value))


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}" if name else ""
