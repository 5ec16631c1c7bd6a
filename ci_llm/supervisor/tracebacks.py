"""The exception that a script died of, found in its output: of the script, not of its launcher or its peers."""

from __future__ import annotations

import re
from typing import Final

_LONGEST: Final = 500
#: An exception so many lines ago did not end the script.
_RECENT_LINES: Final = 500
#: What stands before each line: the rank, for torchrun, srun -l and mpirun; the margin of an exception group.
_MARGIN: Final = re.compile(r"^(?:\[[\w,]{1,20}\](?:<\w{1,8}>)?: ?|\d{1,5}: |\s*\| ?)")
_HEADER: Final = "Traceback (most recent call last)"
_LEVEL: Final = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: The line that ends a traceback: `ValueError: boom`, `pkg.errors.Boom: why`, `KeyboardInterrupt`.
_LAST: Final = re.compile(r"(?:(?:\w+\.)*[A-Z]\w*|(?:\w+\.)+\w+)(?::(?:\s.*)?)?$")
#: What is an exception wherever it stands, and what tells the end of a program that prints no traceback.
_ANYWHERE: Final = re.compile(
    r"\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Expired|Failure)(?:\(\w+\))?: +\S"
    r"|Fatal Python error: |\S+: error: "  # argparse
    r"|Could not override |In '[^']{1,200}': Could not |(?:Cannot find p|P)rimary config "  # Hydra
)
#: Tracebacks that others print because the script has died, or that died without ending it.
_FOLLOWS: Final = re.compile(
    r"\bChildFailedError\b|\breturned non-zero exit status\b|\bProcessExitedException\b|\bSignalException\b"
    r"|\bConnection (?:closed|reset) by peer\b|\bBroken pipe\b|\bDistBackendError\b|\bremote process exited\b"
    r"|(?:^|\.)(?:KeyboardInterrupt|SystemExit)\b|^(?:srun|slurmstepd): error: "
)
_HARMLESS: Final = re.compile(r"Exception ignored in|Error in atexit|--- Logging error ---")
#: Last lines that say nothing of what happened.
EMPTY_WORDS: Final = re.compile(
    r"Set the environment variable HYDRA_FULL_ERROR=1|For simplicity, JAX has removed|wandb: |[\W_]*$"
)


class Tracebacks:
    """Reads the output line by line and remembers the last exception that may be the cause.

    Of chained exceptions it is the last one, as Python prints them. What a launcher or a peer raises counts only where
    nothing else was raised.
    """

    def __init__(self) -> None:
        self._cause: str | None = None
        self._consequence: str | None = None
        self._lines_since = 0
        self._inside = self._harmless = self._unfinished = False

    @property
    def exception(self) -> str | None:
        """The exception with its message in one line; None if there was none of late."""
        return (self._cause or self._consequence) if self._lines_since < _RECENT_LINES else None

    def note(self, line: str) -> None:
        """Take a line into account; its indentation counts."""
        self._lines_since += 1
        line = _MARGIN.sub("", line[:_LONGEST].rstrip())
        if self._unfinished and line:
            self._finish(line.strip())
        if _HEADER in line:
            self._inside = True
        elif _HARMLESS.match(line):
            self._harmless = True
        elif (self._inside and _LAST.match(line) and not _LEVEL.match(line)) or _ANYWHERE.match(line):
            self._raised(line.strip())

    def _raised(self, exception: str) -> None:
        if self._harmless and self._inside:
            pass
        elif _FOLLOWS.search(exception):
            self._consequence = exception.rstrip(":")
        else:
            self._cause = exception
            self._unfinished = exception.endswith(":")
        self._inside = self._harmless = False
        self._lines_since = 0

    def _finish(self, line: str) -> None:
        """A message that ends with a colon goes on in the next line."""
        self._unfinished = False
        if not EMPTY_WORDS.match(line):
            self._cause = f"{self._cause} {line}"
