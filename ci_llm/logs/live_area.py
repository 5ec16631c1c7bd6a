"""What the live area of a terminal shows: bars, speed and the losses of the agents, made to fit its width.

score        200/400   50%  ━━━━━━━━━━━━━━━━━━━━━━━━━━━                           0:00:04 left
step       1204/4000   30%  ━━━━━━━━━━━━━━━━                                      0:12:31 left
epoch 1.20  3.71 steps/s  12.4k tokens/s  lr 9.40e-04  0:05:25 so far
loss 1.234  agent0 1.201  agent1 1.250  agent2 1.233  agent3 1.252
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ci_llm.core.work import Work
from ci_llm.logs.progress import Position, Speed, finite, left_of, mean_of, means

SMOOTHED_STEPS: Final = 10  # a loss is shown as the mean of so many steps, else it could not be read
MOST_LOSS_LINES: Final = 2
GAP: Final = Text("  ")


class View:
    """What is known of a run, and how it looks now.

    One thread updates it while another draws it, without a lock: what is updated is replaced, never changed.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._position: Position | None = None
        self._losses: tuple[list[str], tuple[Sequence[float], ...]] = [], ()  # names of the agents, [steps][K]
        self._works: tuple[Work, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return self._position is None and not self._works

    def take_position(self, position: Position | None) -> None:
        """Take where the run stands; None: it has come to its end."""
        self._position = position
        if position is not None and position.losses:
            names, steps = self._losses
            before = steps if position.names == names else ()
            self._losses = position.names, (*before, position.losses)[-SMOOTHED_STEPS:]

    def take_work(self, work: Work) -> None:
        """Take work that has begun, advanced or ended."""
        if work.ended:
            self._works = tuple(other for other in self._works if other is not work)
        elif not any(other is work for other in self._works):
            self._works = (*self._works, work)

    def draw(self, width: int) -> RenderableType:
        """All of it, in lines of at most `width` columns."""
        position, works = self._position, self._works
        bars = _bars(width)
        for work in works:
            _add_work(bars, work, width)
        if position is None:
            return bars
        left = self._speed.left(position.total)
        _add_bar(bars, "step", position.step, position.total, left, width)
        lines = [_fitting(_figures(position, self._speed), width)]
        names, losses = self._losses
        if losses:
            lines += losses_in(means(losses), width, names)
        return Group(bars, *lines)


def _bars(width: int) -> Table:
    """A line for each: name, done/total, percent, bar and time left; in a narrow terminal without the bar."""
    columns = [Column(), Column(justify="right"), Column(justify="right"), *([Column(ratio=1)] * _has_room(width))]
    return Table.grid(*columns, Column(justify="right"), padding=(0, 2, 0, 0), expand=_has_room(width))


def _has_room(width: int) -> bool:
    return width >= 48


def _add_work(bars: Table, work: Work, width: int) -> None:
    seconds = time.monotonic() - work.began_at
    left = left_of(work.total - work.done, work.done, seconds)
    _add_bar(bars, work.what, work.done, work.total, left, width)


def _add_bar(bars: Table, name: str, done: int, total: int, left: timedelta | None, width: int) -> None:
    share, room = done / max(total, 1), _has_room(width)
    bar = [ProgressBar(total=1.0, completed=share, complete_style="cyan", finished_style="green")] * room
    until = "" if left is None else f"{left} left" if room else f"{left}"
    bars.add_row(Text(name, style="bold"), f"{done}/{total}", f"{share:.0%}", *bar, until)


def _figures(position: Position, speed: Speed) -> list[Text]:
    """Epoch, speed and so on, the most important first."""
    parts = [f"epoch {position.epoch:.2f}"]
    if (rates := speed.rates()) is not None:
        parts += [f"{rates[0]:.3g} steps/s", f"{_short(rates[1])} tokens/s"]
    if position.learning_rate is not None:
        parts.append(f"lr {position.learning_rate:.2e}")
    return [*map(Text, parts), Text(f"{speed.elapsed()} so far")]


def losses_in(losses: Sequence[float], width: int, names: Sequence[str]) -> list[Text]:
    """The mean over the agents and the loss of each, in columns; of more agents than fit, mean and range."""
    mean = Text().append(f"loss {_loss(mean_of(losses))}", style="bold")
    in_full, short = _cells(names, losses), _cells([name.removeprefix("agent") for name in names], losses)
    if _fits(line := GAP.join([mean, *in_full]), width):
        return [line]
    for cells in (in_full, short):
        per_line = (width + len(GAP)) // (max(map(len, cells)) + len(GAP))
        if per_line > 0 and (count := -(-len(cells) // per_line)) <= MOST_LOSS_LINES:
            per_line = -(-len(cells) // count)
            rows = [GAP.join(cells[start : start + per_line]) for start in range(0, len(cells), per_line)]
            return [_fitting([mean, *_range(losses, names)], width), *rows]
    return [_fitting([mean, *_range(losses, names)], width)]


def _range(losses: Sequence[float], names: Sequence[str]) -> list[Text]:
    known, parts = finite(losses), []
    if without := len(losses) - len(known):
        parts.append(Text().append(f"not finite: {without} of {len(losses)}", style="bold red"))
    for word, loss in (("lowest", min(known)), ("highest", max(known))) if known else ():
        cell = Text().append(f"{word} ", style="dim").append(_loss(loss))
        parts.append(cell.append(f" {names[losses.index(loss)]}", style="dim"))
    return parts


def _fitting(parts: Sequence[Text], width: int) -> Text:
    """As many of the parts as fit into a line."""
    line = parts[0]
    for part in parts[1:]:
        if _fits(longer := GAP.join([line, part]), width):
            line = longer
    return line


def _fits(line: Text, width: int) -> bool:
    return line.cell_len <= width


def _cells(names: Sequence[str], losses: Sequence[float]) -> list[Text]:
    """`agent0 1.234` for each agent, all of one width."""
    widest = max(map(len, names))
    return [
        Text().append(f"{name:>{widest}} ", style="dim").append(_loss(loss), style="" if finite([loss]) else "bold red")
        for name, loss in zip(names, losses, strict=True)
    ]


def _loss(loss: float) -> str:
    """At least five columns, so that lines do not jump from step to step."""
    return f"{loss:>5.3f}" if 0.001 <= abs(loss) < 1000 or loss == 0 else f"{loss:>5.2g}"


def _short(number: float) -> str:
    """With three digits: 719, 12.4k, 1.2M."""
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g}"
