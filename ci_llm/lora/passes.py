"""The end of a pass through the frozen base, from hidden states to log-probabilities of the targets, and its checks.

`target_log_probs` never holds all logits at once. `distance`, `tolerance` and `agrees_by_norm` say whether two passes
agree, `spare_tokens` which tokens are added to one, and `recompute_layers` saves its memory.

Legend: K agents, S targets, N packed tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ci_llm.core.memory import is_out_of_memory
from ci_llm.errors import CiLlmError
from ci_llm.lora.products import LEAST_ROWS, product
from ci_llm.lora.reading import Reading, compute_dtype


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference, divided by the largest absolute value of `wanted`; NaN if one holds NaN."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def tolerance(*dtypes: torch.dtype) -> float:
    """The largest `distance` that counts as equal: half the digits of the coarsest dtype.

    It lies far above rounding and far below the effect of a wrong mask. It is at least 1e-5, because some families
    compute their softmax in fp32 in any dtype.
    """
    return max(1e-5, math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes)))


def agrees_by_norm(found: Tensor, wanted: Tensor, limit: float) -> bool:
    """True if numbers [K, N, V] of K agents are the wanted ones up to rounding, which may change single ones a lot.

    In thirty layers of bf16, rounding changes a hundredth of the tokens by a tenth. The norm of the difference over all
    tokens is then 0.02 of the norm of an agent's wanted numbers; with a wrong mask it is 0.11 or more. Agents that are
    mixed up may be as near as 0.05, so each agent must also be nearer to its own numbers than to any other's.
    """
    found, wanted = (each.double().flatten(1) for each in (found, wanted))
    gaps = torch.cdist(found, wanted)
    own = gaps.diagonal() / wanted.norm(dim=1)
    return bool((own <= limit).all() and (gaps.argmin(dim=1) == torch.arange(len(gaps), device=gaps.device)).all())


def dtypes_of(model: PreTrainedModel, logits: Tensor) -> list[torch.dtype]:
    """The dtypes in which the logits were computed, including autocast's if it is on."""
    return [logits.dtype, model.dtype, compute_dtype(logits)]


def describe_error(error: Exception) -> str:
    """The type and first line of an error that a base raised.

    Raises:
        Exception: `error` itself, if it is an error of this package or out of memory, and so not about the base.
    """
    if isinstance(error, CiLlmError) or is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


LOGITS_PER_CHUNK = 8_388_608  # 256 rows of a 32k vocabulary, 32 MB in fp32
LOGITS_PER_CHUNK_OF_A_GPU = 8 * LOGITS_PER_CHUNK  # each chunk is 18 launches, and reads the weight twice


@dataclass(frozen=True)
class Head:
    """A frozen output layer: logits = softcap · tanh(scale · (h Wᵀ + b) / softcap).

    Attributes:
        weight: [V, D].
        bias: [V], or None.
        scale: 1 in families without a scale.
        softcap: None in families without a soft cap, whose logits are scale · (h Wᵀ + b).
        by_onednn: how `logits` computes the product; see `product` in products.py.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None
    by_onednn: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of a model, with its family's scaling (Granite, Cohere) and soft cap (Gemma)."""
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(layer.weight, getattr(layer, "bias", None), scale, softcap)

    def to(self, dtype: torch.dtype) -> Head:
        """The head with its numbers in `dtype`."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def logits(self, states: Tensor) -> Tensor:
        """The logits [..., V] of states [..., D], in fp32, or in fp64 for states in fp64.

        For states [K, S, D] each agent has its own product, as in `target_log_probs`.
        """
        head = self.to(states.dtype)
        if states.dim() > 2:
            return torch.stack([head.logits(own) for own in states])
        z = product(states, head.weight, head.bias, by_onednn=head.by_onednn)
        return self.shape_logits(z.to(torch.promote_types(z.dtype, torch.float32)))

    def logits_into(self, buffers: tuple[Tensor, Tensor], states: Tensor) -> Tensor:
        """The logits [S, V] of states [S, D], computed in two buffers of at least S rows.

        The first buffer has the dtype of the states, as weight and bias must have, and the second the wide dtype.
        """
        narrow, wide = (buffer[: len(states)] for buffer in buffers)
        if self.bias is None:
            torch.mm(states, self.weight.mT, out=narrow)
        else:
            torch.addmm(self.bias, states, self.weight.mT, out=narrow)
        return self.shape_logits(narrow if narrow.dtype == wide.dtype else wide.copy_(narrow))

    def shape_logits(self, z: Tensor) -> Tensor:
        """Apply scale and soft cap to h Wᵀ + b of any shape."""
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    @property
    def chunk_rows(self) -> int:
        """The number of rows whose logits fit into a chunk on this device; at least 16, for a very large vocabulary."""
        size = LOGITS_PER_CHUNK_OF_A_GPU if self.weight.is_cuda else LOGITS_PER_CHUNK
        return max(16, size // self.weight.shape[0])

    def chunks(self, rows: int, copies: int = 1) -> Iterator[slice]:
        """Slices of at most `chunk_rows` rows, and of fewer if the logits of `copies` agents are held at once."""
        size = max(16, self.chunk_rows // copies)
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def give_head_contiguous_rows(model: PreTrainedModel) -> RemovableHandle:
    """Make the inputs of a model's head contiguous, until the handle is removed.

    For the next token, Transformers gives the head `hidden_states[:, -1:, :]` (`slice_logits_to_keep` in
    `transformers/modeling_utils.py`), which is not contiguous. torch then does not fold the rows into one product
    (`should_fold` in `aten/src/ATen/native/LinearAlgebra.cpp`): it copies the weight for each of them.
    """
    return model.get_output_embeddings().register_forward_pre_hook(  # type: ignore[no-any-return]
        lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
    )


#: Computes the log-probabilities [S] of a chunk. Arguments: its logits [S, V], its targets [S, 1], the head, a buffer
#: [S, V] in the dtype of the states, and memory [S, D] for the gradients of the log-probabilities by the states, or
#: None. Logits and buffer may be overwritten.
OfChunk = Callable[[Tensor, Tensor, Head, Tensor, Tensor | None], Tensor]


def plain_chunk(z: Tensor, index: Tensor, head: Head, narrow: Tensor, grads: Tensor | None) -> Tensor:
    """The arithmetic of a chunk (see `OfChunk`) with `kernels: plain`."""
    # The derivative of the soft cap needs z, which is overwritten below.
    bend = None if grads is None or head.softcap is None else 1 - (z / head.softcap) ** 2
    peak = z.amax(1, keepdim=True)  # without the largest logit subtracted, exp() would overflow
    wanted = z.gather(1, index) - peak
    total = z.sub_(peak).exp_().sum(1, keepdim=True)  # in place: z is the largest tensor of the pass
    found = (wanted - total.log()).squeeze(1)
    if grads is not None:
        # z becomes scale · (onehot - softmax), the gradient of the log-probability before the soft cap.
        # `scatter_add_` of a tensor would be a sort, under deterministic algorithms on a GPU.
        z.mul_(-head.scale / total).scatter_(1, index, head.scale, reduce="add")
        if bend is not None:
            z.mul_(bend)
        torch.mm(z if z.dtype == narrow.dtype else narrow.copy_(z), head.weight, out=grads)
    return found


class _TargetLogProbs(torch.autograd.Function):
    """Log-probabilities [K, S] of targets [S] for states [K, S, D], with a gradient for the states only.

    The head is frozen, so the gradient with respect to a hidden state is a row of (onehot - softmax) W. The forward
    pass computes it chunk by chunk, and the backward pass only scales it, as do the fused linear losses of Liger (Hsu
    et al., 2024) and Cut Cross-Entropy (Wijmans et al., 2024). Here every token has its own factor in the backward
    pass, so any function of the log-probabilities may follow.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Head, of_chunk: OfChunk) -> Tensor:
        whole = states.shape
        if states.is_cuda:  # all agents' rows as those of one agent, for fewer chunks
            states, targets = states.reshape(1, -1, whole[-1]), targets.repeat(len(states))
        agents, count, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        log_probs = torch.empty(agents, count, dtype=wide, device=states.device)
        state_grads = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Cast once and not per chunk: with a large vocabulary there are many chunks, and each cast is expensive.
        head = head.to(states.dtype)
        # The largest tensors of the pass: made once, and used by every chunk.
        narrow = states.new_empty(min(count, head.chunk_rows), head.weight.shape[0])
        buffers = narrow, narrow if states.dtype == wide else torch.empty_like(narrow, dtype=wide)
        # On a CPU no chunk holds rows of two agents: the last rows of a product may round differently (in fp64), and an
        # agent's bits must not depend on its neighbours.
        for k, chunk in itertools.product(range(agents), head.chunks(count)):
            z = head.logits_into(buffers, states[k, chunk])
            own = None if state_grads is None else state_grads[k, chunk]
            log_probs[k, chunk] = of_chunk(z, targets[chunk, None], head, narrow[: len(z)], own)
        ctx.save_for_backward(None if state_grads is None else state_grads.view(whole))
        return log_probs.view(whole[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (state_grads,) = ctx.saved_tensors
        grad = grad[..., None]
        # fp16 cannot represent a loss scale of 65536, but it can represent its product with a gradient.
        if state_grads.dtype == torch.float16:
            return (state_grads * grad).to(state_grads.dtype), None, None, None
        return state_grads * grad.to(state_grads.dtype), None, None, None


def target_log_probs(states: Tensor, targets: Tensor, head: Head, of_chunk: OfChunk = plain_chunk) -> Tensor:
    """Log-probability of each target under each agent.

    Args:
        states: [K, S, D] hidden states at the positions that predict the targets.
        targets: [S] token ids.
        head: the frozen output layer.
        of_chunk: the arithmetic of a chunk.

    Returns:
        [K, S] in nats, differentiable in `states`; fp32, or fp64 for states in fp64.
    """
    states = states.to(compute_dtype(states))
    with torch.autocast(states.device.type, enabled=False):
        return _TargetLogProbs.apply(states, targets, head, of_chunk)  # type: ignore[no-any-return]


def spare_tokens(model: PreTrainedModel, tokens: int, copies: int = 1) -> int:
    """The number of tokens to add, so that an agent's bits do not depend on the number of agents.

    Each product with the base takes the tokens of all agents at once. On a CPU the kernels for the last rows of a
    product (1, 2 or 3 in fp64), and for products of fewer than 4 rows, round differently from the others.

    Args:
        copies: how many copies of the tokens stand in every product.
    """
    if model.dtype == torch.float64:
        return -tokens % LEAST_ROWS
    return max(0, -(-LEAST_ROWS // copies) - tokens)


def recompute_layers(model: PreTrainedModel, reading: Reading) -> None:
    """Switch activation checkpointing on: autograd keeps only the inputs of the base's layers."""
    _checkpointing(model, "enable")({"use_reentrant": False, "context_fn": partial(_both_passes, reading)})
    # Transformers gives the embedded tokens a gradient, which reentrant checkpointing needs. Here the gradient would
    # pass through the layers below the first adapter, and recompute them for nothing.
    model.disable_input_require_grads()


def stop_recomputing(model: PreTrainedModel) -> None:
    """Switch activation checkpointing off, which makes the layers of the base hold references to the agents."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        _checkpointing(model, "disable")()


def _checkpointing(model: PreTrainedModel, what: str) -> Callable[..., None]:
    """The method of Transformers, whose name says gradient instead of activation before 5.23."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    method: Callable[..., None] = getattr(model, f"{name}_checkpointing_{what}")
    return method


def _both_passes(reading: Reading) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a layer's forward pass and of its recomputation, which must know whose tokens it reads."""
    return nullcontext(), reading.of(reading.agents, reading.sizes)
