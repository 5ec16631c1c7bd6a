"""Neighbouring agents whose adapters have one shape on a layer: their A and B as one batch, and their gradients.

Legend: n agents of a group, r rank, in and out features. A [n, r, in], B [n, out, r].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ci_llm.crowd.casting import Casts


@dataclass(frozen=True)
class AgentGroup:
    """Neighbouring agents with adapters of one shape on a layer; their products are one batched product.

    Agents of other shapes are not padded to one batch: a longer sum or another kernel could round differently, and an
    agent shall have the bits that it has alone.

    Attributes:
        first, end: the agents `first`, ..., `end - 1`.
        scaling: of all of them.
        drops: whether they read their input after dropout.
        stacked: A [n, r, in] and B [n, out, r], views of the crowd's storage; None: they have no adapter here.
        masks: DropConnect masks of the same shapes, or None.
        noise: what a pass of training adds to A and B, or None.
        casts: where the pass under way has A and B ready, or None.
        tokens: of the only agent, in an input [1, N, in] of agents with rows of their own; else None.
        gradients: of A and B, views of the crowd's gradients; None: autograd owns them.
    """

    first: int
    end: int
    scaling: float = 1.0
    drops: bool = False
    stacked: tuple[Tensor, Tensor] | None = None
    masks: tuple[Tensor, Tensor] | None = None
    noise: tuple[Tensor, Tensor] | None = None
    casts: Casts | None = None
    gradients: tuple[Tensor, Tensor] | None = None
    tokens: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` [K, ...] that belongs to these agents, or that of [1, N, ...] with their tokens."""
        return tensor[self.first : self.end] if self.tokens is None else tensor[:, self.tokens]

    @property
    def axis(self) -> int:
        """The dimension of an input along which the groups follow each other."""
        return 0 if self.tokens is None else 1

    @property
    def extent(self) -> int:
        """How much of `axis` belongs to these agents."""
        return self.end - self.first if self.tokens is None else self.tokens.stop - self.tokens.start

    def only(self, agent: int) -> AgentGroup:
        """The same for one of its agents, as the first and only one of a crowd."""
        part = slice(agent - self.first, agent - self.first + 1)
        pairs = (self.stacked, self.masks, self.noise, self.gradients)
        stacked, masks, noise, gradients = (pair and (pair[0][part], pair[1][part]) for pair in pairs)
        return replace(self, first=0, end=1, stacked=stacked, masks=masks, noise=noise, gradients=gradients)

    def on(self, spans: Sequence[slice]) -> Iterator[AgentGroup]:
        """Each of these agents by itself, if it has tokens in an input whose agents have rows of their own."""
        for k in range(self.first, self.end):
            if spans[k].start < spans[k].stop:
                yield replace(self.only(k), first=k, end=k + 1, tokens=spans[k])

    def at_rest(self) -> AgentGroup:
        """The same without dropout, DropConnect and noise."""
        if not (self.drops or self.masks or self.noise):
            return self
        return replace(self, masks=None, noise=None, drops=False)

    def effective(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B as they were drawn for this step, in the dtype of the computation."""
        assert self.stacked is not None
        a, b = self.stacked
        if self.casts is not None:
            is_drawn = self.masks is not None or self.noise is not None
            ready = [self.casts.ready(view, dtype, is_drawn=is_drawn) for view in (a, b)]
            if ready[0] is not None and ready[1] is not None:
                return ready[0], ready[1]
        if self.noise is not None:
            a, b = a + self.noise[0], b + self.noise[1]
        if self.masks is not None:
            a, b = a * self.masks[0], b * self.masks[1]
        return a.to(dtype), b.to(dtype)

    def accumulating_in(self, parameters: Sequence[Tensor]) -> AgentGroup:
        """The group as it is if `gradients` are those of its parameters, as `begin_step` leaves them; or without."""
        if self.gradients is None:
            return self
        places = [(whole, k) for whole in self.gradients for k in range(self.end - self.first)]
        own = all(_is_part(each.grad, *place) for each, place in zip(parameters, places, strict=True))
        return self if own else replace(self, gradients=None)

    def parameter_gradients(self, grad_a: Tensor, grad_b: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradients in the order of the parameters: A of every agent, then B of every agent.

        Where `gradients` exist they are added there, all agents at once, and autograd gets none.
        """
        if self.masks is not None:
            grad_a, grad_b = grad_a.to(dtype) * self.masks[0], grad_b.to(dtype) * self.masks[1]
        if self.gradients is not None:
            self.gradients[0].add_(grad_a)
            self.gradients[1].add_(grad_b)
            return (None,) * (2 * (self.end - self.first))
        return (*grad_a.to(dtype).unbind(0), *grad_b.to(dtype).unbind(0))


def _is_part(tensor: Tensor | None, whole: Tensor, index: int) -> bool:
    """Whether `tensor` is the memory of `whole[index]`."""
    if tensor is None or tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return False
    return tensor.storage_offset() == whole.storage_offset() + index * whole.stride(0)
