"""The evidence in an attempt's output: non-finite losses, lack of memory, kills, exceptions, W&B runs, by line.

Only whole tokens match: "nano", "finance loss" and "nancy" never do. Nor does a sentence about what would happen
("stops if loss is NaN", "stop on NaN loss", "to avoid NaN loss"), what did not happen ("0 nan losses found") or what
was best so far ("best_val_loss=inf").

Every pattern looks at a bounded piece of the line, so that the time per line is bounded too. The patterns are data, in
output_scan.yaml beside this file.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

#: How many characters before a match are read as its sentence.
_CONTEXT: Final = 160
#: How many non-finite values of one line are examined.
_MAX_VALUES: Final = 32


@dataclass(frozen=True)
class WandbRun:
    """A run of Weights & Biases as the output names it. Only a URL names its entity and project."""

    id: str
    entity: str | None = None
    project: str | None = None


def plain(line: str) -> str:
    """Return the line without colours and cursor movements."""
    return _grammar("ansi").sub("", line)


def may_match(line: str) -> bool:
    """True if a pattern of this file could match the line."""
    return _grammar("may_match").search(line) is not None and not _grammar("source").match(line)


def says_nonfinite(line: str) -> bool:
    """True if the line reports a loss that is NaN or infinite, or an end of the training because of one."""
    values = islice(_grammar("value").finditer(line), _MAX_VALUES)
    return any(_is_present_loss(line, value) for value in values) or _any("nonfinite", line)


def says_killed(line: str) -> bool:
    """True if the line reports that a process of the script died of SIGKILL."""
    return _any("killed", line)


def wandb_run(line: str) -> WandbRun | None:
    """Return the W&B run that the line names, or None."""
    found = _grammar("wandb_run").search(line) if "wandb" in line.lower() else None
    if found is None:
        return None
    entity, project, run_id = (part and unquote(part) for part in found.group("entity", "project", "run"))
    return WandbRun(run_id or found["folder"] or found["id"], entity, project)


def _is_present_loss(line: str, value: re.Match[str]) -> bool:
    """True if a non-finite value belongs to the present loss: the text before it is the name of a loss.

    The value is found first, because it is rare; the text to its left then says what it belongs to.
    """
    left = line[max(0, value.start() - _CONTEXT) : value.start()]
    named = _grammar("named").search(left)
    if named is None:
        return False
    # A running mean may be infinite for a harmless reason (nothing counted yet); NaN has none.
    if (named["mean"] is not None or named["other"]) and value["nan"] is None:
        return False
    if named["mean"] is not None and not re.match(r"\s*\)", line[value.end() :]):
        return False
    before = left[: named.start()]
    if (
        _grammar("best").search(before)
        or _grammar("not_a_loss").search(named["rest"])
        or _grammar("hypothetical").search(before)
    ):
        return False
    if named["became"]:
        untold = _is_supposed(before) or _grammar("denied").search(before)
        return not (untold or _grammar("handled").search(before) or _grammar("handled").search(line, value.end()))
    return named["bare"] is None or _ends_column(line, value, before, named["bare"])


def _ends_column(line: str, value: re.Match[str], before: str, gap: str) -> bool:
    """True if "loss nan" is a column of a log, and neither part of a sentence nor a row that pandas has printed."""
    if (
        value[0] == "NaN"
        and (len(before.split()) < 2 or len(gap) > 1)
        and _grammar("row_of_pandas").fullmatch(line, value.end())
    ):
        return False
    return _grammar("after_bare").match(line, value.end()) is not None


def _any(kind: str, line: str) -> bool:
    matches = (pattern.search(line) for pattern in _patterns(kind))
    return any(match is not None and _happened(line, match) for match in matches)


@cache
def _texts() -> dict[str, Any]:
    """The content of output_scan.yaml, with the parts in place of their names."""
    from ci_llm.config.yaml_file import read_texts  # here, because the help of safe_train.py does without

    known, parts = read_texts(Path(__file__).with_suffix(".yaml")), dict[str, str]()

    def whole(pieces: Sequence[str]) -> str:
        text = "".join(pieces)
        for name, part in parts.items():
            text = text.replace(f"<{name}>", part)
        return text

    for name, pieces in known.pop("parts").items():  # a part may hold those before it
        parts[name] = whole(pieces)
    grammar = {name: whole(pieces) for name, pieces in known.pop("grammar").items()}
    return {"grammar": grammar} | {kind: [whole(text) for text in texts] for kind, texts in known.items()}


@cache
def _patterns(kind: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, _texts()[kind]))


@cache
def _grammar(name: str) -> re.Pattern[str]:
    return re.compile(_texts()["grammar"][name])


def _is_supposed(before: str) -> bool:
    """True if a clause that begins like this speaks of what would happen, and not of what has happened."""
    return bool(
        _grammar("hypothetical").search(before)
        or (_grammar("condition").search(before) and not _grammar("event").search(before))
    )


def _happened(line: str, match: re.Match[str]) -> bool:
    """False if the line around a match denies it, makes it a condition, or says that it was handled."""
    before = line[max(0, match.start() - _CONTEXT) : match.start()]
    if _is_supposed(before) or _grammar("denied").search(before) or _grammar("handled").search(before):
        return False
    return not (
        _grammar("talk").match(line, match.end())
        or _grammar("handled").search(line, match.end(), match.end() + _CONTEXT)
    )


#: In lines. A script that prints these after it ran out of memory, and continues, has recovered from that.
RECENT_LINES: Final = 20
_MAX_LINE_LENGTH: Final = 4096
_LINE_END: Final = re.compile(r"[\r\n]+")

#: An exception that lies this many lines back did not end the script.
_EXCEPTION_LINES: Final = 500


class LineSplitter:
    """Cuts one stream of bytes into lines at \\r and \\n, in whatever pieces the bytes arrive.

    Args:
        take: called with every line.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Hand over the lines that `data` completes; b"" ends the stream. A line that is too long comes in pieces."""
        *lines, self._rest = _LINE_END.split(self._rest + self._decode(data, not data))
        if not data or len(self._rest) > _MAX_LINE_LENGTH:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            for start in range(0, len(line), _MAX_LINE_LENGTH):
                self._take(line[start : start + _MAX_LINE_LENGTH])


class Evidence:
    """The facts that the output of one attempt has told.

    Attributes:
        nonfinite, killed: the first line that reported it; None if no line did.
        out_of_memory: the first line that reported the latest lack of memory; None if no line did.
        wandb_runs: the W&B runs that were named, by id.
        wandb_resumed: a W&B run existed before this attempt.
        last_lines: the end of the output, for people.
        num_lines: how many lines there were, each redrawing of a progress bar included.
    """

    def __init__(self) -> None:
        for kind in ("nonfinite", "out_of_memory", "killed"):
            _patterns(kind)  # read before an attempt runs, which may fill the disk
        self.nonfinite: str | None = None
        self.out_of_memory: str | None = None
        self.killed: str | None = None
        self.wandb_runs: dict[str, WandbRun] = {}
        self.wandb_resumed = False
        self.last_lines: deque[str] = deque(maxlen=RECENT_LINES)
        self.num_lines = 0
        self._exception: str | None = None
        self._is_ignored = False  # the next one, because Python has caught it and it ends nothing
        self._is_consequence = False  # of another exception, that of a process which this one waited for
        self._lines_since_exception = self._lines_since_memory = 0

    def ended_out_of_memory(self, *, failed: bool) -> bool:
        """True if the lack of memory ended the script, which then printed little more.

        Args:
            failed: its exit code was not 0. Then it may have tidied up for long, unless another exception ended it.
        """
        limit = _EXCEPTION_LINES if failed and self.exception is None else RECENT_LINES
        return self.out_of_memory is not None and self._lines_since_memory < limit

    @property
    def exception(self) -> str | None:
        """The exception that ended the script, with its message in one line; None without a recent one.

        Of chained exceptions that is the last one. One of a launcher or of a peer counts only where there is no other.
        """
        return self._exception if self._lines_since_exception < _EXCEPTION_LINES else None

    @property
    def last_words(self) -> str:
        """The exception that ended the script, or else the last line that says something."""
        spoken = (line for line in reversed(self.last_lines) if not _grammar("empty_words").match(line))
        return self.exception or next(spoken, "it said nothing")

    def note(self, line: str) -> None:
        """Take one line of the output into account."""
        line = plain(line[:_MAX_LINE_LENGTH])
        self._note_exception(_grammar("margin").sub("", line))  # with its indentation, which the rest does without
        line = line.strip()
        if not line:
            return
        self.num_lines += 1
        self.last_lines.append(line)
        if not may_match(line):
            return
        if says_nonfinite(line):
            self.nonfinite = self.nonfinite or line
        if _any("out_of_memory", line):  # of a device or of the host
            self._note_out_of_memory(line)
        if says_killed(line):
            self.killed = self.killed or line
        self._note_wandb(line)

    def _note_exception(self, line: str) -> None:
        """Take note of an exception by its last line, the only one without indentation."""
        self._lines_since_exception += 1
        if line[:1].isspace():
            return
        self._lines_since_memory += bool(line)
        self._is_ignored |= line.startswith(("Exception ignored in", "Error in atexit"))
        if not _grammar("exception").match(line):
            return
        if self._is_ignored:
            self._is_ignored = False
            return
        is_consequence = _grammar("consequence").search(line) is not None
        if is_consequence and self.exception is not None and not self._is_consequence:
            return
        self._exception, self._is_consequence = line.strip().rstrip(":"), is_consequence
        self._lines_since_exception = 0

    def _note_wandb(self, line: str) -> None:
        self.wandb_resumed |= _grammar("wandb_resumed").search(line) is not None
        # A later line may name the same run without its project: the fuller one stays.
        run = wandb_run(line)
        if run is not None and (run.project or run.id not in self.wandb_runs):
            self.wandb_runs[run.id] = run

    def _note_out_of_memory(self, line: str) -> None:
        if self.out_of_memory is None or self._lines_since_memory >= RECENT_LINES:
            self.out_of_memory = line
        self._lines_since_memory = 0
