"""The objectives of a training: the rows they need, and the loss of each unit.

One of your own is a file in this folder, `objectives/<name>.py`, and `objective: <name>` selects it. It defines
`objective`, a frozen dataclass that is an `Objective`. `objective: module:name` takes the same from elsewhere, or a
function `loss(evidence)` that returns [K, U], with its `Needs` as the attribute `needs`. The fields of the dataclass
are keys of the configuration. A field whose key differs between agents holds a tensor [K, 1] instead of a number.
`sft`, next-token prediction, has its loss in `ci_llm.crowd.objective`, and `grpo` is a package of its own.

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
import torch.nn.functional as F
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


# Pairs and rated rows


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


@dataclass(frozen=True)
class Dpo(Objective):
    """DPO: the better answer of a pair is to gain more over the base than the worse one (Rafailov et al., 2023).

    Loss types: sigmoid; robust (Chowdhury et al., 2024); ipo (Azar et al., 2023; per token, as its authors told TRL);
    hinge (SLiC, Zhao et al., 2023); sigmoid_norm (per token, as in Tulu 3, Lambert et al., 2024); apo_zero
    (D'Oosterlinck et al., 2024); sft, the next-token loss of the better answer. Several are added by `loss_weights`.
    """

    beta: Number
    loss_type: tuple[str, ...] | None
    loss_weights: tuple[float, ...] | None
    label_smoothing: float

    def __post_init__(self) -> None:
        require_loss_types(self._types, [*LOSS_TYPES], "dpo")
        if len(self._weights) != len(self._types):
            raise ConfigError(
                f"loss_weights has {len(self._weights)} for {len(self._types)} of loss_type",
                where="loss_weights",
                hint="give each loss type one weight",
            )
        if self.label_smoothing and "robust" not in self._types:
            raise ConfigError(
                f"label_smoothing {self.label_smoothing:g} does nothing for loss_type {', '.join(self._types)}",
                where="label_smoothing",
                hint="take loss_type=robust, or leave label_smoothing out",
            )

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, nll="answers" if "sft" in self._types else "none")

    def losses(self, e: Evidence) -> Tensor:
        losses = [weight * LOSS_TYPES[kind](self, e) for kind, weight in zip(self._types, self._weights, strict=True)]
        return torch.stack(losses).sum(0)

    @property
    def _types(self) -> tuple[str, ...]:
        return self.loss_type or ("sigmoid",)

    @property
    def _weights(self) -> tuple[float, ...]:
        return self.loss_weights or (1.0,) * len(self._types)


def _gain(values: Tensor) -> Tensor:
    chosen, rejected = pairs(values)
    return chosen - rejected


def _robust(o: Dpo, e: Evidence) -> Tensor:
    share = o.label_smoothing
    gain = o.beta * _gain(e.ratios)
    return (share * F.logsigmoid(-gain) - (1 - share) * F.logsigmoid(gain)) / (1 - 2 * share)


def _apo_zero(o: Dpo, e: Evidence) -> Tensor:
    chosen, rejected = pairs(o.beta * e.ratios)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


LOSS_TYPES: Final[Mapping[str, Callable[[Dpo, Evidence], Tensor]]] = {
    "sigmoid": lambda o, e: -F.logsigmoid(o.beta * _gain(e.ratios)),
    "robust": _robust,
    "ipo": lambda o, e: (_gain(e.ratios / e.lengths) - 1 / (2 * o.beta)) ** 2,
    "hinge": lambda o, e: torch.relu(1 - o.beta * _gain(e.ratios)),
    "sigmoid_norm": lambda o, e: -F.logsigmoid(o.beta * _gain(e.ratios / e.lengths)),
    "apo_zero": _apo_zero,
    "sft": lambda o, e: e.mean_nll,
}


@dataclass(frozen=True)
class Kto(Objective):
    """KTO: a good answer is to gain over the base, and a bad one to lose, measured from `kl` (Ethayarajh et al., 2024).

    `kl` is estimated from answers to other prompts, of the whole step: TRL takes those of a micro-batch. The loss type
    apo_zero_unpaired (D'Oosterlinck et al., 2024) measures from 0.
    """

    beta: Number
    loss_type: tuple[str, ...] | None
    desirable_weight: Number
    undesirable_weight: Number

    def __post_init__(self) -> None:
        require_loss_types(self.loss_type or (), ("kto", "apo_zero_unpaired"), "kto", mixed=False)

    @property
    def needs(self) -> Needs:
        return Needs("rated", reference=True, mismatched=self.loss_type in (None, ("kto",)))

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        gain = self.beta * (e.ratios if e.kl is None else e.ratios - e.kl)
        good = self.desirable_weight * (1 - torch.sigmoid(gain))
        bad = self.undesirable_weight * (1 - torch.sigmoid(-gain))
        return torch.where(e.labels, good, bad)


@dataclass(frozen=True)
class Orpo(Objective):
    """ORPO: next-token prediction of the better row, and odds in favour of its answer (Hong et al., 2024).

    It has no reference. As in TRL, the prompt of the better row is learned as well.
    """

    beta: Number
    needs = Needs(nll="rows")
    metric_names = ("log_odds_ratio", "log_odds_chosen")

    def losses(self, e: Evidence) -> Tensor:
        return e.mean_nll - self.beta * F.logsigmoid(log_odds(e))

    def metrics(self, e: Evidence) -> Metrics:
        odds = log_odds(e)
        units = float(e.sums.shape[1] // 2)
        return {"log_odds_ratio": (F.logsigmoid(odds).sum(1), units), "log_odds_chosen": (odds.sum(1), units)}


def log_odds(e: Evidence) -> Tensor:
    """The log of the odds ratio [K, U] of the better to the worse answer."""
    chosen, rejected = pairs(e.means.clamp(max=-_LEAST))
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


#: The least distance of a log-probability from 0, because a certain answer has infinite odds.
_LEAST = 1e-12


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0: Mächler, "Accurately computing log(1 - exp(-|a|))", 2012."""
    return torch.where(x > -0.6931471805599453, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


@dataclass(frozen=True)
class Simpo(Objective):
    """SimPO: log-probability per token of the better answer above the worse one, by a margin (Meng et al., 2024).

    Without a reference, by TRL's names and defaults. Those are not the paper's, which has cpo_alpha 0, beta 2 to 2.5
    and simpo_gamma 0.3 to 0.5 of beta: TRL adds `cpo_alpha` times the next-token loss of the better answer (CPO, Xu et
    al., 2024).
    """

    beta: Number
    simpo_gamma: Number
    cpo_alpha: float

    @property
    def needs(self) -> Needs:
        return Needs(nll="answers" if self.cpo_alpha else "none")

    def losses(self, e: Evidence) -> Tensor:
        chosen, rejected = pairs(e.means)
        losses = -F.logsigmoid(self.beta * (chosen - rejected) - self.simpo_gamma)
        return losses + self.cpo_alpha * e.mean_nll if self.cpo_alpha else losses


# Heads


@dataclass(frozen=True)
class Reward(Objective):
    """Reward: a head's number for the better answer is to exceed that for the worse one (Bradley and Terry, 1952).

    As in TRL, a column `margin` says by how much (Touvron et al., "Llama 2", 2023), and `center_rewards_coefficient`
    draws the two numbers of a pair towards a sum of 0 (Eisenstein et al., 2023).
    """

    center_rewards_coefficient: float | None
    needs = Needs("pairs", head=True)

    def losses(self, e: Evidence) -> Tensor:
        chosen, rejected = pairs(self.answer_rewards(e))
        losses = -F.logsigmoid(chosen - rejected - (0.0 if e.labels is None else e.labels))
        if self.center_rewards_coefficient is None:
            return losses
        return losses + self.center_rewards_coefficient * (chosen + rejected) ** 2


@dataclass(frozen=True)
class Classification(Objective):
    """Classification: cross-entropy of a head's numbers, one per class, as in SEQ_CLS models of Transformers."""

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


@dataclass(frozen=True)
class Regression(Objective):
    """Regression: squared error of a head's number, as in SEQ_CLS models of Transformers with one label."""

    needs = Needs("labelled", head=True)

    def losses(self, e: Evidence) -> Tensor:
        assert e.labels is not None
        return (e.outputs[..., 0] - e.labels) ** 2


# The objective of a configuration

#: The objectives of this module.
_OWN: Final[Mapping[str, type[Objective]]] = {
    "classification": Classification,
    "dpo": Dpo,
    "kto": Kto,
    "orpo": Orpo,
    "regression": Regression,
    "reward": Reward,
    "simpo": Simpo,
}
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
    if is_function(name):
        kind = import_named(name, "objective")
    else:
        kind = _OWN.get(name) or load_plugin(__name__, name, "objective")
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

    In its place stands one for agents of the same form: by the columns, or for heads with this number of `outputs`. The
    rows are read by it; the loss of the training is not known.
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
