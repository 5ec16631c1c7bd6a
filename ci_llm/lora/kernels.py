"""Fast kernels for parts of a pass: the mathematics of the family's own code in fewer passes over memory.

`take` puts them in place of what the family computes, where a class looks as they expect; whether they compute the same
is for a trial to say (`ci_llm/run/fast_parts.py`), and `give_back` puts everything back. `torch.compile` of the same
functions gained nothing over them, cost 33 s and needed a compiler (docs/results.md).

Legend: N tokens, D width of what is normed, H heads, d width of a head, F width of the feed-forward layer, S targets,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.lora import joined
from ci_llm.lora.adapters import AgentStorage
from ci_llm.lora.passes import Head

#: What `take` knows, in the order in which a run tries it.
PARTS: Final = ("head", "norms", "rotation", "gate", "joined", "precision")
_ROTATION: Final = "apply_rotary_pos_emb"  # the name of the function in every family that has it
_EPSILONS: Final = ("variance_epsilon", "eps")
_ACTIVATIONS: Final = ("SiLU", "SiLUActivation")


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
    """x · cos + rotate_half(x) · sin for x [R, H, N, d], cos and sin [R or 1, 1, N, d]; as products want it.

    The result is contiguous. RoPE: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        x = x.to(torch.promote_types(x.dtype, cos.dtype))
        half, out = x.shape[-1] // 2, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x, cos, out=out)
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        rows, heads, tokens, width = grad.shape
        half = width // 2
        # In the order of the product that x came from, [R, N, H, d]: its backward pass then copies nothing.
        out = torch.empty(rows, tokens, heads, width, dtype=grad.dtype, device=grad.device).transpose(1, 2)
        torch.mul(grad, cos, out=out)
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out.to(ctx.dtype), None, None


def fast_chunk(z: Tensor, index: Tensor, head: Head, narrow: Tensor, slopes: Tensor | None) -> Tensor:
    """See `OfChunk` in `ci_llm/lora/passes.py`: softmax in place, and the target's row of W added to the slopes.

    The log-probability comes from the largest logit, never from a probability that has underflowed. The target's own
    probability stays out of the product: in 16 bits, one near 1 would be rounded to 1, and its row would vanish.
    """
    bend = None if slopes is None or head.softcap is None else 1 - (z / head.softcap) ** 2
    wanted = z.gather(1, index) - z.amax(1, keepdim=True)
    torch.softmax(z, 1, out=z)
    found = (wanted + z.amax(1, keepdim=True).log()).squeeze(1)  # the largest is 1 / sum of exp(z - peak)
    if slopes is not None:
        pull = 1 - z.gather(1, index)
        z.scatter_(1, index, 0.0)
        if bend is not None:
            z.mul_(bend)
            pull *= bend.gather(1, index)
        rows = head.weight.index_select(0, index.squeeze(1)) * pull.to(head.weight.dtype)
        others = z if z.dtype == narrow.dtype else narrow.copy_(z)
        torch.addmm(rows, others, head.weight, beta=head.scale, alpha=-head.scale, out=slopes)
    return found


def _norm(self: Any, x: Tensor) -> Tensor:
    epsilon = next(getattr(self, name) for name in _EPSILONS if hasattr(self, name))
    return RmsNorm.apply(x, self.weight, epsilon)  # type: ignore[no-any-return]


def _gated(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Query and key after rotation; arguments and result are those of Transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotation.apply(query, cos, sin), Rotation.apply(key, cos, sin)


@cache
def _rotating(own: FunctionType) -> Any:
    """The family's own forward of attention, which calls `rotate` where it calls its own function."""
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


#: Part -> the forward to give a module, or None for one that it is not for.
_FORWARDS: Final[dict[str, Callable[[Any], Any]]] = {"norms": _norm_of, "rotation": _rotation_of, "gate": _gate_of}


def take(model: PreTrainedModel, agents: AgentStorage, parts: Collection[str], kinds: Collection[type]) -> None:
    """Let these parts of a base with agents be computed fast, and no others.

    Args:
        parts: some of `PARTS`; head and precision are for `CrowdModel` to heed.
        kinds: the classes of modules that may be changed: those that a trial has seen at work.
    """
    give_back(model, agents)
    for module in model.modules():
        if type(module) not in kinds or "forward" in vars(module):  # there other libraries have their hooks
            continue
        for part, forward_of in _FORWARDS.items():
            if part in parts and (forward := forward_of(module)) is not None:
                module.forward = MethodType(forward, module)
    if "joined" in parts:
        joined.join(agents.layers.values())


def give_back(model: PreTrainedModel, agents: AgentStorage) -> None:
    """Let the base compute everything by the family's own code again."""
    joined.take_apart(agents.layers.values())
    for module in model.modules():
        if any(is_fast(module, forward_of) for forward_of in _FORWARDS.values()):
            del module.forward


def is_fast(module: nn.Module, forward_of: Callable[[Any], Any]) -> bool:
    """Whether the forward of a module is the one of ours that `forward_of` gives it."""
    own = vars(module).get("forward")
    return isinstance(own, MethodType) and own.__func__ is forward_of(module)
