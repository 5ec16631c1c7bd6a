"""The drawings of a report. Colours are left to the page, which is light, dark or printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from ci_llm.report.attempts import Attempt, Span
from ci_llm.report.facts import Metrics, Points
from ci_llm.report.plot import Axis, Plot, legend
from ci_llm.report.scores import Score

#: Points a curve is drawn with: what the eye can tell apart, and what keeps a long run's page small.
MOST_POINTS: Final = 400
#: Attempts that a timeline can show one below the other.
MOST_LANES: Final = 24

#: Colours of agents that the style sheet has.
NUM_COLOURS: Final = 8
_WIDTH, _HEIGHT = 440, 270

#: Title, key of the agent {}, keys of what is of all agents together, unit.
_CURVES: Final[Sequence[tuple[str, str, Mapping[str, str], str]]] = (
    ("Training loss", "train/{}/loss", {"mean": "train/task_loss"}, "nats per token"),
    ("Held-out loss", "eval/{}/nll", {"crowd": "eval/crowd/nll"}, "nats per token"),
    ("Held-out exact match", "eval/{}/exact_match", {"crowd": "eval/crowd/exact_match"}, "share of rows"),
    ("Gradient norm before clipping", "train/{}/grad_norm", {}, "norm"),
    ("Learning rate", "", {"learning rate": "train/learning_rate"}, ""),
    ("Speed", "", {"tokens/s": "tokens_per_s"}, "tokens per second"),
)


def draw_curves(
    metrics: Metrics, resumed: Sequence[int] = (), names: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """(title, drawing) of every curve that the run has left, agents beside the crowd.

    Args:
        resumed: steps after which a later attempt went on; a dotted line stands at each.
        names: those that people gave the agents, by the names that metrics have.
    """
    drawings = []
    for title, agent_key, together, unit in _CURVES:
        keys = {name: agent_key.format(name) for name in metrics.agents} if agent_key else {}
        lines = {name: metrics.curve(key) for name, key in {**keys, **together}.items()}
        if any(lines.values()):
            drawings.append((title, _steps(title, lines, unit, resumed, names or {})))
    return drawings


def draw_lines(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, across: str, unit: str, log: bool = False
) -> str:
    """Any curves over a common axis, each with its name.

    Args:
        across: what the axis from left to right shows.
        unit: of the values.
        log: whether that axis is logarithmic.
    """
    colours = {name: _agent(number) for number, name in enumerate(lines)}
    plot = _plot(title, Axis.around((x for line in lines.values() for x, _ in line), across, log=log), lines, unit)
    for name, points in lines.items():
        plot.line(points, colours[name], name)
        for x, y in points:
            plot.dot(x, y, colours[name], name, radius=2.5)
    return _with_legend(colours, plot)


def draw_scores(scores: Sequence[Score]) -> str:
    """Exact match of everyone, with intervals."""
    places = {float(place): score for place, score in enumerate(reversed(scores))}
    right = min(1.0, 1.05 * max(score.high or score.exact_match for score in scores)) or 1.0
    names = {place: score.who for place, score in places.items()}
    plot = Plot(
        _WIDTH,
        60 + 26 * len(scores),
        "exact match with intervals",
        Axis(0, right, "exact match"),
        Axis(-0.6, len(scores) - 0.4, names=names),
    )
    for place, score in places.items():
        colour = "crowd" if score.who == "crowd" else "ink"
        label = f"{score.who}: {score.exact_match:.3f}"
        if score.low is not None and score.high is not None:
            plot.line([(score.low, place), (score.high, place)], colour, label, width=2.5)
        plot.dot(score.exact_match, place, colour, label)
    return plot.svg()


def draw_timeline(attempts: Sequence[Attempt]) -> str:
    """One lane for each of the last attempts, coloured by what its time went into."""
    lanes = {float(place): attempt for place, attempt in enumerate(reversed(attempts[-MOST_LANES:]))}
    begin = min(attempt.launched for attempt in lanes.values())
    scale, unit = _scale(max(attempt.ended for attempt in lanes.values()) - begin)
    end = max((span.end for attempt in lanes.values() for span in _merged(attempt)), default=begin + scale)
    plot = Plot(
        900,
        60 + 28 * len(lanes),
        "what the time of every attempt went into",
        Axis(0, 1.02 * (end - begin) / scale, f"{unit} since {datetime.fromtimestamp(begin):%Y-%m-%d %H:%M:%S}"),
        Axis(-0.6, len(lanes) - 0.4, names={place: f"attempt {attempt.number}" for place, attempt in lanes.items()}),
    )
    for place, attempt in lanes.items():
        for span in _merged(attempt):
            start, stop = ((each - begin) / scale for each in (span.start, span.end))
            label = f"{span.kind}: {stop - start:.3g} {unit}"
            plot.bar(start, stop, place, f"kind-{span.kind.replace(' ', '-')}", label, thickness=0.62)
    return plot.svg()


def thinned(points: Points) -> Points:
    """At most about `MOST_POINTS` points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: Points = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _steps(title: str, lines: Mapping[str, Points], unit: str, resumed: Sequence[int], names: Mapping[str, str]) -> str:
    """Curves over the steps of a run."""
    known = {name: thinned(points) for name, points in lines.items() if points}
    agents = [name for name in known if name.startswith("agent")]
    colours = {name: _agent(agents.index(name)) if name in agents else "crowd" for name in known}
    if not agents:
        colours = dict.fromkeys(known, _agent(0))
    steps = (step for points in known.values() for step, _ in points)
    plot = _plot(title, Axis.around(steps, "optimizer step", margin=0.02, whole=True), known, unit)
    for step in resumed[-MOST_LANES:]:
        if plot.across.low <= step <= plot.across.high:
            plot.mark(step + 0.5)
    for name, points in known.items():
        plot.line(points, colours[name], names.get(name, name), width=1.4 if name in agents else 2.4)
    if len(agents) > NUM_COLOURS:  # more than colours: one entry for all
        colours = {f"{len(agents)} agents": _agent(0)} | {name: colours[name] for name in known if name not in agents}
    return _with_legend({names.get(name, name): colour for name, colour in colours.items()}, plot)


def _plot(title: str, across: Axis, lines: Mapping[str, Sequence[tuple[float, float]]], unit: str) -> Plot:
    """A plot that has room for these lines."""
    return Plot(_WIDTH, _HEIGHT, title, across, Axis.around((y for line in lines.values() for _, y in line), unit))


def _with_legend(colours: Mapping[str, str], plot: Plot) -> str:
    """The plot below its legend, which a single line does not need."""
    return legend(colours) + plot.svg() if len(colours) > 1 else plot.svg()


def _agent(number: int) -> str:
    return f"agent{number % NUM_COLOURS}"


def _merged(attempt: Attempt) -> list[Span]:
    """Its time, neighbours of one kind in one piece, without that after its end."""
    merged: list[Span] = []
    for span in attempt.spans:
        if span.kind == "no process":
            continue
        if merged and merged[-1].kind == span.kind:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return merged


def _scale(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
