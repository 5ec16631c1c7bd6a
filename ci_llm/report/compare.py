"""The comparison of several runs, or of the trials of a sweep: differences in settings and scores, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from string import ascii_uppercase
from typing import Any, Final

from ci_llm.config.schema import with_trait
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.measures import LEAST_ROWS, METRICS, Measures
from ci_llm.report.facts import RunFacts
from ci_llm.report.scores import LEADING, TOGETHER, Gain, Leaderboard, Score, comparable, differences, notes, scores

#: The names of the runs in a comparison.
LETTERS: Final = ascii_uppercase
#: Keys that say only where a run lies.
_PLACES: Final = frozenset(with_trait("place"))


def as_json(runs: Sequence[RunFacts]) -> object:
    """The whole comparison, for programs. Differences are against the first run."""
    return {
        "runs": [
            {
                "folder": str(run.folder),
                **{key: getattr(run.status, key) for key in ("status", "step", "agent_steps")},
                "attempts": len(run.attempts),
                "wall_s": run.wall_s,
                "scores": [asdict(score) for score in scores(run.evaluation)] if run.evaluation else None,
                **{key: getattr(run.evaluation, key, None) for key in ("n", "data", "learning_rates")},
            }
            for run in runs
        ],
        "configuration": differing_keys(runs),
        "size": differing_sizes(runs),
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
    }


def differing_keys(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """The keys that differ, with their value in each run; None for a run without a configuration."""
    known = [run.config for run in runs if run.config is not None]
    keys = [key for key in type(known[0]).model_fields if key not in _PLACES] if known else []
    return {
        key: [run.config and getattr(run.config, key) for run in runs]
        for key in keys
        if any(getattr(config, key) != getattr(known[0], key) for config in known)
    }


def differing_sizes(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """Processes and rows per step that differ, with their value in each run: the launcher may decide these."""
    values = {name: [run.size.get(name) for run in runs] for name in ("processes", "rows per step")}
    return {name: each for name, each in values.items() if len({*each} - {None}) > 1}


def as_text(runs: Sequence[RunFacts]) -> Iterator[str]:
    """The comparison in lines for a terminal."""
    named = dict(zip(LETTERS, runs, strict=False))
    for letter, run in named.items():
        status, reason = run.status, f" ({run.status.reason})" if run.status.reason else ""
        yield f"{letter}  {run.folder}: {status.status}{reason}, step {status.step}, attempt {status.attempt}"
    without = [letter for letter, run in named.items() if run.config is None]
    differing = differing_keys(runs) | differing_sizes(runs)
    rows = [("configuration", *named), *((key, *map(dump_value, values)) for key, values in differing.items())]
    tables = [{score.who: score for score in scores(run.evaluation)} if run.evaluation else {} for run in runs]
    if any(tables):
        known = dict.fromkeys(name for table in tables for name in table)
        names = sorted(known, key=lambda name: (name not in LEADING, name in TOGETHER))  # of all agents: below them
        titles = dict.fromkeys(f"{run.words.right} ({run.words.loss})" for run in runs)
        rows.append((" or ".join(titles), *[""] * len(runs)))
        rows += [(name, *(_shown(table.get(name)) for table in tables)) for name in names]
    if all(run.status.agent_steps is not None for run in runs):
        rows.append(("agent-steps", *(f"{run.status.agent_steps:,}" for run in runs)))
    yield ""
    yield from aligned(rows)
    yield ""
    if without:
        yield f"no checkpoint, and so no configuration to compare: {', '.join(without)}"
    elif not differing:
        yield "configuration: no difference"
    if not any(tables):
        yield "scores: none of these runs has been evaluated yet"
        return
    for number, gain, why in _differences(runs):
        shown = _as_text(gain, runs[number].words) if gain else f"not compared ({why})"
        yield f"crowd {LETTERS[number]} - crowd A: {shown}"
    for letter, run in named.items():
        if run.evaluation:
            yield f"{letter}: {run.what_evaluated}"
            if rates := run.evaluation.learning_rates:
                yield f"{letter}: learning rates {', '.join(f'{rate:g}' for rate in rates)}"
            yield from (f"{letter}: {line}" for line in notes(run.evaluation, run.folder))


def trials_as_text(board: Leaderboard) -> Iterator[str]:
    """The trials of a sweep side by side, in lines for a terminal, and where the best one is."""
    if board.best_run is None:
        yield "no trial has a score yet"
        return
    yield from aligned([board.columns, *board.rows])
    yield f"best: trial {board.best}, trained last in {board.best_run}, which ci-llm report and ci-llm compare take"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a table as lines, in columns that are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


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


def _as_text(gain: Gain, words: Measures) -> str:
    """A difference in the words of its objective."""
    right = words.right if gain.measure == "exact_match" else METRICS[gain.measure].told
    if gain.measure == "nll":
        return f"{gain} {words.loss} (no interval: its rows are not kept one by one)"
    if gain.interval95 is None:
        why = "too few rows for an interval" if gain.rows < LEAST_ROWS else f"the same in each of {gain.rows} rows"
        return f"{gain} {right} ({why})"
    why = ": not both have predictions of what was evaluated" if gain.measure == "exact_match" else ""
    how = f"paired over {gain.rows} rows" if gain.paired else f"unpaired, {gain.rows} rows{why}"
    verdict = "a difference" if abs(gain.value) > gain.interval95 else "no difference shown"
    return f"{gain} {right} (95 %, {how}): {verdict}"


def _shown(score: Score | None) -> str:
    if score is None:
        return ""
    exact = "-" if score.exact_match is None else f"{score.exact_match:.3f}"
    return exact + (f" ({score.nll:.4f})" if score.nll is not None else "")
