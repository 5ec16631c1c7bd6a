"""The runs that `ci-llm watch` shows: which ones are meant, whether all have ended, and the table of them."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ci_llm.cluster.slurm import QueuedJob, query, query_queue
from ci_llm.errors import BadInput
from ci_llm.report.status import Reading, lines, look_at, speed, time_left, way_on

Ask: TypeAlias = Callable[[Sequence[str]], "dict[str, QueuedJob] | None"]

_ASK_EVERY_S: Final = 10.0  # a controller serves the whole cluster
_ANSWER_WITHIN_S: Final = 2.0  # for the picture waits for it
_PATIENCE_S: Final = 120.0  # for a supervisor to launch a run again, and for a folder that has gone
_WORST_FIRST: Final = (1, 75, 3)


@dataclass(frozen=True)
class Absent:
    """A folder in which no run can be read now, and why, for people."""

    folder: Path
    why: str


Look: TypeAlias = Reading | Absent


class Scene:
    """Runs that begin, train and end.

    Args:
        words: folders of runs, and folders that hold runs.
        ask: what squeue says about jobs, by their ids; by default squeue itself, where it is installed.

    Attributes:
        looks: at each run, as it was at the last `look`.
        jobs: the last answer of squeue, by id.
    """

    def __init__(self, words: Sequence[str], ask: Ask | None = None) -> None:
        if ask is None and shutil.which("squeue"):
            ask = partial(query_queue, query=partial(query, timeout_s=_ANSWER_WITHIN_S))
        self._words, self._ask = words, ask
        self._asked: tuple[float, set[str]] = -math.inf, set()
        self._answered: set[str] = set()  # jobs that the last answer is about
        self.looks: list[Look] = []
        self.jobs: Mapping[str, QueuedJob] = {}

    def look(self) -> None:
        """Look at every run."""
        self.looks = [*map(_look_at, find_runs(self._words))]
        runs = [look for look in self.looks if isinstance(look, Reading) and look.status.status != "completed"]
        self._ask_squeue({run.slurm_job for run in runs if run.slurm_job})

    def has_ended(self) -> bool:
        """True if every run has ended and none will be started again."""
        return bool(self.looks) and all(map(self._is_over, self.looks))

    def exit_code(self) -> int:
        """The exit code of `ci-llm status`; of several runs the worst: failed, interrupted, running, completed."""
        codes = {look.status.exit_code if isinstance(look, Reading) else 3 for look in self.looks}
        return next((code for code in _WORST_FIRST if code in codes), 0)

    def _ask_squeue(self, jobs: set[str]) -> None:
        now, (asked_at, before) = time.monotonic(), self._asked
        if self._ask is None or not jobs or (jobs == before and now - asked_at < _ASK_EVERY_S):
            return
        self._asked = now, jobs
        answer = self._ask(sorted(jobs))
        if answer is not None:  # else the last answer holds: a controller may be busy, or away
            self.jobs, self._answered = answer, jobs

    def _is_over(self, look: Look) -> bool:
        if isinstance(look, Absent):
            return False
        if look.status.status == "completed":
            return True
        job = look.slurm_job
        has_left = job is None or self._ask is None or (job in self._answered and job not in self.jobs)
        if look.is_running or not has_left:  # its job may be waiting to run it again
            return False
        return not look.is_supervised or look.heartbeat_age_s > _PATIENCE_S


def find_runs(words: Sequence[str]) -> list[Path]:
    """The folders of the runs that the words of a call mean now.

    A word is the folder of a run, or a folder that holds runs. A folder without a run stays in the list, because the
    run may begin later.
    """
    found: dict[Path, None] = {}
    for path in map(Path, words):
        runs = [path] if (path / "status.json").is_file() else [each.parent for each in path.glob("*/status.json")]
        found |= dict.fromkeys(sorted(runs) or [path])
    return [*found]


def _look_at(folder: Path) -> Look:
    try:
        return look_at(folder)
    except (BadInput, OSError) as error:
        return Absent(folder, str(error) if (folder / "status.json").exists() else "no run has begun here yet")


_STYLES: Final = {"running": "cyan", "completed": "green", "interrupted": "yellow", "waiting": "dim"}


def picture(looks: Sequence[Look], jobs: Mapping[str, QueuedJob], footer: str = "") -> Group:
    """A table of runs, and below it what asks for attention; of a single run all that `ci-llm status` tells.

    Args:
        jobs: what squeue says, by the id of the job.
        footer: a line below.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("step", "loss", "held out", "speed", "left"):
        table.add_column(title, justify="right")
    for look in looks:
        table.add_row(Text(_name(look, looks)), *_cells(look))
    if len(looks) == 1:
        [look] = looks
        notes = [look.why] if isinstance(look, Absent) else [_reason(look), *lines(look, _job(look, jobs))]
    else:
        notes = [f"{_name(look, looks)}: {note}" for look in looks for note in _alarms(look, jobs)]
    told = [Text(note, style="yellow" if "warning: " in note else "") for note in notes if note]
    return Group(table, *told, *([Text(footer, style="dim")] if footer else []))


def _cells(look: Look) -> list[RenderableType]:
    if isinstance(look, Absent):
        return [Text("waiting", style=_STYLES["waiting"])]
    run, total = look.status, look.status.total_steps
    return [
        Text(run.status, style=_STYLES.get(run.status, "red")),
        f"{run.step}/{total}" if total else f"{run.step}",
        f"{look.loss:.4g}" if look.losses else "",
        f"{look.scores.crowd_nll:.4g}" if look.scores else "",
        speed(look).split(",")[0] if look.is_running else "",
        time_left(look).removesuffix(" left"),
    ]


def _alarms(look: Look, jobs: Mapping[str, QueuedJob]) -> list[str]:
    if isinstance(look, Absent):
        return [look.why]
    ended = "; ".join(filter(None, [_reason(look), way_on(look.status)]))
    warning = f"warning: {look.status.warning}" if look.status.warning else ""
    return [*filter(None, [ended, _job(look, jobs), warning])]


def _job(run: Reading, jobs: Mapping[str, QueuedJob]) -> str:
    """A line about the run's SLURM job; empty if squeue does not list it."""
    if run.slurm_job is None or run.slurm_job not in jobs:
        return ""
    found = jobs[run.slurm_job]
    waits = f" ({found.reason})" if found.state == "PENDING" else f", {found.time_left} left"
    return f"SLURM job {run.slurm_job} {found.state}{waits}"


def _reason(run: Reading) -> str:
    return f"{run.status.status} ({run.status.reason})" if run.status.reason else ""


def _name(look: Look, looks: Sequence[Look]) -> str:
    """The name of the folder, or its path if several folders have that name."""
    names = [other.folder.resolve().name for other in looks]
    name = look.folder.resolve().name
    return name if names.count(name) == 1 else str(look.folder)
