"""Classification: cross-entropy of a head's numbers, one for each class, as in the SEQ_CLS models of Transformers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ci_llm.objectives import Evidence, Metrics, Needs, Objective


@dataclass(frozen=True)
class Classification(Objective):
    """Keys: none; `num_labels` is about the rows."""

    needs = Needs("labelled", head=True)
    metric_names = ("accuracy",)

    def losses(self, e: Evidence) -> Tensor:
        return -e.outputs.log_softmax(-1).gather(-1, _classes(e)[..., None]).squeeze(-1)

    def metrics(self, e: Evidence) -> Metrics:
        right = e.outputs.argmax(-1) == _classes(e)
        return {"accuracy": (right.double().sum(1), float(right.shape[1]))}


def _classes(e: Evidence) -> Tensor:
    """The numbers of the rows' classes, [K, U]."""
    assert e.labels is not None
    return e.labels.long().expand(len(e.outputs), -1)


objective = Classification
