"""evaluation.json, the scores of agents and crowd: one typed record, its only writer and its only reader.

A part that does not apply is None or empty, and has no key in the file. A number that is not known, NaN, is null there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ci_llm.core.durable import read_object, write_json
from ci_llm.core.measures import METRICS, Measures, PrimaryMetric, measures_of
from ci_llm.core.run_folder import EVALUATION, parsed
from ci_llm.core.typed_json import Number, as_plain, as_type, with_nulls


@dataclass(frozen=True)
class Difference:
    """The mean difference of two values over rows, with the half-width of its 95 % interval.

    There is no interval for too few rows, or if all rows differ by the same.
    """

    value: Number
    interval95: float | None


@dataclass(frozen=True)
class Intervals:
    """The ends of the 95 % intervals of agents and crowd."""

    agents: tuple[tuple[Number, Number], ...]
    crowd: tuple[Number, Number]


@dataclass(frozen=True)
class Figure:
    """The values of one measure.

    Attributes:
        crowd: None for a base alone, which has no agents either.
        vote: the value of a majority vote of the agents' answers.
        base: the value of the untrained base, where `Evaluation.base` does not have it.
        crowd_minus_mean, crowd_minus_best, crowd_minus_vote: the crowd compared with the agents' mean, with the best
            agent on these rows and with the vote.
    """

    agents: tuple[Number, ...]
    crowd: float | None
    vote: float | None = None
    base: float | None = None
    crowd_minus_mean: Difference | None = None
    crowd_minus_best: Difference | None = None
    crowd_minus_vote: Difference | None = None
    intervals95: Intervals | None = None

    def __post_init__(self) -> None:
        if self.agents and self.crowd is None:  # null in a file, where it was not known
            object.__setattr__(self, "crowd", math.nan)


#: The figure of a base alone.
NOBODY: Final = Figure((), None)


@dataclass(frozen=True)
class Judgement:
    """The figures of n pairs, rated rows, classes, numbers or prompts; see `ci_llm.core.measures.METRICS`.

    Attributes:
        temperature: the temperature of the crowd's class probabilities, if it is not 1.
    """

    n: int
    temperature: float | None = None
    accuracies: Figure | None = None
    auroc: Figure | None = None
    margins: Figure | None = None
    accuracy: Figure | None = None
    f1: Figure | None = None
    calibration_error: Figure | None = None
    mse: Figure | None = None
    mae: Figure | None = None
    r2: Figure | None = None
    reward: Figure | None = None
    sampled_reward: Figure | None = None


@dataclass(frozen=True)
class TeacherForced:
    """The share of n whole solutions that greedy decoding would reproduce."""

    n: int
    exact_match: Figure


@dataclass(frozen=True)
class AnsweredQuestions:
    """The questions that were answered: their fingerprint, the metric that judged the answers, and their length."""

    questions: str
    metric: str
    max_new_tokens: int


@dataclass(frozen=True)
class BaseScores:
    """The scores of the untrained base."""

    exact_match: Number
    nll: Number


@dataclass(frozen=True)
class BestAgent:
    """The numbers of the best two agents, and how many rows tell the best from the next, for it and against it."""

    agent: int
    next: int
    rows_better: int
    rows_worse: int


@dataclass(frozen=True)
class RowSet:
    """The teacher-forced scores of all agents on one of several sets of rows, and the numbers of its own agents."""

    rows: str
    n: int
    rows_trained_on: str
    measured_by: str
    agents: tuple[int, ...]
    exact_match: Figure
    nll: Figure


@dataclass(frozen=True)
class Abstention:
    """The share of answers that are at least as sure as `below`, and the share of right ones among them."""

    below: float
    answered: float
    exact_match: float | None


@dataclass(frozen=True)
class Sureness:
    """The quality of the number called `by` as a sign that an answer is right.

    Attributes:
        rows, right: the number of answers, and of right ones.
    """

    by: str
    rows: int
    right: int
    auroc: Number
    calibration_error: Number
    abstention: Abstention | None = None


@dataclass(frozen=True)
class Best:
    """The best value of the crowd or of one agent, and the optimizer step after which it was measured."""

    step: int
    value: Number


@dataclass(frozen=True)
class BestSteps:
    """The best evaluations of a run by `metric`; None for whoever was never evaluated."""

    metric: str
    crowd: Best | None
    agents: tuple[Best | None, ...]


@dataclass(frozen=True)
class Ending:
    """The end of the run that has made the evaluation.

    Attributes:
        last_step: the last optimizer step of the run; the evaluation may be of an earlier one.
        agent_steps: the optimizer steps of all agents together.
        warning: a defect of the training, for people.
    """

    last_step: int
    agent_steps: int
    stopped_early: bool
    best: BestSteps
    warning: str | None


#: The parts whose keys lie among those of the evaluation, each with a key of its own.
_FLAT: Final = {"answered": "questions", "ending": "last_step"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of K agents and of the crowd on n rows.

    Attributes:
        task: the name of the data set; `data` are its parts, for people.
        rows_trained_on: which of the rows were trained on.
        measured_by: generated answers, heads, teacher-forced solutions, or rewards of answers.
        judged_by: `nll` for free text and for numbers, which no answer matches exactly.
        exact_match: the share of right answers, whole solutions, classes or pairs, by `measured_by`.
        nll: nats per target token, teacher-forced; for heads the loss of a row, for rewards minus the reward.
        step: the optimizer step of the weights; None for a base alone.
        names: the agents' names by the configuration; empty if it gives none.
        folders: their names in checkpoints, if these have gaps.
        of_rows: by metric [K][n], the part of each row in an agent's mean; a sweep compares them.
        dropped: the numbers of agents that left the run because their numbers were not finite.
        left_out: the number of rows that were not asked.
        tokens, bytes: the size of the targets of free text.
    """

    task: str
    data: tuple[str, ...]
    rows_trained_on: Literal["none", "some", "all"]
    aggregator: str
    n: int
    measured_by: Literal["generation", "heads", "teacher_forcing", "rewards"]
    judged_by: PrimaryMetric
    exact_match: Figure
    nll: Figure
    step: int | None
    teacher_forced: TeacherForced | None = None
    answered: AnsweredQuestions | None = None
    base: BaseScores | None = None
    preferences: Judgement | None = None
    classes: Judgement | None = None
    numbers: Judgement | None = None
    rewards: Judgement | None = None
    names: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    best_agent: BestAgent | None = None
    sets: tuple[RowSet, ...] = ()
    of_rows: Mapping[str, tuple[tuple[Number, ...], ...]] | None = None
    dropped: tuple[int, ...] = ()
    left_out: int | None = None
    sureness: Sureness | None = None
    tokens: int | None = None
    bytes: int | None = None
    perplexity: Figure | None = None
    bits_per_byte: Figure | None = None
    ending: Ending | None = None

    @property
    def is_free_text(self) -> bool:
        """True if the NLL judges the rows, because no answer has to match theirs."""
        return self.judged_by == "nll"

    @property
    def agent_folders(self) -> tuple[str, ...]:
        """The names of the agents in metrics and checkpoints; a crowd that has changed has gaps."""
        return self.folders or tuple(f"agent{k}" for k in range(len(self.nll.agents)))

    @property
    def agent_names(self) -> tuple[str, ...]:
        """The names of the agents for people."""
        return self.names or self.agent_folders

    @property
    def solutions(self) -> TeacherForced:
        """The teacher-forced solutions, which are what `exact_match` is about if no answers were generated."""
        return self.teacher_forced or TeacherForced(self.n, self.exact_match)

    @property
    def measures(self) -> Measures:
        """The measures of the objective that the agents were trained for, as far as the figures tell."""
        if self.measured_by == "rewards":
            return measures_of("grpo")
        pairs, heads = self.preferences, self.measured_by == "heads"
        if pairs is None:
            return measures_of("sft" if not heads else "regression" if self.is_free_text else "classification")
        return measures_of("reward" if heads else "pairs" if pairs.auroc is None else "kto")

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures that there are, by the names of `METRICS`."""
        parts = {name: getattr(self, metric.part) if metric.part else self for name, metric in METRICS.items()}
        found = {name: getattr(part, name.removeprefix("rewards/"), None) for name, part in parts.items()}
        return {name: figure for name, figure in found.items() if figure is not None}

    @property
    def objective_figures(self) -> dict[str, Figure]:
        """The figures of the objective, as far as they are defined."""
        return {name: figure for name, figure in self.figures.items() if name in self.measures.metrics}

    def to_dict(self) -> dict[str, Any]:
        """The content of evaluation.json."""
        found = as_plain(self, exclude_defaults=True)
        for part in _FLAT:
            found |= found.pop(part, {})
        return {key: with_nulls(value, lambda number: not math.isnan(number)) for key, value in found.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evaluation:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a part is missing, or not of its type.
        """
        flat = {part: content for part, own in _FLAT.items() if own in content}
        return as_type(cls, {**content, **flat})


def write_evaluation(run_folder: Path, evaluation: Evaluation, staging: Path | None) -> None:
    """Write evaluation.json; for `staging` see `ci_llm.core.durable.write_bytes`."""
    write_json(run_folder / EVALUATION, evaluation.to_dict(), staging=staging)


def read_evaluation(run_folder: Path) -> Evaluation | None:
    """The evaluation of a run; None before there is one.

    Raises:
        BadInput: the file was not written by this program.
    """
    try:
        return parsed(
            run_folder / EVALUATION, lambda path: Evaluation.from_dict(read_object(path)), "this is not an evaluation"
        )
    except FileNotFoundError:
        return None
