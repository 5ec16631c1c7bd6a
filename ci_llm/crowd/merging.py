"""The merge of K agents into one adapter: its methods, what a call may ask for, and how PEFT's methods make it.

A merge works on the agents' products B A, or on their factors A and B. Agents with random starts lie in different
subspaces: there the mean of their factors is meaningless, and only the products can be combined.

PEFT writes a merge with `lora_alpha` = r and keeps `use_rslora`, which would scale it by √r: here the scale is 1. Its
`svd` decomposes the product as a full matrix, which takes minutes per layer of a large base. A product of rank K·r
needs the SVD of a K·r x K·r matrix only. Torch and PEFT are imported only where agents are merged.

Legend: K agents, r rank, A [r, in], B [out, r].
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Method:
    """A way to merge.

    Attributes:
        peft: PEFT's `combination_type`.
        does: what comes out, in a line.
        cut: whether the result is brought to a rank by SVD; otherwise its rank follows from the agents'.
        of_factors: whether A and B are combined separately.
    """

    peft: str
    does: str
    cut: bool = False
    of_factors: bool = False


METHODS: Final[Mapping[str, Method]] = {
    "cat": Method("cat", "the mean of the agents' products B A, exactly; its rank is the sum of theirs"),
    "svd": Method("cat", "the mean of the products, cut to the rank of the agents by SVD", cut=True),
    "mean": Method("linear", "mean of A and mean of B, for agents with a common start", of_factors=True),
}
#: Names that people know from PEFT and from papers.
ALIASES: Final[Mapping[str, str]] = {
    "soup": "mean",
    "linear": "mean",
}
#: What PEFT makes of exported agents, and this program does not.
_OF_PEFT: Final = ("ties", "dare", "magnitude_prune")


@dataclass(frozen=True)
class Merge:
    """A merge as it was asked for.

    Attributes:
        weights: one per agent, in any unit; None: all alike.
        rank: the rank of the result; None: that of the agents.
    """

    name: str
    weights: tuple[float, ...] | None = None
    rank: int | None = None

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    def shares(self, num_agents: int) -> list[float]:
        """The agents' weights, with the sum 1.

        Raises:
            BadInput: there are not as many weights as agents.
        """
        weights = self.weights or (1.0,) * num_agents
        if len(weights) != num_agents:
            raise BadInput(
                f"{len(weights)} weights for {num_agents} agents", where="--weights", hint="give one weight per agent"
            )
        return [weight / sum(weights) for weight in weights]

    def peft_weights(self, num_agents: int) -> list[float]:
        """The weights with which PEFT gives this merge.

        PEFT puts the root of a weight on each factor, so it is squared here.
        """
        shares = self.shares(num_agents)
        return [share**2 for share in shares] if self.method.of_factors else shares


#: The merge that trains: see `ci_llm.crowd.distilling`.
DISTILLED: Final = "distilled"
DISTILLED_DOES: Final = "one agent trained on the crowd's distributions; beside it a control trained on its own labels"


@dataclass(frozen=True)
class Distillation:
    """How one agent learns from the crowd.

    Attributes:
        prompts: a file of prompts without answers; None: prompts of the embedded generator for a run on its stories,
            and no prompts for any other run.
        generated: so many of the embedded generator.
        steps: optimizer steps, each on the run's `batch_size` rows.
        temperature: the temperature of both distributions, crowd's and agent's, while they are compared.
        soft: weight of the crowd's distributions; the rest is that of the texts.
        learning_rate: at its peak; None: a quarter of the run's.
        start: the agent that it begins as; None: the one that a calibration found best, or the first.
    """

    prompts: Path | None = None
    generated: int = 800
    steps: int = 120
    temperature: float = 1.0
    soft: float = 1.0
    learning_rate: float | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        wrong = {
            "--steps must be at least 1": self.steps < 1,
            "--distill-temperature must be above 0": not self.temperature > 0,
            "--soft is a share, from 0 to 1": not 0 <= self.soft <= 1,
            "--distill-rate must be above 0": self.learning_rate is not None and not self.learning_rate > 0,
        }
        if problems := [text for text, holds in wrong.items() if holds]:
            raise BadInput("; ".join(problems), where=f"--merge {DISTILLED}", hint="ci-llm export --help")


def merge_of(name: str, weights: Sequence[float] | None = None, rank: int | None = None) -> Merge:
    """The merge that a call asks for.

    Raises:
        BadInput: all that is wrong with it, in one message.
    """
    from ci_llm.config.parsing import nearest  # it loads the schema, which --help does without

    known = ALIASES.get(name, name)
    if known not in METHODS:
        close = nearest(name, [*METHODS, *ALIASES, DISTILLED])
        hint = f"{f'did you mean {close}? ' if close else ''}one of: {', '.join([*METHODS, DISTILLED])}"
        if name.startswith(_OF_PEFT):
            hint = f"{hint}; PEFT makes it of exported agents, as docs/commands.md shows"
        raise BadInput(f"there is no merge {name!r}", where="--merge", hint=hint)
    wrong = []
    if weights is not None and not (all(0 <= w < math.inf for w in weights) and 0 < sum(weights) < math.inf):
        wrong.append("--weights: each must be a number of at least 0, and one above 0")
    if rank is not None and not METHODS[known].cut:
        wrong.append(f"--rank: the rank of {known} follows from the agents'; svd cuts it")
    elif rank is not None and rank < 1:
        wrong.append(f"--rank {rank}: it must be at least 1")
    if wrong:
        raise BadInput("; ".join(wrong), where=f"--merge {name}", hint="ci-llm export --help")
    return Merge(known, tuple(weights) if weights else None, rank)


#: PEFT cannot load adapters whose names are part of "lora_"; these names are not.
_MERGED = "merged"
_IN_LAYERS = ("layers_to_transform", "layers_pattern")


@dataclass(frozen=True)
class Adapter:
    """One adapter in the form of PEFT's files.

    Attributes:
        config: the content of `adapter_config.json`.
        tensors: the content of `adapter_model.safetensors`.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules of the base."""
        ends = ".lora_A.weight"
        return [name.removeprefix("base_model.model.").removesuffix(ends) for name in self.tensors if ends in name]


def merged(base: PreTrainedModel, agents: Sequence[Adapter], merge: Merge) -> Adapter:
    """The agents as one adapter of scale 1.

    Args:
        base: without agents on it, before and after.

    Raises:
        BadInput: the weights or the rank do not fit the agents.
    """
    from ci_llm.base.targets import peft_targets

    weights = merge.peft_weights(len(agents))
    if merge.method.of_factors and len({(agent.rank, *agent.modules) for agent in agents}) > 1:
        raise BadInput(
            "the agents differ in rank or modules, and have no mean of A and of B",
            where=f"--merge {merge.name}",
            hint="--merge svd or cat",
        )
    most = sum(agent.rank for agent in agents)
    rank = merge.rank or max(agent.rank for agent in agents)
    if rank > most:
        raise BadInput(f"the agents' products have rank {most} together", where=f"--rank {rank}", hint=f"--rank {most}")
    names = [f"agent{k}" for k in range(len(agents))]
    with _quiet(), _attached(base, dict(zip(names, agents, strict=True))) as model:
        model.add_weighted_adapter(
            names,
            weights,
            _MERGED,
            combination_type=merge.method.peft,
            svd_rank=rank,
            svd_full_matrices=False,
        )
        tensors = _tensors(model, _MERGED)
    if merge.method.cut:
        tensors = _pairwise(tensors, rank)
    modules = Adapter({}, tensors).modules
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    plain = {"r": rank, "lora_alpha": rank, "use_rslora": False, "lora_dropout": 0.0}
    common = {key: value for key, value in agents[0].config.items() if key not in _IN_LAYERS}
    return Adapter({**common, **plain, **peft_targets(base, modules)}, tensors)


def merge_into_base(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The base with the adapter added to its weights, in its precision. `base` itself is changed."""
    from peft import PeftModel

    with _quiet():
        model: PeftModel = _peft_model(base, "agent0", adapter)
    whole: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    return whole


@contextmanager
def _attached(base: PreTrainedModel, adapters: Mapping[str, Adapter]) -> Iterator[Any]:
    """The base as PEFT's model with these adapters; afterwards it is without them."""
    from peft import set_peft_model_state_dict

    (first, adapter), *others = adapters.items()
    model: Any = _peft_model(base, first, adapter)
    try:
        for name, other in others:
            model.add_adapter(name, _exactly(other))
            set_peft_model_state_dict(model, dict(other.tensors), adapter_name=name)
        yield model
    finally:
        model.unload()


def _peft_model(base: PreTrainedModel, name: str, adapter: Adapter) -> Any:
    from peft import PeftModel, set_peft_model_state_dict

    model = PeftModel(base, _exactly(adapter), adapter_name=name)
    set_peft_model_state_dict(model, dict(adapter.tensors), adapter_name=name)
    return model


def _exactly(adapter: Adapter) -> Any:
    """PEFT's configuration, with the whole name of each module: a merge takes the modules of all adapters, but their
    layers from the first."""
    from peft import LoraConfig

    config = {key: value for key, value in adapter.config.items() if key not in _IN_LAYERS}
    return LoraConfig.from_peft_type(**{**config, "target_modules": adapter.modules})


def _tensors(model: Any, name: str) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # Without its question to the hub whether the base has other embeddings: the agents adapt none.
    found = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of PEFT that say nothing about the call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _pairwise(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Every pair A and B cut to `rank`; of a layer that is narrower, filled up with zeros."""
    out = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            out[name], out[other] = truncated(a, tensors[other], rank)
    return out


def truncated(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors of rank `rank` whose product is nearest to B A, by Eckart and Young (1936).

    Args:
        a: [n, in], with any n.
        b: [out, n].

    Returns:
        [rank, in] and [out, rank], with equal norms.
    """
    import torch

    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    root = s[:rank].sqrt()
    narrow_a = root[:, None] * (vh[: len(root)] @ q_a.T)
    narrow_b = (q_b @ u[:, : len(root)]) * root
    missing = rank - len(root)
    pad = torch.nn.functional.pad
    wide = pad(narrow_a, (0, 0, 0, missing)), pad(narrow_b, (0, missing))
    return wide[0].to(a.dtype).contiguous(), wide[1].to(b.dtype).contiguous()
