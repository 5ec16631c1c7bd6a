"""The evidence in the output of one attempt: bytes become lines, lines become findings and a short memory."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable
from typing import Final

from ci_llm.supervisor import patterns

#: With exit code 0, out of memory counts only within the last lines: a script that goes on has recovered from it.
RECENT_LINES: Final = 20
_MAX_LINE_LENGTH: Final = 4096
_LINE_END: Final = re.compile(r"[\r\n]+")

_MAX_TRACEBACK_LINE: Final = 500
#: An exception that lies this many lines back did not end the script.
_TRACEBACK_LINES: Final = 500
#: What may stand before a line: the rank (torchrun, srun -l, mpirun), or the margin of an exception group.
_MARGIN: Final = re.compile(r"^(?:\[[\w,]{1,20}\](?:<\w{1,8}>)?: ?|\d{1,5}: |\s*\| ?)")
_HEADER: Final = "Traceback (most recent call last)"
_LOG_LEVEL: Final = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
#: The last line of a traceback: `ValueError: boom`, `pkg.errors.Boom: why`, `KeyboardInterrupt`.
_LAST_LINE: Final = re.compile(r"(?:(?:\w+\.)*[A-Z]\w*|(?:\w+\.)+\w+)(?::(?:\s.*)?)?$")
#: What is an exception outside of a traceback too, and the last message of programs that print no traceback.
_WITHOUT_TRACEBACK: Final = re.compile(
    r"\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Expired|Failure)(?:\(\w+\))?: +\S"
    r"|Fatal Python error: |\S+: error: "  # argparse
    r"|Could not override |In '[^']{1,200}': Could not |(?:Cannot find p|P)rimary config "  # Hydra
)
#: Exceptions that a launcher or a peer raises because the script has died.
_CONSEQUENCE: Final = re.compile(
    r"\bChildFailedError\b|\breturned non-zero exit status\b|\bProcessExitedException\b|\bSignalException\b"
    r"|\bConnection (?:closed|reset) by peer\b|\bBroken pipe\b|\bDistBackendError\b|\bremote process exited\b"
    r"|(?:^|\.)(?:KeyboardInterrupt|SystemExit)\b|^(?:srun|slurmstepd): error: "
)
#: Introduces a traceback of an exception that Python has caught and that ends nothing.
_IGNORED: Final = re.compile(r"Exception ignored in|Error in atexit|--- Logging error ---")
#: Last lines that say nothing about what happened.
_EMPTY_WORDS: Final = re.compile(
    r"Set the environment variable HYDRA_FULL_ERROR=1|For simplicity, JAX has removed|wandb: |[\W_]*$"
)


class LineSplitter:
    """Cuts one stream of bytes into lines at \\r and \\n, in whatever pieces the bytes arrive.

    Args:
        take: called with every line.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Hand over the lines that `data` completes. A line that is too long comes in pieces.

        Args:
            final: nothing follows, so that the last line needs no end.
        """
        *lines, self._rest = _LINE_END.split(self._rest + self._decode(data, final))
        if final or len(self._rest) > _MAX_LINE_LENGTH:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            for start in range(0, len(line), _MAX_LINE_LENGTH):
                self._take(line[start : start + _MAX_LINE_LENGTH])


class Evidence:
    """What the output of one attempt said.

    Args:
        user_patterns: patterns of the user, beside the known ones.

    Attributes:
        nonfinite, out_of_memory, killed: the first line that reported it; None if no line did.
        learning_rate: the last one that was printed, as written there.
        wandb_runs: the W&B runs that were named, by id.
        wandb_resumed: a W&B run existed before this attempt.
        last_lines: the end of the output, for people.
        num_lines: how many lines there were, each redrawing of a progress bar included.
    """

    def __init__(self, user_patterns: patterns.UserPatterns | None = None) -> None:
        self._user_patterns = user_patterns or patterns.UserPatterns()
        self._tracebacks = _Tracebacks()
        self.nonfinite: str | None = None
        self.out_of_memory: str | None = None
        self.killed: str | None = None
        self.learning_rate: str | None = None
        self.wandb_runs: dict[str, patterns.WandbRun] = {}
        self.wandb_resumed = False
        self.last_lines: deque[str] = deque(maxlen=RECENT_LINES)
        self.num_lines = 0
        self._out_of_memory_at = 0

    @property
    def ended_out_of_memory(self) -> bool:
        """Whether memory ran out within the last lines."""
        return self.out_of_memory is not None and self.num_lines - self._out_of_memory_at < RECENT_LINES

    @property
    def exception(self) -> str | None:
        """The exception that ended the script, as far as the output shows it."""
        return self._tracebacks.exception

    @property
    def last_words(self) -> str:
        """The exception that ended the script, or else the last line that says something."""
        spoken = (line for line in reversed(self.last_lines) if not _EMPTY_WORDS.match(line))
        return self.exception or next(spoken, "it said nothing")

    def note(self, line: str) -> None:
        """Take one line of the output into account."""
        line = patterns.plain(line[:_MAX_LINE_LENGTH])
        self._tracebacks.note(line)  # with its indentation, which the rest does without
        if not (line := line.strip()):
            return
        self.num_lines += 1
        self.last_lines.append(line)
        if self._user_patterns.nonfinite_in(line):
            self._note_nonfinite(line)
        if self._user_patterns.out_of_memory_in(line):
            self._note_out_of_memory(line)
        self.learning_rate = patterns.printed_rate(line) or self.learning_rate
        if patterns.may_match(line):
            self._match(line)

    def _match(self, line: str) -> None:
        if patterns.says_nonfinite(line):
            self._note_nonfinite(line)
        if patterns.says_out_of_memory(line):
            self._note_out_of_memory(line)
        if self.killed is None and patterns.says_killed(line):
            self.killed = line
        self.wandb_resumed |= patterns.says_resumed(line)
        # A later line may name the same run without its project: the fuller one stays.
        if (run := patterns.wandb_run(line)) is not None and (run.project or run.id not in self.wandb_runs):
            self.wandb_runs[run.id] = run

    def _note_nonfinite(self, line: str) -> None:
        self.nonfinite = self.nonfinite or line

    def _note_out_of_memory(self, line: str) -> None:
        self.out_of_memory = self.out_of_memory or line
        self._out_of_memory_at = self.num_lines


class _Tracebacks:
    """Finds the exception that ended a script: the last one that is neither ignored nor a consequence of another.

    Of chained exceptions that is the last one, in the order in which Python prints them. An exception of a launcher or
    of a peer counts only where the script itself printed none.
    """

    def __init__(self) -> None:
        self._cause: str | None = None
        self._consequence: str | None = None
        self._lines_since = 0
        self._in_traceback = self._is_ignored = self._continues = False

    @property
    def exception(self) -> str | None:
        """The exception with its message in one line; None if there was none of late."""
        return (self._cause or self._consequence) if self._lines_since < _TRACEBACK_LINES else None

    def note(self, line: str) -> None:
        """Take a line into account, with its indentation: inside a traceback only its last line has none."""
        self._lines_since += 1
        # Cut, because some exceptions print a whole tensor.
        line = _MARGIN.sub("", line[:_MAX_TRACEBACK_LINE].rstrip())
        if self._continues and line:
            self._complete(line.strip())
        if _HEADER in line:
            self._in_traceback = True
        elif _IGNORED.match(line):
            self._is_ignored = True
        elif self._ends_traceback(line) or _WITHOUT_TRACEBACK.match(line):
            self._note_exception(line.strip())

    def _ends_traceback(self, line: str) -> bool:
        # Log lines of other processes mix with a traceback: "ERROR: ..." looks like an exception named ERROR.
        return self._in_traceback and _LAST_LINE.match(line) is not None and not _LOG_LEVEL.match(line)

    def _note_exception(self, exception: str) -> None:
        is_ignored = self._is_ignored and self._in_traceback
        self._in_traceback = self._is_ignored = False
        self._lines_since = 0
        if is_ignored:
            return
        if _CONSEQUENCE.search(exception):
            self._consequence = exception.rstrip(":")
        else:
            self._cause = exception
            self._continues = exception.endswith(":")

    def _complete(self, line: str) -> None:
        """A message that ends with a colon continues in the next line."""
        self._continues = False
        if not _EMPTY_WORDS.match(line):
            self._cause = f"{self._cause} {line}"
