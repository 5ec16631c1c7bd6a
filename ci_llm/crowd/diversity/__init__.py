"""The diversity forms, one per module of this package: each is a term that rewards agents for being different.

To add one, add a file `diversity/<name>.py` that defines

    def term(inputs: TermInputs) -> Tensor          one number, multiplied by the number of targets S
    form = DiversityForm(term)

and `diversity: <name>` selects it. The objective then subtracts `lambda_sw`·K·term from the summed cross-entropy. A
term masks out the agents that `inputs.finite` does not mark, before it computes with their numbers, because NaN times
zero is NaN. It must not wait for the device.

Legend: K agents, S targets, N packed tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ci_llm.core.imports import load_plugin
from ci_llm.data.batches import Batch


@dataclass(frozen=True)
class TermInputs:
    """The inputs of a term: one micro-batch of one optimizer step.

    Attributes:
        log_probs: [K, S] log-probability of every target under every agent, in nats.
        states: [K, N, D] final hidden states, in packed order; empty for a form without a reward where every agent
            takes a pass of its own.
        finite: [K] bool, the agents whose log-probabilities are all finite.
        batch: the rows of the micro-batch.
        step: the optimizer step; with `seed` it keys random numbers, so that a resumed run draws the same.
        representation: `swd_representation`.
    """

    log_probs: Tensor
    states: Tensor
    finite: Tensor
    batch: Batch
    step: int
    seed: int
    representation: str


@dataclass(frozen=True)
class DiversityForm:
    """A term, and whether agents are rewarded for it; a term without reward is measured for the log only."""

    term: Callable[[TermInputs], Tensor]
    rewarded: bool = True


def find_form(name: str) -> DiversityForm:
    """The form of the module `name`.

    Raises:
        BadInput: no module of this package has that name.
    """
    form: DiversityForm = load_plugin(__name__, name, "form")
    return form
