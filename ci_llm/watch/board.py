"""Runs drawn for a terminal: panels side by side, or a table with a line per run where there is no room for panels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ci_llm.cluster.slurm import QueuedJob
from ci_llm.watch.curve import draw_curve
from ci_llm.watch.reading import Reading
from ci_llm.watch.scene import Absent, Look
from ci_llm.watch.words import losses, progress, scores, speed, time_left, whereabouts

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
