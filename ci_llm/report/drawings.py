"""The drawings of a report: small plots as SVG. Fonts and colours come from the style sheet of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from html import escape
from itertools import groupby, pairwise
from typing import Final

from ci_llm.core.scores import METRICS, Measures
from ci_llm.report.facts import Attempt, Metrics, Points, Span
from ci_llm.report.scores import Score

#: The width of a character (roughly) and the height of a line, in CSS pixels at the full size of a plot.
_CHARACTER, _LINE = 6.7, 17.0
_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_SUPERSCRIPT: Final = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Axis:
    """An axis of a plot.

    Attributes:
        low, high: the ends of the axis.
        title: the quantity, or its unit.
        whole: whether only whole numbers are marked.
        names: words as marks, in place of numbers.
    """

    low: float
    high: float
    title: str = ""
    whole: bool = False
    names: Mapping[float, str] = field(default_factory=dict)

    @classmethod
    def around(cls, values: Iterable[float], title: str = "", *, margin: float = 0.05, whole: bool = False) -> Axis:
        """An axis around the finite values, with a margin at both ends, as a share of their range."""
        known = [value for value in values if math.isfinite(value)] or [1.0]
        low, high = min(known), max(known)
        rim = margin * (high - low) or 0.05 * abs(high) or 0.5
        return cls(low - rim, high + rim, title, whole)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def marks(self, most: int) -> tuple[dict[float, str], str]:
        """About `most` round values with their labels, and a power of ten that multiplies the labels."""
        if self.names:
            return dict(self.names), ""
        return _labelled(_round_values(self.low, self.high, most, whole=self.whole))


@dataclass
class Plot:
    """A plot that grows by what is added to it.

    Attributes:
        width, height: in CSS pixels at its full size; a page scales it.
        label: a description for screen readers.
    """

    width: float
    height: float
    label: str
    across: Axis
    up: Axis
    _parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._up_marks, power = self.up.marks(6)
        self._left = max(map(len, self._up_marks.values()), default=0) * _CHARACTER + 10
        self._right = self.width - 8
        self._top = 6.0 + _LINE * bool(self.up.title or power)
        self._bottom = self.height - 1.2 * _LINE - _LINE * bool(self.across.title)
        self._frame(power)

    def line(self, points: Sequence[tuple[float, float]], colour: str, name: str, *, width: float = 1.6) -> None:
        """Join points by a line; a value that is not finite makes a gap, and a point alone is a dot."""
        finite = groupby(points, key=lambda point: math.isfinite(point[1]))
        for run in (list(group) for is_finite, group in finite if is_finite):
            if len(run) == 1:
                self.dot(*run[0], colour, name, radius=1 + width)
                continue
            path = "L".join(f"{self._x(x):.1f} {self._y(y):.1f}" for x, y in run)
            self._add("path", name, f'd="M{path}" style="stroke:var(--{colour});stroke-width:{width}"')

    def dot(self, x: float, y: float, colour: str, name: str, *, radius: float = 3.5) -> None:
        """A point."""
        place = f'cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="{radius:.1f}"'
        self._add("circle", name, f'{place} style="fill:var(--{colour})"')

    def bar(self, start: float, end: float, y: float, colour: str, name: str, *, thickness: float) -> None:
        """A horizontal bar; its thickness is in the units of the vertical axis."""
        left, right = self._x(start), self._x(end)
        above, below = self._y(y + thickness / 2), self._y(y - thickness / 2)
        size = f'width="{max(0.5, right - left):.1f}" height="{below - above:.1f}"'
        self._add("rect", name, f'x="{left:.1f}" y="{above:.1f}" {size} style="fill:var(--{colour})"')

    def mark(self, x: float) -> None:
        """A vertical dotted line."""
        self._parts.append(f'<path class="mark" d="M{self._x(x):.1f} {self._bottom:.1f}V{self._top:.1f}"/>')

    def svg(self) -> str:
        """The plot for a page."""
        head = f'<svg class="plot" viewBox="0 0 {self.width:g} {self.height:g}" role="img"'
        return f'{head} aria-label="{escape(self.label)}">{"".join(self._parts)}</svg>'

    def _frame(self, power: str) -> None:
        """Grid, marks and titles."""
        for value, label in self._up_marks.items():
            y = self._y(value)
            if not self.up.names:
                self._parts.append(f'<path class="grid" d="M{self._left:.1f} {y:.1f}H{self._right:.1f}"/>')
            self._text(label, self._left - 7, y + 4, "end")
        for value, label in self.across.marks(round(self.width / 62))[0].items():
            x = self._x(value)
            self._parts.append(f'<path class="grid" d="M{x:.1f} {self._bottom:.1f}V{self._top:.1f}"/>')
            self._text(label, x, self._bottom + _LINE, "middle")
        self._parts.append(f'<path class="axis" d="M{self._left:.1f} {self._bottom:.1f}H{self._right:.1f}"/>')
        self._text(f"{power} {self.up.title}".strip(), 0, 12, "start")
        self._text(self.across.title, (self._left + self._right) / 2, self.height - 4, "middle")

    def _text(self, text: str, x: float, y: float, anchor: str) -> None:
        if text:
            self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def _add(self, kind: str, name: str, attributes: str) -> None:
        """A shape that shows its name when the mouse is on it."""
        self._parts.append(f"<{kind} {attributes}><title>{escape(name)}</title></{kind}>")

    def _x(self, value: float) -> float:
        return self._left + (self._right - self._left) * self.across.share(value)

    def _y(self, value: float) -> float:
        return self._bottom + (self._top - self._bottom) * self.up.share(value)


def legend(colours: Mapping[str, str]) -> str:
    """Names with their colours, as HTML."""
    keys = (
        f'<span><span class="key" style="background:var(--{colour})"></span>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<p class="soft legend">{"".join(keys)}</p>'


def _round_values(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most `most` round values from low to high, evenly spread."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    steps = (digit * power for digit in _ROUND)
    step = next(step for step in steps if step * most >= high - low and (not whole or step % 1 == 0 or step < 1))
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)  # 3e-4 / 5e-5 is a little less than 6
    return [number * step for number in range(first, last + 1)]


def _labelled(values: Sequence[float]) -> tuple[dict[float, str], str]:
    """The values with labels of equally many decimals, and the power of ten that was factored out of them."""
    power = math.floor(math.log10(max(map(abs, values)))) if any(values) else 0
    power = power if not -4 < power < 6 else 0
    scaled = [value / 10.0**power for value in values]
    step = min((abs(b - a) for a, b in pairwise(scaled)), default=abs(scaled[0]) if scaled else 1)
    decimals = next((d for d in range(12) if all(abs(round(v, d) - v) < 1e-3 * step for v in scaled)), 12)
    labels = {value: f"{each:,.{decimals}f}".replace("-", "−") for value, each in zip(values, scaled, strict=True)}
    return labels, f"×10{str(power).translate(_SUPERSCRIPT)}" if power else ""


#: The most points of a curve: as many as can be told apart; more would only make the page large.
MOST_POINTS: Final = 400
#: The most attempts in a timeline.
MOST_LANES: Final = 24

#: The number of colours for agents in the style sheet.
NUM_COLOURS: Final = 8
_WIDTH, _HEIGHT = 440, 270

_USUAL: Final = Measures()
#: (title, key of agent {}, keys of lines that are about all agents, unit); the other {} are fields of `Measures`.
_CURVES: Final[Sequence[tuple[str, str, Mapping[str, str], str]]] = (
    ("Training loss", "train/{}/loss", {"mean": "train/task_loss"}, "{trained}"),
    ("Held-out loss", "eval/{}/nll", {"crowd": "eval/crowd/nll"}, "{loss}"),
    ("Held-out {right}", "eval/{}/exact_match", {"crowd": "eval/crowd/exact_match"}, "share of rows"),
    ("Gradient norm before clipping", "train/{}/grad_norm", {}, "norm"),
    ("Learning rate", "", {"learning rate": "train/learning_rate"}, ""),
    ("Speed", "", {"tokens/s": "tokens_per_s"}, "tokens per second"),
)


def draw_curves(
    metrics: Metrics, resumed: Sequence[int] = (), names: Mapping[str, str] | None = None, words: Measures = _USUAL
) -> list[tuple[str, str]]:
    """(title, drawing) of every curve that the run has left, agents beside the crowd.

    Args:
        resumed: steps after which a later attempt continued; a dotted line stands at each.
        names: the names that people gave the agents, by the names in the metrics.
        words: the words of the objective.
    """
    drawings = []
    named = [(METRICS[name].told, f"eval/{{}}/{name}", {"crowd": f"eval/crowd/{name}"}, "") for name in words.metrics]
    for title, agent_key, together, unit in (*_CURVES[:3], *named, *_CURVES[3:]):
        title, unit = (each.format(**vars(words)) for each in (title, unit))
        keys = {name: agent_key.format(name) for name in metrics.agents} if agent_key else {}
        lines = {name: metrics.curve(key) for name, key in {**keys, **together}.items()}
        if any(lines.values()):
            drawings.append((title, _steps(title, lines, unit, resumed, names or {})))
    return drawings


def draw_scores(scores: Sequence[Score], right: str = Measures.right) -> str:
    """The share of right answers of each line of scores, with intervals; empty for free text.

    Args:
        right: the word for a right answer.
    """
    places = {float(place): (s, s.exact_match) for place, s in enumerate(reversed(scores)) if s.exact_match is not None}
    if not places:
        return ""
    end = min(1.0, 1.05 * max(score.high or share for score, share in places.values())) or 1.0
    names = {place: score.who for place, (score, _) in places.items()}
    plot = Plot(
        _WIDTH,
        60 + 26 * len(scores),
        f"{right} with intervals",
        Axis(0, end, right),
        Axis(-0.6, len(scores) - 0.4, names=names),
    )
    for place, (score, share) in places.items():
        colour = "crowd" if score.who == "crowd" else "ink"
        label = f"{score.who}: {share:.3f}"
        if score.low is not None and score.high is not None:
            plot.line([(score.low, place), (score.high, place)], colour, label, width=2.5)
        plot.dot(share, place, colour, label)
    return plot.svg()


def draw_timeline(attempts: Sequence[Attempt]) -> str:
    """A lane for each of the last attempts, coloured by the kinds of its time."""
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
    """About `MOST_POINTS` points at most; the lowest and the highest of each stretch stay, so that no spike is lost."""
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
    across = Axis.around(steps, "optimizer step", margin=0.02, whole=True)
    plot = Plot(_WIDTH, _HEIGHT, title, across, Axis.around((y for line in known.values() for _, y in line), unit))
    for step in resumed[-MOST_LANES:]:
        if plot.across.low <= step <= plot.across.high:
            plot.mark(step + 0.5)
    for name, points in known.items():
        plot.line(points, colours[name], names.get(name, name), width=1.4 if name in agents else 2.4)
    if len(agents) > NUM_COLOURS:  # more than colours: one entry for all
        colours = {f"{len(agents)} agents": _agent(0)} | {name: colours[name] for name in known if name not in agents}
    named = {names.get(name, name): colour for name, colour in colours.items()}
    return (legend(named) if len(named) > 1 else "") + plot.svg()  # a single line needs no legend


def _agent(number: int) -> str:
    return f"agent{number % NUM_COLOURS}"


def _merged(attempt: Attempt) -> list[Span]:
    """The spans of an attempt up to its end, with neighbours of the same kind joined."""
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
