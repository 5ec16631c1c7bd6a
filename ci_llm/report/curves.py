"""The drawings of a report, as SVG by matplotlib. Colours are left to the page, which is light, dark or printed."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ci_llm.errors import BadInput
from ci_llm.report.attempts import KINDS, Attempt
from ci_llm.report.facts import Metrics, Points
from ci_llm.report.scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Points a curve is drawn with: what the eye can tell apart, and what keeps a long run's page small.
MOST_POINTS: Final = 400
#: Attempts that a timeline can show one below the other.
MOST_LANES: Final = 24

_WIDE_LEFT: Final = (0.95, 0.1, 0.42, 0.04)

#: Colours stand in the drawing as these, and in the page as the variables of its style sheet.
_INK, _FAINT, _CROWD, _PAPER = "#010101", "#010102", "#010103", "#010104"
_AGENTS: Final = tuple(f"#0102{k:02x}" for k in range(8))
_KINDS: Final = {kind: f"#0103{number:02x}" for number, kind in enumerate(KINDS)}
_VARIABLES: Final = (
    {_INK: "ink", _FAINT: "faint", _CROWD: "crowd", _PAPER: "paper"}
    | {colour: f"agent{k}" for k, colour in enumerate(_AGENTS)}
    | {colour: f"kind-{kind.replace(' ', '-')}" for kind, colour in _KINDS.items()}
)

#: Title, key of agent {}, keys of what is of all agents together, unit.
_CURVES: Final[Sequence[tuple[str, str, Mapping[str, str], str]]] = (
    ("Training loss", "train/agent{}/loss", {"mean": "train/task_loss"}, "nats per token"),
    ("Held-out loss", "eval/agent{}/nll", {"crowd": "eval/crowd/nll"}, "nats per token"),
    ("Held-out exact match", "eval/agent{}/exact_match", {"crowd": "eval/crowd/exact_match"}, "share of rows"),
    ("Gradient norm before clipping", "train/agent{}/grad_norm", {}, "norm"),
    ("Learning rate", "", {"learning rate": "train/learning_rate"}, ""),
    ("Speed", "", {"tokens/s": "tokens_per_s"}, "tokens per second"),
)

_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the font of the page
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.3,
    "legend.facecolor": _PAPER,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
}


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        BadInput: it is not installed, or cannot be imported.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BadInput(
            f"a report is drawn with matplotlib, which cannot be imported: {error}",
            hint="pip install 'ci-llm[report]', or pip install matplotlib",
        ) from error


def draw_curves(metrics: Metrics, resumed: Sequence[int] = ()) -> list[tuple[str, str]]:
    """(title, SVG) of every curve that the run has left, agents beside the crowd.

    Args:
        resumed: steps after which a later attempt went on; a dotted line stands at each.
    """
    drawings = []
    for title, agent_key, together, unit in _CURVES:
        keys = {f"agent{k}": agent_key.format(k) for k in range(metrics.num_agents)} if agent_key else {}
        lines = {name: metrics.curve(key) for name, key in {**keys, **together}.items()}
        if any(lines.values()):
            drawings.append(
                (title, _drawn(partial(_lines, lines=lines, unit=unit, resumed=resumed), (4.4, 2.7), title))
            )
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

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(lines.items()):
            colour = _AGENTS[number % len(_AGENTS)]
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker="o", markersize=3)
        if log:
            axes.set_xscale("log")
        axes.set_xlabel(across)
        axes.set_ylabel(unit)
        if len(lines) > 1:
            axes.legend(fontsize=8)

    return _drawn(draw, (4.4, 2.7), title)


def draw_scores(scores: Sequence[Score]) -> str:
    """Exact match of everyone, with intervals."""
    return _drawn(partial(_dots, scores=scores), (4.4, 0.5 + 0.26 * len(scores)), "scores", _WIDE_LEFT)


def draw_timeline(attempts: Sequence[Attempt]) -> str:
    """One lane for each of the last attempts, coloured by what its time went into."""
    lanes = attempts[-MOST_LANES:]
    return _drawn(partial(_timeline, attempts=lanes), (9.0, 0.5 + 0.28 * len(lanes)), "timeline", _WIDE_LEFT)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    if len(points) <= most:
        return points
    width = math.ceil(2 * len(points) / most)
    kept: Points = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch[:1]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _drawn(
    draw: Callable[[Axes], None],
    inches: tuple[float, float],
    name: str,
    margins: tuple[float, float, float, float] = (0.66, 0.08, 0.42, 0.08),
) -> str:
    """An SVG of `inches`, with margins in inches: left, right, bottom, top."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**_STYLE, "svg.hashsalt": name}):  # the same run gives the same bytes
        figure = Figure(figsize=inches)
        # Fixed margins: to measure every label takes as long as to draw it.
        left, right, bottom, top = margins
        width, height = inches
        draw(figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)))
        return _svg(figure)


def _svg(figure: Figure) -> str:
    """The drawing without its head, with the page's colours and fonts, and without names that another one may have."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


def _lines(axes: Axes, lines: Mapping[str, Points], unit: str, resumed: Sequence[int]) -> None:
    agents = [name for name in lines if name.startswith("agent")]
    for number, (name, points) in enumerate((name, thinned(points)) for name, points in lines.items() if points):
        is_agent = name in agents
        label = name
        if is_agent and len(agents) > len(_AGENTS):  # more than colours: one line of the legend for all
            label = "_" if number else f"{len(agents)} agents"
        axes.plot(
            *zip(*points, strict=True),
            label=label,
            color=_AGENTS[number % len(_AGENTS)] if is_agent or not agents else _CROWD,
            linewidth=1.1 if is_agent else 1.8,
            marker="o" if len(points) == 1 else None,
        )
    for step in resumed[-MOST_LANES:]:
        axes.axvline(step + 0.5, color=_INK, linewidth=0.8, linestyle=":", alpha=0.6, zorder=1)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.locator_params(axis="x", integer=True)
    if len(lines) > 1:
        axes.legend(fontsize=8, ncols=2)


def _dots(axes: Axes, scores: Sequence[Score]) -> None:
    for place, score in enumerate(reversed(scores)):
        colour = _CROWD if score.who == "crowd" else _INK
        if score.low is not None and score.high is not None:
            axes.plot([score.low, score.high], [place, place], color=colour, linewidth=2, solid_capstyle="round")
        axes.plot([score.exact_match], [place], "o", color=colour, markersize=5)
    axes.set_yticks(range(len(scores)), [score.who for score in reversed(scores)])
    axes.set_ylim(-0.6, len(scores) - 0.4)
    axes.set_xlim(left=0, right=min(1.0, 1.05 * max(score.high or score.exact_match for score in scores)) or 1.0)
    axes.set_xlabel("exact match")


def _timeline(axes: Axes, attempts: Sequence[Attempt]) -> None:
    begin = attempts[0].launched
    scale, unit = _scale(attempts[-1].ended - begin)
    for place, attempt in enumerate(reversed(attempts)):
        for kind, start, length in _merged(attempt):
            axes.barh(
                place, length / scale, left=(start - begin) / scale, height=0.62, color=_KINDS[kind], linewidth=0.6
            )
    axes.set_yticks(range(len(attempts)), [f"attempt {attempt.number}" for attempt in reversed(attempts)])
    axes.set_xlabel(f"{unit} since {datetime.fromtimestamp(begin):%Y-%m-%d %H:%M:%S}")
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)


def _merged(attempt: Attempt) -> Iterable[tuple[Any, float, float]]:
    """(kind, start, seconds), neighbours of one kind in one piece."""
    merged: list[tuple[Any, float, float]] = []
    for span in attempt.spans:
        if span.kind == "no process":
            continue
        if merged and merged[-1][0] == span.kind:
            merged[-1] = (span.kind, merged[-1][1], span.end - merged[-1][1])
        else:
            merged.append((span.kind, span.start, span.seconds))
    return merged


def _scale(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
