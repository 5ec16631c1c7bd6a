"""Regression: squared error of a head's number, as Transformers computes it for SEQ_CLS models of one label."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ci_llm.objectives import Evidence, Needs, Objective


@dataclass(frozen=True)
class Regression(Objective):
    """Keys: none."""

    needs = Needs("labelled", head=True)

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        return (e.outputs[..., 0] - e.labels) ** 2


objective = Regression
