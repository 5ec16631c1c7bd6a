"""The merge of K agents into one adapter: its methods, what a call may ask for, and the merged factors.

A merge works on the agents' products B A, or on their factors A and B. Agents with random starts lie in different
subspaces: there the mean of their factors is meaningless, and only the products can be combined.

The methods are those of PEFT's `add_weighted_adapter`, which has three traps: it keeps `use_rslora`, which scales the
merge by √r; weights 1/K make its `linear` K times too large; and its `svd` decomposes the product as a full matrix,
which takes minutes per layer of a large base. A product of rank K·r needs the SVD of a K·r x K·r matrix only.

Torch and PEFT are imported only where agents are merged.

Legend: K agents, r rank, A [r, in], B [out, r].
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ci_llm.crowd.adapter_files import Adapter


#: The merges, each with its result in a line.
METHODS: Final[Mapping[str, str]] = {
    "cat": "the mean of the agents' products B A, exactly; its rank is the sum of theirs",
    "svd": "the mean of the products, cut to the rank of the agents by SVD",
    "mean": "mean of A and mean of B, for agents with a common start",
}
#: What PEFT makes of exported agents, and this program does not.
_OF_PEFT: Final = ("ties", "dare", "magnitude_prune")


@dataclass(frozen=True)
class Merge:
    """A merge as a call asks for it.

    Attributes:
        weights: one per agent, in any unit; None if all weigh the same.
        rank: the rank of the result; None for that of the agents.
    """

    name: str
    weights: tuple[float, ...] | None = None
    rank: int | None = None

    def shares(self, num_agents: int) -> list[float]:
        """The agents' weights, scaled to the sum 1.

        Raises:
            BadInput: there are not as many weights as agents.
        """
        weights = self.weights or (1.0,) * num_agents
        if len(weights) != num_agents:
            raise BadInput(
                f"{len(weights)} weights for {num_agents} agents", where="--weights", hint="give one weight per agent"
            )
        return [weight / sum(weights) for weight in weights]


#: The merge that trains: see `ci_llm.crowd.distilling`.
DISTILLED: Final = "distilled"
DISTILLED_DOES: Final = "one agent trained on the crowd's distributions; beside it a control trained on its own labels"


@dataclass(frozen=True)
class Distillation:
    """The settings by which one agent learns from the crowd.

    Attributes:
        prompts: a file of prompts without answers; None takes prompts of the embedded generator for a run on its
            stories, and no prompts for any other run.
        steps: optimizer steps, each on the run's `batch_size` rows.
        learning_rate: the peak of the learning rate; None takes a quarter of the run's.
    """

    prompts: Path | None = None
    steps: int = 120
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.learning_rate is not None and not self.learning_rate > 0:
            what = "--distill-rate must be above 0"
            raise BadInput(what, where=f"--merge {DISTILLED}", hint="ci-llm export --help")


def merge_of(name: str, weights: Sequence[float] | None = None, rank: int | None = None) -> Merge:
    """The merge that a call asks for.

    Raises:
        BadInput: with everything that is wrong in one message.
    """
    from ci_llm.config.parsing import nearest  # it loads the schema, which --help does without

    if name not in METHODS:
        close = nearest(name, [*METHODS, DISTILLED])
        hint = f"{f'did you mean {close}? ' if close else ''}one of: {', '.join([*METHODS, DISTILLED])}"
        if name.startswith(_OF_PEFT):
            hint = f"{hint}; PEFT makes it of exported agents, as docs/commands.md shows"
        raise BadInput(f"there is no merge {name!r}", where="--merge", hint=hint)
    wrong = []
    if weights is not None and not (all(0 <= w < math.inf for w in weights) and 0 < sum(weights) < math.inf):
        wrong.append("--weights: each must be a number of at least 0, and one above 0")
    if rank is not None and name != "svd":
        wrong.append(f"--rank: the rank of {name} follows from the agents'; svd cuts it")
    if wrong:
        raise BadInput("; ".join(wrong), where=f"--merge {name}", hint="ci-llm export --help")
    return Merge(name, tuple(weights) if weights else None, rank)


#: Keys of a PEFT configuration that limit its target modules to some layers.
_IN_LAYERS: Final = ("layers_to_transform", "layers_pattern")


def merged(base: PreTrainedModel, agents: Sequence[Adapter], merge: Merge) -> Adapter:
    """The agents as one adapter of scale 1.

    Args:
        base: the base of the agents, without agents on it.

    Raises:
        BadInput: the weights or the rank do not fit the agents.
    """
    from torch.nn.functional import pad

    from ci_llm.base.targets import peft_targets
    from ci_llm.crowd.adapter_files import Adapter, tensor_name

    weighted = [*zip(agents, merge.shares(len(agents)), strict=True)]
    of_factors = merge.name == "mean"
    if of_factors and len({(agent.rank, *agent.modules) for agent in agents}) > 1:
        raise BadInput(
            "the agents differ in rank or modules, and have no mean of A and of B",
            where=f"--merge {merge.name}",
            hint="--merge svd or cat",
        )
    most = sum(agent.rank for agent in agents)
    rank = merge.rank or (most if merge.name == "cat" else max(agent.rank for agent in agents))
    if rank > most:
        raise BadInput(f"the agents' products have rank {most} together", where=f"--rank {rank}", hint=f"--rank {most}")
    modules = list(dict.fromkeys(name for agent in agents for name in agent.modules))
    tensors = {}
    for module in modules:
        a, b = (_mean_factors if of_factors else _joined_factors)(weighted, module)
        if merge.name == "svd":
            a, b = truncated(a, b, rank)
        missing = rank - len(a)  # an adapter has one rank, which not every module can have
        tensors[tensor_name(module, "A")] = pad(a, (0, 0, 0, missing)).cpu().contiguous()
        tensors[tensor_name(module, "B")] = pad(b, (0, missing)).cpu().contiguous()
    plain = {"r": rank, "lora_alpha": rank, "use_rslora": False, "lora_dropout": 0.0}
    common = {key: value for key, value in agents[0].config.items() if key not in _IN_LAYERS}
    return Adapter({**common, **plain, **peft_targets(base, modules)}, tensors)


def _joined_factors(weighted: Sequence[tuple[Adapter, float]], module: str) -> tuple[Tensor, Tensor]:
    """A [n, in] and B [out, n] whose product is the mean of the agents' products; n is the sum of their ranks."""
    import torch

    parts = [(*agent.factors(module), share * agent.scaling) for agent, share in weighted if module in agent.modules]
    return torch.cat([a * factor for a, _, factor in parts]), torch.cat([b for _, b, _ in parts], dim=1)


def _mean_factors(weighted: Sequence[tuple[Adapter, float]], module: str) -> tuple[Tensor, Tensor]:
    """The mean A and the mean B, each with the root of the agents' scale."""
    import torch

    roots = [share * math.sqrt(agent.scaling) for agent, share in weighted]
    each = zip(*(agent.factors(module) for agent, _ in weighted), strict=True)
    a, b = (torch.stack([root * own for root, own in zip(roots, factors, strict=True)]).sum(0) for factors in each)
    return a, b


def merge_into_base(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The base with the adapter added to its weights, in its precision. `base` itself is changed."""
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # not about this call
        model = PeftModel(base, LoraConfig.from_peft_type(**adapter.config))
    set_peft_model_state_dict(model, dict(adapter.tensors))
    whole: PreTrainedModel = model.merge_and_unload(safe_merge=True)
    return whole


def truncated(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors of rank `rank` whose product is nearest to B A, by Eckart and Young (1936).

    Args:
        a: [n, in], with any n.
        b: [out, n].

    Returns:
        [n', in] and [out, n'], with equal norms; n' is `rank`, or the most that the product can have.
    """
    import torch

    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    root = s[:rank].sqrt()
    narrow_a = root[:, None] * (vh[: len(root)] @ q_a.T)
    narrow_b = (q_b @ u[:, : len(root)]) * root
    return narrow_a.to(a.dtype), narrow_b.to(b.dtype)
