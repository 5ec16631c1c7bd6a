"""Make the rows of configs/data/docstrings: a sentence of Python's documentation, and the module that it is from.

`python -m tools.docstrings FOLDER` writes train.jsonl and test.jsonl. The rows are those of the Python that runs it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Modules with enough sentences, and without a licence of their own.
MODULES = (
    *("asyncio", "builtins", "calendar", "configparser", "decimal", "imaplib", "inspect", "mailbox"),
    *("math", "shutil", "smtplib", "statistics", "threading", "tkinter", "typing", "zipfile"),
)
MOST = 57  # rows of a module
TRAIN, TEST = 256, 400
QUESTION = "Which module of Python's standard library has this? "


def docstrings(module: str) -> Iterator[str]:
    """The docstrings of the public functions and classes that a module defines, and of the methods of these classes."""
    for name, value in vars(importlib.import_module(module)).items():
        defined = inspect.isroutine(value) or inspect.isclass(value)
        if name.startswith("_") or not defined or not f"{value.__module__}.".startswith(f"{module}."):
            continue
        yield value.__doc__ or ""
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                yield member.__doc__ or ""


def sentences(module: str) -> set[str]:
    """The first paragraph of each docstring, on one line, where it is short, no signature, and names no module."""
    found = {" ".join(inspect.cleandoc(text).partition("\n\n")[0].split()) for text in docstrings(module)}
    return {
        line
        for line in found
        if 20 <= len(line) <= 100
        and line.isascii()
        and module not in line.lower()
        and not re.search(r"->|=|^[\w.]+\(", line)
    }


def rows() -> list[dict[str, str]]:
    """TRAIN + TEST rows, shuffled; a sentence of two modules is left out."""
    found = {module: sentences(module) for module in MODULES}
    drawn = random.Random(0)
    made = []
    for module, lines in found.items():
        own = sorted(lines.difference(*(other for name, other in found.items() if name != module)))
        kept = drawn.sample(own, min(MOST, len(own)))
        made += [{"question": QUESTION + line, "answer": module} for line in kept]
    drawn.shuffle(made)
    return made[: TRAIN + TEST]


def main(folder: Path) -> None:
    made = rows()
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", made[:TRAIN]), ("test", made[TRAIN:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
