"""The way in from a checkout: where a package is not installed, that is one line with its cure and no traceback."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

BAD_CALL: Final = 2


def enter(door: str, words: list[str]) -> int:
    """Call the function `door` of `ci_llm.cli` with the words of the command line; returns its exit code."""
    try:
        code: int = getattr(importlib.import_module("ci_llm.cli"), door)(words)
    except ModuleNotFoundError as error:
        if "--debug" in words or (error.name or "").startswith("ci_llm"):
            raise
        script = Path(sys.argv[0]).name
        print(
            f"error: the package {error.name} is not installed for {sys.executable}\n"
            f"  cure:  make install, then .venv/bin/python {script}",
            file=sys.stderr,
        )
        return BAD_CALL
    return code
