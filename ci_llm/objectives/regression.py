"""Regression: squared error of a head's number, as Transformers computes it for SEQ_CLS models of one label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ci_llm.objectives import Evidence, Metrics, Needs


@dataclass(frozen=True)
class Regression:
    """It has no keys."""

    metric_names: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Needs] = Needs("labelled", head=True)

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        return (e.outputs[..., 0] - e.labels) ** 2

    def rewards(self, e: Evidence) -> Tensor:
        return e.outputs[..., 0]

    def metrics(self, e: Evidence) -> Metrics:
        return {}


objective = Regression
