"""All keys as the table of docs/keys.md, group by group: key and default, on a resume, what it is.

`python -m tools.keys_table` writes the table into the page. The names that other trainers have for a key stand below
what it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from ci_llm.config.config import given_groups, with_default
from ci_llm.config.foreign import ALIASES, FIELDS, TRANSLATIONS
from ci_llm.config.schema import meaning_of

PAGE = Path(__file__).parents[1] / "docs" / "keys.md"
HEAD = "| key=default | on a resume | what it is; its names elsewhere |\n| --- | --- | --- |\n"


def table() -> str:
    """The table, which is the end of the page."""
    rows = []
    for title, keys in given_groups().items():
        rows.append(f"| **{title}** | | |")
        for key in keys:
            named = with_default(key, FIELDS[key])
            rows.append(f"| `{named}` | {_on_resume(key)} | {_text(key)}{_elsewhere(key)} |")
    return HEAD + "\n".join(rows) + "\n"


def _on_resume(key: str) -> str:
    """A word for what another value means for a resumed run; docs/keys.md explains each. Most keys are free."""
    meaning = meaning_of(FIELDS[key])
    if meaning["kind"] == "free":
        return "" if meaning["keeps_bits"] else "rounding"
    if meaning["kind"] == "schedule":
        return "ending" if meaning["keeps_bits"] else "length"
    return "refused"


def _elsewhere(key: str) -> str:
    """The names that other trainers have for a key, on a line of their own; some of them mean it by their value."""
    names = [f"`{alias}`" for alias, meant in ALIASES.items() if meant == key]
    for name, values in TRANSLATIONS.items():
        if any(meant.startswith(f"{key}=") for meant in values.values()):
            names.append(f"`{name}`" + " (inverted)" * (values.get("true") == f"{key}=false"))
    return f"<br>{', '.join(names)}" if names else ""


def _text(key: str) -> str:
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", str(FIELDS[key].description).replace("|", "or"))


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(HEAD)[0] + table(), encoding="utf-8")
