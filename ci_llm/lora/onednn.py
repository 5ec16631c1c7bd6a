"""Frozen weights for oneDNN, whose products are faster than those of MKL on some CPUs; see `product` in products.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.core.determinism import processor
from ci_llm.core.memory import free_host_memory
from ci_llm.lora.layer import AdaptedLinear
from ci_llm.lora.passes import Head
from ci_llm.lora.products import LEAST_ROWS, dense, product


@cache
def onednn_is_faster() -> bool:
    """True if fp32 products by oneDNN were measured faster than by MKL, torch's choice, on this kind of processor.

    It is never timed here, because a resume could not repeat the result.
    """
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and "AMD" in processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"


#: The copy may take this share of the free memory.
_MEMORY_SHARE: Final = 1 / 8
#: The rows of a trial.
_TRIAL_ROWS: Final = (LEAST_ROWS, 17, 33)


@dataclass(frozen=True)
class ReorderedWeights:
    """The frozen weights of a base for the products of a decoder, which have few rows.

    For a plain weight, oneDNN reorders the numbers in every product. A reordered weight is a copy in that order. The
    products have the same bits, which a trial shows for each shape, so it changes no result whether there is memory for
    the copy.

    Attributes:
        dtype: that of the products.
        by_onednn: how products with plain weights are computed; see `product`.
        weights: by layer, for those whose products have the bits of the plain weight.
        head: the head of the base in `dtype`, reordered as well if its products have these bits.
        source: what tells that the plain weights are still those that were reordered.
    """

    dtype: torch.dtype
    by_onednn: bool
    weights: dict[nn.Module, Tensor]
    head: Head
    source: tuple[Any, ...]

    @classmethod
    def of(cls, layers: Collection[AdaptedLinear], head: Head, dtype: torch.dtype) -> ReorderedWeights:
        """Reorder the weights of these layers and of the head in `dtype`; none of them without the memory for all."""
        plain, source = _plain(layers), _source(layers, head)
        on_cpu = head.weight.device.type == "cpu"
        by_onednn = on_cpu and onednn_is_faster()
        head = replace(head.to(dtype), by_onednn=by_onednn)
        weights, known = dict[nn.Module, Tensor](), dict[torch.Size, bool]()
        numbers = head.weight.numel() + sum(weight.numel() for weight in plain.values())
        is_onednn = on_cpu and (by_onednn or dtype != torch.float32)  # MKL has other bits
        if is_onednn and numbers * dtype.itemsize <= _MEMORY_SHARE * free_host_memory()[0]:
            for layer, weight in plain.items():
                if (found := _reordered(dense(weight, dtype), known, by_onednn=by_onednn)) is not None:
                    weights[layer] = found
            if (found := _reordered(head.weight, known, by_onednn=by_onednn)) is not None:
                head = replace(head, weight=found)
        return cls(dtype, by_onednn, weights, head, source)

    def is_of(self, layers: Collection[AdaptedLinear], head: Head, dtype: torch.dtype) -> bool:
        """True if these were made of these layers and this head, which have not changed since."""
        return self.dtype == dtype and self.source == _source(layers, head)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a crowd reorders its own weights: torch cannot copy these."""


def _plain(layers: Collection[AdaptedLinear]) -> dict[nn.Module, Tensor]:
    """The weights of linear layers that are in the memory of this process, neither sharded nor quantised."""
    linear = [layer for layer in layers if type(layer.base_layer) is nn.Linear]
    found: dict[nn.Module, Any] = {layer: layer.base_layer.weight for layer in linear}
    return {layer: weight for layer, weight in found.items() if type(weight) is nn.Parameter and not weight.is_meta}


def _source(layers: Collection[AdaptedLinear], head: Head) -> tuple[Any, ...]:
    weights = (*_plain(layers).values(), head.weight)
    return tuple((weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in weights)


def _reordered(weight: Tensor, known: dict[torch.Size, bool], *, by_onednn: bool) -> Tensor | None:
    """A reordered copy of the weight [out, in]; None if products with it have other bits than with the weight.

    Args:
        known: the outcome of earlier trials by shape; that of this one is added.
    """
    if known.get(weight.shape) is False:
        return None
    try:
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LEAST_ROWS)
        if weight.shape not in known:
            random = torch.randn(max(_TRIAL_ROWS), weight.shape[1], generator=torch.Generator().manual_seed(0))
            rows = random.to(weight.dtype)
            known[weight.shape] = all(
                torch.equal(*(product(rows[:count], each, by_onednn=by_onednn) for each in (weight, found)))
                for count in _TRIAL_ROWS
            )
    except (RuntimeError, AttributeError):  # this processor, or this build of torch, reorders no weights of this dtype
        known[weight.shape] = False
    return found if known[weight.shape] else None
