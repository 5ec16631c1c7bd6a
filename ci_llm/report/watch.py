"""The runs that `ci-llm watch` shows: which ones are meant, whether all have ended, and how they are drawn.

They share a table, and a drawing of their loss curves.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ci_llm.cluster.slurm import QueuedJob, query_queue
from ci_llm.core.curves import HEIGHT, LETTERS, draw_curves
from ci_llm.core.scores import measures_of
from ci_llm.errors import BadInput
from ci_llm.report.status import Reading, RunReader, find_runs, lines, speed, time_left, way_on

Query = Callable[[Sequence[str]], dict[str, QueuedJob] | None]

_INTERVAL_S: Final = 10.0  # a controller serves the whole cluster


class JobQueue:
    """The last answer of squeue about some jobs; empty where squeue is not installed.

    A thread asks it, because its answer may take longer than the time between two pictures.

    Args:
        query: asks for jobs by id.
        is_there: whether squeue can be asked.
    """

    def __init__(self, query: Query = query_queue, is_there: bool | None = None) -> None:
        self._query = query
        self._is_there = shutil.which("squeue") is not None if is_there is None else is_there
        self._ids: tuple[str, ...] = ()
        self._asked_at = -_INTERVAL_S
        self._thread: threading.Thread | None = None
        self._answer: tuple[frozenset[str], Mapping[str, QueuedJob]] = (frozenset(), {})

    def look(self, ids: Sequence[str], *, wait: bool = False) -> Mapping[str, QueuedJob]:
        """The last answer; asks again for these jobs if it is old.

        Args:
            wait: until the question under way is answered.
        """
        if ids and self._is_there and self._is_due(tuple(ids)):
            self._ids, self._asked_at = tuple(ids), time.monotonic()
            self._thread = threading.Thread(target=self._ask, args=(self._ids,), name="ci_llm squeue", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        return self._answer[1]

    def has_left(self, job: str | None) -> bool:
        """Whether a job is known to have left the queue; true without a job or a queue as well."""
        known, listed = self._answer
        return job is None or not self._is_there or (job in known and job not in listed)

    def _is_due(self, ids: tuple[str, ...]) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        return ids != self._ids or time.monotonic() - self._asked_at >= _INTERVAL_S

    def _ask(self, ids: tuple[str, ...]) -> None:
        found = self._query(ids)
        if found is not None:  # else the last answer holds: a controller may be busy, or away
            self._answer = frozenset(ids), found


_PATIENCE_S: Final = 120.0  # for a supervisor to launch a run again, and for a folder that has gone
_WORST_FIRST: Final = (1, 75, 3)


@dataclass(frozen=True)
class Absent:
    """A folder in which no run can be read now.

    Attributes:
        why: the reason, for people.
        gone_s: seconds since a run was seen there; None if none was.
    """

    folder: Path
    why: str
    gone_s: float | None = None


Look: TypeAlias = Reading | Absent


class Scene:
    """Runs that begin, train and end.

    Args:
        words: folders of runs, folders that hold runs, or patterns.
        clock: unix seconds.

    Attributes:
        looks: at each run, as it was at the last `look`.
        jobs: what squeue says about their jobs, by id.
    """

    def __init__(
        self, words: Sequence[str], queue: JobQueue | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._words, self._queue, self._clock = words, queue or JobQueue(), clock
        self._readers: dict[Path, RunReader] = {}
        self._seen_at: dict[Path, float] = {}  # of each folder in which a run was there
        self.looks: list[Look] = []
        self.jobs: Mapping[str, QueuedJob] = {}

    def look(self, *, wait_for_squeue: bool = False) -> None:
        """Look at every run; a run that was seen stays, even if its folder has gone."""
        folders = dict.fromkeys([*find_runs(self._words), *self._seen_at])
        self.looks = [self._look_at(folder) for folder in folders]
        unfinished = {run.slurm_job for run in self._runs() if run.slurm_job and run.status.status != "completed"}
        self.jobs = self._queue.look(sorted(unfinished), wait=wait_for_squeue)

    def has_ended(self) -> bool:
        """Whether every run has ended and none will be started again."""
        return bool(self.looks) and all(map(self._is_over, self.looks))

    def exit_code(self) -> int:
        """The exit code of `ci-llm status`; of several runs the worst: failed, interrupted, running, completed."""
        codes = {look.status.exit_code if isinstance(look, Reading) else 3 for look in self.looks}
        codes |= {1 for look in self.looks if isinstance(look, Absent) and look.gone_s is not None}
        return next((code for code in _WORST_FIRST if code in codes), 0)

    def _runs(self) -> list[Reading]:
        return [look for look in self.looks if isinstance(look, Reading)]

    def _look_at(self, folder: Path) -> Look:
        now = self._clock()
        try:
            found = self._readers.setdefault(folder, RunReader(folder)).look()
        except (BadInput, OSError) as error:
            if (seen_at := self._seen_at.get(folder)) is not None:
                return Absent(folder, "the run is not here any more", now - seen_at)
            is_there = exists(folder / "status.json")
            return Absent(folder, str(error) if is_there else "no run has begun here yet")
        self._seen_at[folder] = now
        return found

    def _is_over(self, look: Look) -> bool:
        if isinstance(look, Absent):
            return look.gone_s is not None and look.gone_s > _PATIENCE_S
        if look.status.status == "completed":
            return True
        if look.is_running or not self._queue.has_left(look.slurm_job):  # its job may be waiting to run it again
            return False
        return not look.is_supervised or look.heartbeat_age_s > _PATIENCE_S


_COLUMNS: Final = ("run", "state", "step", "done", "loss", "crowd", "speed", "left")
_NARROW: Final = ("run", "state", "step", "loss")  # on fewer than `_TABLE_WIDTH` columns
_TABLE_WIDTH: Final = 72
_AXIS_ROWS: Final = 3  # the title of the curve, and its axis
_LEAST_CURVE_ROWS: Final = 4
_MOST_CURVE_WIDTH: Final = 100
_STYLES: Final = {
    "running": "cyan",
    "completed": "green",
    "interrupted": "yellow",
    "failed": "red",
    "vanished": "red",
    "waiting": "dim",
}


@dataclass(frozen=True)
class Board:
    """A picture of some runs: a table, notes, and their loss curves in one drawing.

    Parts that do not fit the height of the terminal are left out: first the curves, last the table.

    Attributes:
        looks: at each run, in the order of the picture.
        jobs: what squeue says, by the id of the job.
        footer: a line below.
    """

    looks: Sequence[Look]
    jobs: Mapping[str, QueuedJob]
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = console.height - 1 - bool(self.footer) if console.is_terminal else 10**6
        for part in (self._table, self._notes, self._curve):
            shown = part(options, room)
            if shown is not None and (height := len(console.render_lines(shown, options))) <= room:
                yield shown
                room -= height
        if self.footer:
            yield Text(self.footer, style="dim")

    def _table(self, options: ConsoleOptions, room: int) -> RenderableType:
        columns = _COLUMNS if options.max_width >= _TABLE_WIDTH else _NARROW
        table = Table(box=None, pad_edge=False)
        if self._letters:
            table.add_column("", min_width=1)
        measured = {_crowd(look)[0] for look in self.looks if isinstance(look, Reading)} or {"nll"}
        titles = {"crowd": f"crowd {min(measured)}" if len(measured) == 1 else "crowd"}
        for name in columns:
            table.add_column(
                titles.get(name, name), no_wrap=True, justify="left" if name in ("run", "state") else "right"
            )
        rows = room - 1  # for the head
        shown = self.looks if len(self.looks) <= rows else self.looks[: max(1, rows - 1)]
        for place, look in enumerate(shown):
            cells = _cells(look) | {"run": Text(self._name(look))}
            if isinstance(look, Reading) and (value := _crowd(look)[1]):
                cells["crowd"] = value if len(measured) == 1 else " ".join(_crowd(look))
            letter = [self._letters[place : place + 1]] if self._letters else []
            table.add_row(*letter, *(cells.get(name, "") for name in columns))
        if len(shown) == len(self.looks):
            return table
        hidden = [_state(look) for look in self.looks[len(shown) :]]
        counts = ", ".join(f"{hidden.count(state)} {state}" for state in dict.fromkeys(hidden))
        return Group(table, Text(f"and {len(hidden)} more: {counts}", style="dim"))

    def _notes(self, options: ConsoleOptions, room: int) -> RenderableType | None:
        """The lines of `ci-llm status` about a single run; of several runs those that ask for attention."""
        if len(self.looks) == 1:
            look = self.looks[0]
            told = _absence(look) if isinstance(look, Absent) else [_reason(look), *lines(look, self._job(look))]
        else:
            told = [f"{self._name(look)}: {note}" for look in self.looks for note in self._alarms(look)]
        notes = [Text(note, style="yellow" if "warning: " in note else "") for note in told if note]
        return Group(*notes) if notes else None

    def _alarms(self, look: Look) -> list[str]:
        if isinstance(look, Absent):
            return _absence(look)
        ended = "; ".join(filter(None, [_reason(look), way_on(look.status)]))
        job = self._job(look) if look.slurm_job in self.jobs else ""
        warning = f"warning: {look.status.warning}" if look.status.warning else ""
        return [*filter(None, [ended, job, warning])]

    def _curve(self, options: ConsoleOptions, room: int) -> RenderableType | None:
        if room < _LEAST_CURVE_ROWS + _AXIS_ROWS:
            return None
        points = [[(p.step, p.loss) for p in look.points] if isinstance(look, Reading) else [] for look in self.looks]
        drawn = draw_curves(
            dict(zip(self._letters or "o", points, strict=False)),
            min(options.max_width, _MOST_CURVE_WIDTH),
            min(HEIGHT, room - _AXIS_ROWS),
            ascii_only=options.ascii_only,
        )
        words = (measures_of(look.status.objective) for look in self.looks if isinstance(look, Reading))
        units = " and ".join(dict.fromkeys(own.trained for own in words))
        return Text(f"training loss, {units} by optimizer step\n{drawn}", no_wrap=True) if drawn else None

    @property
    def _letters(self) -> str:
        """The letters that draw the curves of several runs; runs beyond the alphabet have no letter and no curve."""
        return LETTERS[: len(self.looks)] if len(self.looks) > 1 else ""

    def _job(self, run: Reading) -> str:
        """A line about the run's SLURM job; empty without one."""
        if run.slurm_job is None or run.slurm_job not in self.jobs:
            return f"SLURM job {run.slurm_job}" if run.slurm_job else ""
        found = self.jobs[run.slurm_job]
        waits = f" ({found.reason})" if found.state == "PENDING" else f", {found.time_left} left"
        return f"SLURM job {run.slurm_job} {found.state}{waits}"

    def _name(self, look: Look) -> str:
        """The name of the folder, or its path if several folders have that name."""
        name = look.folder.resolve().name
        twins = sum(other.folder.resolve().name == name for other in self.looks)
        return name if twins == 1 else str(look.folder)


def _cells(look: Look) -> dict[str, str | Text]:
    """The cells of a run in the table, by column."""
    state = _state(look)
    shown = Text(state, style=_STYLES[state])
    if isinstance(look, Absent):
        return {"state": shown}
    step, total = look.status.step, look.status.total_steps
    return {
        "state": shown,
        "step": f"{step}/{total}" if total else f"{step}",
        "done": f"{step / total:.0%}" if total else "",
        "loss": f"{look.loss:.4g}" if look.losses else "",
        "speed": speed(look).split(",")[0] if look.is_running else "",
        "left": time_left(look).removesuffix(" left"),
    }


def _crowd(look: Reading) -> tuple[str, str]:
    """(the measure that judges the crowd, its value); for next tokens, free text and numbers it is the loss."""
    words, found = measures_of(look.status.objective), look.scores
    by_loss = words.told == "exact match" or (look.status.judged_by == "nll" and words.first == "exact_match")
    name = words.nll if by_loss else words.told
    if found is None:
        return name, ""
    value = found.crowd_metric if found.metric else found.crowd_exact_match
    value = found.crowd_nll if by_loss else value
    return name, "" if math.isnan(value) else f"{value:.4g}"


def _state(look: Look) -> str:
    return "waiting" if isinstance(look, Absent) else look.status.status


def _reason(run: Reading) -> str:
    return f"{run.status.status} ({run.status.reason})" if run.status.reason else ""


def _absence(look: Absent) -> list[str]:
    return [look.why, str(look.folder)]
