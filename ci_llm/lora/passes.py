"""A pass of rows through the frozen base with K agents on it, from token ids to log-probabilities of the targets.

`Passes` takes rows packed or padded, in one pass for all agents or in one for each. Attention that keeps packed rows
apart is registered with Transformers' attention interface under the name `PACKED`, so that no model code is changed.
`target_log_probs` never holds all logits at once. `distance` and `tolerance` say whether two passes agree.

Legend: K agents, S targets, N packed tokens, R rows of the base's input (packed: K or 1), D hidden width,
V vocabulary. In attention: H heads, G key/value heads, T tokens of one packed row, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from ci_llm.base.targets import text_model
from ci_llm.core.determinism import capture_draws
from ci_llm.core.memory import is_out_of_memory
from ci_llm.data.batches import AgentBatches, Batch, MicroBatch, padded
from ci_llm.errors import CiLlmError, ModelError
from ci_llm.lora.adapters import AgentStorage
from ci_llm.lora.layer import LEAST_ROWS, Reading, Shared, compute_dtype


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


def dtypes_of(model: PreTrainedModel, logits: Tensor) -> list[torch.dtype]:
    """The dtypes in which the logits were computed, that of autocast included, if it is on."""
    kind = logits.device.type
    autocast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    return [logits.dtype, model.dtype, *autocast]


def describe_error(error: Exception) -> str:
    """Type and first line of an error that a base raised.

    Raises:
        Exception: `error` itself, if it says nothing about the base: an error of this package, or out of memory.
    """
    if isinstance(error, CiLlmError) or is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def unusable_base(model: PreTrainedModel, base_name: str, what: str) -> ModelError:
    """The error to raise for a base that cannot be used; `what` follows the name of its class."""
    return ModelError(
        f"{type(model).__name__} {what}",
        where=f"model_name: {base_name}",
        hint="use a base of another family; Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and GPT-2 are known to work",
    )


PACKED = "ci_llm_packed"
EXPLICIT_UP_TO = 320  # on a CPU the fused kernel's backward is slower than the explicit form up to about here


class Segments:
    """Where the packed rows begin and end, and the masks for their lengths, each made once per pass.

    Args:
        bounds: 0 and the end of every row, in packed tokens.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.lengths = [end - start for start, end in pairwise(bounds)]
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, length: int, window: int | None, like: Tensor) -> Tensor:
        """Additive causal mask [T, T]; with a window, a position attends to itself and `window - 1` before it."""
        key = (length, window, like.dtype, like.device)
        if key not in self._masks:
            mask = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device)
            visible = torch.ones_like(mask, dtype=torch.bool).tril()
            if window is not None:
                visible = visible.triu(1 - window)
            self._masks[key] = mask.masked_fill(visible, 0.0)
        return self._masks[key]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H.
        segments: the packed rows; a keyword argument of the model's forward, which the layers pass on.
        scaling: of the scores; None: 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, limits attention by its mask alone, or uses attention
            sinks; the trial at the start then takes the padded route.
    """
    if segments is None or s_aux is not None:  # without rows or with sinks the result would silently be wrong
        raise TypeError("packed attention needs `segments` from the model's forward, and supports no attention sinks")
    if not sliding_window and _needs_window(module):  # the rows of the trial may be shorter than the window
        raise TypeError(f"{type(module).__name__} has its window in a mask, and packed attention makes no masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Cast before the rows are taken apart, and not by autocast for every product of every row.
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    parts = []
    with torch.autocast(query.device.type, enabled=False):
        for q, k, v in zip(*(x.split(segments.lengths, dim=2) for x in (query, key, value)), strict=True):
            length = q.shape[2]
            window = sliding_window if sliding_window and sliding_window < length else None  # else it hides nothing
            explicit = softcap or (length <= EXPLICIT_UP_TO and not q.is_cuda)
            mask = segments.mask(length, window, q) if explicit or window else None
            attend = _explicit if explicit else _fused
            parts.append(attend(q, k, v, mask, scale, dropout, softcap).transpose(1, 2))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def _needs_window(module: torch.nn.Module) -> bool:
    """Whether this layer attends to a window or a chunk only, by its configuration."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and number is not None:
        return "sliding" in kinds[number] or "chunked" in kinds[number]
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True) is not False


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """One packed row by PyTorch's kernel: q [R, H, T, D], k and v [R, G, T, D] -> [R, H, T, D]."""
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """The same by matrix products, which also allows a soft cap, and is faster for short rows on a CPU."""
    assert mask is not None
    rows, heads, length, width = q.shape
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    flat = (rows * heads, length, width)
    q, k, v = q.reshape(flat), k.reshape(flat), v.reshape(flat)
    if softcap:
        scores = softcap * torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scale / softcap)) + mask
    else:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    # Its sums are in fp32 for 16 bits as well, and what it returns is all that the backward pass needs.
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return torch.bmm(weights, v).view(rows, heads, length, width)


# No mask is registered beside it: Transformers then makes none, and does not ask the device where rows begin.
AttentionInterface.register(PACKED, packed_attention)


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

    def to(self, dtype: torch.dtype) -> Head:
        """The head with its numbers in `dtype`."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def logits(self, states: Tensor) -> Tensor:
        """States [..., D] -> logits [..., V], in fp32, or in fp64 for states in fp64.

        Agents [K, S, D] have a product each, as in `target_log_probs`.
        """
        head = self.to(states.dtype)
        if states.dim() > 2:
            return torch.stack([head.logits(own) for own in states])
        z = torch.nn.functional.linear(states, head.weight, head.bias)
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

    def chunks(self, rows: int, copies: int = 1) -> Iterator[slice]:
        """Slices of at most `chunk_rows` rows; of fewer, where the logits of so many agents are held at once."""
        size = max(16, self.chunk_rows // copies)
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def give_head_contiguous_rows(model: PreTrainedModel) -> RemovableHandle:
    """Let the head of a model read contiguous rows, whoever calls it, until the handle is removed.

    For the next token, Transformers gives the head `hidden_states[:, -1:, :]` (`slice_logits_to_keep` in
    `transformers/modeling_utils.py`), which is not contiguous. torch then does not fold the rows into one product
    (`should_fold` in `aten/src/ATen/native/LinearAlgebra.cpp`): it copies the weight for each of them.
    """
    return model.get_output_embeddings().register_forward_pre_hook(  # type: ignore[no-any-return]
        lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
    )


class _TargetLogProbs(torch.autograd.Function):
    """States [K, S, D] and targets [S] -> log-probabilities [K, S]; its own gradient with respect to the states.

    The head is frozen, so the gradient with respect to a hidden state is a row of (onehot - softmax) W. The forward
    pass computes it chunk by chunk, and the backward pass only scales it. The idea is that of the fused linear losses
    of Liger (Hsu et al., 2024) and of Cut Cross-Entropy (Wijmans et al., 2024); here every token has a weight of its
    own in the backward pass, so that any function of the log-probabilities may follow.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Head) -> Tensor:
        agents, count, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        log_probs = torch.empty(agents, count, dtype=wide, device=states.device)
        slopes = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        # Cast once and not per chunk: with a large vocabulary there are many chunks, and each cast is expensive.
        head = head.to(states.dtype)
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


Laid = tuple[Tensor, Tensor, tuple[int, ...]]  # ids [N], positions [N] and bounds of packed rows


@dataclass(frozen=True)
class Part:
    """One pass of a micro-batch.

    Attributes:
        rows: what it reads.
        agent: whose rows they are; None: those of all agents, or of each its own.
        layers: what tells the layers whose tokens they read.
        shared: with the passes of the other agents; None: it is the only pass.
    """

    rows: MicroBatch
    agent: int | None
    layers: Reading
    shared: Shared | None

    def reading(self) -> AbstractContextManager[None]:
        """Let the layers read the rows of the agent. The backward pass belongs inside: layers may be recomputed."""
        return self.layers.of(self.agent, shared=self.shared)


@dataclass(frozen=True)
class Passes:
    """Passes of rows through a base with agents on it.

    Attributes:
        model: the base.
        agents: on its layers.
        pad_id: token id of pads and spare tokens.
        packed: rows lie end to end, or side by side in a rectangle.
    """

    model: PreTrainedModel
    agents: AgentStorage
    pad_id: int
    packed: bool

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [K, N, D] of the agents that read these rows, all or one, in packed order."""
        if self.agents.pass_per_agent and self.agents.reading.agent is None:
            return torch.cat([self._states_of(part) for part in self.parts(batch)])
        if self.packed:
            ids, positions, bounds = self._laid(batch)
            with once_below(self.agents) as copies:
                states = self._end_to_end(ids.expand(copies, -1), positions, bounds)
            return states[:, : batch.num_tokens] if len(ids) > batch.num_tokens else states
        inputs, (rows, columns) = self._rectangle(batch)
        copies = self.agents.settings.num_agents if self.agents.reading.agent is None else 1
        states = self._hidden({name: each.repeat(copies, 1) for name, each in inputs.items()})
        return states.unflatten(0, (copies, batch.num_rows))[:, rows, columns]  # type: ignore[no-any-return]

    def states_of_each(self, batches: AgentBatches) -> Sequence[Tensor]:
        """Final hidden states [1, N, D] of every agent on its own rows, in packed order; N is 0 without any."""
        parts = self.parts(batches)
        if parts[0].agent is None:
            return self._agent_after_agent(batches)
        nothing = self.agents.weights.new_zeros(1, 0, 1)
        found = {part.agent: self._states_of(part) for part in parts}
        return [found.get(k, nothing) for k in range(len(batches.each))]

    def parts(self, batch: MicroBatch) -> list[Part]:
        """The passes that a micro-batch takes: one for all agents, or one for each that has a row in it.

        A rectangle of the rows of all agents would pad them to another length than alone, so padded rows of each
        agent's own always take a pass per agent.
        """
        reading, each = self.agents.reading, isinstance(batch, AgentBatches)
        if not (self.agents.pass_per_agent or (each and not self.packed)):
            return [Part(batch, None, reading, None)]
        shared = Shared(same_rows=not each)
        rows = batch.each if isinstance(batch, AgentBatches) else [batch] * self.agents.settings.num_agents
        return [Part(own, k, reading, shared) for k, own in enumerate(rows) if own is not None]

    def _states_of(self, part: Part) -> Tensor:
        assert isinstance(part.rows, Batch)
        with part.reading():
            return self.states(part.rows)

    def _agent_after_agent(self, batches: AgentBatches) -> list[Tensor]:
        laid = [None if batch is None else self._laid(batch) for batch in batches.each]
        sizes = [0 if own is None else len(own[0]) for own in laid]
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        bounds = [span.start + bound for span, own in zip(spans, laid, strict=True) if own for bound in own[2][1:]]
        ids, positions = torch.cat([own[0] for own in laid if own]), torch.cat([own[1] for own in laid if own])
        with self.agents.reading.of(spans=spans):
            states = self._end_to_end(ids[None], positions, (0, *bounds))
        parts = zip(states.split(sizes, dim=1), batches.each, strict=True)
        return [part if batch is None else part[:, : batch.num_tokens] for part, batch in parts]

    def cast_head(self, states: Tensor) -> Head:
        """The head of the base for these states; passes of single agents cast it once for all."""
        head, shared = Head.of(self.model), self.agents.reading.shared
        if shared is None:
            return head
        if shared.head is None:
            shared.head = head.to(compute_dtype(states))
        return shared.head  # type: ignore[no-any-return]

    def _end_to_end(self, ids: Tensor, positions: Tensor, bounds: Sequence[int]) -> Tensor:
        """Final hidden states [R, N, D] of ids [R, N]."""
        inputs = {"input_ids": ids, "position_ids": positions[None], "segments": Segments(bounds)}
        return self._hidden(inputs)

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        dtype = compute_dtype(self.model.get_input_embeddings().weight)
        with self.agents.ready(dtype, training=self.model.training):
            return text_model(self.model)(**inputs, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _laid(self, batch: Batch) -> Laid:
        """Ids, positions and bounds of the rows; spare tokens are one more row, which nothing reads."""
        ids, positions, bounds = batch.input_ids, batch.position_ids, batch.bounds
        if spare := self._spare(batch.num_tokens):
            ids = F.pad(ids, (0, spare), value=self.pad_id)
            positions = torch.cat([positions, positions.new_tensor(range(spare))])
            bounds = (*bounds, bounds[-1] + spare)
        return ids, positions, bounds

    def _rectangle(self, batch: Batch) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        """The rows side by side, and the index that leads back; see `padded`."""
        inputs, index = padded(batch, self.pad_id)
        if spare := self._spare(inputs["input_ids"].shape[1]):
            inputs = {name: F.pad(each, (0, spare)) for name, each in inputs.items()}
        # No attention mask is given. Pads stand to the right of a row, where no token of a causal model attends. A
        # mask that leaves a pad no position to attend to makes its state NaN in some families, and NaN spreads.
        return {name: inputs[name] for name in ("input_ids", "position_ids")}, index

    def _spare(self, tokens: int) -> int:
        return spare_tokens(self.model, tokens)


def spare_tokens(model: PreTrainedModel, tokens: int, copies: int = 1) -> int:
    """Tokens that have to be added, so that an agent's bits do not depend on how many agents there are.

    Each product with the base takes the tokens of all agents at once. On a CPU the kernels for the last rows of a
    product (1, 2 or 3 in fp64), and for products of fewer than 4 rows, round differently from the others.

    Args:
        copies: in how many the tokens always stand side by side in these products.
    """
    if model.dtype == torch.float64:
        return -tokens % LEAST_ROWS
    return max(0, -(-LEAST_ROWS // copies) - tokens)


@contextmanager
def once_below(agents: AgentStorage) -> Iterator[int]:
    """Run the trunk of the base once for all agents, which read the same rows, and every layer above it for each.

    Nothing in the trunk is trained, so autograd keeps nothing of it, and checkpointing does not compute it again. Where
    every agent takes a pass of its own, the first pass runs the trunk, and the others take the states that it left.

    Yields:
        how many copies of the rows the base has to be given.
    """
    reading, trunk = agents.reading, agents.trunk
    count = agents.settings.num_agents if reading.agent is None else 1
    shared = reading.shared if reading.shared is not None and reading.shared.same_rows else None
    if not trunk:
        yield count
        return

    def spread(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if shared is not None:
            shared.trunk = output, capture_draws(*(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))
        return tree_map_only(Tensor, lambda states: states.expand(count, *states.shape[1:]), output)

    if shared is not None and shared.trunk is not None:
        with _skipped(trunk, *shared.trunk):
            yield 1
        return
    handle = trunk[-1].register_forward_hook(spread)
    try:
        yield 1
    finally:
        handle.remove()


@contextmanager
def _skipped(layers: Sequence[nn.Module], output: Any, restore_draws: Callable[[], None]) -> Iterator[None]:
    """Let these layers compute nothing and return `output`; the base may have drawn its own dropout in them."""

    def forward(*_inputs: Any, **_named: Any) -> Any:
        restore_draws()
        return output

    own = [vars(layer).get("forward") for layer in layers]  # hooks of other libraries stand there
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            del layer.forward
            if before is not None:
                layer.forward = before


def recompute_layers(model: PreTrainedModel, agents: AgentStorage) -> None:
    """Let autograd keep the inputs of the base's layers only; the backward pass computes the rest again."""
    _checkpointing(model, "enable")({"use_reentrant": False, "context_fn": partial(_both_passes, agents)})
    # Transformers lets the embedded tokens have a gradient, which another form of checkpointing needs. Here it would
    # lead through the trunk, and have it computed again for nothing.
    model.disable_input_require_grads()


def stop_recomputing(model: PreTrainedModel) -> None:
    """Undo `recompute_layers`, by which the layers of the base hold the agents."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        _checkpointing(model, "disable")()


def _checkpointing(model: PreTrainedModel, what: str) -> Callable[..., None]:
    """The method of Transformers that does it, which before 5.23 was called after gradients."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    method: Callable[..., None] = getattr(model, f"{name}_checkpointing_{what}")
    return method


def _both_passes(agents: AgentStorage) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a recomputed layer: of its pass, and of that in backward, which has to know whose tokens it reads."""
    reading = agents.reading
    return nullcontext(), reading.of(reading.agent, spans=reading.spans)
