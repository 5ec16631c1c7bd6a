"""The merge of K agents into one adapter, by PEFT's `add_weighted_adapter`, or of an adapter into its base.

PEFT writes a merge with `lora_alpha` = r and keeps `use_rslora`, which would scale it by √r: here the scale is 1. Its
`svd` decomposes the product as a full matrix, which takes minutes per layer of a large base. A product of rank K·r
needs the SVD of a K·r x K·r matrix only.

Legend: K agents, r rank, A [r, in], B [out, r].
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.base.targets import peft_targets
from ci_llm.crowd.merge_methods import Merge
from ci_llm.errors import BadInput

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
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T)
    root = s[:rank].sqrt()
    narrow_a = root[:, None] * (vh[: len(root)] @ q_a.T)
    narrow_b = (q_b @ u[:, : len(root)]) * root
    missing = rank - len(root)
    wide = nn.functional.pad(narrow_a, (0, 0, 0, missing)), nn.functional.pad(narrow_b, (0, missing))
    return wide[0].to(a.dtype).contiguous(), wide[1].to(b.dtype).contiguous()
