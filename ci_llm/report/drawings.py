"""Curves as small plots, laid out for the template that draws them. Colours are names in the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ci_llm.core.scores import METRICS, Measures
from ci_llm.report.facts import Metrics, Points

#: The size of a plot, and its frame, in CSS pixels at its full size; a page scales it.
WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 430, 24, 226
#: The most points of a curve: as many as can be told apart; more would only make the page large.
MOST_POINTS: Final = 400
#: The number of colours for agents in the style sheet.
NUM_COLOURS: Final = 8
_MARKS: Final = 5

#: (title, key of agent {}, keys of lines that are about all agents, unit); the other {} are fields of `Measures`.
_CURVES: Final[Sequence[tuple[str, str, Mapping[str, str], str]]] = (
    ("Training loss", "train/{}/loss", {"mean": "train/task_loss"}, "{trained}"),
    ("Held-out loss", "eval/{}/nll", {"crowd": "eval/crowd/nll"}, "{loss}"),
    ("Held-out {right}", "eval/{}/exact_match", {"crowd": "eval/crowd/exact_match"}, "share of rows"),
    ("Gradient norm before clipping", "train/{}/grad_norm", {}, "norm"),
    ("Learning rate", "", {"learning rate": "train/learning_rate"}, ""),
    ("Speed", "", {"tokens/s": "tokens_per_s"}, "tokens per second"),
)


@dataclass(frozen=True)
class Plot:
    """A plot: places are in pixels from its upper left corner.

    Attributes:
        unit, across: the quantities of the two axes.
        paths: name, colour and SVG path of every curve.
        legend: names with their colours.
        columns, rows: places and labels of the marks of the two axes.
        dotted: places of dotted vertical lines.
    """

    title: str
    unit: str
    across: str
    paths: Sequence[tuple[str, str, str]]
    legend: Sequence[tuple[str, str]]
    columns: Sequence[tuple[float, str]]
    rows: Sequence[tuple[float, str]]
    dotted: Sequence[float] = ()


def lay_out(
    title: str,
    curves: Mapping[str, Points],
    unit: str = "",
    across: str = "optimizer step",
    *,
    marks: Mapping[float, str] | None = None,
    dotted: Iterable[float] = (),
) -> Plot:
    """A plot of curves; a value that is not finite makes a gap, and a point alone is a dot.

    Args:
        curves: points by the name of the curve; agents get a colour each, and other names that of the crowd.
        marks: labels of the horizontal axis; by default of whole numbers.
        dotted: where dotted vertical lines stand.
    """
    known = {name: thinned(points) for name, points in curves.items() if points}
    first, last = _around(x for points in known.values() for x, _ in points)
    low, high = _around(y for points in known.values() for _, y in points)

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(BOTTOM + (TOP - BOTTOM) * (value - low) / (high - low), 1)

    agents = [name for name in known if name != "crowd" and name != "mean"]
    colours = {name: f"agent{agents.index(name) % NUM_COLOURS}" if name in agents else "crowd" for name in known}
    legend = colours
    if len(agents) > NUM_COLOURS:  # more than colours: one entry for all
        legend = {f"{len(agents)} agents": "agent0"} | {name: colours[name] for name in known if name not in agents}
    if marks is None:
        marks = {value: f"{value:,.0f}" for value in round_values(first, last, least=1)}
    return Plot(
        title,
        unit,
        across,
        [(name, colours[name], _path([(x(at), y(value)) for at, value in known[name]])) for name in known],
        [*legend.items()] if len(legend) > 1 else [],  # a single line needs no legend
        [(x(at), label) for at, label in marks.items()],
        [(y(value), f"{value:.6g}") for value in round_values(low, high)],
        [x(at) for at in dotted if first <= at <= last],
    )


def plots_of(
    metrics: Metrics, resumed: Sequence[int] = (), names: Mapping[str, str] | None = None, words: Measures | None = None
) -> list[Plot]:
    """Every curve that the run has left, agents beside the crowd.

    Args:
        resumed: steps after which a later attempt continued; a dotted line stands at each.
        names: the names that people gave the agents, by the names in the metrics.
        words: the words of the objective.
    """
    names, words, plots = names or {}, words or Measures(), []
    named = [(METRICS[name].told, f"eval/{{}}/{name}", {"crowd": f"eval/crowd/{name}"}, "") for name in words.metrics]
    for title, agent_key, together, unit in (*_CURVES[:3], *named, *_CURVES[3:]):
        title, unit = (each.format(**vars(words)) for each in (title, unit))
        keys = {names.get(name, name): agent_key.format(name) for name in metrics.agents} if agent_key else {}
        curves = {name: metrics.curve(key) for name, key in {**keys, **together}.items()}
        if any(curves.values()):
            plots.append(lay_out(title, curves, unit, dotted=[step + 0.5 for step in resumed]))
    return plots


def thinned(points: Points) -> Points:
    """About `MOST_POINTS` points at most; the lowest and the highest of each stretch stay, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: Points = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return kept


def round_values(low: float, high: float, least: float = 0.0) -> list[float]:
    """A few round values from low to high, evenly spread.

    Args:
        least: the smallest distance between two of them.
    """
    power = 10 ** math.floor(math.log10((high - low) / _MARKS))
    step = max(least, next(digit * power for digit in (1, 2, 5, 10) if digit * power * _MARKS >= high - low))
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _around(values: Iterable[float]) -> tuple[float, float]:
    """The ends of an axis around the finite values, with a margin."""
    known = [value for value in values if math.isfinite(value)] or [1.0]
    low, high = min(known), max(known)
    rim = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
    return low - rim, high + rim


def _path(points: Sequence[tuple[float, float]]) -> str:
    path, pen = "", "M"
    for x, y in points:
        if math.isfinite(y):
            path += f"{pen}{x} {y}" + ("h0" if pen == "M" else "")  # a length of nothing draws a dot
        pen = "L" if math.isfinite(y) else "M"
    return path
