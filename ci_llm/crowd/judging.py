"""What heads are worth on pairs and labelled rows: the scores of every row, and figures of classes and numbers.

The probabilities of the crowd are the mean of its agents', and so are its numbers. A row costs its loss:
cross-entropy in nats, the squared error, or of a pair -log σ(better - worse).

Legend: K agents, U units (pairs or labelled rows), n classes; index K stands for the crowd.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.ranking import Ranking, auroc
from ci_llm.data.batches import Batch

#: Into so many bins of equal width a calibration error sorts probabilities.
BINS: Final = 10


@dataclass(frozen=True)
class Classes:
    """What classes were predicted.

    Attributes:
        probabilities: [K+1, U, n] fp64.
        labels: [U] the number of each row's class.
    """

    probabilities: Tensor
    labels: Tensor
    key: ClassVar = "classes"

    @classmethod
    def joined(cls, parts: Sequence[Classes]) -> Classes:
        """The rows of all parts, in order."""
        return cls(torch.cat([part.probabilities for part in parts], 1), torch.cat([part.labels for part in parts]))

    @property
    def figures(self) -> dict[str, list[float]]:
        """By measure, K agents and then the crowd."""
        found = {
            "accuracy": [float((own.argmax(-1) == self.labels).double().mean()) for own in self.probabilities],
            "f1": [macro_f1(own.argmax(-1), self.labels) for own in self.probabilities],
            "auroc": [self._auroc(own) for own in self.probabilities],
            "calibration_error": [calibration_error(own, self.labels) for own in self.probabilities],
        }
        return {name: values for name, values in found.items() if not any(map(math.isnan, values))}

    def _auroc(self, probabilities: Tensor) -> float:
        """Of two classes that of the second; of more the mean over classes, each against the others."""
        classes = [1] if probabilities.shape[-1] == 2 else [*range(probabilities.shape[-1])]
        areas = [auroc(probabilities[:, each], self.labels == each) for each in classes]
        known = [area for area in areas if area is not None]
        return fmean(known) if known else math.nan

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """By the names of metrics.jsonl, for the agents of these names."""
        return _metrics(self.figures, names)

    def record(self) -> dict[str, Any]:
        """`classes` of `evaluation.json`."""
        return {"n": len(self.labels), **_record(self.figures)}

    def __str__(self) -> str:
        return _told(f"accuracy of {self.probabilities.shape[-1]} classes", self.figures["accuracy"])


@dataclass(frozen=True)
class Numbers:
    """What numbers were predicted.

    Attributes:
        values: [K+1, U] fp64.
        labels: [U] fp64.
    """

    values: Tensor
    labels: Tensor
    key: ClassVar = "numbers"

    @classmethod
    def joined(cls, parts: Sequence[Numbers]) -> Numbers:
        """The rows of all parts, in order."""
        return cls(torch.cat([part.values for part in parts], 1), torch.cat([part.labels for part in parts]))

    @property
    def figures(self) -> dict[str, list[float]]:
        """By measure, K agents and then the crowd; `r2` is the share of the variance that is explained."""
        errors = (self.values - self.labels) ** 2
        spread = ((self.labels - self.labels.mean()) ** 2).mean()
        found = {"mse": errors.mean(1), "mae": errors.sqrt().mean(1)}
        if spread > 0:
            found["r2"] = 1 - found["mse"] / spread
        return {name: values.tolist() for name, values in found.items()}

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """By the names of metrics.jsonl, for the agents of these names."""
        return _metrics(self.figures, names)

    def record(self) -> dict[str, Any]:
        """`numbers` of `evaluation.json`."""
        return {"n": len(self.labels), **_record(self.figures)}

    def __str__(self) -> str:
        return _told("mean squared error", self.figures["mse"])


Judged = Ranking | Classes | Numbers


def joined(parts: Iterable[Judged]) -> Judged | None:
    """The rows of all parts, which are of one kind, in order; None for no part."""
    listed: Any = list(parts)
    return type(listed[0]).joined(listed) if listed else None


def judge(crowd: CrowdModel, batch: Batch) -> tuple[Tensor, Tensor, Judged]:
    """Score the units of a batch by the heads of a crowd.

    Returns:
        [K+1, U] whether each is right, of numbers never; [K+1, U] fp64 what each costs; and what was found.
    """
    found = crowd(batch)
    assert found.values is not None
    assert batch.labels is not None
    values, labels = found.values.double().cpu(), batch.labels.cpu()
    if batch.num_rows == 2 * batch.num_units:
        ranking = Ranking(values[..., 0].unflatten(1, (-1, 2)), labels > 0)
        gap = ranking.rewards.diff(dim=-1)[..., 0].neg()
        gap = torch.cat([gap, gap.mean(0, keepdim=True)])
        return gap > 0, -F.logsigmoid(gap), ranking
    if values.shape[-1] == 1:
        numbers = Numbers(with_mean(values[..., 0]), labels)
        errors = (numbers.values - labels) ** 2
        return torch.zeros_like(errors, dtype=torch.bool), errors, numbers
    classes = Classes(with_mean(values.softmax(-1)), labels.long())
    of_label = classes.probabilities.gather(-1, classes.labels.expand(len(values) + 1, -1)[..., None])[..., 0]
    return classes.probabilities.argmax(-1) == classes.labels, -of_label.log(), classes


def with_mean(values: Tensor) -> Tensor:
    """[K, ...] of agents -> [K+1, ...], of the crowd last."""
    return torch.cat([values, values.mean(0, keepdim=True)])


def macro_f1(found: Tensor, labels: Tensor) -> float:
    """The mean over the classes that occur, predicted or as labels, of F1 = 2 TP / (2 TP + FP + FN)."""
    scores = []
    for each in torch.cat([found, labels]).unique():
        right = int(((found == each) & (labels == each)).sum())
        scores.append(2 * right / int((found == each).sum() + (labels == each).sum()))
    return fmean(scores) if scores else math.nan


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """How far the largest probability is from the share of right rows, in the mean over bins (Guo et al., 2017)."""
    sure, found = probabilities.max(-1)
    right, bins = (found == labels).double(), (sure * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - sure)
    return float(gaps.abs().sum() / len(labels)) if len(labels) else math.nan


def _metrics(figures: dict[str, list[float]], names: Sequence[str]) -> dict[str, float]:
    everyone = [*names, "crowd"]
    return {
        f"eval/{who}/{name}": value
        for name, values in figures.items()
        for who, value in zip(everyone, values, strict=True)
    }


def _record(figures: dict[str, list[float]]) -> dict[str, Any]:
    return {name: {"agents": values[:-1], "crowd": values[-1]} for name, values in figures.items()}


def _told(what: str, values: Sequence[float]) -> str:
    *agents, crowd = values
    return f"{what}: crowd {crowd:.3f}; agents {', '.join(f'{own:.3f}' for own in agents)}"
