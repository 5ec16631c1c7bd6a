"""A study of one cluster: the goodput of ways to save, the best interval, and what else could change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ci_llm.core.quantities import duration
from tools.simulate import model
from tools.simulate.model import Cluster
from tools.simulate.world import SPENT, Story, simulate

#: Saves are tried at these multiples of the interval that Daly's formula names for all that a save costs.
AROUND: Final = (1 / 3, 1 / 1.5, 1, 1.5, 3, 20)
#: What many trainers do, for comparison.
USUAL_S: Final = 300.0
#: Goodput that is asked for.
AIM: Final = 0.99
#: Student's t, 95 %, two-sided, by degrees of freedom from 1 on.
_STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_SHARES: Final = ("lost steps", *SPENT[1:])


@dataclass(frozen=True)
class Line:
    """Some jobs that differ in their failures only.

    Attributes:
        goodput: mean share of the time that is work.
        spread: half the width of its 95 % interval; None of a single job.
        shares: what the rest of the time went into, as shares of it.
        lost_s, elapsed_s: mean seconds of a job.
        completed: all jobs came to their end in a sensible time.
        endings: calls for a person, per job.
    """

    name: str
    goodput: float
    spread: float | None
    shares: Mapping[str, float]
    attempts: float
    lost_s: float
    elapsed_s: float
    completed: bool
    endings: float


@dataclass(frozen=True)
class Study:
    """The result of `python -m tools.simulate`.

    Attributes:
        lines: the ways to save; the cluster's own first.
        best: the line with the highest goodput.
        what_if: goodput of the cluster's own way if one thing were another, by that thing.
        predicted: Daly's goodput at the best interval.
        bound: what no way to save can pass.
        longest_recovery_s: mean recovery that would still reach AIM; negative if none does.
    """

    cluster: Cluster
    lines: Sequence[Line]
    best: Line
    what_if: Mapping[str, Line]
    predicted: float
    bound: float
    longest_recovery_s: float

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "cluster": self.cluster.model_dump(),
            "mtbf_s": self.cluster.mtbf_s,
            "lines": [asdict(line) for line in self.lines],
            "best": asdict(self.best),
            "what_if": {name: asdict(line) for name, line in self.what_if.items()},
            "daly_goodput": self.predicted,
            "bound": self.bound,
            "longest_recovery_s": self.longest_recovery_s,
        }


def study(cluster: Cluster) -> Study:
    """Simulate the ways to save, and what would change if the cluster were another."""
    own = line(cluster, _name(cluster.save_interval))
    cost_s = model.save_cost_s(cluster)
    centre_s = max(model.best_interval_s(cost_s, cluster.mtbf_s), cluster.step)
    tried = sorted({round_s(max(centre_s * factor, cluster.step)) for factor in AROUND} | {USUAL_S})
    tried = [each for each in tried if each != cluster.save_interval]
    lines = [own, *(line(cluster.but(save_interval=each), _name(each)) for each in tried)]
    return Study(
        cluster,
        lines,
        max(lines, key=lambda one: one.goodput),
        {name: line(other, name) for name, other in _others(cluster)},
        model.best_goodput(cluster),
        model.bound(cluster),
        model.longest_recovery_s(cluster, AIM),
    )


def line(cluster: Cluster, name: str) -> Line:
    """Some simulated jobs, `cluster.repeats` of them. The failures of the n-th are the same in every line."""
    return summary([simulate(cluster, repeat) for repeat in range(cluster.repeats)], name)


def summary(stories: Sequence[Story], name: str) -> Line:
    """Means over jobs."""
    elapsed_s = fmean(story.elapsed_s for story in stories)
    seconds = {kind: fmean(story.seconds[kind] for story in stories) for kind in SPENT}
    seconds["lost steps"] = fmean(story.lost_s for story in stories)  # type: ignore[index]
    return Line(
        name=name,
        goodput=fmean(story.goodput for story in stories),
        spread=_spread([story.goodput for story in stories]),
        shares={kind: seconds[kind] / elapsed_s for kind in _SHARES},  # type: ignore[index]
        attempts=fmean(story.attempts for story in stories),
        lost_s=seconds["lost steps"],  # type: ignore[index]
        elapsed_s=elapsed_s,
        completed=all(story.completed for story in stories),
        endings=fmean(len(story.endings) for story in stories),
    )


def round_s(seconds: float) -> float:
    """To two digits, as a person would write it."""
    return float(f"{seconds:.2g}")


def _others(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    yield (
        "failures twice as often",
        cluster.but(
            node_mtbf=cluster.node_mtbf / 2, job_mtbf=None if cluster.job_mtbf is None else cluster.job_mtbf / 2
        ),
    )
    yield "half the restart time", cluster.but(restart=cluster.restart / 2)
    yield "no wait in the queue", cluster.but(queue=0.0)
    yield "saves that slow nothing down", cluster.but(slowdown=0.0)
    yield "storage ten times slower", cluster.but(storage_mb_per_s=cluster.storage_mb_per_s / 10)
    yield "checkpoints ten times larger", cluster.but(state_mb=cluster.state_mb * 10)


def _name(interval_s: float) -> str:
    return f"every {interval_s:g} s"


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    t = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 1.96
    return t * stdev(values) / math.sqrt(len(values))


_SAID = {"lost steps": "lost", "saving": "saving", "start-up": "start"}


def show(study: Study, console: Console) -> None:
    """Print the study."""
    console.print(head(study.cluster), style="bold")
    console.print(_table("ways to save", study.lines, study.best))
    others = [study.lines[0], *study.what_if.values()]
    console.print(_table(f"{study.lines[0].name}, if it were otherwise", others, None))
    for line in conclusions(study):
        console.print(line, highlight=False)


def head(cluster: Cluster) -> str:
    """One line about the cluster."""
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    return (
        f"{nodes}, a failure every {duration(cluster.mtbf_s)},"
        f" {duration(cluster.work)} of work, {cluster.repeats} jobs each"
    )


def conclusions(study: Study) -> Iterator[str]:
    """The content of the tables in sentences."""
    cluster, own, best = study.cluster, study.lines[0], study.best
    yield f"best: {best.name}, goodput {percent(best.goodput)}; Daly's formula predicts {percent(study.predicted)}"
    recovery_s = model.recovery_s(cluster)
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


def _table(title: str, lines: Sequence[Line], best: Line | None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "goodput", "±", "lost", "saving", "start", "waiting", "attempts", "hours"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for line in lines:
        waiting = sum(line.shares[kind] for kind in ("unnoticed", "queue", "pause", "person"))
        table.add_row(
            line.name,
            percent(line.goodput),
            "" if line.spread is None else f"{100 * line.spread:.2f}",
            *(percent(line.shares[kind]) for kind in _SAID),
            percent(waiting),
            f"{line.attempts:.0f}",
            f"{line.elapsed_s / 3600:.1f}",
            style="bold" if line is best else None,
        )
    return table


def percent(share: float) -> str:
    """0.9912 as 99.12 %."""
    return f"{100 * share:.2f} %"
