"""The runs that `ci-llm watch` shows, look by look: which are meant, whether all have ended, how they are drawn.

They are panels side by side, or lines of a table where there is no room for panels.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ci_llm.cluster.slurm import QueuedJob, query_queue
from ci_llm.core.text_curves import draw_curve
from ci_llm.errors import BadInput
from ci_llm.report.status import Reading, RunReader, find_runs, losses, progress, scores, speed, time_left, whereabouts

Query = Callable[[Sequence[str]], dict[str, QueuedJob] | None]

_INTERVAL_S: Final = 10.0  # a controller serves the whole cluster


class JobQueue:
    """What squeue said last about some jobs; nothing where squeue is not installed.

    It is asked in a thread, because its answer may take longer than a picture may.

    Args:
        query: asks for jobs by id.
        is_there: whether it can be asked.
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
        """Whether a job is known to be in the queue no more; also where there is no job, and no queue."""
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
        why: for people.
        gone_s: seconds since its run was there; None if none was.
    """

    folder: Path
    why: str
    gone_s: float | None = None


Look: TypeAlias = Reading | Absent


class Scene:
    """Runs that come, go on and end.

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
        """Look at every run; one that was there stays, even if its folder has gone."""
        folders = dict.fromkeys([*find_runs(self._words), *self._seen_at])
        self.looks = [self._look_at(folder) for folder in folders]
        unfinished = {run.slurm_job for run in self._runs() if run.slurm_job and run.status.status != "completed"}
        self.jobs = self._queue.look(sorted(unfinished), wait=wait_for_squeue)

    def has_ended(self) -> bool:
        """Whether every run has ended and none will be started again."""
        return bool(self.looks) and all(map(self._is_over, self.looks))

    def exit_code(self) -> int:
        """That of `ci-llm status`; of several runs the worst: failed, interrupted, running, completed."""
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


_PANEL_WIDTH: Final = 39  # two stand side by side on 80 columns
_TABLE_WIDTH: Final = 64  # below it, scores and the time left are left out
_CURVE_ROWS: Final = 6  # where no terminal limits them
_LEAST_CURVE_ROWS: Final = 3
_MOST_CURVE_ROWS: Final = 10
_FRAME: Final = 4  # columns of a panel's border and padding
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
    """One picture of some runs.

    Attributes:
        looks: at each run, in the order of the picture.
        jobs: what squeue says, by the id of the job.
        footer: a line below.
    """

    looks: Sequence[Look]
    jobs: Mapping[str, QueuedJob]
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = console.height - 1 - bool(self.footer) if console.is_terminal else None
        panels = self._panels(console, options, room)
        if room is None or len(self.looks) == 1 or len(console.render_lines(panels, options)) <= room:
            yield panels
        else:
            yield self._table(room, options.max_width)
        if self.footer:
            yield Text(self.footer, style="dim")

    def _panels(self, console: Console, options: ConsoleOptions, room: int | None) -> Table:
        """As many side by side as fit, those of one row equally high."""
        across = max(1, min(len(self.looks), options.max_width // _PANEL_WIDTH))
        width = options.max_width // across
        curve_rows = _curve_rows(room) if len(self.looks) <= across else _LEAST_CURVE_ROWS
        panels = [self._panel(look, width - _FRAME, curve_rows, ascii_only=options.ascii_only) for look in self.looks]
        grid = Table.grid(expand=True)
        for _ in range(across):
            grid.add_column(ratio=1)
        for first in range(0, len(panels), across):
            row = panels[first : first + across]
            height = max(len(console.render_lines(panel, options.update(width=width))) for panel in row)
            for panel in row:
                panel.height = height
            grid.add_row(*row)
        return grid

    def _panel(self, look: Look, width: int, curve_rows: int, *, ascii_only: bool) -> Panel:
        state = _state(look)
        title = Text.assemble((self._name(look), "bold"), "  ", (state, _STYLES[state]))
        content = _waiting(look) if isinstance(look, Absent) else self._content(look, width, curve_rows, ascii_only)
        return Panel(Group(*content), title=title, title_align="left", border_style=_STYLES[state])

    def _content(self, run: Reading, width: int, curve_rows: int, ascii_only: bool) -> Iterator[Text]:
        status, left = run.status, time_left(run)
        yield Text(progress(run) + (f"  {left}".rjust(width - len(progress(run))) if left else ""))
        if status.total_steps:
            yield _bar(status.step / status.total_steps, width, _STYLES[status.status], ascii_only=ascii_only)
        yield Text(speed(run) if run.is_running else status.reason or "")
        yield Text(losses(run, width))
        drawn = draw_curve([(point.step, point.loss) for point in run.points], width, curve_rows, ascii_only=ascii_only)
        yield Text("\n".join([*drawn, *[""] * (curve_rows - len(drawn))]), style="cyan", no_wrap=True)
        yield Text(scores(run, width))
        yield Text(whereabouts(run, width), style="dim")
        if run.slurm_job:
            yield Text(self._job(run.slurm_job), style="dim")
        if status.warning:
            yield Text(f"warning: {status.warning}", style="yellow")
        if status.next_command and not run.is_running:
            yield Text(f"go on with: {status.next_command}")

    def _job(self, job: str) -> str:
        if job not in self.jobs:
            return f"SLURM job {job}"
        found = self.jobs[job]
        waits = f" ({found.reason})" if found.state == "PENDING" else f", {found.time_left} left"
        return f"SLURM job {job} {found.state}{waits}"

    def _table(self, rows: int, width: int) -> RenderableType:
        table = Table(box=None, expand=True, pad_edge=False)
        table.add_column("run", no_wrap=True, min_width=12)
        names = ("state", "step", "loss", "crowd nll", "left")[: 5 if width >= _TABLE_WIDTH else 3]
        for name in names:
            table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
        rows -= 1  # for the head
        shown = self.looks if len(self.looks) <= rows else self.looks[: max(1, rows - 1)]
        for look in shown:
            table.add_row(self._name(look), *_cells(look, self.jobs)[: len(names)])
        if len(shown) == len(self.looks):
            return table
        hidden = [_state(look) for look in self.looks[len(shown) :]]
        counts = ", ".join(f"{hidden.count(state)} {state}" for state in dict.fromkeys(hidden))
        return Group(table, Text(f"and {len(hidden)} more: {counts}", style="dim"))

    def _name(self, look: Look) -> str:
        """The name of its folder; the path, where two have the same."""
        name = look.folder.resolve().name
        twins = sum(other.folder.resolve().name == name for other in self.looks)
        return name if twins == 1 else str(look.folder)


def _curve_rows(room: int | None) -> int:
    """Of a single row of panels: what the other lines of a panel leave."""
    return _CURVE_ROWS if room is None else min(_MOST_CURVE_ROWS, max(_LEAST_CURVE_ROWS, room - 12))


def _cells(look: Look, jobs: Mapping[str, QueuedJob]) -> list[str | Text]:
    """Of the table: state, step, loss, crowd nll, time left."""
    state = _state(look)
    shown = Text(state, style=_STYLES[state])
    if isinstance(look, Absent):
        return [shown, "", "", "", ""]
    if not look.is_running and look.slurm_job in jobs:
        shown.append(f" {jobs[look.slurm_job or ''].state}", style="dim")
    total = f"/{look.status.total_steps}" if look.status.total_steps else ""
    loss = f"{look.loss:.4g}" if look.losses and not math.isnan(look.loss) else ""
    nll = f"{look.scores.crowd_nll:.4g}" if look.scores else ""
    return [shown, f"{look.status.step}{total}", loss, nll, time_left(look).removesuffix(" left")]


def _bar(share: float, width: int, style: str, *, ascii_only: bool) -> Text:
    done, rest = ("#", "-") if ascii_only else ("━", "─")
    filled = round(min(share, 1.0) * width)
    return Text.assemble((done * filled, style), (rest * (width - filled), "dim"))


def _state(look: Look) -> str:
    return "waiting" if isinstance(look, Absent) else look.status.status


def _waiting(look: Absent) -> Iterator[Text]:
    yield Text(look.why)
    yield Text(str(look.folder), style="dim")
