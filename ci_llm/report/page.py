"""report.html: one self-contained page about a run, which the template page.html.j2 makes of its facts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from ci_llm._version import __version__
from ci_llm.config import Config, groups
from ci_llm.config.auto import FOLLOWED
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.durable import write_bytes
from ci_llm.core.quantities import count, duration, size
from ci_llm.errors import CiLlmError
from ci_llm.report import drawings
from ci_llm.report.facts import KINDS, RunFacts, seconds_by_kind
from ci_llm.report.scores import gains, is_free_text, notes, read_trials, scores, surest_first

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
    is_free = evaluation is not None and is_free_text(evaluation)
    restarts = [attempt.first_step for attempt in attempts[1:]][-MOST_ATTEMPTS:]
    plots = drawings.plots_of(facts.metrics, restarts, facts.agents_names, words)
    failed = sorted((row for row in facts.predictions if row["correct"] is False), key=surest_first)
    solved = [row for row in facts.predictions if row["correct"] is not False]
    memory = facts.metrics.peak("memory/cuda_peak_bytes")
    return render_template(
        "page.html.j2",
        {
            "facts": facts,
            "version": __version__,
            "now": datetime.now().timestamp(),
            "words": words,
            "leaderboard": read_trials(facts.folder),
            "scores": scores(evaluation) if evaluation else [],
            "gains": list(gains(evaluation)) if evaluation else [],
            "notes": list(notes(evaluation, facts.folder)) if evaluation else [],
            "plots": [plot for plot in plots if not (is_free and plot.title.endswith(words.right))],
            "attempts": attempts[-MOST_ATTEMPTS:],
            "redone": sum(attempt.redone_steps for attempt in attempts),
            "kinds": KINDS,
            "spent": spent,
            "total_s": sum(spent.values()) or 1.0,
            "memory": memory if memory is not None else facts.metrics.peak("memory/resident_bytes"),
            "solved": solved[:MOST_EXAMPLES],
            "failed": failed[:MOST_EXAMPLES],
            "settings": list(_settings(facts.config)) if facts.config else [],
            "folder": shlex.quote(str(facts.folder)),
            "curves": curves_command(facts.folder) if (facts.folder / "tensorboard").is_dir() else "",
            "is_final": (facts.folder / "final_checkpoint").is_dir(),
            "most_lines": MOST_LINES,
        },
    )


def render_template(name: str, contents: Mapping[str, Any]) -> str:
    """Render a template of this package with these contents."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ci_llm.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        each.__name__: each for each in (duration, clock, share, cut, number, count, size, shlex.quote)
    }
    environment.globals["paper"] = {
        "size": (drawings.WIDTH, drawings.HEIGHT),
        "frame": (drawings.LEFT, drawings.RIGHT, drawings.TOP, drawings.BOTTOM),
    }
    page: str = environment.get_template(name).render(**contents)
    return page


def _settings(config: Config) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """The keys group by group: (title, [(key, value as YAML, whether it differs from the default)])."""
    defaults = config.usual().model_copy(update={key: Config.model_fields[key].default for key in FOLLOWED})
    for title, keys in groups().items():
        values = ((key, getattr(config, key), getattr(defaults, key)) for key in keys)
        yield title, [(key, dump_value(value), value != default) for key, value, default in values]


def curves_command(folder: Path) -> str:
    """The command that opens the curves of a run in TensorBoard, under the run's name."""
    name, drawn = folder.resolve().name, str(folder / "tensorboard")
    is_plain = not {":", ","} & {*name, *drawn}  # which separate names, folders and runs there
    return shlex.join(["tensorboard", *(["--logdir_spec", f"{name}:{drawn}"] if is_plain else ["--logdir", drawn])])


def clock(seconds: float) -> str:
    """Local time of unix seconds."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def share(value: float) -> str:
    return f"{value:.0%}"


def number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def cut(text: object) -> str:
    """A text that may be long, shortened."""
    shown = str(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]} ..."
