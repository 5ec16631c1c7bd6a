"""Frozen weights packed for oneDNN, which makes products of few rows on a CPU faster.

For a plain weight, oneDNN reorders the numbers in every product. A packed weight is a copy in that order. The products
have the same bits, which a trial shows for each shape, so it changes no result whether there is memory for the copy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.core.memory import free_host_memory
from ci_llm.lora.layer import AdaptedLinear
from ci_llm.lora.passes import Head
from ci_llm.lora.products import LEAST_ROWS, dense, product

#: The copy may take this share of the free memory.
_SHARE: Final = 1 / 8
#: The rows of a trial.
_ROWS: Final = (LEAST_ROWS, 17, 33)


@dataclass(frozen=True)
class Packed:
    """The packed weights of a base.

    Attributes:
        dtype: that of the products.
        weights: by layer, for those whose products have the bits of the plain weight.
        head: the head of the base in `dtype`, packed as well if its products have these bits.
        source: what tells that the plain weights are still those that were packed.
    """

    dtype: torch.dtype
    weights: dict[nn.Module, Tensor]
    head: Head
    source: tuple[Any, ...]

    @classmethod
    def of(cls, layers: Collection[AdaptedLinear], head: Head, dtype: torch.dtype, *, by_onednn: bool) -> Packed:
        """Pack the weights of these layers and of the head in `dtype`; none of them without the memory for all.

        Args:
            by_onednn: how products with plain weights are computed; see `product`.
        """
        plain, source = _plain(layers), _source(layers, head)
        weights, known, head = dict[nn.Module, Tensor](), dict[torch.Size, bool](), head.to(dtype)
        numbers = head.weight.numel() + sum(weight.numel() for weight in plain.values())
        is_onednn = head.weight.device.type == "cpu" and (by_onednn or dtype != torch.float32)  # MKL has other bits
        if is_onednn and numbers * dtype.itemsize <= _SHARE * free_host_memory()[0]:
            for layer, weight in plain.items():
                if (packed := _packed(dense(weight, dtype), known, by_onednn=by_onednn)) is not None:
                    weights[layer] = packed
            if (packed := _packed(head.weight, known, by_onednn=by_onednn)) is not None:
                head = replace(head, weight=packed)
        return cls(dtype, weights, head, source)

    def is_of(self, layers: Collection[AdaptedLinear], head: Head, dtype: torch.dtype) -> bool:
        """True if these are the packed weights of these layers and this head, which have not changed since."""
        return self.dtype == dtype and self.source == _source(layers, head)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a crowd packs its own weights: torch cannot copy these."""


def _plain(layers: Collection[AdaptedLinear]) -> dict[nn.Module, Tensor]:
    """The weights of linear layers that are in the memory of this process, neither sharded nor quantised."""
    linear = [layer for layer in layers if type(layer.base_layer) is nn.Linear]
    found: dict[nn.Module, Any] = {layer: layer.base_layer.weight for layer in linear}
    return {layer: weight for layer, weight in found.items() if type(weight) is nn.Parameter and not weight.is_meta}


def _source(layers: Collection[AdaptedLinear], head: Head) -> tuple[Any, ...]:
    weights = (*_plain(layers).values(), head.weight)
    return tuple((weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in weights)


def _packed(weight: Tensor, known: dict[torch.Size, bool], *, by_onednn: bool) -> Tensor | None:
    """A packed copy of the weight [out, in]; None if products with it have other bits than with the weight.

    Args:
        known: the outcome of earlier trials by shape; that of this one is added.
    """
    if known.get(weight.shape) is False:
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LEAST_ROWS)
        if weight.shape not in known:
            random = torch.randn(max(_ROWS), weight.shape[1], generator=torch.Generator().manual_seed(0))
            rows = random.to(weight.dtype)
            known[weight.shape] = all(
                torch.equal(*(product(rows[:count], each, by_onednn=by_onednn) for each in (weight, packed)))
                for count in _ROWS
            )
    except (RuntimeError, AttributeError):  # this processor, or this build of torch, packs no weights of this dtype
        known[weight.shape] = False
    return packed if known[weight.shape] else None
