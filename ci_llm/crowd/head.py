"""From final hidden states to log-probabilities of the targets, without holding all logits at once.

The head is frozen, so the gradient with respect to a hidden state is a row of (onehot - softmax) W. The forward pass
computes it chunk by chunk, and the backward pass only scales it. The idea is that of the fused linear losses of Liger
(Hsu et al., 2024) and of Cut Cross-Entropy (Wijmans et al., 2024); here every token has a weight of its own in the
backward pass, so that any function of the log-probabilities may follow.

Legend: K agents, S targets, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 8_388_608  # 256 rows of a 32k vocabulary, 32 MB in fp32


@dataclass(frozen=True)
class Head:
    """A frozen output layer: logits = softcap · tanh(scale · (h Wᵀ + b) / softcap).

    Attributes:
        weight: [V, D].
        bias: [V], if the family has one.
        scale: 1 in families without one.
        softcap: None in families without one; the logits are then scale · (h Wᵀ + b).
    """

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of a model, with its family's scaling (Granite, Cohere) and soft cap (Gemma)."""
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(
            layer.weight,
            getattr(layer, "bias", None),
            scale,
            getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, states: Tensor) -> Tensor:
        """States [..., D] -> logits [..., V], in fp32, or in fp64 for states in fp64.

        Agents [K, S, D] have a product each, as in `target_log_probs`.
        """
        weight, bias = self.weight.to(states.dtype), _cast(self.bias, states.dtype)
        if states.dim() > 2:
            head = replace(self, weight=weight, bias=bias)  # cast once for all agents
            return torch.stack([head.logits(own) for own in states])
        z = torch.nn.functional.linear(states, weight, bias)
        return self.shape_logits(z.to(torch.promote_types(z.dtype, torch.float32)))

    def logits_into(self, buffers: tuple[Tensor, Tensor], states: Tensor) -> Tensor:
        """The same for states [S, D] into two buffers of at least S rows, of which the second has the wide dtype.

        The weight and the bias have the dtype of the states.
        """
        narrow, wide = (buffer[: len(states)] for buffer in buffers)
        if self.bias is None:
            torch.mm(states, self.weight.mT, out=narrow)
        else:
            torch.addmm(self.bias, states, self.weight.mT, out=narrow)
        return self.shape_logits(narrow if narrow.dtype == wide.dtype else wide.copy_(narrow))

    def shape_logits(self, z: Tensor) -> Tensor:
        """Apply scale and soft cap to h Wᵀ + b; any shape."""
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    @property
    def chunk_rows(self) -> int:
        """Rows whose logits fit into `LOGITS_PER_CHUNK` numbers, or 16 for a very large vocabulary."""
        return max(16, LOGITS_PER_CHUNK // self.weight.shape[0])

    def chunks(self, rows: int) -> Iterator[slice]:
        """Slices of at most `chunk_rows` rows."""
        size = self.chunk_rows
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _TargetLogProbs(torch.autograd.Function):
    """States [K, S, D] and targets [S] -> log-probabilities [K, S]; its own gradient with respect to the states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Head) -> Tensor:
        agents, count, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        log_probs = torch.empty(agents, count, dtype=wide, device=states.device)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Cast once and not per chunk: with a large vocabulary there are many chunks, and each cast is expensive.
        head = replace(head, weight=head.weight.to(states.dtype), bias=_cast(head.bias, states.dtype))
        # The largest tensors of the pass: made once, and used by every chunk.
        narrow = states.new_empty(min(count, head.chunk_rows), head.weight.shape[0])
        buffers = narrow, narrow if states.dtype == wide else torch.empty_like(narrow, dtype=wide)
        # No chunk holds rows of two agents: the last rows of a product may round differently (fp64 on a CPU), and an
        # agent's bits shall not depend on its neighbours.
        for k, chunk in product(range(agents), head.chunks(count)):
            z = head.logits_into(buffers, states[k, chunk])
            index = targets[chunk, None]
            # The derivative of the soft cap needs z, which is overwritten below.
            bend = None if slopes is None or head.softcap is None else 1 - (z / head.softcap) ** 2
            peak = z.amax(1, keepdim=True)  # without the largest logit subtracted, exp() would overflow
            wanted = z.gather(1, index) - peak
            total = z.sub_(peak).exp_().sum(1, keepdim=True)  # in place: z is the largest tensor of the pass
            log_probs[k, chunk] = (wanted - total.log()).squeeze(1)
            if slopes is not None:
                # z becomes scale · (onehot - softmax), the gradient of the log-probability before the soft cap.
                z.mul_(-head.scale / total).scatter_add_(1, index, torch.full_like(total, head.scale))
                if bend is not None:
                    z.mul_(bend)
                small = z if z.dtype == states.dtype else narrow[: len(z)].copy_(z)
                torch.mm(small, head.weight, out=slopes[k, chunk])
        ctx.save_for_backward(slopes)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        grad = grad[..., None]
        # A loss scale of 65536 is no number of fp16, and its product with a slope is one.
        if slopes.dtype == torch.float16:
            return (slopes * grad).to(slopes.dtype), None, None
        return slopes * grad.to(slopes.dtype), None, None


def target_log_probs(states: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Log-probability of each target under each agent.

    Args:
        states: [K, S, D] hidden states at the positions that predict the targets.
        targets: [S] token ids.
        head: the frozen output layer.

    Returns:
        [K, S] in nats, differentiable in `states`; fp32, or fp64 for states in fp64.
    """
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _TargetLogProbs.apply(states, targets, head)  # type: ignore[no-any-return]


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
