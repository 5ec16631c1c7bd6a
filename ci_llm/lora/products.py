"""The products of adapters with owned rows, forward and backward, beside those of the frozen weight.

To y = base(x) every owner's adapter adds s B(A(x)) on the owner's rows. Adapters of neighbouring agents with one shape
are one batched product (`Stack`), because every product that is started costs.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

Legend: n agents of a stack, P parameters of one agent, R rows of the input, N of them per agent, r rank, in and out
features. x [R, in], y [R, out], z [n, N, in], h [n, N, r], A [n, r, in], B [n, out, r], W [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.lora.reading import Casts

#: On a CPU, products of fewer rows round differently, so they are padded to this many, as in decoding single tokens.
LEAST_ROWS: Final = 4


@dataclass(frozen=True)
class Stack:
    """The adapters of neighbouring agents with one shape on a layer: their products are one batched product.

    Agents of other shapes are not padded to one batch: a longer sum or another kernel could round differently, and an
    agent must have the bits that it has alone.

    Attributes:
        first, end: the agents are `first`, ..., `end - 1`.
        scaling: the factor of every B A.
        drops: true if the adapters read their input after dropout.
        a, b: A [n, r, in] and B [n, out, r], views of the crowd's storage.
        casts: the casts of A and B in the current pass.
        gradients: the gradients of A and B, views of the crowd's gradients; None if autograd owns them.
        masks: DropConnect masks of the same shapes, or None.
    """

    first: int
    end: int
    scaling: float
    drops: bool
    a: Tensor
    b: Tensor
    casts: Casts
    gradients: tuple[Tensor, Tensor] | None
    masks: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """The number n of agents."""
        return self.end - self.first

    def of(self, rows: Tensor) -> Tensor:
        """Rows [n * N, ...] of these agents as [n, N, ...]."""
        return rows.view(self.size, -1, *rows.shape[1:])

    def only(self, agent: int) -> Stack:
        """The adapter of one of these agents."""
        part = slice(agent - self.first, agent - self.first + 1)
        masks, gradients = (pair and (pair[0][part], pair[1][part]) for pair in (self.masks, self.gradients))
        a, b = self.a[part], self.b[part]
        return replace(self, first=agent, end=agent + 1, a=a, b=b, masks=masks, gradients=gradients)

    def at_rest(self) -> Stack:
        """The stack without dropout and DropConnect."""
        return replace(self, masks=None, drops=False) if self.drops or self.masks else self

    def from_numbers(self, numbers: Tensor) -> Stack:
        """The stack with A and B from the same places of another storage [K, P]."""
        a, b = (numbers.as_strided(each.size(), each.stride(), each.storage_offset()) for each in (self.a, self.b))
        return replace(self, a=a, b=b)

    def effective(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B with masks applied, in `dtype`."""
        a, b = self.a, self.b
        if self.masks is None and a.dtype == dtype:
            return a, b
        ready = [self.casts.ready(view, dtype, is_drawn=self.masks is not None) for view in (a, b)]
        if ready[0] is not None and ready[1] is not None:
            return ready[0], ready[1]
        if self.masks is not None:
            a, b = a * self.masks[0], b * self.masks[1]
        return a.to(dtype), b.to(dtype)

    def parameter_gradients(self, grad_a: Tensor, grad_b: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradients in the order of the parameters: A of every agent, then B of every agent.

        If the stack has `gradients`, all are added there at once, and autograd gets None.
        """
        if self.gradients is not None:
            self.add_gradients(grad_a, grad_b)
            return (None,) * (2 * self.size)
        if self.masks is not None:
            grad_a, grad_b = grad_a.to(dtype) * self.masks[0], grad_b.to(dtype) * self.masks[1]
        return (*grad_a.to(dtype).unbind(0), *grad_b.to(dtype).unbind(0))

    def add_gradients(self, grad_a: Tensor, grad_b: Tensor) -> None:
        """Add the gradients of A [n, r, in] and B [n, out, r] to the storage's."""
        assert self.gradients is not None
        for whole, grad, mask in zip(self.gradients, (grad_a, grad_b), self.masks or (None, None), strict=True):
            whole.add_(grad if mask is None else grad.to(whole.dtype) * mask)


#: The adapters that read an input, each stack with its rows.
Owned = Sequence[tuple[Stack, slice]]


class FusedLinear(torch.autograd.Function):
    """y = x Wᵀ + b, and for every owner y[rows] += s (z Aᵀ) Bᵀ, with W frozen; z is x[rows], or that after dropout.

    It computes in the dtype of `cast`, which is a cast of x, and keeps only z and the rank-r product h = z Aᵀ for the
    backward pass. W is dequantised or cast once per pass for all agents, and again in the backward pass, because a
    copy of every layer would otherwise live until then. The gradients have the dtypes of x, A and B.

    `layer` is the `AdaptedLinear`, whose frozen layer has W and b. `dropped` holds z of the stacks that drop, one after
    the other. `parameters` hold the same numbers as the stacks: for each stack A agent by agent, then B agent by agent.
    They are arguments because autograd returns gradients to arguments only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cast: Tensor, dropped: Tensor | None, layer: Any, owned: Owned, *parameters: Tensor
    ) -> Tensor:
        base = layer.base_layer
        y, kept = with_adapters(cast, dropped, base, base.bias, owned, layer.by_onednn)
        ctx.save_for_backward(cast if any(not stack.drops for stack, _ in owned) else None, dropped, *kept)
        ctx.layer, ctx.owned = layer, owned
        ctx.dtypes = x.dtype, parameters[0].dtype if parameters else None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cast, dropped, *kept = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grads_z = None, []
        if ctx.needs_input_grad[0]:
            grad_x = product(grad, dense(ctx.layer.base_layer, grad.dtype).mT, by_onednn=ctx.layer.by_onednn)
        gradients: list[Tensor | None] = []
        for number, (stack, rows, z) in enumerate(inputs_of(ctx.owned, cast, dropped)):
            a, b, h = kept[3 * number : 3 * number + 3]
            grad_h, grad_b = low_rank_gradients(stack.of(grad[rows]), b, h, stack.scaling)
            grad_a = torch.bmm(grad_h.mT, z)
            # Without dropout z is x, so both parts of the gradient belong to the same input.
            if stack.drops:
                grads_z.append(torch.bmm(grad_h, a).flatten(0, 1))
            elif grad_x is not None:
                stack.of(grad_x[rows]).baddbmm_(grad_h, a)
            gradients += stack.parameter_gradients(grad_a, grad_b, ctx.dtypes[1])
        grad_x = None if grad_x is None else grad_x.to(ctx.dtypes[0])
        return grad_x, None, joined(grads_z) if grads_z else None, None, None, *gradients


def with_adapters(
    cast: Tensor,
    dropped: Tensor | None,
    weight: Tensor | nn.Module,
    bias: Tensor | None,
    owned: Owned,
    by_onednn: bool,
) -> tuple[Tensor, list[Tensor]]:
    """y [R, out] of `FusedLinear`, and A, B and h of each stack, which the backward pass needs."""
    dtype = cast.dtype
    # One product with W for the rows of all agents: this is where the fused pass saves time.
    bias = None if bias is None else bias.to(dtype)
    y = product(cast, dense(weight, dtype), bias, by_onednn=by_onednn)
    kept = list[Tensor]()
    for stack, rows, z in inputs_of(owned, cast, dropped):
        a, b = stack.effective(dtype)
        h = add_low_rank(stack.of(y[rows]), z, a, b, stack.scaling)
        kept += [a, b, h]
    return y, kept


class LowRank(torch.autograd.Function):
    """s (z Aᵀ) Bᵀ alone for the z of one stack, for base layers other than nn.Linear, such as Conv1D."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, stack: Stack, *parameters: Tensor) -> Tensor:
        a, b = stack.effective(z.dtype)
        rows = z.shape[1]
        h = torch.bmm(nn.functional.pad(z, (0, 0, 0, max(0, LEAST_ROWS - rows))), a.mT)
        ctx.save_for_backward(z, a, b, h[:, :rows])
        ctx.stack, ctx.dtype = stack, parameters[0].dtype
        return torch.bmm(h, b.transpose(1, 2)).mul_(stack.scaling)[:, :rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, a, b, h = ctx.saved_tensors
        grad = grad.contiguous()
        grad_h, grad_b = low_rank_gradients(grad, b, h, ctx.stack.scaling)
        grad_a = torch.bmm(grad_h.mT, z)
        grad_z = torch.bmm(grad_h, a) if ctx.needs_input_grad[0] else None
        return grad_z, None, *ctx.stack.parameter_gradients(grad_a, grad_b, ctx.dtype)


def add_low_rank(y: Tensor, z: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add s (z Aᵀ) Bᵀ to y [n, N, out], and return h = z Aᵀ [n, N, r].

    It works in place, because y is the largest tensor here and autograd does not need its value before the sum.
    """
    spare = LEAST_ROWS - z.shape[1]
    if spare <= 0:
        h = torch.bmm(z, a.mT)
        y.baddbmm_(h, b.mT, alpha=scaling)
        return h
    more = (0, 0, 0, spare)
    h = torch.bmm(nn.functional.pad(z, more), a.mT)
    y.copy_(torch.baddbmm(nn.functional.pad(y, more), h, b.mT, alpha=scaling)[:, :-spare])
    return h[:, :-spare]


def dense(weight: Tensor | nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a frozen layer, or this weight, in `dtype`."""
    if isinstance(weight, QuantizedLinear):
        return weight.dequantize(dtype)
    plain: Any = weight if isinstance(weight, Tensor) else weight.weight
    return plain if plain.dtype == dtype else plain.to(dtype)  # type: ignore[no-any-return]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, by_onednn: bool) -> Tensor:
    """x Wᵀ + b for x [..., in] and a frozen weight [out, in].

    Args:
        weight: a plain or a reordered one.
        by_onednn: compute fp32 products by oneDNN's operator. The operator is private to torch, so a trial at the start
            of a run finds out whether it exists and is right.
    """
    if weight.is_mkldnn or (by_onednn and x.dtype == torch.float32):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return nn.functional.linear(x, weight, bias)


def low_rank_gradients(
    grad: Tensor, b: Tensor, h: Tensor, scaling: float, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of h [K, N, r] and B [K, out, r] for the output s h Bᵀ; that of h is written to `into` if given."""
    # The longer dimension is the last one, in memory as well: MKL is up to four times slower otherwise.
    grad_h = _scaled_product(grad, b if b.is_cuda else b.mT.contiguous().mT, scaling, into)
    return grad_h, _scaled_product(h.mT, grad, scaling).mT


def _scaled_product(one: Tensor, other: Tensor, scaling: float, into: Tensor | None = None) -> Tensor:
    """s · one @ other for batches of matrices, on a GPU as a single kernel, because every launch costs the host."""
    if one.is_cuda:
        return torch.baddbmm(one.new_empty(1, 1, 1), one, other, beta=0, alpha=scaling, out=into)
    found = torch.bmm(one, other).mul_(scaling)
    return found if into is None else into.copy_(found)


def inputs_of(owned: Owned, x: Tensor | None, dropped: Tensor | None) -> Iterator[tuple[Stack, slice, Tensor]]:
    """Yield every stack with its rows and the input z of its adapters: a part of x [R, in] or of `dropped`."""
    start = 0
    for stack, rows in owned:
        whole, own = (dropped, slice(start, start + rows.stop - rows.start)) if stack.drops else (x, rows)
        assert whole is not None
        yield stack, rows, stack.of(whole[own])
        start += (rows.stop - rows.start) * stack.drops


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
