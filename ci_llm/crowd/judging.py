"""How good agents and crowd are at pairs, rated and labelled rows that were not trained on.

A pair is ranked right if its chosen answer has the higher reward; ties count as wrong, as in TRL. Rated rows are judged
by the share of (good, bad) couples that are in order. Rewards, probabilities and numbers of the crowd are the mean of
its agents', probabilities at the temperature of a calibration. With heads a row costs its loss: cross-entropy in nats,
the squared error, or of a pair -log σ(better - worse). Intervals are of the bootstrap over units (Efron, 1979).

Legend: K agents, U units (pairs, rated or labelled rows), n classes; index K stands for the crowd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ci_llm.core.scores import LEAST_ROWS, METRICS
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.preferences import Preferences
from ci_llm.data.batches import Batch

#: Into so many bins of equal width a calibration error sorts probabilities.
BINS: Final = 10
#: A figure without intervals: units that are drawn twice make bins look worse than they are.
UNSTABLE: Final = "calibration_error"
#: Draws of a bootstrap.
DRAWS: Final = 400

J = TypeVar("J", bound="Judged")


@dataclass(frozen=True)
class Judged:
    """What was found about U units.

    Attributes:
        found: [K, U, ...] fp64 of the agents.
        labels: [U] what is right.
        temperature: the temperature of the crowd's probabilities, of classes; see `Learned`.
        key: the place of the figures in `evaluation.json`.
        prefix: before the names of the figures in metrics.jsonl.
    """

    found: Tensor
    labels: Tensor
    temperature: float = 1.0
    key: ClassVar[str]
    prefix: ClassVar[str] = ""

    @classmethod
    def joined(cls: type[J], parts: Iterable[J]) -> J:
        """The units of all parts, in order."""
        listed = list(parts)
        found, labels = torch.cat([part.found for part in listed], 1), torch.cat([part.labels for part in listed])
        return replace(listed[0], found=found, labels=labels)

    @property
    def everyone(self) -> Tensor:
        """[K+1, U, ...], of the crowd last."""
        return torch.cat([self.found, self.found.mean(0, keepdim=True)])

    @property
    def figures(self) -> dict[str, list[float]]:
        """The value of each measure for K agents and then the crowd; people are told the first measure. A measure that
        is not defined is missing, or NaN."""
        raise NotImplementedError

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        """[K+1, U] whether each is right, of numbers never; [K+1, U] fp64 what each costs."""
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

    def record(self) -> dict[str, Any]:
        """What `evaluation.json` has under `key`."""
        drawn = self._drawn()
        heated = {} if self.temperature == 1 else {"temperature": self.temperature}
        return {"n": len(self.labels), **heated} | {
            name: _with_intervals(values, [each[name] for each in drawn if name in each and name != UNSTABLE])
            for name, values in self.figures.items()
        }

    def _drawn(self) -> list[dict[str, list[float]]]:
        """The figures of units that are drawn with replacement, the same in every call; none of few units."""
        count, generator = len(self.labels), torch.Generator().manual_seed(0)
        if count < LEAST_ROWS:
            return []
        draws = torch.randint(count, (DRAWS, count), generator=generator)
        return [replace(self, found=self.found[:, rows], labels=self.labels[rows]).figures for rows in draws]

    def __str__(self) -> str:
        *agents, crowd = next(iter(self.figures.values()))
        return f"{self.told}: crowd {crowd:.3f}; agents {', '.join(f'{own:.3f}' for own in agents)}"


def _with_intervals(values: Sequence[float], draws: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A figure of K agents and the crowd, with the 95 % interval of each, and by how much the crowd leads their mean.

    Args:
        draws: the figure of drawn units. Where the figure is defined in fewer than half, there is no interval.
    """
    *agents, crowd = values
    gain, half = crowd - sum(agents) / len(agents), None
    found: dict[str, Any] = {"agents": agents, "crowd": crowd}
    drawn = torch.tensor(draws, dtype=torch.float64).view(-1, len(values))
    drawn = drawn[~drawn.isnan().any(1)]
    if 2 * len(drawn) >= DRAWS:
        ends = torch.tensor([0.025, 0.975], dtype=drawn.dtype)
        *own, of_crowd = drawn.quantile(ends, dim=0).T.tolist()
        found["intervals95"] = {"agents": own, "crowd": of_crowd}
        gains = drawn[:, -1] - drawn[:, :-1].mean(1)
        half = float((gains.quantile(ends) - gain).abs().max()) or None
    return found | {"crowd_minus_mean": {"value": gain, "interval95": half}}


class Ranking(Judged):
    """Rewards: `found` [K, U, 2] of the chosen and the rejected answer, or of rated rows [K, U, 1]; `labels` are bool,
    whether a rated row is good."""

    key = "preferences"
    prefix = "rewards/"

    @property
    def are_pairs(self) -> bool:
        return self.found.shape[-1] == 2

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        gaps = self.everyone[..., 0] - self.everyone[..., 1]
        return gaps > 0, -F.logsigmoid(gaps)

    @property
    def figures(self) -> dict[str, list[float]]:
        everyone, good = self.everyone, self.labels
        if self.are_pairs:
            gaps = everyone[..., 0] - everyone[..., 1]
            return {"accuracies": (gaps > 0).double().mean(1).tolist(), "margins": gaps.mean(1).tolist()}
        margins = everyone[:, good, 0].mean(1) - everyone[:, ~good, 0].mean(1)
        return {"auroc": [_area(own[:, 0], good) for own in everyone], "margins": margins.tolist()}


class Classes(Judged):
    """Probabilities: `found` [K, U, n]; `labels` are the numbers of the classes."""

    key = "classes"

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
        """The area under the ROC curve: of two classes that of the second, else the mean of each against the others."""
        classes = [1] if probabilities.shape[-1] == 2 else range(probabilities.shape[-1])
        return float(torch.tensor([_area(probabilities[:, each], self.labels == each) for each in classes]).nanmean())

    @property
    def told(self) -> str:
        return f"accuracy of {self.found.shape[-1]} classes"


class Numbers(Judged):
    """Numbers: `found` [K, U]; `labels` are those to be predicted."""

    key = "numbers"

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        errors = (self.everyone - self.labels) ** 2
        return torch.zeros_like(errors, dtype=torch.bool), errors

    @property
    def figures(self) -> dict[str, list[float]]:
        """`r2` is the share of the variance that is explained."""
        _, errors = self.outcome
        figures = {"mse": errors.mean(1), "mae": errors.sqrt().mean(1)}
        if (variance := self.labels.var(correction=0)) > 0:
            figures["r2"] = 1 - figures["mse"] / variance
        return {name: values.tolist() for name, values in figures.items()}


def judge(crowd: CrowdModel, batch: Batch) -> Judged:
    """What the heads of a crowd find about the units of a batch."""
    output = crowd(batch)
    assert output.values is not None
    assert batch.labels is not None
    values, labels = output.values.double().cpu(), batch.labels.cpu()
    if batch.num_rows == 2 * batch.num_units:
        return Ranking(values[..., 0].unflatten(1, (-1, 2)), labels > 0)
    if values.shape[-1] == 1:
        return Numbers(values[..., 0], labels)
    return Classes(values.softmax(-1), labels.long(), crowd.learned.temperature if crowd.learned else 1.0)


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """[..., n] probabilities at a temperature: as they are at 1, sharper below."""
    return probabilities if temperature == 1 else (probabilities.log() / temperature).softmax(-1)


@torch.no_grad()
def rank(objective: Preferences, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> Ranking | None:
    """Let the agents judge every unit of `batches` by their log-probabilities.

    Args:
        stop: called before every batch.

    Returns:
        the ranking, of no unit at all for no batch; None if `stop` returned True.
    """
    crowd, parts = objective.crowd, list[Ranking]()
    with crowd.evaluating():
        for batch in batches:
            if stop():
                return None
            batch = batch.to(crowd.device)
            rewards = objective.objective.rewards(objective.evidence(crowd(batch), batch))
            assert batch.labels is not None
            parts.append(Ranking(rewards.unflatten(1, (batch.num_units, -1)).cpu(), (batch.labels > 0).cpu()))
    width = 2 if objective.objective.needs.rows == "pairs" else 1  # a process may have no unit
    nothing = Ranking(torch.zeros(crowd.num_agents, 0, width, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))
    return Ranking.joined(parts or [nothing])


def auroc(sure: ArrayLike, right: ArrayLike) -> float | None:
    """The area under the ROC curve, by the statistic of Mann and Whitney: the chance that a right answer has a higher
    number than a wrong one; ties count half. None if all are right, or none."""
    numbers, is_right = np.asarray(sure, float), np.asarray(right, bool)
    if is_right.all() or not is_right.any():
        return None
    wrong = np.sort(numbers[~is_right])
    below, not_above = (np.searchsorted(wrong, numbers[is_right], side) for side in ("left", "right"))
    return float((below + not_above).mean() / 2 / len(wrong))


def _area(sure: Tensor, right: Tensor) -> float:
    """`auroc`, or NaN."""
    return math.nan if (area := auroc(sure, right)) is None else area


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
