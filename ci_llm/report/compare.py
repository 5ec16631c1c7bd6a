"""The comparison of several runs, or of the trials of a sweep: differences in settings, scores and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ci_llm.config.schema import with_trait
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.curves import LETTERS, draw_curves
from ci_llm.core.run_status import Status
from ci_llm.core.scores import LEAST_ROWS, METRICS, Measures
from ci_llm.report.facts import RunFacts
from ci_llm.report.scores import LEADING, TOGETHER, Gain, Leaderboard, Score, comparable, differences, notes, scores

#: Keys that say only where a run lies.
_PLACES: Final = frozenset(with_trait("place"))
_CURVES: Final = ("train/task_loss", "eval/crowd/nll")
_WIDTH: Final = 80
_UNPAIRED: Final = "not both have predictions of what was evaluated"


def as_json(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """The whole comparison, for programs. Differences are against the first run."""
    return {
        "runs": [
            {
                "folder": str(run.folder),
                "status": run.status.status,
                "step": run.status.step,
                "agent_steps": run.status.agent_steps,
                "attempts": len(run.attempts),
                "wall_s": run.wall_s,
                "scores": [asdict(score) for score in scores(run.evaluation)] if run.evaluation else None,
                "n": run.evaluation["n"] if run.evaluation else None,
                "data": run.evaluation.get("data") if run.evaluation else None,
                "learning_rates": run.evaluation.get("learning_rates") if run.evaluation else None,
            }
            for run in runs
        ],
        "configuration": {key: list(values) for key, values in differing_keys(runs)},
        "size": {name: list(values) for name, values in differing_sizes(runs)},
        "differences": [
            {
                "run": number,
                "minus": 0,
                "score": f"crowd {gain.measure if gain else 'exact_match'}",
                "not_compared": why,
                **(asdict(gain) if gain else {}),
            }
            for number, gain, why in _differences(runs)
        ],
        "curves": {key: [_plain(run.metrics.curve(key)) for run in runs] for key in _CURVES},
    }


def _plain(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """JSON has no NaN."""
    return [(step, value if math.isfinite(value) else None) for step, value in curve]


def differing_keys(runs: Sequence[RunFacts]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The keys that differ, with their value in each run; None for a run without a configuration."""
    configs = [run.config for run in runs]
    known = next((config for config in configs if config is not None), None)
    for key in type(known).model_fields if known is not None else ():
        values = tuple(None if config is None else getattr(config, key) for config in configs)
        wanted = getattr(known, key)
        if key not in _PLACES and any(config is not None and getattr(config, key) != wanted for config in configs):
            yield key, values


def differing_sizes(runs: Sequence[RunFacts]) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Processes and rows per step that differ, with their value in each run: the launcher may decide these."""
    for name in dict.fromkeys(name for run in runs for name in run.size):
        values = tuple(run.size.get(name) for run in runs)
        if len({*values} - {None}) > 1:
            yield name, values


def as_text(runs: Sequence[RunFacts]) -> Iterator[str]:
    """The comparison in lines for a terminal, without the heads of the runs."""
    yield ""
    yield from _configuration_lines(runs)
    yield ""
    yield from _score_lines(runs)
    words = [run.words for run in runs]
    titles = ("training loss, mean over agents", "held-out loss of the crowd")
    units = ([own.trained for own in words], [own.loss for own in words])
    for key, title, unit in zip(_CURVES, titles, units, strict=True):
        curves = [run.metrics.curve(key) for run in runs]
        if drawn := draw_curves(dict(zip(LETTERS, curves, strict=False)), _WIDTH):
            yield ""
            yield f"{title}, {' and '.join(dict.fromkeys(unit))} by optimizer step"
            yield drawn


def trials_as_text(board: Leaderboard) -> Iterator[str]:
    """The trials of a sweep side by side, in lines for a terminal, and where the best one is."""
    if board.best_run is None:
        yield "no trial has a score yet"
        return
    yield from trials_table(board)
    yield f"best: trial {board.best}, trained last in {board.best_run}, which ci-llm report and ci-llm compare take"


def trials_table(board: Leaderboard) -> Iterator[str]:
    """The trials that were scored, in lines below the names of the columns; those that went furthest come first."""
    rows = [
        (str(id), status, str(step), "" if score is None else f"{score:.4f}", *settings)
        for id, status, step, score, settings in board.rows
    ]
    yield from _table([("trial", "status", "step", board.metric, *board.keys), *rows])


def head(letter: str, folder: Path, status: Status) -> str:
    """A line about a run, shown before anything large is read."""
    reason = f" ({status.reason})" if status.reason else ""
    return f"{letter}  {folder}: {status.status}{reason}, step {status.step}, attempt {status.attempt}"


def _configuration_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    if any(run.config is None for run in runs):
        without = ", ".join(letter for letter, run in zip(LETTERS, runs, strict=False) if run.config is None)
        yield f"no checkpoint, and so no configuration to compare: {without}"
    differing = [*differing_keys(runs), *differing_sizes(runs)]
    rows = [(key, *map(dump_value, values)) for key, values in differing]
    if rows:
        yield from _table([("configuration", *LETTERS[: len(runs)]), *rows])
    elif all(run.config is not None for run in runs):
        yield "configuration: no difference"


def _score_lines(runs: Sequence[RunFacts]) -> Iterator[str]:
    tables = [scores(run.evaluation) if run.evaluation else [] for run in runs]
    if not any(tables):
        yield "scores: none of these runs has been evaluated yet"
        return
    names = list(dict.fromkeys(score.who for table in tables for score in table))
    names.sort(key=lambda name: (name not in LEADING, name in TOGETHER))  # what is about all of them stands below
    found = [{score.who: score for score in table} for table in tables]
    yield from _table(
        [
            (_title(runs), *LETTERS[: len(runs)]),
            *((name, *(_shown(table.get(name)) for table in found)) for name in names),
        ]
    )
    steps = [(letter, run.status.agent_steps) for letter, run in zip(LETTERS, runs, strict=False)]
    if all(taken is not None for _, taken in steps):
        yield "agent-steps: " + ", ".join(f"{letter} {taken:,}" for letter, taken in steps)
    for number, gain, why in _differences(runs):
        pair = f"crowd {LETTERS[number]} - crowd {LETTERS[0]}"
        shown = _as_text(gain, runs[number].words) if gain else f"not compared ({why})"
        yield f"{pair}: {shown}"
    for letter, run in zip(LETTERS, runs, strict=False):
        if run.evaluation:
            rates = ", ".join(f"{rate:g}" for rate in run.evaluation.get("learning_rates", ()))
            told = [
                run.what_evaluated,
                *([f"learning rates {rates}"] if rates else []),
                *notes(run.evaluation, run.folder),
            ]
            yield from (f"{letter}: {line}" for line in told)


def _differences(runs: Sequence[RunFacts]) -> Iterator[tuple[int, Gain | None, str | None]]:
    """(number of the run, its crowd minus the first crowd, why they are not compared) for every run but the first."""
    first = runs[0]
    for number, run in enumerate(runs[1:], 1):
        if first.evaluation is None or run.evaluation is None:
            yield number, None, "not evaluated yet"
        elif why := comparable(first.evaluation, run.evaluation):
            yield number, None, why
        else:
            rows = run.evaluated_predictions, first.evaluated_predictions
            yield from ((number, gain, None) for gain in differences(run.evaluation, first.evaluation, *rows))


def _title(runs: Sequence[RunFacts]) -> str:
    """The title of the table of scores, with the measures of all runs."""
    told = dict.fromkeys(f"{own.right} ({own.loss})" for own in (run.words for run in runs))
    return " or ".join(told)


def _as_text(gain: Gain, words: Measures) -> str:
    """A difference in the words of its objective."""
    right = words.right if gain.measure == "exact_match" else METRICS[gain.measure].told
    if gain.measure == "nll":
        return f"{gain} {words.loss} (no interval: its rows are not kept one by one)"
    if gain.interval95 is None:
        why = "too few rows for an interval" if gain.rows < LEAST_ROWS else f"the same in each of {gain.rows} rows"
        return f"{gain.value:+.3f} {right} ({why})"
    why = f": {_UNPAIRED}" if gain.measure == "exact_match" else ""
    how = f"paired over {gain.rows} rows" if gain.paired else f"unpaired, {gain.rows} rows{why}"
    verdict = "a difference" if abs(gain.value) > gain.interval95 else "no difference shown"
    return f"{gain.value:+.3f} ± {gain.interval95:.3f} {right} (95 %, {how}): {verdict}"


def _shown(score: Score | None) -> str:
    if score is None:
        return ""
    exact = "-" if score.exact_match is None else f"{score.exact_match:.3f}"
    return exact + (f" ({score.nll:.4f})" if score.nll is not None else "")


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
