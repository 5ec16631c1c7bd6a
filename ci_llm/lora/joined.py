"""Frozen layers that read one input, computed together by the first that is called: q, k and v, or gate and up.

The adapters of all of them are one product with the input, the gradients of the input are added in place, and those of
the agents go to the crowd's storage without a parameter in autograd's graph. The sums have another order than layer by
layer, so the bits differ.

Legend: that of `ci_llm/lora/layer.py`; R is the rank of all layers together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.lora.layer import AgentGroup, StackedLoRALinear, compute_dtype, dense, low_rank_gradients

#: Names of neighbours that read one input, in families that do not join them themselves.
_NEIGHBOURS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _JoinedLinears(torch.autograd.Function):
    """y_i[k] = x[k] W_iᵀ + b_i + s_i (x[k] A_i[k]ᵀ) B_i[k]ᵀ for all layers i; see `_FusedLinear`.

    The gradients of A and B are added to the storage. `anchor` stands for them in the graph: without it an input that
    needs no gradient would end the backward pass before this node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Tensor,
        _anchor: Tensor,
        layers: Sequence[nn.Linear | QuantizedLinear],
        groups: Sequence[AgentGroup],
    ) -> tuple[Tensor, ...]:
        (agents, rows, width), dtype = cast.shape, cast.dtype
        adapters = [group.effective(dtype) for group in groups]
        a = torch.cat([a for a, _ in adapters], 1)
        h = torch.bmm(cast, a.mT)
        parts = h.split([b.shape[2] for _, b in adapters], 2)
        outputs, flat = [], cast.reshape(agents * rows, width)
        for layer, group, (_, b), part in zip(layers, groups, adapters, parts, strict=True):
            bias = None if layer.bias is None else layer.bias.to(dtype)
            weight = layer if isinstance(layer, QuantizedLinear) else layer.weight
            y = nn.functional.linear(flat, dense(weight, dtype), bias).view(agents, rows, -1)
            outputs.append(y.baddbmm_(part, b.mT, alpha=group.scaling))
        stored = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        ctx.save_for_backward(cast, a, h, *(b for _, b in adapters), *stored)
        ctx.layers, ctx.groups, ctx.dtype = layers, groups, x.dtype
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cast, a, h, *kept = ctx.saved_tensors
        bs, stored = kept[: len(grads)], iter(kept[len(grads) :])
        agents, rows, _ = cast.shape
        grad_h, grad_x, grads_b, start = torch.empty_like(h), None, [], 0
        for layer, group, grad, b in zip(ctx.layers, ctx.groups, grads, bs, strict=True):
            grad, part = grad.contiguous(), slice(start, start + b.shape[2])
            own, grad_b = low_rank_gradients(grad, b, h[..., part], group.scaling)
            grad_h[..., part] = own
            grads_b.append(grad_b)
            start = part.stop
            weight = next(stored) if isinstance(layer, nn.Linear) else layer
            if ctx.needs_input_grad[0]:
                flat, weight = grad.view(agents * rows, -1), dense(weight, grad.dtype)
                grad_x = torch.mm(flat, weight) if grad_x is None else grad_x.addmm_(flat, weight)
        grad_a = torch.bmm(grad_h.mT, cast).split([b.shape[2] for b in bs], 1)
        for group, own_a, own_b in zip(ctx.groups, grad_a, grads_b, strict=True):
            group.add_gradients(own_a, own_b)
        if grad_x is None:
            return (None,) * 5
        return grad_x.view(cast.shape).baddbmm_(grad_h, a).to(ctx.dtype), None, None, None, None


class JoinedInput:
    """Neighbouring layers; the first that is called computes all, and the others take what it left.

    Each does so only for the very tensor that the first one read. Agents of several shapes, with dropout, or with rows
    of their own in one pass stay with the layers themselves, and so do a layer that they do not adapt, which an agent
    has by itself when it is alone, and a pass without gradients.
    """

    def __init__(self, layers: Sequence[StackedLoRALinear]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._left: dict[str, Tensor] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def output(self, layer: StackedLoRALinear, x: Tensor) -> Tensor | None:
        """What the layer gives for the input [K·B, ..., in]; None: it has to compute that itself."""
        if self._input is not x or layer.name not in self._left:
            chosen = self._chosen() if torch.is_grad_enabled() and layer.reading.in_storage else {}
            if layer.name not in chosen or len(chosen) == 1:
                return None
            self._input, self._left = x, self._computed(x, chosen)
        found = self._left.pop(layer.name)
        if not self._left:
            self._input = None
        return found

    def forget(self) -> None:
        """Drop what a pass that was given up, as where memory ran out, has left: it holds the whole pass in memory."""
        self._input, self._left = None, {}

    def _computed(self, x: Tensor, chosen: dict[str, AgentGroup]) -> dict[str, Tensor]:
        """The outputs of these layers by name."""
        layers, groups = [each for each in self._layers if each.name in chosen], [*chosen.values()]
        rows = (groups[0].end - groups[0].first, -1, layers[0].in_features)
        cast = layers[0].casts.input(x, compute_dtype(x)).reshape(rows)
        outputs = _JoinedLinears.apply(
            x.reshape(rows), cast, self._anchor, [each.base_layer for each in layers], groups
        )
        return {name: y.view(*x.shape[:-1], y.shape[-1]) for name, y in zip(chosen, outputs, strict=True)}

    def _chosen(self) -> dict[str, AgentGroup]:
        """By name, the only group of each layer that has one whose gradients are added to the storage."""
        found = {layer.name: layer.present_groups() for layer in self._layers}
        return {name: groups[0] for name, groups in found.items() if len(groups) == 1 and groups[0].is_joinable}


def join(layers: Iterable[StackedLoRALinear]) -> None:
    """Let neighbours that read one input be computed together."""
    found: dict[tuple[str, int], list[StackedLoRALinear]] = {}
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        for kind, names in enumerate(_NEIGHBOURS):
            if name in names and isinstance(layer.base_layer, nn.Linear | QuantizedLinear):
                found.setdefault((parent, kind), []).append(layer)
    for neighbours in found.values():
        if len(neighbours) > 1:
            joined = JoinedInput(neighbours)
            for layer in neighbours:
                layer.joined = joined


def take_apart(layers: Iterable[StackedLoRALinear]) -> None:
    """Undo `join`."""
    for layer in layers:
        layer.joined = None
