"""One frozen linear layer with K low-rank adapters: the layer, and the own autograd Functions behind it.

Legend: K agents, N rows of activations per agent, r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ci_llm.errors import ModelError


@dataclass(frozen=True)
class LoraSettings:
    """What every agent looks like, in PEFT's words."""

    num_agents: int = 4
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    dropconnect: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    initialize_adapters_rand: bool = True
    seed: int = 42

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class _FusedLinear(torch.autograd.Function):
    """y[k] = x[k] Wᵀ + b + s (z[k] A[k]ᵀ) B[k]ᵀ with W frozen; z is x, or x after dropout.

    Saves x and the rank-r product only. Works in the dtype of x; gradients come back in the dtype of A and B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        scaling: float,
        *parameters: Tensor,
    ) -> Tensor:
        agents, rows, width = x.shape
        a, b = _effective(stacked, masks, x.dtype)
        z = x if dropped is None else dropped
        h = torch.bmm(z, a.mT)
        y = nn.functional.linear(x.reshape(agents * rows, width), weight, bias)
        y = y.view(agents, rows, -1).baddbmm_(h, b.transpose(1, 2), alpha=scaling)
        ctx.save_for_backward(z, weight, a, b, h)
        ctx.scaling, ctx.masks, ctx.dropped, ctx.dtype = (
            scaling,
            masks,
            dropped is not None,
            parameters[0].dtype,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, a, b, h = ctx.saved_tensors
        agents, rows, _ = grad.shape
        grad = grad.contiguous()
        grad_a, grad_b, grad_h = _low_rank_gradients(grad, z, b, h, ctx.scaling)
        grad_x = grad_z = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad.view(agents * rows, -1), weight).view(agents, rows, -1)
        if ctx.dropped:
            grad_z = torch.bmm(grad_h, a)
        elif grad_x is not None:
            grad_x.baddbmm_(grad_h, a)
        return grad_x, grad_z, None, None, None, None, None, *_per_agent(ctx, grad_a, grad_b)


class _LowRank(torch.autograd.Function):
    """s (z[k] A[k]ᵀ) B[k]ᵀ alone, for bases that are not a plain nn.Linear (Conv1D, quantised)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        scaling: float,
        *parameters: Tensor,
    ) -> Tensor:
        a, b = _effective(stacked, masks, z.dtype)
        h = torch.bmm(z, a.mT)
        ctx.save_for_backward(z, a, b, h)
        ctx.scaling, ctx.masks, ctx.dtype = scaling, masks, parameters[0].dtype
        return torch.bmm(h, b.transpose(1, 2)).mul_(scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, a, b, h = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a, grad_b, grad_h = _low_rank_gradients(grad, z, b, h, ctx.scaling)
        grad_z = torch.bmm(grad_h, a) if ctx.needs_input_grad[0] else None
        return grad_z, None, None, None, *_per_agent(ctx, grad_a, grad_b)


def _effective(
    stacked: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    a, b = stacked
    if masks is not None:
        a, b = a * masks[0], b * masks[1]
    return a.to(dtype), b.to(dtype)


def _low_rank_gradients(grad: Tensor, z: Tensor, b: Tensor, h: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """Gradients of A and B and of h = z Aᵀ, of s h Bᵀ."""
    # The long side last, in memory as well: MKL is up to four times slower the other way round.
    grad_h = torch.bmm(grad, b.mT.contiguous().mT).mul_(scaling)
    grad_b = torch.bmm(h.mT, grad).mul_(scaling).mT
    return torch.bmm(grad_h.mT, z), grad_b, grad_h


def _per_agent(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    grad_a, grad_b = grad_a.to(ctx.dtype), grad_b.to(ctx.dtype)
    if ctx.masks is not None:
        grad_a, grad_b = grad_a * ctx.masks[0], grad_b * ctx.masks[1]
    return (*grad_a.unbind(0), *grad_b.unbind(0))


class _Kind:
    """The weight of an adapted layer, of which a base may ask what it is made of, and nothing else.

    Some bases multiply with a layer's weight themselves: the agents on that layer would learn nothing, without a word.
    """

    def __init__(self, weight: Tensor, name: str) -> None:
        self.dtype, self.device, self.shape, self._name = weight.dtype, weight.device, weight.shape, name

    def _refuse(self, *_: Any) -> NoReturn:
        raise ModelError(
            f"the base reads the weight of {self._name} itself, past the agents on that layer",
            where="lora_target_modules",
            hint=f"name the layers to adapt, and leave {self._name.rpartition('.')[2]} out",
        )

    __getattr__ = __getitem__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()


class StackedLoRALinear(nn.Module):
    """A frozen linear layer with K low-rank adapters, one per agent.

    Input [K·B, ..., in], agent-major (all rows of agent 0 first); output [K·B, ..., out]. With `solo` set to k, all
    rows belong to agent k. The module's parameters `lora_A.agent<k> [r, in]` and `lora_B.agent<k> [out, r]` are views
    into the crowd's storage; `stacked` are the same numbers as [K, r, in] and [K, out, r]. `name` is the layer's own in
    the base, for messages.
    """

    def __init__(self, base_layer: nn.Module, settings: LoraSettings, name: str) -> None:
        super().__init__()
        self.name = name
        self.base_layer = base_layer
        self.settings = settings
        self.in_features, self.out_features = _features(base_layer)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.stacked: tuple[Tensor, Tensor] | None = None
        self.masks: tuple[Tensor, Tensor] | None = None
        self.solo: int | None = None

    @property
    def weight(self) -> _Kind:
        return _Kind(self.base_layer.weight, self.name)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]  # the same with and without agents

    def forward(self, x: Tensor) -> Tensor:
        assert self.stacked is not None
        stacked, masks = self.stacked, self.masks if self.training else None
        parameters = (*self.lora_A.values(), *self.lora_B.values())
        if self.solo is not None:
            k, agents = self.solo, self.settings.num_agents
            stacked = (stacked[0][k : k + 1], stacked[1][k : k + 1])
            masks = None if masks is None else (masks[0][k : k + 1], masks[1][k : k + 1])
            parameters = (parameters[k], parameters[agents + k])
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        rows = x.to(dtype).reshape(stacked[0].shape[0], -1, self.in_features)
        dropout = self.settings.dropout if self.training else 0.0
        dropped = nn.functional.dropout(rows, dropout) if dropout else None
        y = self._apply_both(rows, dropped, stacked, masks, parameters)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply_both(
        self,
        x: Tensor,
        dropped: Tensor | None,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        parameters: tuple[Tensor, ...],
    ) -> Tensor:
        base, scaling = self.base_layer, self.settings.scaling
        if type(base) is nn.Linear:
            bias = None if base.bias is None else base.bias.to(x.dtype)
            weight = base.weight.to(x.dtype)
            return _FusedLinear.apply(x, dropped, weight, bias, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]
        z = x if dropped is None else dropped
        # Autocast, if it is on, casts the base's own weights; the adapters have the dtype of x by themselves.
        return base(x) + _LowRank.apply(z, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features
