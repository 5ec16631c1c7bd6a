"""A study in lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ci_llm.simulate import closed_forms
from ci_llm.simulate.cluster import Cluster
from ci_llm.simulate.study import AIM, Line, Study

_SAID = {"lost steps": "lost", "saving": "saving", "start-up": "start"}


def show(study: Study, console: Console) -> None:
    """Print the study."""
    console.print(head(study.cluster), style="bold")
    console.print(_table("ways to save", study.lines, study.best, priced=study.cluster.price > 0))
    others = [study.lines[0], *study.what_if.values()]
    console.print(_table(f"{study.lines[0].name}, if it were otherwise", others, None, priced=study.cluster.price > 0))
    for line in conclusions(study):
        console.print(line, highlight=False)


def head(cluster: Cluster) -> str:
    """One line about the cluster."""
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    return (
        f"{nodes}, a failure every {duration(cluster.mtbf_s)} ({cluster.failures}),"
        f" {duration(cluster.work)} of work, {cluster.repeats} jobs each"
    )


def conclusions(study: Study) -> Iterator[str]:
    """What the tables say, in sentences."""
    cluster, own, best = study.cluster, study.lines[0], study.best
    yield f"best: {best.name}, goodput {percent(best.goodput)}; Daly's formula predicts {percent(study.predicted)}"
    recovery_s = closed_forms.recovery_s(cluster)
    yield (
        f"bound: {percent(study.bound)}. A failure every {duration(cluster.mtbf_s)} costs {duration(recovery_s)}"
        " until the first step, however often the job saves"
    )
    if own.goodput < AIM and study.longest_recovery_s < recovery_s:
        yield (
            f"{percent(AIM)} would need a recovery of at most {duration(study.longest_recovery_s)}"
            if study.longest_recovery_s > 0
            else f"{percent(AIM)} is out of reach, however short the recovery: saves, preemptions and limits cost more"
        )
    if own.endings:
        yield f"a person is called {own.endings:.3g} times per job: the limits are max_retries and max_requeues"
    if not own.completed:
        yield "not all jobs end: they make too little progress between failures"


def _table(title: str, lines: Sequence[Line], best: Line | None, *, priced: bool) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "interval", "goodput", "±", "lost", "saving", "start", "waiting", "attempts", "hours"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    if priced:
        table.add_column("cost", justify="right", no_wrap=True)
    for line in lines:
        waiting = sum(line.shares[kind] for kind in ("unnoticed", "queue", "pause", "person"))
        table.add_row(
            line.name,
            duration(line.interval_s),
            percent(line.goodput),
            "" if line.spread is None else f"{100 * line.spread:.2f}",
            *(percent(line.shares[kind]) for kind in _SAID),
            percent(waiting),
            f"{line.attempts:.0f}",
            f"{line.elapsed_s / 3600:.1f}",
            *([f"{line.cost:,.0f}"] if priced else []),
            style="bold" if line is best else None,
        )
    return table


def percent(share: float) -> str:
    """0.9912 as 99.12 %."""
    return f"{100 * share:.2f} %"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
