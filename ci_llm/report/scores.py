"""Scores with their intervals: of agents and crowd, of one run beside another, of the trials of a sweep."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from ci_llm.core.durable import read_json, read_object
from ci_llm.core.run_folder import SEGMENTS, SWEEP, parsed
from ci_llm.core.scores import (
    LEAST_ROWS,
    METRICS,
    figures,
    hybrid_interval,
    measures,
    paired_interval,
    place_of_trial,
    share_interval,
    unpaired_interval,
)

Row = Mapping[str, Any]
R = TypeVar("R", bound=Row)

#: The lines above those of the agents.
BASE, BEST = LEADING = ("base", "best agent")
#: The lines about all agents together.
MEAN, VOTE, CROWD = TOGETHER = ("agents, mean", "majority vote", "crowd")
_OVER: Final = {
    "crowd_minus_mean": "the agents' mean",
    "crowd_minus_best": "the best agent",
    "crowd_minus_vote": "a majority vote",
}
BY_OWN_ROWS: Final = "each agent is scored by its own rows; the crowd and the differences are over the rows of all"

_HOW: Final = {"generation": "final answers, generated", "teacher_forcing": "whole solutions, teacher-forced"}
#: By how many of the rows were trained on.
_ROWS: Final = {
    "none": "held-out rows",
    "some": "rows, some of them trained on",
    "all": "rows that were trained on: none was held out",
}


@dataclass(frozen=True)
class Score:
    """The scores in one line of an evaluation.

    Attributes:
        who: the name of an agent, or one of `LEADING` and `TOGETHER`.
        exact_match: the share of right answers; None for free text, which is neither right nor wrong.
        low, high: a 95 % interval of that share over rows (Wilson); None for too few rows, or a mean of several agents.
        nll: nats per target token, teacher-forced; None for a vote.
        learning_rate: that of the agent; None if it is not known.
    """

    who: str
    exact_match: float | None
    low: float | None
    high: float | None
    nll: float | None
    learning_rate: float | None = None

    @property
    def interval(self) -> str:
        """The interval for people; empty without one."""
        return "" if self.low is None else f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True)
class Gain:
    """A difference of two shares of right answers, of two NLLs, or of two other figures.

    Attributes:
        measure: one of `METRICS`.
        interval95: the half-width of its 95 % interval, or the longer side of one that is not symmetric; None for too
            few rows, or if all rows differ by the same.
        paired: whether both answered the same rows, which are compared row by row.
        rows: the number of rows.
    """

    value: float
    interval95: float | None
    paired: bool
    rows: int
    measure: str = "exact_match"

    @property
    def is_sure(self) -> bool | None:
        """Whether the whole interval is on the better side of zero; None for too few rows."""
        better = self.value if METRICS[self.measure].greater else -self.value
        return None if self.rows < LEAST_ROWS else better > (self.interval95 or 0.0)

    def __str__(self) -> str:
        digits = 4 if self.measure == "nll" else 3
        half = "" if self.interval95 is None else f" ± {self.interval95:.{digits}f}"
        return f"{self.value:+.{digits}f}{half}"


def scores(evaluation: Mapping[str, Any]) -> list[Score]:
    """The lines of an evaluation.json, the base's first and the crowd's last; a base alone has one line.

    Agents that are scored by their own rows have no mean, which would be of other rows than the crowd's score, and no
    intervals, because evaluation.json does not count the rows of each agent.
    """
    exact, nll, rows = evaluation["exact_match"], evaluation["nll"], evaluation["n"]
    have_own, is_free, names = bool(by_own_rows(evaluation)), is_free_text(evaluation), agents_of(evaluation)

    def score(who: str, share: float | None, loss: float | None, *, whole: bool = True, rate: Any = None) -> Score:
        has_interval = whole and share is not None and rows >= LEAST_ROWS and not is_free
        low, high = share_interval(share or 0.0, rows) if has_interval else (None, None)
        return Score(who, None if is_free else share, low, high, loss, rate)

    rates = evaluation.get("learning_rates") or [None] * len(names)
    agents = [
        score(name, share, loss, whole=not have_own, rate=rate)
        for name, share, loss, rate in zip(names, exact["agents"], nll["agents"], rates, strict=True)
    ]
    base = [score(BASE, found["exact_match"], found["nll"])] if (found := evaluation.get("base")) else []
    best = [replace(agents[each["agent"]], who=BEST)] if (each := evaluation.get("best_agent")) else []
    if not agents:
        return base
    mean = [] if have_own else [score(MEAN, fmean(exact["agents"]), fmean(nll["agents"]), whole=False)]
    vote = [score(VOTE, exact["vote"], None)] if "vote" in exact and not is_free else []
    return [*base, *best, *agents, *mean, *vote, score(CROWD, exact["crowd"], nll["crowd"])]


def read_evaluation(run_folder: Path) -> dict[str, Any] | None:
    """evaluation.json with all its scores; None without the file.

    Raises:
        BadInput: the file cannot be read, or lacks a score.
    """
    try:
        return parsed(run_folder / "evaluation.json", _complete_evaluation, "this is not an evaluation")
    except FileNotFoundError:
        return None


def _complete_evaluation(path: Path) -> dict[str, Any]:
    evaluation = read_object(path)
    _ = scores(evaluation), list(gains(evaluation))
    return evaluation


def is_free_text(evaluation: Mapping[str, Any]) -> bool:
    """Whether the rows are judged by NLL, because no answer has to match theirs; see `crowd.scoring.judged_by`."""
    return evaluation.get("judged_by") == "nll"


def agents_of(evaluation: Mapping[str, Any]) -> list[str]:
    """The names of the agents for people: those of the configuration, or those of their folders."""
    return [*evaluation.get("names", folders_of(evaluation))]


def folders_of(evaluation: Mapping[str, Any]) -> list[str]:
    """The names of the agents as metrics and checkpoints have them; a crowd that has changed has gaps."""
    return [*evaluation.get("folders", (f"agent{k}" for k in range(len(evaluation["nll"]["agents"]))))]


def as_line(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation.json as a line of metrics.jsonl: `step`, and a number for each agent and for the crowd."""
    line: dict[str, Any] = {"step": evaluation["step"]}
    known = {"nll": evaluation["nll"], "exact_match": evaluation["exact_match"], **judged_figures(evaluation)}
    for name, found in known.items():
        of_agents = zip(folders_of(evaluation), found["agents"], strict=True)
        line |= {f"eval/{agent}/{name}": value for agent, value in of_agents}
        line[f"eval/crowd/{name}"] = found["crowd"]
    return line


def by_own_rows(evaluation: Mapping[str, Any]) -> str:
    """A note that agents are scored by their own rows, for people; empty if all rows score all agents."""
    return BY_OWN_ROWS if "sets" in evaluation else ""


def gains(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, Gain]]:
    """(the other side, crowd minus it) in an evaluation.json, by the measure that judges its rows; paired over rows."""
    measure = "nll" if is_free_text(evaluation) else "exact_match"
    found, rows = evaluation[measure], evaluation["n"]
    for key, name in _OVER.items():
        if gain := found.get(key):
            interval = gain["interval95"]
            known = interval is not None and math.isfinite(interval)
            yield name, Gain(gain["value"], interval if known else None, True, rows, measure)


def notes(evaluation: Mapping[str, Any], run: Path | str) -> Iterator[str]:
    """Lines for people: other figures, the best agent of those with settings of their own, and a useless crowd.

    Args:
        run: the argument RUN of the commands in the lines.
    """
    yield from judged_lines(evaluation)
    names = agents_of(evaluation)
    if found := evaluation.get("best_agent"):
        better, worse = found["rows_better"], found["rows_worse"]
        tell = f"{better + worse} rows tell it from {names[found['next']]}, {better} for it and {worse} against"
        yield f"best agent: {names[found['agent']]}; {tell}"
    if len(names) > 1 and not by_own_rows(evaluation) and (nothing := _adds_nothing(evaluation)):
        best, why = nothing
        folder = folders_of(evaluation)[best]
        serve = shlex.join(["ci-llm", "export", str(run), "--agent", folder, "--to", folder])
        yield f"the crowd adds nothing{why} rows; {names[best]} alone costs 1/{len(names)}: {serve}"


def _adds_nothing(evaluation: Mapping[str, Any]) -> tuple[int, str] | None:
    """The agent to serve instead of the crowd, and why; None if the crowd adds something.

    It adds nothing if its NLL is worse than the best agent's, or if by the measure that judges the rows the interval of
    its gain over the agents' mean, or over the best agent, holds zero.
    """
    nll, crowd, exact = evaluation["nll"]["agents"], evaluation["nll"]["crowd"], evaluation["exact_match"]["agents"]
    if not all(each is not None and math.isfinite(each) for each in (*nll, crowd)):
        return None
    best, words = nll.index(min(nll)), measures(evaluation)
    if crowd > nll[best]:
        rows = evaluation.get("teacher_forced", evaluation)["n"]
        return best, f": {crowd:.4f} {words.loss}, {agents_of(evaluation)[best]} {nll[best]:.4f}, over {rows}"
    for over, gain in [*gains(evaluation)][:2]:
        if gain.is_sure is False:
            by_loss = gain.measure == "nll"
            best = best if by_loss else exact.index(max(exact))
            return best, f" sure in {words.loss if by_loss else words.right}: {gain} over {over}, over {gain.rows}"
    return None


def table(evaluation: Mapping[str, Any], run: Path | str) -> Iterator[str]:
    """An evaluation.json for a terminal, line by line; for `run` see `notes`."""
    found, are_several = scores(evaluation), len(evaluation["nll"]["agents"]) > 1
    if not are_several:  # the crowd is the agent
        found = [score for score in found if score.who not in TOGETHER]
    columns = [*_columns(evaluation, found)]
    yield f"{'':<14}" + "".join(f"{title:>{width}}" for title, width, _ in columns)
    for place, score in enumerate(found):
        yield f"{score.who:<14}{''.join(f'{cells[place]:>{width}}' for _, width, cells in columns)}".rstrip()
    yield from (f"crowd - {name}: {gain}" for name, gain in gains(evaluation) if are_several)
    yield what_evaluated(evaluation)
    yield from notes(evaluation, run)


def _columns(evaluation: Mapping[str, Any], found: Sequence[Score]) -> Iterator[tuple[str, int, list[str]]]:
    """(title, width, cells) of the columns for which there are figures."""

    def shown(numbers: Iterable[float | None], form: str) -> list[str]:
        return ["" if number is None else format(number, form) for number in numbers]

    words = measures(evaluation)
    nll, rates = [score.nll for score in found], [score.learning_rate for score in found]
    if not is_free_text(evaluation):
        yield words.right, 12, shown([score.exact_match for score in found], ".3f")
        if any(score.low is not None for score in found):
            yield "95 % interval", 17, [score.interval for score in found]
    elif "bytes" in evaluation:
        bits = evaluation["tokens"] / math.log(2) / max(1, evaluation["bytes"])
        yield "perplexity", 12, shown((each and math.exp(each) for each in nll), ".3f")
        yield "bits per byte", 17, shown((each and each * bits for each in nll), ".4f")
    yield words.loss, 16, shown(nll, ".4f")
    if len({*rates} - {None}) > 1:
        yield "learning rate", 15, shown(rates, "g")


def judged_lines(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Lines about pairs, ratings, classes and numbers, with 95 % intervals."""
    for name, found in judged_figures(evaluation).items():
        if math.isnan(found["crowd"]):
            yield f"{METRICS[name].told}: not known, for all rows that were evaluated are good, or all are bad"
            continue
        agents = ", ".join(f"{own:.3f}" for own in found["agents"])
        low, high = found.get("intervals95", {}).get("crowd", (None, None))
        within = "" if low is None else f" ({low:.3f} to {high:.3f})"
        gain = found.get("crowd_minus_mean", {})
        over = f"; crowd - mean {gain['value']:+.3f} ± {gain['interval95']:.3f}" if gain.get("interval95") else ""
        yield f"{METRICS[name].told}: crowd {found['crowd']:.3f}{within}; agents {agents}{over}"


def judged_figures(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The figures of the objective in an evaluation, by the names of `METRICS`; some may not be defined."""
    found = {}
    for name in measures(evaluation).metrics:
        with suppress(KeyError):
            found[name] = figures(evaluation, name)
    return found


def how_measured(evaluation: Mapping[str, Any]) -> str:
    """How an evaluation has measured, for people."""
    is_free = is_free_text(evaluation)
    if evaluation.get("measured_by") == "heads":
        classes = "the better of each pair" if "preferences" in evaluation else "classes"
        return f"{'numbers' if is_free else classes}, by heads"
    return "free text, judged by NLL" if is_free else _HOW.get(evaluation.get("measured_by", ""), "answers")


def rows_evaluated(count: int, trained_on: str) -> str:
    """The rows of an evaluation in words; `none`, `some` or `all` of them were trained on."""
    return f"{count} {_ROWS.get(trained_on, 'rows')}"


def what_evaluated(evaluation: Mapping[str, Any]) -> str:
    """How, on which rows and on which data set an evaluation.json has measured, for people."""
    rows = rows_evaluated(evaluation["n"], evaluation.get("rows_trained_on", "none"))
    of = f"{how_measured(evaluation)}, over {rows}; data set {', '.join(evaluation.get('data', [evaluation['task']]))}"
    if (metric := evaluation.get("metric", "exact_match")) != "exact_match":
        of += f"; right is what {metric} finds equal"
    return f"{of}; {whose}" if (whose := by_own_rows(evaluation)) else of


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why two evaluations cannot be subtracted; None if they can."""
    known = "data" if "data" in one and "data" in other else "task"
    for key, what in ((known, "data sets"), ("measured_by", "measures"), ("rows_trained_on", "kinds of rows")):
        if one.get(key) != other.get(key):
            return f"different {what}: {one.get(key)} and {other.get(key)}"
    return None


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], own_rows: Sequence[Row] = (), other_rows: Sequence[Row] = ()
) -> Iterator[Gain]:
    """The crowd of `one` minus the crowd of `other`, by the measure of the rows and by the figures of the objective.

    Paired over the rows that both have answered, if both runs left their predictions. Else by the two shares alone, as
    if they were of different rows: that interval is wider.

    Args:
        one, other: evaluation.json.
        own_rows, other_rows: predictions, which are joined by prompt and reference.
    """
    rows = min(one["n"], other["n"])
    if is_free_text(one):
        yield Gain(one["nll"]["crowd"] - other["nll"]["crowd"], None, False, rows, "nll")
    elif pairs := _joined(own_rows, other_rows):
        apart = [float(a) - float(b) for a, b in pairs]
        yield Gain(fmean(apart), paired_interval(apart), True, len(pairs))
    else:
        own, others = ((evaluation["exact_match"]["crowd"], evaluation["n"]) for evaluation in (one, other))
        yield Gain(own[0] - others[0], unpaired_interval(*own, *others), False, rows)
    known, theirs = judged_figures(one), judged_figures(other)
    for name in (name for name in known if name in theirs):
        mine, their = known[name], theirs[name]
        ends = [each["intervals95"]["crowd"] for each in (mine, their) if "intervals95" in each]
        half = hybrid_interval(mine["crowd"], ends[0], their["crowd"], ends[1]) if len(ends) == 2 else None
        yield Gain(mine["crowd"] - their["crowd"], half, False, rows, name)


def failed_rows(rows: Iterable[R]) -> list[R]:
    """The rows that the crowd answered wrong, beginning with those of which it was most sure.

    They are sorted by the log-probability of the text, as the confidence of a long text is 0; a row without signals by
    its confidence.
    """

    def sure(row: Row) -> float:
        first = [*row.get("signals", ())][:1] or [row.get("confidence")]
        return -first[0] if isinstance(first[0], int | float) else 0.0

    return sorted((row for row in rows if row["correct"] is False), key=sure)


def _joined(own: Sequence[Row], other: Sequence[Row]) -> list[tuple[bool, bool]]:
    """(whether the one is right, whether the other is right) for every row that both have answered."""
    known = {_question(row): bool(row["correct"]) for row in other}
    return [(bool(row["correct"]), known[_question(row)]) for row in own if _question(row) in known]


def _question(row: Row) -> tuple[str, str]:
    return str(row["prompt"]), str(row.get("reference"))


@dataclass(frozen=True)
class Leaderboard:
    """The trials that were scored.

    Attributes:
        columns: the names of the columns, settings last.
        rows: the cells of every trial, its id first; the trials that went furthest come first.
        best: the id of the best trial; None before there is one.
        best_run: the folder of the run that trained the best trial last.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None
    best_run: Path | None


def read_trials(folder: Path) -> Leaderboard | None:
    """The leaderboard of a sweep; None if the folder does not hold a sweep.

    Raises:
        BadInput: sweep.json was not written by this program.
    """
    try:
        return parsed(folder / SWEEP, _leaderboard, "this is not the record of a sweep")
    except FileNotFoundError:
        return None


def _leaderboard(path: Path) -> Leaderboard:
    record: Any = read_json(path)
    metric, steps = record["plan"]["metric"], record["plan"]["steps"]
    trials = [trial for trial in record["trials"] if trial["scores"]]
    trials.sort(key=lambda trial: place_of_trial(trial["id"], trial["scores"], metric))
    keys = dict.fromkeys(key for trial in trials for key in trial["settings"])
    rows = []
    for trial in trials:
        values = [trial["settings"].get(key, "") for key in keys]
        told = [", ".join(map(str, each)) if isinstance(each, list) else str(each) for each in values]
        score = "" if trial["score"] is None else f"{trial['score']:.4f}"
        rows.append((str(trial["id"]), trial["status"], str(steps[trial["rung"] - 1]), score, *told))
    segments = {trial["id"]: path.parent / SEGMENTS / str(trial["segment"]) for trial in trials}
    best = record["best"]
    return Leaderboard(("trial", "status", "step", metric, *keys), tuple(rows), best, segments.get(best))
