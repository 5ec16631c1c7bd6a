"""What a simulation is for: goodput and cost of ways to save, the best interval, and what else could change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any, Final, Literal

import numpy as np

from ci_llm.checkpoints.interval import best_interval_s
from ci_llm.simulate import closed_forms
from ci_llm.simulate.cluster import HOUR, Cluster
from ci_llm.simulate.world import SPENT, Story, simulate

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
        interval_s: median seconds between saves.
        goodput: mean share of the time that is work.
        spread: half the width of its 95 % interval; None of a single job.
        shares: what the rest of the time went into, as shares of it.
        lost_s, elapsed_s: mean seconds of a job.
        cost: mean of a job, in the unit of `price`.
        completed: whether all jobs came to their end in a sensible time.
        endings: calls for a person, per job.
    """

    name: str
    interval_s: float
    goodput: float
    spread: float | None
    shares: Mapping[str, float]
    attempts: float
    lost_s: float
    elapsed_s: float
    cost: float
    completed: bool
    endings: float


@dataclass(frozen=True)
class Study:
    """What `ci-llm simulate` tells.

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
    cost_s = closed_forms.save_cost_s(cluster)
    centre_s = max(best_interval_s(cost_s, cluster.mtbf_s), cluster.step)
    tried = sorted({round_s(max(centre_s * factor, cluster.step)) for factor in AROUND} | {USUAL_S})
    tried = [each for each in tried if each != cluster.save_interval]
    lines = [own, *(line(cluster.but(save_interval=each), _name(each)) for each in tried)]
    return Study(
        cluster,
        lines,
        max(lines, key=lambda one: one.goodput),
        {name: line(other, name) for name, other in _others(cluster)},
        closed_forms.best_goodput(cluster),
        closed_forms.bound(cluster),
        closed_forms.longest_recovery_s(cluster, AIM),
    )


def line(cluster: Cluster, name: str) -> Line:
    """Some simulated jobs, `cluster.repeats` of them. The failures of the n-th are the same in every line."""
    return summary([simulate(cluster, repeat) for repeat in range(cluster.repeats)], cluster, name)


def summary(stories: Sequence[Story], cluster: Cluster, name: str) -> Line:
    """Means over jobs."""
    elapsed_s = fmean(story.elapsed_s for story in stories)
    seconds = {kind: fmean(story.seconds[kind] for story in stories) for kind in SPENT}
    seconds["lost steps"] = fmean(story.lost_s for story in stories)  # type: ignore[index]
    return Line(
        name=name,
        interval_s=median([each for story in stories for each in story.intervals] or [math.nan]),
        goodput=fmean(story.goodput for story in stories),
        spread=_spread([story.goodput for story in stories]),
        shares={kind: seconds[kind] / elapsed_s for kind in _SHARES},  # type: ignore[index]
        attempts=fmean(story.attempts for story in stories),
        lost_s=seconds["lost steps"],  # type: ignore[index]
        elapsed_s=elapsed_s,
        cost=fmean(story.paid_s for story in stories) / HOUR * cluster.nodes * cluster.price,
        completed=all(story.completed for story in stories),
        endings=fmean(len(story.endings) for story in stories),
    )


def goodput_by_nodes(
    cluster: Cluster, largest: int, ways: Sequence[float | Literal["auto"]]
) -> dict[str, list[tuple[int, float]]]:
    """(nodes, goodput) of ways to save, for 1 to `largest` nodes."""
    numbers = sorted({round(number) for number in np.geomspace(1, largest, 9)})
    found: dict[str, list[tuple[int, float]]] = {_name(way): [] for way in ways}
    for number in numbers:
        # The whole job fails more often with more nodes; its own MTBF would hide that.
        node_mtbf = cluster.mtbf_s * cluster.nodes if cluster.job_mtbf else cluster.node_mtbf
        fleet = cluster.but(nodes=number, job_mtbf=None, node_mtbf=min(node_mtbf, 1e9))
        for way in ways:
            found[_name(way)].append((number, line(fleet.but(save_interval=way), "").goodput))
    return found


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


def _name(interval: float | Literal["auto"]) -> str:
    return "auto (ours)" if interval == "auto" else f"every {interval:g} s"


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    t = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 1.96
    return t * stdev(values) / math.sqrt(len(values))
