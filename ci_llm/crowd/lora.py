"""One frozen linear layer with K low-rank adapters: the module and its autograd Functions.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Rank-stabilised scaling: Kalajdzievski,
"A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

Legend: K agents, N rows of activations per agent, r rank, in and out features. x, z [K, N, in], h [K, N, r],
A [K, r, in], B [K, out, r], W [out, in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ci_llm.crowd.quantized import QuantizedLinear
from ci_llm.errors import ModelError


@dataclass(frozen=True)
class LoraSettings:
    """Number and shape of the agents; the words are PEFT's.

    Args:
        num_agents: K.
        rank: r of each adapter.
        alpha: see `scaling`.
        dropout: probability of dropping an input of an adapter.
        dropconnect: probability of dropping a weight of an adapter.
        target_modules: "all-linear", a regular expression, or suffixes of module names.
        use_rslora: see `scaling`.
        initialize_adapters_rand: every agent draws its own start; otherwise all start as agent 0.
        seed: of the start and of the DropConnect masks.
    """

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
        """The factor of B A: alpha / r, or alpha / √r with `use_rslora`."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class _FusedLinear(torch.autograd.Function):
    """y[k] = x[k] Wᵀ + b + s (z[k] A[k]ᵀ) B[k]ᵀ with W frozen; z is x, or x after dropout.

    It keeps only z and the rank-r product h = z Aᵀ for the backward pass. A quantised W is made dense once per pass for
    all agents, and again in the backward pass. It computes in the dtype of x; the gradients
    of A and B have the dtype of A and B.

    `parameters` are the same numbers as `stacked`, agent by agent. They are arguments because autograd routes gradients
    to arguments, and the gradients are returned for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor | QuantizedLinear,
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
        # One product with W for the rows of all agents: this is where the fused pass saves time.
        y = nn.functional.linear(x.reshape(agents * rows, width), _dense(weight, x.dtype), bias)
        # In place, because y is the largest tensor here and autograd does not need its value before the sum.
        y = y.view(agents, rows, -1).baddbmm_(h, b.transpose(1, 2), alpha=scaling)
        quantized = isinstance(weight, QuantizedLinear)
        ctx.save_for_backward(z, None if quantized else weight, a, b, h)
        ctx.quantized, ctx.scaling, ctx.masks, ctx.dropped, ctx.dtype = (
            weight if quantized else None,
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
            weight = _dense(ctx.quantized or weight, grad.dtype)
            grad_x = torch.mm(grad.view(agents * rows, -1), weight).view(agents, rows, -1)
        # Without dropout z is x, so both parts of the gradient belong to the same input.
        if ctx.dropped:
            grad_z = torch.bmm(grad_h, a)
        elif grad_x is not None:
            grad_x.baddbmm_(grad_h, a)
        return grad_x, grad_z, None, None, None, None, None, *_per_agent(ctx, grad_a, grad_b)


class _LowRank(torch.autograd.Function):
    """s (z[k] A[k]ᵀ) B[k]ᵀ alone, for base layers that are no plain nn.Linear, such as Conv1D."""

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


def _dense(weight: Tensor | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def _effective(
    stacked: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A and B with this step's DropConnect masks, in the dtype of the computation."""
    a, b = stacked
    if masks is not None:
        a, b = a * masks[0], b * masks[1]
    return a.to(dtype), b.to(dtype)


def _low_rank_gradients(grad: Tensor, z: Tensor, b: Tensor, h: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """Gradients of A [K, r, in], B [K, out, r] and h [K, N, r], where h = z Aᵀ and the output is s h Bᵀ."""
    # The longer dimension is the last one, in memory as well: MKL is up to four times slower otherwise.
    grad_h = torch.bmm(grad, b.mT.contiguous().mT).mul_(scaling)
    grad_b = torch.bmm(h.mT, grad).mul_(scaling).mT
    return torch.bmm(grad_h.mT, z), grad_b, grad_h


def _per_agent(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    """The gradients in the order of `parameters`: A of every agent, then B of every agent."""
    grad_a, grad_b = grad_a.to(ctx.dtype), grad_b.to(ctx.dtype)
    if ctx.masks is not None:
        grad_a, grad_b = grad_a * ctx.masks[0], grad_b * ctx.masks[1]
    return (*grad_a.unbind(0), *grad_b.unbind(0))


class _WeightMetadata:
    """Stands for the weight of an adapted layer: a base may read its dtype, device and shape, and nothing else.

    Some bases multiply by a layer's weight themselves. The agents on that layer would then have no effect and learn
    nothing, so any other access raises an error.
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

    Input [K·B, ..., in], agent-major (all rows of agent 0 first); output [K·B, ..., out].

    Args:
        base_layer: the frozen layer.
        settings: number and shape of the agents.
        name: of the layer in the base, for messages.

    Attributes:
        lora_A, lora_B: parameters `agent<k>` [r, in] and [out, r], views of the crowd's storage.
        stacked: the same numbers as A [K, r, in] and B [K, out, r].
        masks: DropConnect masks of the same shapes, or None.
        active_agent: the agent to which all rows of the input belong; None: the input holds the rows of all K agents.
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
        self.active_agent: int | None = None

    @property
    def weight(self) -> _WeightMetadata:
        return _WeightMetadata(self.base_layer.weight, self.name)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]  # the same with and without agents

    def forward(self, x: Tensor) -> Tensor:
        assert self.stacked is not None
        stacked, masks = self.stacked, self.masks if self.training else None
        parameters = (*self.lora_A.values(), *self.lora_B.values())
        if self.active_agent is not None:
            # The slices keep a leading dimension of 1, so that the code below serves one agent as it serves K.
            k, agents = self.active_agent, self.settings.num_agents
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
        if type(base) is nn.Linear or isinstance(base, QuantizedLinear):
            bias = None if base.bias is None else base.bias.to(x.dtype)
            weight = base if isinstance(base, QuantizedLinear) else base.weight.to(x.dtype)
            return _FusedLinear.apply(x, dropped, weight, bias, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]
        z = x if dropped is None else dropped
        # Autocast, if it is on, casts the base's weights; `_LowRank` casts the adapters to the dtype of its input.
        return base(x) + _LowRank.apply(z, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    assert isinstance(layer, nn.Linear | QuantizedLinear)
    return layer.in_features, layer.out_features
