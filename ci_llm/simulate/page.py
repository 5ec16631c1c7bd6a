"""A study as one page: curves of goodput by interval and by nodes, and the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ci_llm._version import __version__
from ci_llm.core.durable import write_bytes
from ci_llm.errors import ConfigError
from ci_llm.report.curves import draw_lines
from ci_llm.report.page import render_template
from ci_llm.simulate.closed_forms import daly_goodput, recovery_s, save_cost_s
from ci_llm.simulate.study import Line, Study
from ci_llm.simulate.text import conclusions, duration, head, percent

Points = Sequence[tuple[float, float]]


def write_page(path: Path, study: Study, by_nodes: Mapping[str, Points]) -> None:
    """Write the page of a study.

    Args:
        by_nodes: (nodes, goodput) by the name of the way to save.

    Raises:
        ConfigError: the disk refuses the file.
    """
    text = render_template(
        "figures.html.j2",
        {
            "title": "A simulated job",
            "subtitle": head(study.cluster),
            "sentences": list(conclusions(study)),
            "drawings": list(_drawings(study, by_nodes)),
            "tables": [
                ("Ways to save", _rows(study.lines)),
                ("If it were otherwise", _rows([*study.what_if.values()])),
            ],
            "version": __version__,
        },
    )
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.strerror}", where=str(path), hint="name a file in a folder of yours"
        ) from error


def _drawings(study: Study, by_nodes: Mapping[str, Points]) -> Iterator[tuple[str, str]]:
    cluster, own = study.cluster, study.lines[0]
    simulated = sorted((line.interval_s, line.goodput) for line in study.lines[1:] if math.isfinite(line.interval_s))
    cost_s, back_s = save_cost_s(cluster), recovery_s(cluster)
    predicted = [(at, daly_goodput(at, cost_s, back_s, cluster.mtbf_s)) for at, _ in simulated]
    lines = {"simulated": simulated, "Daly": predicted, own.name: [(own.interval_s, own.goodput)]}
    yield "Goodput by the time between saves", draw_lines("interval", lines, across="seconds", unit="goodput", log=True)
    lost = {
        name: sorted((line.interval_s, line.shares[name]) for line in study.lines[1:])
        for name in ("lost steps", "saving")
    }
    yield "What saving and not saving cost", draw_lines("costs", lost, across="seconds", unit="share of time", log=True)
    if by_nodes:
        yield "Goodput by nodes", draw_lines("nodes", by_nodes, across="nodes", unit="goodput", log=True)


def _rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "interval", "goodput", "lost", "saving", "start-up", "attempts", "hours")]
    for line in lines:
        shares = (percent(line.shares[kind]) for kind in ("lost steps", "saving", "start-up"))
        hours = f"{line.elapsed_s / 3600:.1f}"
        rows.append(
            (line.name, duration(line.interval_s), percent(line.goodput), *shares, f"{line.attempts:.0f}", hours)
        )
    return rows
