"""Scores with their intervals: of agents and crowd, of one run beside another, of the trials of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ci_llm.core.run_folder import SEGMENTS, SWEEP
from ci_llm.core.scores import LEAST_ROWS, paired_interval, place_of_trial, share_interval, unpaired_interval
from ci_llm.errors import BadInput

Row = Mapping[str, Any]

#: The lines about all agents together.
MEAN, VOTE, CROWD = TOGETHER = ("agents, mean", "majority vote", "crowd")
BY_OWN_ROWS: Final = "each agent is scored by its own rows; the crowd and the differences are over the rows of all"

HOW: Final = {"generation": "final answers, generated", "teacher_forcing": "whole solutions, teacher-forced"}


@dataclass(frozen=True)
class Score:
    """How one answered.

    Attributes:
        who: the name of an agent, "agents, mean", "crowd", "majority vote".
        exact_match: share of right answers.
        low, high: a 95 % interval of that share over rows (Wilson); None where there are too few rows, or the share is
            a mean of several agents.
        nll: nats per target token, teacher-forced; None where there is none.
    """

    who: str
    exact_match: float
    low: float | None
    high: float | None
    nll: float | None


@dataclass(frozen=True)
class Gain:
    """A difference of two shares of right answers.

    Attributes:
        interval95: the half-width of its 95 % interval, or the longer side of one that is not symmetric; None where
            there are too few rows, or all of them differ alike.
        paired: whether both answered the same rows, which are compared row by row.
        rows: how many.
    """

    value: float
    interval95: float | None
    paired: bool
    rows: int


def scores(evaluation: Mapping[str, Any]) -> list[Score]:
    """The lines of an evaluation.json, the crowd's last. Agents that are scored by their own rows have neither a mean,
    which would be of other rows than the crowd's score, nor an interval, because their rows are not counted there."""
    exact, nll, rows = evaluation["exact_match"], evaluation["nll"], evaluation["n"]
    have_own = bool(by_own_rows(evaluation))
    agents = [
        Score(name, match, None, None, loss) if have_own else _score(name, match, rows, loss)
        for name, match, loss in zip(agents_of(evaluation), exact["agents"], nll["agents"], strict=True)
    ]
    mean = [] if have_own else [Score(MEAN, fmean(exact["agents"]), None, None, fmean(nll["agents"]))]
    vote = [_score(VOTE, exact["vote"], rows, None)] if "vote" in exact else []
    return [*agents, *mean, *vote, _score(CROWD, exact["crowd"], rows, nll["crowd"])]


def agents_of(evaluation: Mapping[str, Any]) -> list[str]:
    """The names of the agents for people: those that the run gave them, or else those of their folders."""
    return [*evaluation.get("names", folders_of(evaluation))]


def folders_of(evaluation: Mapping[str, Any]) -> list[str]:
    """The names of the agents as metrics and checkpoints have them; a crowd that has changed has gaps."""
    return [*evaluation.get("folders", (f"agent{k}" for k in range(len(evaluation["nll"]["agents"]))))]


def by_own_rows(evaluation: Mapping[str, Any]) -> str:
    """By which rows the agents are scored, for people; empty where all rows score everyone."""
    return BY_OWN_ROWS if "sets" in evaluation else ""


def gains(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, Gain]]:
    """What the crowd is better by, as evaluation.json says it: paired over rows."""
    names = {
        "crowd_minus_mean": "the agents' mean",
        "crowd_minus_best": "the best agent",
        "crowd_minus_vote": "a majority vote",
    }
    for key, name in names.items():
        if gain := evaluation["exact_match"].get(key):
            interval = gain["interval95"]
            known = interval is not None and math.isfinite(interval)
            yield name, Gain(gain["value"], interval if known else None, True, evaluation["n"])


def how_measured(evaluation: Mapping[str, Any]) -> str:
    """What "right" means in an evaluation, for people."""
    return HOW.get(evaluation.get("measured_by", ""), "answers")


def rows_evaluated(count: int, trained_on: str) -> str:
    """The rows of an evaluation in words, and whether they were trained on.

    Args:
        trained_on: "none", "some" or "all" of them.
    """
    kinds = {
        "none": "held-out rows",
        "some": "rows, some of them trained on",
        "all": "rows that were trained on: none was held out",
    }
    return f"{count} {kinds.get(trained_on, 'rows')}"


def what_evaluated(evaluation: Mapping[str, Any]) -> str:
    """What the scores of an evaluation.json are of, for people."""
    rows = rows_evaluated(evaluation["n"], evaluation.get("rows_trained_on", "none"))
    of = f"{how_measured(evaluation)}, over {rows}; data set {evaluation['task']}"
    return f"{of}; {whose}" if (whose := by_own_rows(evaluation)) else of


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why two evaluations cannot be subtracted; None if they can."""
    for key, what in (("task", "data sets"), ("measured_by", "measures"), ("rows_trained_on", "kinds of rows")):
        if one.get(key) != other.get(key):
            return f"different {what}: {one.get(key)} and {other.get(key)}"
    return None


def difference(
    one: Mapping[str, Any], other: Mapping[str, Any], own_rows: Sequence[Row] = (), other_rows: Sequence[Row] = ()
) -> Gain:
    """The crowd of `one` minus the crowd of `other`.

    Paired over the rows that both have answered, where both runs left their predictions. Else from the two shares
    alone, as if they were of different rows: that interval is the wider one.

    Args:
        one, other: evaluation.json.
        own_rows, other_rows: predictions, which are joined by prompt and reference.
    """
    pairs = _joined(own_rows, other_rows)
    if pairs:
        differences = [float(a) - float(b) for a, b in pairs]
        return Gain(fmean(differences), paired_interval(differences), True, len(pairs))
    own, others = ((evaluation["exact_match"]["crowd"], evaluation["n"]) for evaluation in (one, other))
    return Gain(own[0] - others[0], unpaired_interval(*own, *others), False, min(own[1], others[1]))


def surest_first(row: Row) -> float:
    """By what predictions are sorted: minus the log-probability of the text, as the confidence of a long one is 0.

    Older releases did not write it: of their lines it is minus the confidence.
    """
    signals = row.get("signals")
    numbers = (*(signals[:1] if isinstance(signals, list) else ()), row.get("confidence"))
    return -next((number for number in numbers if isinstance(number, int | float)), 0.0)


def _score(who: str, share: float, rows: int, nll: float | None) -> Score:
    low, high = share_interval(share, rows) if rows >= LEAST_ROWS else (None, None)
    return Score(who, share, low, high, nll)


def _joined(own: Sequence[Row], other: Sequence[Row]) -> list[tuple[bool, bool]]:
    """Right or not, of one and of the other, for every row that both have answered."""
    known = {_question(row): bool(row["correct"]) for row in other}
    return [(bool(row["correct"]), known[_question(row)]) for row in own if _question(row) in known]


def _question(row: Row) -> tuple[str, str]:
    return str(row["prompt"]), str(row.get("reference"))


@dataclass(frozen=True)
class Leaderboard:
    """The trials that were scored.

    Attributes:
        keys: the columns of settings.
        rows: of every trial its id, status, last step, score and settings; those that went furthest first.
        best: the id of the best one; None before there is one.
        best_run: the folder of the run that trained it last.
    """

    metric: str
    keys: tuple[str, ...]
    rows: tuple[tuple[int, str, int, float | None, tuple[str, ...]], ...]
    best: int | None
    best_run: Path | None


def read_trials(folder: Path) -> Leaderboard | None:
    """The leaderboard of a sweep; None where the folder holds none.

    Raises:
        BadInput: its record is not of this program.
    """
    path = folder / SWEEP
    try:
        record = json.loads(path.read_bytes())
        metric, steps = record["plan"]["metric"], record["plan"]["steps"]
        scored = [trial for trial in record["trials"] if trial["scores"]]
        keys = tuple(dict.fromkeys(key for trial in scored for key in trial["settings"]))
        scored.sort(key=lambda trial: place_of_trial(trial["id"], trial["scores"], metric))
        rows = [
            (each["id"], each["status"], steps[each["rung"] - 1], each["score"], _cells(each["settings"], keys))
            for each in scored
        ]
        best = next((trial for trial in scored if trial["id"] == record["best"]), None)
        best_run = folder / SEGMENTS / str(best["segment"]) if best else None
        return Leaderboard(metric, keys, tuple(rows), record["best"], best_run)
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise BadInput(f"no record of a sweep: {error}", where=str(path), hint="move it away") from error


def _cells(settings: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    values = [settings.get(key, "") for key in keys]
    return tuple(", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
