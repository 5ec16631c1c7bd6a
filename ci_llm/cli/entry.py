"""The entry of train.py and its siblings: a package that is not installed is one message, not a traceback."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Final

BAD_CALL: Final = 2


def run_command(command: str, words: list[str]) -> int:
    """Call the function `command` of `ci_llm.cli.main` with the words of the command line; returns its exit code.

    The process must end after it: signals that arrive while the interpreter exits do not change the code.
    """
    try:
        importlib.import_module("ci_llm.interrupts").ends_with_process()
        code: int = getattr(importlib.import_module("ci_llm.cli.main"), command)(words)
    except ModuleNotFoundError as error:
        if "--debug" in words or not _is_missing_here(error):
            raise
        script = Path(sys.argv[0]).name
        print(
            f"error: the package {error.name} is not installed for {sys.executable}\n"
            f"  hint:  make install, then .venv/bin/python {script}",
            file=sys.stderr,
        )
        return BAD_CALL
    return code


def _is_missing_here(error: ModuleNotFoundError) -> bool:
    """True if this package imports the missing one; an import in other code is a failure of the run."""
    *_, (importer, _) = traceback.walk_tb(error.__traceback__)
    ours = str(importer.f_globals.get("__name__")).startswith("ci_llm.")
    return ours and not str(error.name).startswith("ci_llm")
