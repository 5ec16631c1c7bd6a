"""The judgement of agents and crowd on pairs, rated and labelled rows: figures with intervals.

A pair is ranked right if its chosen answer has the higher reward; ties count as wrong, as in TRL. Rated rows are judged
by the share of (good, bad) couples in the right order. The crowd's rewards, probabilities and numbers are the means of
its agents', probabilities at the temperature of a calibration. The loss of a row with heads is the cross-entropy in
nats, the squared error, or for a pair -log σ(better - worse). Intervals come from the bootstrap over units (Efron,
1979).

Legend: K agents, U units (pairs, rated or labelled rows), n classes; index K stands for the crowd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ci_llm.core.evaluation_file import Difference, Figure, Intervals, Judgement
from ci_llm.core.measures import LEAST_ROWS, METRICS
from ci_llm.crowd.answering import Prompts, answered_rows, batches_of
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import free_positions
from ci_llm.crowd.objective import Preferences
from ci_llm.data.batches import Batch
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import prompts_of
from ci_llm.data.units import unit_of, without_end
from ci_llm.errors import BadInput, ModelError
from ci_llm.lora.heads import pad_of

#: The number of bins of equal width of a calibration error.
BINS: Final = 10
#: A figure without intervals: units drawn twice make bins look worse than they are.
UNSTABLE: Final = "calibration_error"
#: Draws of a bootstrap.
DRAWS: Final = 400

J = TypeVar("J", bound="UnitScores")


@dataclass(frozen=True)
class UnitScores:
    """The numbers of the agents for U units, with the labels.

    Attributes:
        found: [K, U, ...] fp64, the agents' numbers.
        labels: [U] the right ones.
        temperature: the temperature of the crowd's class probabilities; see `Calibration`.
        part: the part of an `Evaluation` that has the figures.
        prefix: the prefix of the figures' names in metrics.jsonl.
        objective: the objective of heads that are judged so.
    """

    found: Tensor
    labels: Tensor
    temperature: float = 1.0
    part: ClassVar[str]
    prefix: ClassVar[str] = ""
    objective: ClassVar[str]

    @classmethod
    def joined(cls: type[J], parts: Iterable[J]) -> J:
        """The units of all parts, in order."""
        listed = list(parts)
        found, labels = torch.cat([part.found for part in listed], 1), torch.cat([part.labels for part in listed])
        return replace(listed[0], found=found, labels=labels)

    @property
    def everyone(self) -> Tensor:
        """The numbers [K+1, U, ...] of the agents, and last of the crowd."""
        return torch.cat([self.found, self.found.mean(0, keepdim=True)])

    @property
    def figures(self) -> dict[str, list[float]]:
        """Each measure by its name, for K agents and then the crowd; the first one is shown to people.

        A measure that is not defined is missing, or NaN.
        """
        raise NotImplementedError

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        """The right units, [K+1, U] bool, none for numbers; and the losses of all units, [K+1, U] fp64."""
        raise NotImplementedError

    @property
    def told(self) -> str:
        """The first measure, in words for people."""
        return METRICS[f"{self.prefix}{next(iter(self.figures))}"].told

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The figures under their names in metrics.jsonl, for agents of these names."""
        return {
            f"eval/{who}/{self.prefix}{name}": value
            for name, values in self.figures.items()
            for who, value in zip([*names, "crowd"], values, strict=True)
        }

    def judgement(self) -> Judgement:
        """The figures with their intervals."""
        drawn = self._drawn()
        figures = {
            name: _with_intervals(values, [each[name] for each in drawn if name in each and name != UNSTABLE])
            for name, values in self.figures.items()
        }
        return Judgement(len(self.labels), None if self.temperature == 1 else self.temperature, **figures)

    def _drawn(self) -> list[dict[str, list[float]]]:
        """The figures of `DRAWS` bootstrap samples, the same in every call; empty for fewer than `LEAST_ROWS` units."""
        count = len(self.labels)
        if count < LEAST_ROWS:
            return []
        draws = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
        return [replace(self, found=self.found[:, rows], labels=self.labels[rows]).figures for rows in draws]

    def __str__(self) -> str:
        *agents, crowd = next(iter(self.figures.values()))
        if all(map(math.isnan, [*agents, crowd])):
            return f"{self.told}: not defined on these rows"
        return f"{self.told}: crowd {crowd:.3f}; agents {', '.join(f'{own:.3f}' for own in agents)}"


def _with_intervals(values: Sequence[float], draws: Sequence[Sequence[float]]) -> Figure:
    """A figure of K agents and the crowd with 95 % intervals, and by how much the crowd exceeds the agents' mean.

    Args:
        draws: the figure of the bootstrap samples. If it is defined in fewer than half of them, there is no interval.
    """
    *agents, crowd = values
    gain = crowd - sum(agents) / len(agents)
    half = intervals = None
    drawn = torch.tensor(draws, dtype=torch.float64).view(-1, len(values))
    drawn = drawn[~drawn.isnan().any(1)]
    if 2 * len(drawn) >= DRAWS:
        ends = torch.tensor([0.025, 0.975], dtype=drawn.dtype)
        *own, of_crowd = ((low, high) for low, high in drawn.quantile(ends, dim=0).T.tolist())
        intervals = Intervals(tuple(own), of_crowd)
        gains = drawn[:, -1] - drawn[:, :-1].mean(1)
        half = float((gains.quantile(ends) - gain).abs().max()) or None
    return Figure(tuple(agents), crowd, crowd_minus_mean=Difference(gain, half), intervals95=intervals)


class Ranking(UnitScores):
    """The judgement of rewards.

    `found` is [K, U, 2] for chosen and rejected answers, or [K, U, 1] for rated rows; `labels` are bool, and True for a
    good rated row.
    """

    part = "preferences"
    prefix = "rewards/"
    objective = "reward"

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        gaps = self.everyone[..., 0] - self.everyone[..., 1]
        return gaps > 0, -F.logsigmoid(gaps)

    @property
    def figures(self) -> dict[str, list[float]]:
        everyone, good = self.everyone, self.labels
        if self.found.shape[-1] == 2:
            gaps = everyone[..., 0] - everyone[..., 1]
            return {"accuracies": (gaps > 0).double().mean(1).tolist(), "margins": gaps.mean(1).tolist()}
        margins = everyone[:, good, 0].mean(1) - everyone[:, ~good, 0].mean(1)
        return {"auroc": [auroc(own[:, 0], good) for own in everyone], "margins": margins.tolist()}


class Classes(UnitScores):
    """The judgement of class probabilities: `found` is [K, U, n], and `labels` are the numbers of the classes."""

    part = "classes"
    objective = "classification"

    @property
    def everyone(self) -> Tensor:
        return torch.cat([self.found, tempered(self.found.mean(0, keepdim=True), self.temperature)])

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        everyone = self.everyone
        costs = -everyone[:, torch.arange(len(self.labels)), self.labels].log()
        return everyone.argmax(-1) == self.labels, costs

    @property
    def figures(self) -> dict[str, list[float]]:
        everyone, labels = self.everyone, self.labels
        sure, said = everyone.max(-1)
        figures = {
            "accuracy": (said == labels).double().mean(1).tolist(),
            "f1": [macro_f1(own, labels) for own in said],
            "auroc": [self._auroc(own) for own in everyone],
            "calibration_error": [calibration_error(*own) for own in zip(sure, said == labels, strict=True)],
        }
        return {name: values for name, values in figures.items() if not any(map(math.isnan, values))}

    def _auroc(self, probabilities: Tensor) -> float:
        """The area under the ROC curve of the second of two classes, or the mean of each class against the others."""
        classes = [1] if probabilities.shape[-1] == 2 else range(probabilities.shape[-1])
        return float(torch.tensor([auroc(probabilities[:, each], self.labels == each) for each in classes]).nanmean())

    @property
    def told(self) -> str:
        return f"accuracy of {self.found.shape[-1]} classes"


class Numbers(UnitScores):
    """The judgement of predicted numbers: `found` is [K, U], and `labels` are the numbers to be predicted."""

    part = "numbers"
    objective = "regression"

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        errors = (self.everyone - self.labels) ** 2
        return torch.zeros_like(errors, dtype=torch.bool), errors

    @property
    def figures(self) -> dict[str, list[float]]:
        """`r2` is the share of the variance that is explained."""
        _, errors = self.outcome
        figures = {"mse": errors.mean(1), "mae": errors.sqrt().mean(1)}
        variance = self.labels.var(correction=0)
        if variance > 0:
            figures["r2"] = 1 - figures["mse"] / variance
        return {name: values.tolist() for name, values in figures.items()}


def judge(crowd: CrowdModel, batch: Batch) -> UnitScores:
    """Let the heads of a crowd judge the units of a batch."""
    output = crowd(batch)
    assert output.values is not None
    assert batch.labels is not None
    values, labels = output.values.double().cpu(), batch.labels.cpu()
    if batch.num_rows == 2 * batch.num_units:
        return Ranking(values[..., 0].unflatten(1, (-1, 2)), labels > 0)
    if values.shape[-1] == 1:
        return Numbers(values[..., 0], labels)
    return Classes(values.softmax(-1), labels.long(), temperature_of(crowd))


def temperature_of(crowd: CrowdModel) -> float:
    """The temperature of the crowd's class probabilities: that of its calibration, if it has one."""
    return crowd.calibration.temperature if crowd.calibration else 1.0


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """The probabilities [..., n] at a temperature, which makes them sharper below 1."""
    return probabilities if temperature == 1 else (probabilities.log() / temperature).softmax(-1)


@torch.no_grad()
def rank(objective: Preferences, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> Ranking | None:
    """Let the agents judge every unit of `batches` by their log-probabilities.

    Args:
        stop: called before every batch.

    Returns:
        the ranking, of no unit if there is no batch; None if `stop` returned True.
    """
    crowd, parts = objective.crowd, list[Ranking]()
    with crowd.evaluating():
        for batch in batches:
            if stop():
                return None
            batch = batch.to(crowd.device)
            rewards = objective.objective.answer_rewards(objective.evidence(crowd(batch)))
            assert batch.labels is not None
            parts.append(Ranking(rewards.unflatten(1, (batch.num_units, -1)).cpu(), (batch.labels > 0).cpu()))
    width = 2 if objective.objective.needs.rows == "pairs" else 1  # a process may have no unit
    nothing = Ranking(torch.zeros(crowd.num_agents, 0, width, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))
    return Ranking.joined(parts or [nothing])


def auroc(sure: ArrayLike, right: ArrayLike) -> float:
    """The area under the ROC curve: the chance that a right answer has a higher number than a wrong one.

    Ties count half, as in the statistic of Mann and Whitney. It is NaN if all answers are right, or none is.
    """
    numbers, is_right = np.asarray(sure, float), np.asarray(right, bool)
    if is_right.all() or not is_right.any():
        return math.nan
    wrong = np.sort(numbers[~is_right])
    below, not_above = (np.searchsorted(wrong, numbers[is_right], side) for side in ("left", "right"))
    return float((below + not_above).mean() / 2 / len(wrong))


def macro_f1(said: Tensor, labels: Tensor) -> float:
    """The mean over the classes that occur, predicted or as labels, of F1 = 2 TP / (2 TP + FP + FN)."""
    count = 1 + max([0, *said.tolist(), *labels.tolist()])
    right, *occurring = (each.bincount(minlength=count) for each in (labels[said == labels], said, labels))
    total = torch.stack(occurring).sum(0)
    return float((2 * right[total > 0].double() / total[total > 0]).mean())


def calibration_error(probabilities: ArrayLike, right: ArrayLike) -> float:
    """The mean distance of a bin's share of right answers from its mean probability, weighted by answers.

    Source: Guo et al., "On Calibration of Modern Neural Networks", 2017.
    """
    p, is_right = np.asarray(probabilities, float), np.asarray(right, float)
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, is_right - p)).sum() / len(p)) if len(p) else math.nan


# Given texts


@dataclass(frozen=True)
class TextScore:
    """The scores of one text.

    Attributes:
        scores: [K] every agent's reward or number, or for classes its probability of `label`.
        mean: the mean of `scores`. For rewards, only differences between answers to one prompt have a meaning.
        std: the agents' sample standard deviation; 0 for one agent.
        lower: mean - std.
        label: the most probable class by the mean of the agents; None where there are no classes.
        probabilities: the agents' mean probability of every class by its name, at the temperature of the crowd's
            calibration if it has one.
        abstained: True if the probability of `label` is below `abstain_below`.
    """

    scores: tuple[float, ...]
    mean: float
    std: float
    lower: float
    label: str | None = None
    probabilities: dict[str, float] | None = None
    abstained: bool = False


@torch.no_grad()
def score_texts(
    crowd: CrowdModel, texts: Prompts, answers: str | Sequence[str] | None, abstain_below: float | None, batch_size: int
) -> list[TextScore]:
    """The scores of texts by the heads; for arguments and errors see `Crowd.score`."""
    if not crowd.settings.outputs:
        raise ModelError(
            "these agents have no heads: they write answers and score none",
            where="Crowd.score",
            hint="ask them by generate; objective=reward, classification or regression trains agents that score",
        )
    if abstain_below is not None and crowd.settings.outputs == 1:
        what = "abstain_below is a probability of a class, and these heads give one number"
        raise BadInput(what, where="Crowd.score", hint="leave it out; `lower` says how sure the agents are")
    if not 0 <= (abstain_below or 0) <= 1:
        what = f"abstain_below must be a probability, from 0 to 1, and is {abstain_below}"
        raise BadInput(what, where="Crowd.score", hint="change the value named")
    rows = [unit_of([row]) for row in _read_by_heads(crowd, texts, answers)]
    scores = list[TextScore]()
    with crowd.evaluating():
        for batch in batches_of(rows, batch_size):
            values = crowd(batch.to(crowd.device)).values.double().cpu()
            scores += [_score(crowd, own, abstain_below) for own in values.unbind(1)]
    return scores


def _read_by_heads(crowd: CrowdModel, texts: Prompts, answers: str | Sequence[str] | None) -> list[Example]:
    prompter = crowd.prompter
    if answers is None:
        found = [prompter.read(text, is_answer=crowd.reads_pairs) for text in prompts_of(texts)]
    elif not crowd.reads_pairs:
        hint = "give texts alone, in a file by a column text or messages; heads of objective=reward take answers"
        raise BadInput("these heads score texts, and not answers to prompts", where="Crowd.score", hint=hint)
    else:
        found = answered_rows(crowd, prompts_of(texts), answers)
    free_positions(crowd.model, [row.input_ids for row in found], "text", least=0)
    pad = pad_of(crowd.model.config, prompter.tokenizer)
    return [without_end(row, pad) for row in found]


def _score(crowd: CrowdModel, outputs: Tensor, abstain_below: float | None) -> TextScore:
    """The score of one text from the numbers [K, n] of the heads."""
    about_classes: dict[str, Any] = {}
    scores = outputs[:, 0]
    if crowd.settings.outputs > 1:
        each = outputs.softmax(-1)
        together = tempered(each.mean(0), temperature_of(crowd))
        probabilities = dict(zip(crowd.classes, together.tolist(), strict=True))
        label = max(probabilities, key=probabilities.__getitem__)
        scores = each[:, crowd.classes.index(label)]
        abstained = abstain_below is not None and probabilities[label] < abstain_below
        about_classes = {"label": label, "probabilities": probabilities, "abstained": abstained}
    values = tuple(scores.tolist())
    mean, std = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return TextScore(values, mean, std, mean - std, **about_classes)
