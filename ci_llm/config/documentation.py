"""The keys in words: the text of `--help`, and the tables of docs/keys.md."""

from __future__ import annotations

import textwrap

from ci_llm.config.aliases import ALIASES, TRANSLATIONS
from ci_llm.config.names import FIELDS
from ci_llm.config.schema import AllKeys, Keys
from ci_llm.config.yaml_file import dump_value

WIDTH = 110
COLUMN = 45  # of the text beside a key


def groups() -> dict[str, list[str]]:
    """The keys below the title of their group, in order."""
    classes = [base for base in reversed(AllKeys.__mro__) if issubclass(base, Keys) and base not in (Keys, AllKeys)]
    return {str(base.__doc__): [key for key in FIELDS if key in base.__annotations__] for base in classes}


def describe_keys() -> str:
    """All keys for `--help`: group, key, default, what it is and in which unit."""
    parts = ["\n".join([title, *map(_described, keys)]) for title, keys in groups().items()]
    return "\n\n".join(parts)


def keys_as_markdown() -> str:
    """All keys as tables, one for each group: key, default, what it is; other names of a key stand below its own."""
    parts = []
    for title, keys in groups().items():
        rows = [f"| {_names(key)} | `{dump_value(FIELDS[key].default)}` | {_text(key)} |" for key in keys]
        parts.append("\n".join([f"## {title}", "", "| key | default | what it is |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def _names(key: str) -> str:
    translated = [
        name for name, values in TRANSLATIONS.items() if any(m.startswith(f"{key}=") for m in values.values())
    ]
    return "<br>".join([f"`{key}`", *(alias for alias, meant in ALIASES.items() if meant == key), *translated])


def _text(key: str) -> str:
    return str(FIELDS[key].description).replace("|", "or")


def _described(key: str) -> str:
    head = f"  {key}={dump_value(FIELDS[key].default)}".replace('"', "")
    return textwrap.fill(
        str(FIELDS[key].description),
        width=WIDTH,
        initial_indent=f"{head:<{COLUMN - 1}} ",
        subsequent_indent=" " * COLUMN,
    )
