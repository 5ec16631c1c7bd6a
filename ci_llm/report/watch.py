"""The runs that `ci-llm watch` shows: which ones are meant, whether all have ended, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ci_llm.errors import BadInput
from ci_llm.report.status import Reading, lines, look_at, speed, time_left, way_on

_PATIENCE_S: Final = 120.0  # for a supervisor or a scheduler to launch a run again
_WORST_FIRST: Final = (1, 75, 3)


@dataclass(frozen=True)
class Absent:
    """A folder in which no run can be read now, and why, for people."""

    folder: Path
    why: str


Look: TypeAlias = Reading | Absent


def look_at_all(words: Sequence[str]) -> list[Look]:
    """A look at every run that the words of a call mean now; see `find_runs`."""
    return [*map(_look_at, find_runs(words))]


def have_ended(looks: Sequence[Look]) -> bool:
    """True if every run has ended and none will be started again."""
    return bool(looks) and all(map(_is_over, looks))


def exit_code(looks: Sequence[Look]) -> int:
    """The exit code of `ci-llm status`; of several runs the worst: failed, interrupted, running, completed."""
    codes = {look.status.exit_code if isinstance(look, Reading) else 3 for look in looks}
    return next((code for code in _WORST_FIRST if code in codes), 0)


def _is_over(look: Look) -> bool:
    if isinstance(look, Absent) or look.is_running:
        return False
    is_launched_again = look.status.status != "completed" and (look.is_supervised or look.slurm_job is not None)
    return not is_launched_again or look.heartbeat_age_s > _PATIENCE_S


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


def picture(looks: Sequence[Look], footer: str = "") -> Group:
    """A table of runs, and below it what asks for attention; of a single run all that `ci-llm status` tells.

    Args:
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
        notes = [look.why] if isinstance(look, Absent) else [_reason(look), *lines(look)]
    else:
        notes = [f"{_name(look, looks)}: {note}" for look in looks for note in _alarms(look)]
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


def _alarms(look: Look) -> list[str]:
    if isinstance(look, Absent):
        return [look.why]
    ended = "; ".join(filter(None, [_reason(look), way_on(look.status)]))
    warning = f"warning: {look.status.warning}" if look.status.warning else ""
    return [*filter(None, [ended, warning])]


def _reason(run: Reading) -> str:
    return f"{run.status.status} ({run.status.reason})" if run.status.reason else ""


def _name(look: Look, looks: Sequence[Look]) -> str:
    """The name of the folder, or its path if several folders have that name."""
    names = [other.folder.resolve().name for other in looks]
    name = look.folder.resolve().name
    return name if names.count(name) == 1 else str(look.folder)
