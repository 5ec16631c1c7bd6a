"""From final hidden states to log-probabilities of the targets, without ever holding all logits.

The head is frozen, so the gradient with respect to a hidden state is a row of (onehot - softmax) W, which is made in
the forward pass chunk by chunk; the backward pass only scales it (the idea of Liger's and Cut Cross-Entropy's fused
linear losses, here with one weight per token, so that any function of the log-probabilities may follow).

Legend: K agents, S targets, R = K·S rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 8_388_608  # 256 rows of a 32k vocabulary, 32 MB in fp32


@dataclass(frozen=True)
class Head:
    """A frozen output layer: logits = cap · tanh(scale · (h Wᵀ + b) / cap), scale and cap where the family has them."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Read the head and its family's scaling (Granite, Cohere) and soft cap (Gemma) off a model."""
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(
            layer.weight,
            getattr(layer, "bias", None),
            scale,
            getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V] in fp32 (fp64 where the states are)."""
        weight, bias = self.weight.to(states.dtype), _cast(self.bias, states.dtype)
        z = torch.nn.functional.linear(states.flatten(0, -2), weight, bias)
        z = self.shape_logits(z.to(torch.promote_types(z.dtype, torch.float32)))
        return z.view(*states.shape[:-1], z.shape[-1])

    def shape_logits(self, z: Tensor) -> Tensor:
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def chunks(self, rows: int) -> Iterator[slice]:
        size = max(16, LOGITS_PER_CHUNK // self.weight.shape[0])
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _TargetLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Head) -> Tensor:
        rows = states.shape[0]
        wide = torch.promote_types(states.dtype, torch.float32)
        log_probs = torch.empty(rows, dtype=wide, device=states.device)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Once and not in every chunk: a large vocabulary makes both many and expensive.
        head = replace(head, weight=head.weight.to(states.dtype))
        for chunk in head.chunks(rows):
            z = head.logits(states[chunk])
            index = targets[chunk, None]
            # The slope of the cap must be read before z is overwritten.
            bend = None if slopes is None or head.softcap is None else 1 - (z / head.softcap) ** 2
            peak = z.amax(1, keepdim=True)
            wanted = z.gather(1, index) - peak
            total = z.sub_(peak).exp_().sum(1, keepdim=True)
            log_probs[chunk] = (wanted - total.log()).squeeze(1)
            if slopes is not None:
                z.mul_(-head.scale / total).scatter_add_(1, index, torch.full_like(total, head.scale))
                if bend is not None:
                    z.mul_(bend)
                torch.mm(z.to(states.dtype), head.weight, out=slopes[chunk])
        ctx.save_for_backward(slopes)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad[:, None].to(slopes.dtype), None, None


def target_log_probs(states: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Log-probability of each target under each agent.

    Args:
        states: [K, S, D] hidden states at the positions that predict the targets.
        targets: [S] token ids.

    Returns:
        [K, S], differentiable in `states`; in fp32, or fp64 where the states are.
    """
    agents, count, width = states.shape
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        flat = _TargetLogProbs.apply(states.reshape(agents * count, width), targets.repeat(agents), head)
    return flat.view(agents, count)  # type: ignore[no-any-return]


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
