"""The evidence that an attempt leaves in its output: bytes become lines, lines become findings and a short memory."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable
from typing import Final

from ci_llm.supervisor import patterns
from ci_llm.supervisor.printed_rate import printed_rate
from ci_llm.supervisor.tracebacks import EMPTY_WORDS, Tracebacks

#: With exit code 0, running out of memory counts only among the last lines: who goes on after it has recovered.
RECENT_LINES: Final = 20
_LONGEST_LINE: Final = 4096
_LINE_END: Final = re.compile(r"[\r\n]+")


class LineSplitter:
    """Cuts one stream of bytes into lines at \\r and \\n, whatever the pieces it arrives in."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Hand over the lines that `data` completes; one that is too long comes in pieces."""
        *lines, self._rest = _LINE_END.split(self._rest + self._decode(data, final))
        if final or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            for start in range(0, len(line), _LONGEST_LINE):
                self._take(line[start : start + _LONGEST_LINE])


class Evidence:
    """What the output of one attempt said.

    Args:
        own: patterns of the user, beside those that are known.

    Attributes:
        nonfinite, out_of_memory, killed: the first line that said so.
        learning_rate: the last one that it printed, as it stands there.
        wandb_runs: the runs it named, by id; `wandb_resumed`: they existed before.
        last_lines: the end of the output, for people.
    """

    def __init__(self, own: patterns.OwnPatterns | None = None) -> None:
        self._own = own or patterns.OwnPatterns()
        self._tracebacks = Tracebacks()
        self.nonfinite: str | None = None
        self.out_of_memory: str | None = None
        self.killed: str | None = None
        self.learning_rate: str | None = None
        self.wandb_runs: dict[str, patterns.WandbRun] = {}
        self.wandb_resumed = False
        self.last_lines: deque[str] = deque(maxlen=RECENT_LINES)
        self._lines = self._memory_line = 0

    @property
    def num_lines(self) -> int:
        """How many lines there were, redrawn bars included."""
        return self._lines

    @property
    def ended_out_of_memory(self) -> bool:
        """Whether memory ran out within the last lines."""
        return self.out_of_memory is not None and self._lines - self._memory_line < RECENT_LINES

    @property
    def exception(self) -> str | None:
        """The exception that the script died of, as far as it told."""
        return self._tracebacks.exception

    @property
    def last_words(self) -> str:
        """What it died of, else the last line that says anything."""
        spoken = (line for line in reversed(self.last_lines) if not EMPTY_WORDS.match(line))
        return self.exception or next(spoken, "it said nothing")

    def note(self, line: str) -> None:
        """Take one line of the output into account."""
        line = patterns.plain(line[:_LONGEST_LINE])
        self._tracebacks.note(line)
        if not (line := line.strip()):
            return
        self._lines += 1
        self.last_lines.append(line)
        if self._own.nonfinite_in(line):
            self._note_nonfinite(line)
        if self._own.out_of_memory_in(line):
            self._note_out_of_memory(line)
        self.learning_rate = printed_rate(line) or self.learning_rate
        if patterns.worth_a_look(line):
            self._examine(line)

    def _note_nonfinite(self, line: str) -> None:
        self.nonfinite = self.nonfinite or line

    def _note_out_of_memory(self, line: str) -> None:
        self.out_of_memory = self.out_of_memory or line
        self._memory_line = self._lines

    def _examine(self, line: str) -> None:
        if patterns.says_nonfinite(line):
            self._note_nonfinite(line)
        if patterns.says_out_of_memory(line):
            self._note_out_of_memory(line)
        if self.killed is None and patterns.says_killed(line):
            self.killed = line
        self.wandb_resumed |= patterns.says_resumed(line)
        if (run := patterns.wandb_run(line)) is not None and (run.project or run.id not in self.wandb_runs):
            self.wandb_runs[run.id] = run
