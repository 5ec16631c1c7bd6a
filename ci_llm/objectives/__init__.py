"""The objectives of a training, one per module of this package: the rows they need, and the loss of each unit.

To add one, add a file `objectives/<name>.py` that defines `objective`, a frozen dataclass that is an `Objective`, and
`objective: <name>` selects it; `objective: module:name` takes the same from elsewhere, or a function
`loss(evidence)` that returns [K, U], with its `Needs` as the attribute `needs`. The fields of the dataclass are keys of
the configuration. A field whose key differs between agents holds a tensor [K, 1] instead of a number. `sft`, next-token
prediction, has its loss in `ci_llm.crowd.objective`.

Formulas, names and defaults are those of TRL 1.16. Sums of log-probabilities are fp64, and so are losses. Objectives do
not communicate, and row k of what they return depends on row k of what they are given.

Legend: K agents, U units (pairs, rated or labelled rows) of one micro-batch, R rows: of a pair two, chosen before
rejected; n numbers of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ci_llm.core.imports import import_named, is_function, load_plugin, may_import
from ci_llm.errors import ConfigError

logger = logging.getLogger(__name__)

RowKind = Literal["single", "pairs", "rated", "labelled", "prompts"]
#: A setting of all agents, or [K, 1] if agents differ.
Number = float | Tensor
Metrics = Mapping[str, tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Needs:
    """The needs of an objective.

    Attributes:
        rows: single rows, pairs of a better and a worse answer, rows rated good or bad, texts with a label, or prompts
            alone.
        reference: true if it needs the log-probabilities of the base without agents.
        mismatched: true if it needs `Evidence.kl`, from answers to other prompts in the whole step.
        nll: which next-token loss of the preferred rows it needs: of their answers, or of all their tokens.
        head: true if it needs a head's numbers for each row, instead of log-probabilities.
    """

    rows: RowKind = "pairs"
    reference: bool = False
    mismatched: bool = False
    nll: Literal["none", "answers", "rows"] = "none"
    head: bool = False


@dataclass(frozen=True)
class Evidence:
    """The results of the passes over one micro-batch.

    Attributes:
        sums: [K, R] the log-probability of every answer, in nats; [K, 0] with heads.
        lengths: [R] the number of tokens of every answer.
        reference: `sums` of the base without agents, [1, R], or of the agents' starts, [K, R].
        labels: [U] for rated rows bool, whether they are good; for labelled rows fp64, the number of the class or the
            number to predict; for pairs fp64, the margins, 0 for rows without one.
        values: [K, R, n] fp64 the numbers of the heads.
        nll: [K, U] next-token loss of every preferred row, summed; `nll_tokens` [U] has the number of its tokens.
        nll_share: units of the whole step for each of its `nll_tokens`: a number, or [K, 1].
        kl: [K, 1] the mean over the mismatched rows of the step, at least 0.
    """

    sums: Tensor
    lengths: Tensor
    reference: Tensor | None = None
    labels: Tensor | None = None
    values: Tensor | None = None
    nll: Tensor | None = None
    nll_tokens: Tensor | None = None
    nll_share: float | Tensor = 1.0
    kl: Tensor | None = None

    @property
    def ratios(self) -> Tensor:
        """The log-probability of every answer minus that of the reference, [K, R]."""
        assert self.reference is not None
        return self.sums - self.reference

    @property
    def means(self) -> Tensor:
        """The log-probability per token of every answer, [K, R]."""
        return self.sums / self.lengths

    @property
    def mean_nll(self) -> Tensor:
        """The next-token loss of every unit, [K, U], scaled so that its mean over units is the mean over tokens."""
        assert self.nll is not None
        return self.nll * self.nll_share

    @property
    def outputs(self) -> Tensor:
        """`values` of an objective with heads."""
        assert self.values is not None
        return self.values


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values [..., R] into those of the chosen and of the rejected answers, each [..., U]."""
    return values[..., 0::2], values[..., 1::2]


class Objective:
    """An objective with its settings; `metric_names` and `metrics` are those that only this objective has."""

    @property
    def needs(self) -> Needs:
        """The objective's needs."""
        raise NotImplementedError

    def losses(self, e: Evidence) -> Tensor:
        """The losses [K, U], differentiable in sums, nll and values; their mean over a step is an agent's loss."""
        raise NotImplementedError

    def answer_rewards(self, e: Evidence) -> Tensor:
        """The reward [K, R] of every answer: the number of a head, or the implicit reward. For pairs and rated rows."""
        if e.values is not None:
            return e.values[..., 0]
        scaled: Tensor = getattr(self, "beta", 1.0) * (e.means if e.reference is None else e.ratios)
        return scaled

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ()

    def metrics(self, e: Evidence) -> Metrics:
        """The sum [K] and the count of every one of `metric_names`."""
        return {}


@dataclass(frozen=True)
class OwnLoss(Objective):
    """A user's loss function as an objective."""

    loss: Callable[[Evidence], Tensor]

    @property
    def needs(self) -> Needs:
        found: Needs = getattr(self.loss, "needs", Needs(reference=True))
        return found

    def losses(self, e: Evidence) -> Tensor:
        return self.loss(e)


#: The objective for each kind of rows, if the configuration says auto.
BY_ROWS: Final[Mapping[RowKind, str]] = {
    "single": "sft",
    "pairs": "dpo",
    "rated": "kto",
    "labelled": "classification",
    "prompts": "grpo",
}
SFT: Final = "sft"


def objective_of(name: str, each: Sequence[Any], device: torch.device | str = "cpu") -> Objective:
    """The objective `name` with the settings of these agents.

    Args:
        each: per agent an object with the keys of the configuration as attributes.

    Raises:
        BadInput: there is no such objective, or its settings do not fit together.
    """
    kind = import_named(name, "objective") if is_function(name) else load_plugin(__name__, name, "objective")
    if not isinstance(kind, type):
        return OwnLoss(kind)
    found: Objective = kind(**{field.name: _value(field.name, each, device) for field in fields(kind)})
    return found


def _value(key: str, each: Sequence[Any], device: torch.device | str) -> Any:
    """The value of a key that all agents have, or the numbers [K, 1] of agents that differ."""
    values = [getattr(own, key) for own in each]
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def head_size(config: Any) -> int:
    """The size of each agent's head by a configuration; 0 if the objective does not use heads."""
    if config.objective in ("auto", SFT) or not objective_of(config.objective, [config]).needs.head:
        return 0
    return config.num_labels or 1


def without_function(config: Any, outputs: int) -> Any:
    """The configuration in a checkpoint, without an objective that nobody but the checkpoint names.

    In its place stands one for agents of the same form: by the columns, or for heads of so many `outputs`. The rows are
    read by it; the loss of the training is not known.
    """
    name = config.objective
    if not is_function(name) or may_import(name):
        return config
    told = "is not imported on a checkpoint's word: its own loss is left out; objective=module:name takes it"
    logger.warning(f"objective {name} {told}")
    stand_in = ("classification" if outputs > 1 else "regression") if outputs else "auto"
    return config.model_copy(update={"objective": stand_in})


def measured_as(config: Any) -> str:
    """The objective by whose figures a run is judged; for a user's loss the built-in one with such rows."""
    if config.objective == SFT:
        return SFT
    needs = objective_of(config.objective, [config]).needs
    if needs.rows == "prompts":
        return "grpo"
    if not needs.head:
        return "kto" if needs.rows == "rated" else "dpo"
    return "reward" if needs.rows == "pairs" else "classification" if head_size(config) > 1 else "regression"


def for_agents(objective: Objective, agents: slice | list[int]) -> Objective:
    """The objective with the settings of some agents only."""
    own = {name: value[agents] for name, value in vars(objective).items() if isinstance(value, Tensor)}
    return replace(objective, **own) if own else objective  # type: ignore[type-var]


def require_loss_types(given: Sequence[str], known: Sequence[str], objective: str, *, mixed: bool = True) -> None:
    """Refuse loss types that the objective does not have, and several of them unless they may be `mixed`."""
    odd = [kind for kind in given if kind not in known]
    if odd or (len(given) > 1 and not mixed):
        raise ConfigError(
            f"objective {objective} has no loss_type {odd[0] if odd else ' with '.join(given)};"
            f" it has {', '.join(known)}",
            where="loss_type",
            hint="take one of these, or write the loss yourself: objective=module:function (docs/objectives.md)",
        )
