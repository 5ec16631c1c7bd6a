"""Small plots as SVG. The page gives them their font, and their colours as variables of its style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from typing import Final

#: Width of a character of a label, about, and height of a line, in the units of a plot: CSS pixels at its full size.
_CHARACTER, _LINE = 6.7, 17.0
_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_SUPERSCRIPT: Final = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        low, high: the ends of what is drawn.
        title: what it shows, or the unit.
        log: whether it is logarithmic; `low` is then above 0.
        whole: whether only whole numbers are marked.
        names: marks with words, in place of numbers.
    """

    low: float
    high: float
    title: str = ""
    log: bool = False
    whole: bool = False
    names: Mapping[float, str] = field(default_factory=dict)

    @classmethod
    def around(
        cls, values: Iterable[float], title: str = "", *, margin: float = 0.05, log: bool = False, whole: bool = False
    ) -> Axis:
        """An axis that shows the values that are finite, with a margin at both ends, as a share of its length."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
        low, high = (math.log10(end) if log else end for end in (min(finite), max(finite)))
        rim = margin * (high - low) or (0.5 if log else 0.05 * abs(high) or 0.5)
        low, high = low - rim, high + rim
        return cls(10**low if log else low, 10**high if log else high, title, log, whole)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        low, high, at = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return (at - low) / (high - low)

    def marks(self, most: int) -> tuple[dict[float, str], str]:
        """Round values with their labels, about `most`; and the power of ten that they are to be multiplied with."""
        if self.names:
            return dict(self.names), ""
        if self.log:
            return {value: f"{value:,.10g}" for value in _round_on_log(self.low, self.high)}, ""
        return _labelled(_round_values(self.low, self.high, most, whole=self.whole))


@dataclass
class Plot:
    """A plot that grows by what is added to it.

    Attributes:
        width, height: in CSS pixels at its full size; a page scales it.
        label: what it shows, for those who do not see it.
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
        """Points joined by a line; one that is not finite is a gap, and one alone is a dot."""
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
        """A bar that lies; its thickness is in the units of the axis."""
        left, right = self._x(start), self._x(end)
        above, below = self._y(y + thickness / 2), self._y(y - thickness / 2)
        size = f'width="{max(0.5, right - left):.1f}" height="{below - above:.1f}"'
        self._add("rect", name, f'x="{left:.1f}" y="{above:.1f}" {size} style="fill:var(--{colour})"')

    def mark(self, x: float) -> None:
        """A dotted line from bottom to top."""
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
        """A shape that says its name when the mouse is on it."""
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


def _round_on_log(low: float, high: float) -> Iterator[float]:
    """Powers of ten; between them twice and five times as much, where they are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    return (value for power in powers for digit in digits if low <= (value := digit * 10.0**power) <= high)


def _labelled(values: Sequence[float]) -> tuple[dict[float, str], str]:
    """The values with labels of equally many decimals, and the power of ten taken out of very small or large ones."""
    power = math.floor(math.log10(max(map(abs, values)))) if any(values) else 0
    power = power if not -4 < power < 6 else 0
    scaled = [value / 10.0**power for value in values]
    step = min((abs(b - a) for a, b in pairwise(scaled)), default=abs(scaled[0]) if scaled else 1)
    decimals = next((d for d in range(12) if all(abs(round(v, d) - v) < 1e-3 * step for v in scaled)), 12)
    labels = {value: f"{each:,.{decimals}f}".replace("-", "−") for value, each in zip(values, scaled, strict=True)}
    return labels, f"×10{str(power).translate(_SUPERSCRIPT)}" if power else ""
