"""The evidence that an attempt leaves in its output: bytes become lines, lines become findings and a short memory."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable
from typing import Final

from ci_llm.supervisor import patterns
from ci_llm.supervisor.printed_rate import printed_rate

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
        """Hand over the lines that `data` completes; a line without end is cut when it grows too long."""
        *lines, self._rest = _LINE_END.split(self._rest + self._decode(data, final))
        if final or len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = ""
        for line in filter(None, lines):
            self._take(line)


class Evidence:
    """What the output of one attempt said.

    Attributes:
        nonfinite, out_of_memory, killed: the first line that said so.
        learning_rate: the last one that it printed, as it stands there.
        wandb_runs: the runs it named, by id; `wandb_resumed`: they existed before.
        last_lines: the end of the output, for people.
    """

    def __init__(self) -> None:
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

    def note(self, line: str) -> None:
        """Take one line of the output into account."""
        line = patterns.plain(line[:_LONGEST_LINE]).strip()
        if not line:
            return
        self._lines += 1
        self.last_lines.append(line)
        self.learning_rate = printed_rate(line) or self.learning_rate
        if patterns.worth_a_look(line):
            self._examine(line)

    def _examine(self, line: str) -> None:
        if self.nonfinite is None and patterns.says_nonfinite(line):
            self.nonfinite = line
        if patterns.says_out_of_memory(line):
            self.out_of_memory = self.out_of_memory or line
            self._memory_line = self._lines
        if self.killed is None and patterns.says_killed(line):
            self.killed = line
        self.wandb_resumed |= patterns.says_resumed(line)
        if (run := patterns.wandb_run(line)) is not None and (run.project or run.id not in self.wandb_runs):
            self.wandb_runs[run.id] = run
