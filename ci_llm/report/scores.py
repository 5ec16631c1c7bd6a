"""Scores with their intervals: of agents and crowd, of one run beside another, of the trials of a sweep."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ci_llm.core import measures
from ci_llm.core.durable import read_json
from ci_llm.core.evaluation_file import Evaluation, Figure
from ci_llm.core.run_folder import SEGMENTS, SWEEP, Record, parsed

Row = Mapping[str, Any]

#: The lines above those of the agents.
BASE, BEST = LEADING = ("base", "best agent")
#: The lines about all agents together.
MEAN, VOTE, CROWD = TOGETHER = ("agents, mean", "majority vote", "crowd")
_BY_OWN_ROWS: Final = "each agent is scored by its own rows; the crowd and the differences are over the rows of all"

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
        paired: both answered the same rows, which are compared row by row.
        rows: the number of rows.
    """

    value: float
    interval95: float | None
    paired: bool
    rows: int
    measure: str = "exact_match"

    @property
    def is_sure(self) -> bool | None:
        """True if the whole interval is on the better side of zero; None for too few rows."""
        better = self.value if measures.METRICS[self.measure].greater else -self.value
        return None if self.rows < measures.LEAST_ROWS else better > (self.interval95 or 0.0)

    def __str__(self) -> str:
        digits = 4 if self.measure == "nll" else 3
        half = "" if self.interval95 is None else f" ± {self.interval95:.{digits}f}"
        return f"{self.value:+.{digits}f}{half}"


def scores(evaluation: Evaluation) -> list[Score]:
    """The lines of an evaluation, the base's first and the crowd's last; a base alone has one line.

    Agents that are scored by their own rows have no mean, which would be of other rows than the crowd's score, and no
    intervals, because an evaluation does not count the rows of each agent.
    """
    exact, nll, is_free = evaluation.exact_match, evaluation.nll, evaluation.is_free_text

    def score(
        who: str, share: float | None, loss: float | None, rate: float | None = None, whole: bool = True
    ) -> Score:
        has_interval = whole and share is not None and evaluation.n >= measures.LEAST_ROWS and not is_free
        low, high = measures.share_interval(share or 0.0, evaluation.n) if has_interval else (None, None)
        return Score(who, None if is_free else share, low, high, loss, rate)

    rates = evaluation.learning_rates or [None] * len(nll.agents)
    each = zip(evaluation.agent_names, exact.agents, nll.agents, rates, strict=True)
    agents = [score(*one, whole=not evaluation.sets) for one in each]
    base = [score(BASE, evaluation.base.exact_match, evaluation.base.nll)] if evaluation.base else []
    if not agents:
        return base
    best = [replace(agents[evaluation.best_agent.agent], who=BEST)] if evaluation.best_agent else []
    mean = [] if evaluation.sets else [score(MEAN, fmean(exact.agents), fmean(nll.agents), whole=False)]
    vote = [] if exact.vote is None or is_free else [score(VOTE, exact.vote, None)]
    return [*base, *best, *agents, *mean, *vote, score(CROWD, exact.crowd, nll.crowd)]


def as_line(evaluation: Evaluation) -> Record:
    """An evaluation as a line of metrics.jsonl: its step, and a number for each agent and for the crowd."""
    known = {"nll": evaluation.nll, "exact_match": evaluation.exact_match, **evaluation.objective_figures}
    everyone = [*evaluation.agent_folders, "crowd"]
    values = {
        f"eval/{who}/{name}": value
        for name, found in known.items()
        for who, value in zip(everyone, (*found.agents, found.crowd), strict=True)
    }
    return {"step": evaluation.step, **values}


def gains(evaluation: Evaluation) -> Iterator[tuple[str, Gain]]:
    """(the other side, crowd minus it) by the measure that judges the rows; paired over rows."""
    measure = evaluation.judged_by
    found = evaluation.nll if measure == "nll" else evaluation.exact_match
    over = (found.crowd_minus_mean, found.crowd_minus_best, found.crowd_minus_vote)
    for name, gain in zip(("the agents' mean", "the best agent", "a majority vote"), over, strict=True):
        if gain is not None:
            if measure == "nll" and (better := evaluation.measures.gain):
                yield name, Gain(-gain.value, gain.interval95, True, evaluation.n, better)
            else:
                yield name, Gain(gain.value, gain.interval95, True, evaluation.n, measure)


def notes(evaluation: Evaluation, run: Path | str | None) -> Iterator[str]:
    """Lines for people: other figures, the best of agents that differ in settings, and a crowd that adds nothing.

    Args:
        run: the argument RUN of the commands in the lines; None for lines in the folder of the agents.
    """
    yield from objective_lines(evaluation)
    names = evaluation.agent_names
    if found := evaluation.best_agent:
        better, worse = found.rows_better, found.rows_worse
        tell = f"{better + worse} rows tell it from {names[found.next]}, {better} for it and {worse} against"
        yield f"best agent: {names[found.agent]}; {tell}"
    if len(names) > 1 and not evaluation.sets and (nothing := _adds_nothing(evaluation)):
        best, why = nothing
        folder = evaluation.agent_folders[best]
        serve = f"the PEFT folder {folder}"
        if run is not None:
            serve = shlex.join(["ci-llm", "export", str(run), "--agent", folder, "--to", folder])
        yield f"the crowd adds nothing{why} rows; {names[best]} alone costs 1/{len(names)}: {serve}"


def _adds_nothing(evaluation: Evaluation) -> tuple[int, str] | None:
    """The agent to serve instead of the crowd, and why; None if the crowd adds something.

    It adds nothing if its NLL is worse than the best agent's, or if by the measure that judges the rows the interval of
    its gain over the agents' mean, or over the best agent, holds zero.
    """
    nll, crowd, exact = evaluation.nll.agents, evaluation.nll.crowd, evaluation.exact_match.agents
    if crowd is None or not all(map(math.isfinite, (*nll, crowd))):
        return None
    best = nll.index(min(nll))
    words = evaluation.measures
    if crowd > nll[best]:
        rows = evaluation.solutions.n
        unit, sign = (words.gain, -1) if words.gain else (words.loss, 1)
        told = f"{sign * crowd:.4f} {unit}, {evaluation.agent_names[best]} {sign * nll[best]:.4f}"
        return best, f": {told}, over {rows}"
    for over, gain in [*gains(evaluation)][:2]:
        if gain.is_sure is False:
            by_loss = gain.measure != "exact_match"
            best = best if by_loss else exact.index(max(exact))
            unit = (words.gain or words.loss) if by_loss else words.right
            return best, f" sure in {unit}: {gain} over {over}, over {gain.rows}"
    return None


def table(evaluation: Evaluation, run: Path | str | None) -> Iterator[str]:
    """An evaluation for a terminal, line by line; for `run` see `notes`."""
    found, are_several = scores(evaluation), len(evaluation.nll.agents) > 1
    if not are_several:  # the crowd is the agent
        found = [score for score in found if score.who not in TOGETHER]
    columns = [*_columns(evaluation, found)]
    yield f"{'':<14}" + "".join(f"{title:>{width}}" for title, width, _ in columns)
    for place, score in enumerate(found):
        yield f"{score.who:<14}{''.join(f'{cells[place]:>{width}}' for _, width, cells in columns)}".rstrip()
    yield from (f"crowd - {name}: {gain}" for name, gain in gains(evaluation) if are_several)
    yield what_evaluated(evaluation)
    yield from notes(evaluation, run)


def _columns(evaluation: Evaluation, found: Sequence[Score]) -> Iterator[tuple[str, int, list[str]]]:
    """(title, width, cells) of the columns for which there are figures."""

    def shown(numbers: Iterable[float | None], form: str) -> list[str]:
        return ["" if number is None else format(number, form) for number in numbers]

    words = evaluation.measures
    nll, rates = [score.nll for score in found], [score.learning_rate for score in found]
    if not evaluation.is_free_text:
        yield words.right, 12, shown([score.exact_match for score in found], ".3f")
        if any(score.low is not None for score in found):
            yield "95 % interval", 17, [score.interval for score in found]
    elif evaluation.tokens is not None and evaluation.bytes is not None:
        bits = evaluation.tokens / math.log(2) / max(1, evaluation.bytes)
        yield "perplexity", 12, shown((each and math.exp(each) for each in nll), ".3f")
        yield "bits per byte", 17, shown((each and each * bits for each in nll), ".4f")
    if words.gain:
        yield words.gain, 16, shown((each and -each for each in nll), ".4f")
    else:
        yield words.loss, 16, shown(nll, ".4f")
    if len({*rates} - {None}) > 1:
        yield "learning rate", 15, shown(rates, "g")


def objective_lines(evaluation: Evaluation) -> Iterator[str]:
    """Lines about pairs, ratings, classes and numbers, with 95 % intervals."""
    rated = evaluation.preferences.auroc if evaluation.preferences else None
    why = "numbers of the agents are not finite"
    if rated is not None and math.isnan(_crowd(rated)):
        why = "all rows that were evaluated are good, or all are bad"
    for name, found in evaluation.objective_figures.items():
        if found.crowd is None or math.isnan(found.crowd):
            yield f"{measures.METRICS[name].told}: not known, for {why}"
            continue
        agents = ", ".join(f"{own:.3f}" for own in found.agents)
        within = " ({:.3f} to {:.3f})".format(*found.intervals95.crowd) if found.intervals95 else ""
        gain = found.crowd_minus_mean
        over = f"; crowd - mean {gain.value:+.3f} ± {gain.interval95:.3f}" if gain and gain.interval95 else ""
        yield f"{measures.METRICS[name].told}: crowd {found.crowd:.3f}{within}; agents {agents}{over}"


def how_measured(evaluation: Evaluation) -> str:
    """The measure of an evaluation in words."""
    is_free = evaluation.is_free_text
    if evaluation.measured_by == "rewards":
        return "answers, by rewards"
    if evaluation.measured_by == "heads":
        classes = "the better of each pair" if evaluation.preferences else "classes"
        return f"{'numbers' if is_free else classes}, by heads"
    return "free text, judged by NLL" if is_free else _HOW[evaluation.measured_by]


def rows_evaluated(count: int, trained_on: str) -> str:
    """The rows of an evaluation in words; `none`, `some` or `all` of them were trained on."""
    return f"{count} {_ROWS[trained_on]}"


def what_evaluated(evaluation: Evaluation) -> str:
    """A line for people: how, on which rows and on which data set an evaluation has measured."""
    rows = rows_evaluated(evaluation.n, evaluation.rows_trained_on)
    of = f"{how_measured(evaluation)}, over {rows}; data set {', '.join(evaluation.data)}"
    if evaluation.answered and evaluation.answered.metric != "exact_match":
        of += f"; right is what {evaluation.answered.metric} finds equal"
    return f"{of}; {_BY_OWN_ROWS}" if evaluation.sets else of


def comparable(one: Evaluation, other: Evaluation) -> str | None:
    """The reason why two evaluations cannot be subtracted; None if they can."""
    if one.data != other.data:
        return f"different data sets: {', '.join(one.data)} and {', '.join(other.data)}"
    if one.measured_by != other.measured_by:
        return f"different measures: {one.measured_by} and {other.measured_by}"
    if one.rows_trained_on != other.rows_trained_on:
        return f"different kinds of rows: {one.rows_trained_on} and {other.rows_trained_on}"
    return None


def differences(
    one: Evaluation, other: Evaluation, own_rows: Sequence[Row] = (), other_rows: Sequence[Row] = ()
) -> Iterator[Gain]:
    """The crowd of `one` minus the crowd of `other`, by the measure of the rows and by the figures of the objective.

    Paired over the rows that both have answered, if both runs left their predictions. Else by the two shares alone, as
    if they were of different rows: that interval is wider.

    Args:
        own_rows, other_rows: predictions, which are joined by prompt and reference.
    """
    rows = min(one.n, other.n)
    if one.is_free_text:
        yield Gain(_crowd(one.nll) - _crowd(other.nll), None, False, rows, "nll")
    elif pairs := _joined(own_rows, other_rows):
        apart = [float(a) - float(b) for a, b in pairs]
        yield Gain(fmean(apart), measures.paired_interval(apart), True, len(pairs))
    else:
        own, others = _crowd(one.exact_match), _crowd(other.exact_match)
        yield Gain(own - others, measures.unpaired_interval(own, one.n, others, other.n), False, rows)
    known, theirs = one.objective_figures, other.objective_figures
    for name in (name for name in known if name in theirs):
        mine, their = known[name], theirs[name]
        half = None
        if mine.intervals95 and their.intervals95:
            ends, their_ends = mine.intervals95.crowd, their.intervals95.crowd
            half = measures.hybrid_interval(_crowd(mine), ends, _crowd(their), their_ends)
        yield Gain(_crowd(mine) - _crowd(their), half, False, rows, name)


def _crowd(figure: Figure) -> float:
    return math.nan if figure.crowd is None else figure.crowd


def failed_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that the crowd answered wrong, beginning with those of which it was most sure.

    They are sorted by the log-probability of the text, as the confidence of a long text is 0; a row without signals by
    its confidence.
    """

    def sure(row: Row) -> float:
        first = [*row.get("signals", ())][:1] or [row.get("confidence")]
        return -first[0] if isinstance(first[0], int | float) else 0.0

    return sorted((row for row in rows if row["correct"] is False), key=sure)


def _joined(own: Sequence[Row], other: Sequence[Row]) -> list[tuple[bool, bool]]:
    """(True if the one is right, True if the other is) for every row that both have answered."""
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
    return parsed(folder / SWEEP, _leaderboard, "this is not the record of a sweep")


def _leaderboard(path: Path) -> Leaderboard | None:
    if not path.exists():
        return None
    record: Any = read_json(path)
    metric, steps = record["plan"]["metric"], record["plan"]["steps"]
    trials = [trial for trial in record["trials"] if trial["scores"]]
    trials.sort(key=lambda trial: measures.place_of_trial(trial["id"], trial["scores"], metric))
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
