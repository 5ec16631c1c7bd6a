"""`ci-llm COMMAND`: the commands and their modules, and the help that lists them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from ci_llm._version import __version__
from ci_llm.cli.command import help_of, run_guarded
from ci_llm.errors import ConfigError
from ci_llm.interrupts import ends_with_process

USAGE: Final = help_of("ci-llm").replace("VERSION", __version__)

# Each command is a function of its words after the name; its module loads when it is called.
COMMANDS: Final = {
    "train": "ci_llm.cli.train:train",
    "check": "ci_llm.cli.train:check",
    "sweep": "ci_llm.cli.train:sweep",
    "status": "ci_llm.cli.runs:status",
    "watch": "ci_llm.cli.runs:watch",
    "supervise": "ci_llm.cli.supervise:supervise",
    "agents": "ci_llm.cli.runs:agents",
    "checkpoints": "ci_llm.cli.checkpoints:checkpoints",
    "generate": "ci_llm.cli.generate:generate",
    "chat": "ci_llm.cli.generate:chat",
    "serve": "ci_llm.cli.serve:serve",
    "score": "ci_llm.cli.generate:score",
    "evaluate": "ci_llm.cli.evaluate:evaluate_run",
    "export": "ci_llm.cli.export:export",
    "push": "ci_llm.cli.export:push",
    "report": "ci_llm.cli.runs:report_run",
    "compare": "ci_llm.cli.runs:compare_runs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`ci-llm COMMAND ...`; returns the exit code.

    Args:
        arguments: the words of the command line; None: those of this process, which ends with the command.
    """
    if arguments is None:
        ends_with_process()
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_guarded(lambda: _dispatch(words), debug="--debug" in words)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] != "supervise":  # the words of another program are its own
        _require_text(words)
    if words[0] not in COMMANDS:
        from ci_llm.config.parsing import nearest

        near = nearest(words[0], COMMANDS)
        hint = f"did you mean {near}?" if near else f"one of: {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {words[0]!r}", hint=hint)
    module, _, function = COMMANDS[words[0]].partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command(words[1:])


def _require_text(words: Sequence[str]) -> None:
    """Refuse bytes of a command line that no text has: Python keeps each of them as half a character."""
    for number, word in enumerate(words, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            what = f"word {number} is not UTF-8 text: {word!r}"
            raise ConfigError(what, where="command line", hint="type text, or give a file by --file")


def run_script(words: Sequence[str]) -> int:
    """`main` for train.py and its siblings: a package that is not installed is one message, not a traceback.

    The process must end after it: signals that arrive while the interpreter exits do not change the code.
    """
    ends_with_process()
    try:
        return main(words)
    except ModuleNotFoundError as error:
        if "--debug" in words or not _is_missing_here(error):
            raise
        script = Path(sys.argv[0]).name
        print(
            f"error: the package {error.name} is not installed for {sys.executable}\n"
            f"  hint:  make install, then .venv/bin/python {script}",
            file=sys.stderr,
        )
        return ConfigError.exit_code


def _is_missing_here(error: ModuleNotFoundError) -> bool:
    """True if this package imports the missing one; an import in other code is a failure of the run."""
    *_, (importer, _) = traceback.walk_tb(error.__traceback__)
    ours = str(importer.f_globals.get("__name__")).startswith("ci_llm.")
    return ours and not str(error.name).startswith("ci_llm")
