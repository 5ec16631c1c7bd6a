"""What the output of a script gives away: non-finite losses, memory that ran out, kills, tracker runs.

Whole tokens only: "nano", "finance loss" and "nancy" never match, and neither does a sentence about what would happen
("stops if loss is NaN").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: Nothing below can match a line without one of these; most lines end here.
_WORTH_A_LOOK: Final = re.compile(r"nan|memory|alloc|exhausted|kill|exitcode|wandb", re.IGNORECASE)
_HYPOTHETICAL: Final = re.compile(
    r"\b(?:if|when|whenever|whether|unless|until|in case|avoid|avoids|prevent|prevents)\b[^.:;!?]*$", re.IGNORECASE
)

_LOSS: Final = r"(?<![A-Za-z])loss(?:es)?(?:_\w+)?(?:/\w+)?"
_NAN: Final = r"[-+]?nan(?![\w-]|\.\w)"
_WRAPPED: Final = r"(?:\w+(?:\.\w+)*\()?"  # tensor(nan, np.float32(nan

NONFINITE: Final = (
    re.compile(rf"{_LOSS}[\"']?\s*[=:]\s*[\"'\[]?{_WRAPPED}{_NAN}", re.IGNORECASE),
    re.compile(rf"{_LOSS}\s+(?:is|became|was)\s+(?:now\s+)?{_NAN}(?!\s*[:=])", re.IGNORECASE),
    re.compile(rf"{_LOSS}\s+{_NAN}\s*(?:[,;|)\]}}/]|$)", re.IGNORECASE),
    re.compile(r"(?<![\w-])(?<!no )nan loss(?:es)? (?:detected|encountered|found|at)\b", re.IGNORECASE),
    re.compile(r"\b(?:detected|encountered|found|got) (?:an? )?nan loss(?:es)?\b", re.IGNORECASE),
)
OUT_OF_MEMORY: Final = (
    re.compile(r"\b(?:CUDA|HIP|XPU|MPS|GPU|Device)(?: backend)?(?: error:)? out of memory\b", re.IGNORECASE),
    re.compile(r"(?<![A-Za-z])OutOfMemoryError\b"),
    re.compile(r"\bRESOURCE[_ ]EXHAUSTED\b", re.IGNORECASE),
    re.compile(r"\bXLA memory error\b", re.IGNORECASE),
    re.compile(r"\bDevice memory exhausted\b", re.IGNORECASE),
    re.compile(r"\bDefaultCPUAllocator: (?:not enough memory|can't allocate memory)"),
    re.compile(r"\bCU(?:DA_ERROR_OUT_OF_MEMORY|(?:BLAS|DNN)_STATUS_ALLOC_FAILED)\b"),
    re.compile(r"\bstd::bad_alloc\b|\bCannot allocate memory\b|^(?:\w+\.)*(?:_Array)?MemoryError\b"),
)
KILLED: Final = (
    re.compile(r"\bkilled by signal: Killed\b"),  # a loader worker of PyTorch
    re.compile(r"\bSignal 9 \(SIGKILL\)|\bexitcode\s*:\s*-9\b"),  # a process of torchrun
)

_RUN_URL: Final = re.compile(r"https?://[^\s/]+/([^\s/]+)/([^\s/]+)/runs/([\w-]+)")
_RUN_FOLDER: Final = re.compile(r"\bsaved locally in \S*[\\/]run-\d{8}_\d{6}-([\w-]+)")
_RUN_ID: Final = re.compile(r"^WandB run ID: ([\w-]+)", re.IGNORECASE)
_RESUMED: Final = re.compile(r"\bwandb: Resuming run\b")


@dataclass(frozen=True)
class WandbRun:
    """A run of Weights & Biases as the output names it; entity and project only where a URL does."""

    id: str
    entity: str | None = None
    project: str | None = None


def plain(line: str) -> str:
    """The line without colours and cursor movements."""
    return _ANSI.sub("", line)


def worth_a_look(line: str) -> bool:
    """Whether any pattern of this file could match."""
    return _WORTH_A_LOOK.search(line) is not None


def says_nonfinite(line: str) -> bool:
    """Whether the line reports a loss that is NaN."""
    return _any(NONFINITE, line)


def says_out_of_memory(line: str) -> bool:
    """Whether the line reports that memory, of a device or of the host, ran out."""
    return _any(OUT_OF_MEMORY, line)


def says_killed(line: str) -> bool:
    """Whether the line reports that a process of the script died of SIGKILL."""
    return _any(KILLED, line)


def says_resumed(line: str) -> bool:
    """Whether W&B goes on with a run that existed before."""
    return _RESUMED.search(line) is not None


def wandb_run(line: str) -> WandbRun | None:
    """The W&B run that the line names."""
    if "wandb" not in line.lower():
        return None
    if url := _RUN_URL.search(line):
        entity, project, run_id = map(unquote, url.groups())
        return WandbRun(run_id, entity, project)
    named = _RUN_FOLDER.search(line) or _RUN_ID.search(line)
    return WandbRun(named[1]) if named else None


def _any(patterns: tuple[re.Pattern[str], ...], line: str) -> bool:
    matches = (pattern.search(line) for pattern in patterns)
    return any(match and not _HYPOTHETICAL.search(line[: match.start()]) for match in matches)
