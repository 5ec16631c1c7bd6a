"""Fast kernels for parts of a pass: the mathematics of the family's own code in fewer passes over memory.

`take` installs them in modules whose class looks as they expect, and `give_back` removes them. Whether they compute the
same is decided by a trial (`ci_llm/run/autotune.py`). `torch.compile` of the same functions gained nothing over them,
cost 33 s and needed a compiler (benchmarks/README.md).

A part stays as long as it saves a twentieth of the time, of what is kept for the backward pass, or of the kernels that
a GPU starts for a step. By benchmarks/README.md plain code takes this many times as long as with the part alone:

    head 1.12, norms 1.12, rotation 1.07, joined 1.15, products 1.26, attention 1.13
    gate 1.03, and it keeps 0.88 of what plain code keeps
    precision 0.97 to 1.00 on a CPU; on a GPU a step in bf16 starts 9,166 kernels with it and 10,138 without
    (tests/accelerator/test_device.py)

Legend: N tokens, D width of a normed tensor, H heads, d width of a head, F width of the feed-forward layer, S targets,
V vocabulary; for joined layers the legend of `ci_llm/lora/products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.lora.layer import AdaptedLinear
from ci_llm.lora.onednn import onednn_is_faster
from ci_llm.lora.passes import Head
from ci_llm.lora.products import Stack, dense, low_rank_gradients, product
from ci_llm.lora.reading import compute_dtype

#: The parts that `take` can make fast, in the order in which a run tries them.
PARTS: Final = ("head", "norms", "rotation", "gate", "joined", "precision", "products", "attention")
_ROTATION: Final = "apply_rotary_pos_emb"  # the name of the function in every family that has it
_EPSILONS: Final = ("variance_epsilon", "eps")
_ACTIVATIONS: Final = ("SiLU", "SiLUActivation")
#: Names of neighbouring layers that read one input, in families that do not join them already.
_NEIGHBOURS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class RmsNorm(torch.autograd.Function):
    """x [..., D] -> w · x / √(mean x² + ε), with statistics in fp32; w [D] is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float() if x.dtype == torch.float64 else x  # as in the families, which norm in fp32
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float32)
        scale = scale.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (wide * scale).to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide = (grad * weight).float(), x.float()
        along = (grad * wide).sum(-1, keepdim=True).mul_(scale.pow(3).div_(-x.shape[-1]))
        return grad.mul_(scale).addcmul_(wide, along).to(x.dtype), None, None


class SwiGlu(torch.autograd.Function):
    """silu(gate) · up, both [..., F]; silu is computed again in the backward pass, and not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class Rotation(torch.autograd.Function):
    """x · cos + rotate_half(x) · sin for x [R, H, N, d], cos and sin [R or 1, 1, N, d]; contiguous on a CPU.

    RoPE: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        x = x.to(torch.promote_types(x.dtype, cos.dtype))
        # Attention on a GPU reads all packed rows in the memory order of the product that gave x, [R, N, H, d].
        out = torch.empty_like(x) if x.is_cuda else torch.empty(x.shape, dtype=x.dtype)
        low, high = sin.chunk(2, -1)
        return _turned(out, x, cos, (low, -1), (high, 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rows, heads, tokens, width = grad.shape
        # In the memory order of the product that gave x, [R, N, H, d], so that its backward pass copies nothing.
        out = torch.empty(rows, tokens, heads, width, dtype=grad.dtype, device=grad.device).transpose(1, 2)
        low, high = sin.chunk(2, -1)
        return _turned(out, grad, cos, (high, 1), (low, -1)).to(ctx.dtype), None, None


def _turned(out: Tensor, x: Tensor, cos: Tensor, *sines: tuple[Tensor, int]) -> Tensor:
    """x · cos + x' · sin in `out`, where x' is x with the halves of every head exchanged.

    Args:
        sines: sin of each half, with the sign that it gets.
    """
    torch.mul(x, cos, out=out)
    others = x.chunk(2, -1)[::-1]
    if _is_slow_in_halves(x):
        return out.addcmul_(torch.cat(others, -1), torch.cat([sin if sign > 0 else -sin for sin, sign in sines], -1))
    for own, other, (sin, sign) in zip(out.chunk(2, -1), others, sines, strict=True):
        own.addcmul_(other, sin, value=sign)
    return out


def _is_slow_in_halves(x: Tensor) -> bool:
    """True if operations on half a head are slow: in 16 bits, a CPU's vectors are longer than that."""
    return x.dtype.itemsize == 2 and not x.is_cuda


def fast_chunk(z: Tensor, index: Tensor, head: Head, narrow: Tensor, grads: Tensor | None) -> Tensor:
    """The fast arithmetic of a chunk (see `OfChunk`): softmax in place, and the target's row of W added separately.

    The log-probability comes from the largest logit, never from a probability that has underflowed. The target's own
    probability stays out of the product: in 16 bits, one near 1 would be rounded to 1, and its row would vanish.
    """
    bend = None if grads is None or head.softcap is None else 1 - (z / head.softcap) ** 2
    wanted = z.gather(1, index) - z.amax(1, keepdim=True)
    torch.softmax(z, 1, out=z)
    found = (wanted + z.amax(1, keepdim=True).log()).squeeze(1)  # the largest is 1 / sum of exp(z - peak)
    if grads is not None:
        pull = 1 - z.gather(1, index)
        z.scatter_(1, index, 0.0)
        if bend is not None:
            z.mul_(bend)
            pull *= bend.gather(1, index)
        rows = head.weight.index_select(0, index.squeeze(1)) * pull.to(head.weight.dtype)
        others = z if z.dtype == narrow.dtype else narrow.copy_(z)
        torch.addmm(rows, others, head.weight, beta=head.scale, alpha=-head.scale, out=grads)
    return found


def _norm(self: Any, x: Tensor) -> Tensor:
    epsilon = next(getattr(self, name) for name in _EPSILONS if hasattr(self, name))
    if x.is_cuda and x.dtype == self.weight.dtype:  # PyTorch has one kernel there for each direction
        return F.rms_norm(x, self.weight.shape, self.weight, epsilon)
    return RmsNorm.apply(x, self.weight, epsilon)  # type: ignore[no-any-return]


def _gated(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Query and key after rotation; arguments and result are those of Transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotation.apply(query, cos, sin), Rotation.apply(key, cos, sin)


@cache
def _rotating(own: FunctionType) -> Any:
    """The family's own forward of attention, with `rotate` in place of the family's function."""
    found = FunctionType(
        own.__code__, {**own.__globals__, _ROTATION: rotate}, own.__name__, own.__defaults__, own.__closure__
    )
    found.__kwdefaults__ = own.__kwdefaults__
    return found


def _norm_of(module: Any) -> Any:
    weighs = isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 1
    has_epsilon = any(hasattr(module, name) for name in _EPSILONS)
    return _norm if type(module).__name__.endswith("RMSNorm") and weighs and has_epsilon else None


def _rotation_of(module: Any) -> Any:
    own = type(module).forward
    calls = isinstance(own, FunctionType) and _ROTATION in own.__code__.co_names and _ROTATION in own.__globals__
    return _rotating(own) if calls else None


def _gate_of(module: Any) -> Any:
    named = all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj"))
    return _gated if named and type(getattr(module, "act_fn", None)).__name__ in _ACTIVATIONS else None


class _JoinedLinears(torch.autograd.Function):
    """Frozen layers that read one input, computed together: q, k and v, or gate and up.

    y_i[k] = x[k] W_iᵀ + b_i + s_i (x[k] A_i[k]ᵀ) B_i[k]ᵀ for all layers i, see `FusedLinear`. One product with the
    input serves the A of all layers, and the gradients of the input are added in place. The order of the sums, and so
    the bits, differ from those of single layers.

    The gradients of A and B are added to the storage. `_anchor` stands for A and B in the graph: without it, autograd
    would not reach this node if the input needs no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Tensor,
        _anchor: Tensor,
        layers: Sequence[AdaptedLinear],
        stacks: Sequence[Stack],
    ) -> tuple[Tensor, ...]:
        (agents, rows, width), dtype = cast.shape, cast.dtype
        adapters = [stack.effective(dtype) for stack in stacks]
        a = torch.cat([a for a, _ in adapters], 1)
        h = torch.bmm(cast, a.mT)
        parts = h.split([b.shape[2] for _, b in adapters], 2)
        flat = cast.reshape(agents * rows, width)
        outputs = []
        for layer, stack, (_, b), part in zip(layers, stacks, adapters, parts, strict=True):
            bias = None if layer.bias is None else layer.bias.to(dtype)
            y = product(flat, dense(layer.base_layer, dtype), bias, by_onednn=layer.by_onednn).view(agents, rows, -1)
            outputs.append(y.baddbmm_(part, b.mT, alpha=stack.scaling))
        ctx.save_for_backward(cast, a, h, *(b for _, b in adapters))
        ctx.layers, ctx.stacks, ctx.dtype = layers, stacks, x.dtype
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cast, a, h, *bs = ctx.saved_tensors
        agents, rows, _ = cast.shape
        grad_h, grad_x = torch.empty_like(h), None
        grads_b, start = [], 0
        for layer, stack, grad, b in zip(ctx.layers, ctx.stacks, grads, bs, strict=True):
            grad = grad.contiguous()
            part = slice(start, start + b.shape[2])
            grads_b.append(low_rank_gradients(grad, b, h[..., part], stack.scaling, into=grad_h[..., part])[1])
            start = part.stop
            if ctx.needs_input_grad[0]:
                flat = grad.view(agents * rows, -1)
                weight = dense(layer.base_layer, grad.dtype)
                if layer.by_onednn or grad_x is None:
                    own = product(flat, weight.mT, by_onednn=layer.by_onednn)
                    grad_x = own if grad_x is None else grad_x.add_(own)
                else:
                    grad_x.addmm_(flat, weight)
        grad_a = torch.bmm(grad_h.mT, cast).split([b.shape[2] for b in bs], 1)
        for stack, own_a, own_b in zip(ctx.stacks, grad_a, grads_b, strict=True):
            stack.add_gradients(own_a, own_b)
        if grad_x is None:
            return (None,) * 5
        return grad_x.view(cast.shape).baddbmm_(grad_h, a).to(ctx.dtype), None, None, None, None


class JoinedInput:
    """Neighbouring layers that read one input: the first one called computes all, and the others take their outputs.

    The others do so only for the very tensor that the first one read. The layers compute by themselves for agents of
    several shapes, with dropout, or with rows of their own in one pass, and in passes without gradients. So does a
    layer that agents do not adapt, as it does for an agent alone.
    """

    def __init__(self, layers: Sequence[AdaptedLinear]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._left: dict[str, Tensor] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def output(self, layer: AdaptedLinear, x: Tensor) -> Tensor | None:
        """The output of the layer for the input [K·B, ..., in]; None if it has to compute that itself."""
        if self._input is not x or layer.name not in self._left:
            chosen = self._chosen(x)
            if layer.name not in chosen or len(chosen) == 1:
                return None
            self._input, self._left = x, self._computed(x, chosen)
        found = self._left.pop(layer.name)
        if not self._left:
            self._input = None
        return found

    def forget(self) -> None:
        """Drop the outputs of a pass that was given up, as when memory ran out: they keep the whole pass in memory."""
        self._input, self._left = None, {}

    def _computed(self, x: Tensor, chosen: dict[str, Stack]) -> dict[str, Tensor]:
        """The outputs of the chosen layers by name."""
        layers, stacks = [each for each in self._layers if each.name in chosen], [*chosen.values()]
        rows = (stacks[0].size, -1, layers[0].in_features)
        cast = layers[0].casts.input(x, compute_dtype(x)).reshape(rows)
        outputs = _JoinedLinears.apply(x.reshape(rows), cast, self._anchor, layers, stacks)
        return {name: y.view(*x.shape[:-1], y.shape[-1]) for name, y in zip(chosen, outputs, strict=True)}

    def _chosen(self, x: Tensor) -> dict[str, Stack]:
        """The layers, by name, whose input one stack reads, with this stack."""
        rows, found = x.numel() // x.shape[-1], dict[str, Stack]()
        if self._layers[0].reading.sizes is not None:
            return found
        for layer in self._layers:
            owned = layer.owned(rows)
            stack, own = owned[0] if len(owned) == 1 else (None, None)
            if stack and own == slice(0, rows) and stack.gradients and not stack.drops:
                found[layer.name] = stack
        return found


def _join(layers: Iterable[AdaptedLinear]) -> None:
    """Give neighbouring layers that read one input a `JoinedInput`."""
    found: dict[tuple[str, int], list[AdaptedLinear]] = {}
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


#: Part -> a function from a module to its fast forward, or to None if there is none for it.
_FORWARDS: Final[dict[str, Callable[[Any], Any]]] = {"norms": _norm_of, "rotation": _rotation_of, "gate": _gate_of}


def take(
    model: PreTrainedModel, layers: Collection[AdaptedLinear], parts: Collection[str], kinds: Collection[type]
) -> None:
    """Compute these parts of a base with agents by fast kernels, and all others by the family's own code.

    Args:
        parts: some of `PARTS`; `LoraModel` itself implements head, precision and attention.
        kinds: the classes of modules that may be changed, which are those in a trial.
    """
    give_back(model, layers)
    for module in model.modules():
        if type(module) not in kinds or "forward" in vars(module):  # other libraries put their hooks there
            continue
        for part, forward_of in _FORWARDS.items():
            forward = forward_of(module) if part in parts else None
            if forward is not None:
                module.forward = MethodType(forward, module)
    if "joined" in parts:
        _join(layers)
    by_onednn = "products" in parts and model.device.type == "cpu" and onednn_is_faster()
    for layer in layers:
        layer.by_onednn = by_onednn


def give_back(model: PreTrainedModel, layers: Collection[AdaptedLinear]) -> None:
    """Compute everything by the family's own code again."""
    for layer in layers:
        layer.joined, layer.by_onednn = None, False
    for module in model.modules():
        if any(is_fast(module, forward_of) for forward_of in _FORWARDS.values()):
            del module.forward


def is_fast(module: nn.Module, forward_of: Callable[[Any], Any]) -> bool:
    """True if the module has the fast forward that `forward_of` gives it."""
    own = vars(module).get("forward")
    return isinstance(own, MethodType) and own.__func__ is forward_of(module)
