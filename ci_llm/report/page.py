"""report.html: one self-contained page about a run, which the template page.html.j2 makes of its facts.

Curves are small plots, laid out for the template that draws them. Colours are names in the style sheet.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm._version import __version__
from ci_llm.config import Config, groups
from ci_llm.config.auto import FOLLOWED
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.durable import write_bytes
from ci_llm.core.measures import METRICS, Measures
from ci_llm.core.quantities import count, duration, size
from ci_llm.errors import CiLlmError
from ci_llm.report.facts import KINDS, Metrics, Points, RunFacts, seconds_by_kind
from ci_llm.report.scores import failed_rows, gains, notes, read_trials, scores

if TYPE_CHECKING:
    from jinja2 import Template

NAME: Final = "report.html"
MOST_ATTEMPTS: Final = 60
MOST_LINES: Final = 60
MOST_EXAMPLES: Final = 5
MOST_CHARACTERS: Final = 1200


def write_report(path: Path | str) -> Path:
    """Write `report.html` into the folder of a run; returns where it lies.

    Args:
        path: the output folder of a run, or a checkpoint in it.

    Raises:
        BadInput: there is no run, or a file of it is damaged.
        CiLlmError: the disk refuses the file.
    """
    facts = RunFacts(path)
    page = facts.folder / NAME
    try:
        write_bytes(page, render(facts).encode())
    except OSError as error:
        raise CiLlmError(
            f"the report cannot be written: {error.strerror}", where=str(page), hint="make space there, or copy the run"
        ) from error
    return page


def render(facts: RunFacts) -> str:
    """The page, as HTML."""
    evaluation, attempts, words = facts.evaluation, facts.attempts, facts.words
    spent = {kind: seconds for kind, seconds in seconds_by_kind(attempts).items() if seconds > 0}
    is_free = evaluation is not None and evaluation.is_free_text
    restarts = [attempt.first_step for attempt in attempts[1:]][-MOST_ATTEMPTS:]
    plots = plots_of(facts.metrics, restarts, facts.agents_names, words)
    solved = [row for row in facts.predictions if row["correct"] is not False]
    memory = facts.metrics.peak("memory/cuda_peak_bytes")
    return _template().render(
        facts=facts,
        version=__version__,
        now=datetime.now().timestamp(),
        words=words,
        leaderboard=read_trials(facts.folder),
        scores=scores(evaluation) if evaluation else [],
        gains=list(gains(evaluation)) if evaluation else [],
        notes=list(notes(evaluation, facts.folder)) if evaluation else [],
        plots=[plot for plot in plots if not (is_free and plot.title.endswith(words.right))],
        attempts=attempts[-MOST_ATTEMPTS:],
        redone=sum(attempt.redone_steps for attempt in attempts),
        kinds=KINDS,
        spent=spent,
        total_s=sum(spent.values()) or 1.0,
        memory=memory if memory is not None else facts.metrics.peak("memory/resident_bytes"),
        solved=solved[:MOST_EXAMPLES],
        failed=failed_rows(facts.predictions)[:MOST_EXAMPLES],
        settings=list(_settings(facts.config)) if facts.config else [],
        folder=shlex.quote(str(facts.folder)),
        curves=curves_command(facts.folder) if (facts.folder / "tensorboard").is_dir() else "",
        has_heads=evaluation is not None and evaluation.measured_by == "heads",
        is_final=(facts.folder / "final_checkpoint").is_dir(),
        most_lines=MOST_LINES,
    )


@cache
def _template() -> Template:
    """The template of the page, compiled when a process writes its first."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ci_llm.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (duration, clock, cut, number, count, size, shlex.quote)}
    environment.globals["paper"] = {"size": (WIDTH, HEIGHT), "frame": (LEFT, RIGHT, TOP, BOTTOM)}
    return environment.get_template("page.html.j2")


def _settings(config: Config) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """The keys group by group: (title, [(key, value as YAML, whether it differs from the default)])."""
    defaults = config.usual().model_copy(update={key: Config.model_fields[key].default for key in FOLLOWED})
    for title, keys in groups().items():
        values = ((key, getattr(config, key), getattr(defaults, key)) for key in keys)
        yield title, [(key, dump_value(value), value != default) for key, value, default in values]


def curves_command(folder: Path) -> str:
    """The command that opens the curves of a run in TensorBoard."""
    return shlex.join(["tensorboard", "--logdir", str(folder)])


def clock(seconds: float) -> str:
    """Local time of unix seconds."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def cut(text: object) -> str:
    """A text that may be long, shortened."""
    shown = str(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]} ..."


# The curves

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
        unit: the quantity of the vertical axis; the other one is that of optimizer steps.
        paths: name, colour and SVG path of every curve.
        legend: names with their colours.
        columns, rows: places and labels of the marks of the two axes.
        dotted: places of dotted vertical lines.
    """

    title: str
    unit: str
    paths: Sequence[tuple[str, str, str]]
    legend: Sequence[tuple[str, str]]
    columns: Sequence[tuple[float, str]]
    rows: Sequence[tuple[float, str]]
    dotted: Sequence[float] = ()


def lay_out(title: str, curves: Mapping[str, Points], unit: str = "", *, dotted: Iterable[float] = ()) -> Plot:
    """A plot of curves; a value that is not finite makes a gap, and a point alone is a dot.

    Args:
        curves: points by the name of the curve; agents get a colour each, and other names that of the crowd.
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
    return Plot(
        title,
        unit,
        [(name, colours[name], _path([(x(at), y(value)) for at, value in known[name]])) for name in known],
        [*legend.items()] if len(legend) > 1 else [],  # a single line needs no legend
        [(x(step), f"{step:,.0f}") for step in round_values(first, last, least=1)],
        [(y(value), f"{value:.6g}") for value in round_values(low, high)],
        [x(at) for at in dotted if first <= at <= last],
    )


def plots_of(metrics: Metrics, resumed: Sequence[int], names: Mapping[str, str], words: Measures) -> list[Plot]:
    """Every curve that the run has left, agents beside the crowd.

    Args:
        resumed: steps after which a later attempt continued; a dotted line stands at each.
        names: the names that people gave the agents, by the names in the metrics.
        words: the words of the objective.
    """
    plots = []
    named = [(METRICS[name].told, f"eval/{{}}/{name}", {"crowd": f"eval/crowd/{name}"}, "") for name in words.metrics]
    for title, agent_key, together, unit in (*_CURVES[:3], *named, *_CURVES[3:]):
        title, unit = (each.format(**vars(words)) for each in (title, unit))
        keys = {names.get(name, name): agent_key.format(name) for name in metrics.agents} if agent_key else {}
        curves = {name: metrics.curve(key) for name, key in {**keys, **together}.items()}
        if any(curves.values()):
            plots.append(lay_out(title, curves, unit, dotted=[step + 0.5 for step in resumed]))
    return plots


def thinned(points: Points) -> Points:
    """At most about `MOST_POINTS` of the points; the extremes of each stretch stay, so that no spike is lost."""
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
