"""A frozen linear layer that carries the low-rank adapters of K agents.

`StackedLoRALinear` is the layer. Adapters of neighbouring agents with one shape are multiplied as one batch
(`AgentGroup`). All layers of a base share three objects: `Casts` holds what a pass casts once, `Reading` says whose
tokens the inputs hold, and `InputDropout` drops inputs of the adapters.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Rank-stabilised scaling: Kalajdzievski,
"A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

Legend: K agents, n agents of a group, P parameters of one agent, N rows of activations per agent, r rank, in and out
features. x, z [K, N, in], h [K, N, r], A [K, r, in], B [K, out, r], W [out, in]; a group has n in place of K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.base.targets import Layers, WeightMetadata
from ci_llm.config.own_keys import SHAPE_KEYS, from_plain, to_plain
from ci_llm.core.determinism import generator_for
from ci_llm.errors import BadInput, ModelError


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: autocast's if it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Casts:
    """The casts of the current forward pass; empty between passes, so that no cast is older than the weights.

    A layer that activation checkpointing recomputes in the backward pass casts for itself, to the same bits.
    """

    def __init__(self) -> None:
        self._under_way = self._is_drawn = False
        self._weights: Tensor | None = None
        self._start = 0  # where the weights begin in the storage
        self._input: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def of_pass(self, weights: Tensor, drawn: Tensor | None, dtype: torch.dtype) -> Iterator[None]:
        """Cast the weights to `dtype` for the pass inside.

        Args:
            weights: [K, P] or [1, P] the rows of the agents in the pass, views of the storage.
            drawn: a copy of these rows with masks applied, which is cast instead; None if there are none.
        """
        self._under_way, self._is_drawn, self._start = True, drawn is not None, int(weights.storage_offset())
        if drawn is not None or weights.dtype != dtype:
            self._weights = (weights if drawn is None else drawn).to(dtype)
        try:
            yield
        finally:
            self._under_way, self._weights, self._input = False, None, None

    def ready(self, view: Tensor, dtype: torch.dtype, *, is_drawn: bool) -> Tensor | None:
        """The cast of `view`, a view of the weights; None if there is none of this dtype and kind."""
        made = self._weights
        if made is None or made.dtype != dtype or self._is_drawn != is_drawn:
            return None
        return made.as_strided(view.size(), view.stride(), view.storage_offset() - self._start)

    @torch.no_grad()
    def input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast `x` to `dtype`, without a gradient; layers that read the same tensor share one cast."""
        if self._input is not None and self._input[0] is x and self._input[1].dtype == dtype:
            return self._input[1]
        cast = x.to(dtype)
        if self._under_way:
            self._input = (x, cast)
        return cast


@dataclass
class Shared:
    """Results that the single agents' passes over one micro-batch share; each is None until the first pass has it.

    Attributes:
        same_rows: whether all agents read the same rows; only then they share the reference.
        head: the cast head of the base.
        reference: [1, S] the log-probabilities of the base alone.
    """

    same_rows: bool
    head: Any = None
    reference: Tensor | None = None


#: In place of an agent's number: the rows belong to no agent, and the base alone reads them.
NOBODY: Final = -1


@dataclass
class Reading:
    """Whose tokens the inputs of all layers hold: those of all agents, of one agent, or of each agent its own rows.

    Attributes:
        agent: the agent to which all rows of the input belong, or `NOBODY`; None if it holds the rows of all K agents.
        spans: [K] the tokens of each agent in an input [1, N, in] of agents with rows of their own; else None.
        shared: the results shared with the passes of other agents; None if nothing is shared.
        in_storage: whether all parameters' gradients are views of the storage, as `begin_step` leaves them.
        by_onednn: whether passes without gradients compute products with frozen weights by oneDNN; see `product`.
        packed: packed weights for passes without gradients, by layer; see `ci_llm/lora/packed.py`.
    """

    agent: int | None = None
    spans: Sequence[slice] | None = None
    shared: Shared | None = None
    in_storage: bool = False
    by_onednn: bool = False
    packed: Mapping[nn.Module, Tensor] = field(default_factory=dict)

    @contextmanager
    def of(
        self, agent: int | None = None, *, spans: Sequence[slice] | None = None, shared: Shared | None = None
    ) -> Iterator[None]:
        """Set these for the passes inside. Backward passes that recompute layers belong inside too."""
        before = self.agent, self.spans, self.shared
        self.agent, self.spans, self.shared = agent, spans, shared
        try:
            yield
        finally:
            self.agent, self.spans, self.shared = before


@dataclass(frozen=True)
class AgentGroup:
    """Neighbouring agents with adapters of one shape on a layer; their products are one batched product.

    Agents of other shapes are not padded to one batch: a longer sum or another kernel could round differently, and an
    agent must have the bits that it has alone.

    Attributes:
        first, end: the agents are `first`, ..., `end - 1`.
        scaling: the factor of every B A.
        drops: whether the adapters read their input after dropout.
        stacked: A [n, r, in] and B [n, out, r], views of the crowd's storage; None if they have no adapter here.
        masks: DropConnect masks of the same shapes, or None.
        casts: the casts of A and B in the current pass, or None.
        tokens: the only agent's tokens in an input [1, N, in] of agents with rows of their own; else None.
        gradients: the gradients of A and B, views of the crowd's gradients; None if autograd owns them.
    """

    first: int
    end: int
    scaling: float = 1.0
    drops: bool = False
    stacked: tuple[Tensor, Tensor] | None = None
    masks: tuple[Tensor, Tensor] | None = None
    casts: Casts | None = None
    gradients: tuple[Tensor, Tensor] | None = None
    tokens: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` [K, ...] that belongs to these agents, or their tokens of `tensor` [1, N, ...]."""
        if self.tokens is None and tensor.shape[0] == self.end - self.first:
            return tensor
        return tensor[self.first : self.end] if self.tokens is None else tensor[:, self.tokens]

    @property
    def axis(self) -> int:
        """The dimension of an input along which the groups follow each other."""
        return 0 if self.tokens is None else 1

    @property
    def extent(self) -> int:
        """The length that these agents have along `axis`."""
        return self.end - self.first if self.tokens is None else self.tokens.stop - self.tokens.start

    def only(self, agent: int) -> AgentGroup:
        """A group of one of these agents, numbered 0."""
        part = slice(agent - self.first, agent - self.first + 1)
        pairs = (self.stacked, self.masks, self.gradients)
        stacked, masks, gradients = (pair and (pair[0][part], pair[1][part]) for pair in pairs)
        return replace(self, first=0, end=1, stacked=stacked, masks=masks, gradients=gradients)

    def on(self, spans: Sequence[slice]) -> Iterator[AgentGroup]:
        """Yield a group for each of these agents that has tokens in an input of agents with rows of their own."""
        for k in range(self.first, self.end):
            if spans[k].start < spans[k].stop:
                yield replace(self.only(k), first=k, end=k + 1, tokens=spans[k])

    def at_rest(self) -> AgentGroup:
        """The group without dropout and DropConnect."""
        return replace(self, masks=None, drops=False) if self.drops or self.masks else self

    def effective(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B with masks applied, in `dtype`."""
        assert self.stacked is not None
        a, b = self.stacked
        if self.masks is None and a.dtype == dtype:
            return a, b
        if self.casts is not None:
            ready = [self.casts.ready(view, dtype, is_drawn=self.masks is not None) for view in (a, b)]
            if ready[0] is not None and ready[1] is not None:
                return ready[0], ready[1]
        if self.masks is not None:
            a, b = a * self.masks[0], b * self.masks[1]
        return a.to(dtype), b.to(dtype)

    def accumulating_in(self, parameters: Sequence[Tensor]) -> AgentGroup:
        """The group itself if its parameters' gradients are `gradients`; otherwise the group without `gradients`."""
        if self.gradients is None:
            return self
        places = [(whole, k) for whole in self.gradients for k in range(self.end - self.first)]
        own = all(_is_part(each.grad, *place) for each, place in zip(parameters, places, strict=True))
        return self if own else replace(self, gradients=None)

    def parameter_gradients(self, grad_a: Tensor, grad_b: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradients in the order of the parameters: A of every agent, then B of every agent.

        If the group has `gradients`, all are added there at once, and autograd gets None.
        """
        if self.gradients is not None:
            self.add_gradients(grad_a, grad_b)
            return (None,) * (2 * (self.end - self.first))
        if self.masks is not None:
            grad_a, grad_b = grad_a.to(dtype) * self.masks[0], grad_b.to(dtype) * self.masks[1]
        return (*grad_a.to(dtype).unbind(0), *grad_b.to(dtype).unbind(0))

    def add_gradients(self, grad_a: Tensor, grad_b: Tensor) -> None:
        """Add the gradients of A [n, r, in] and B [n, out, r] to the storage's."""
        assert self.gradients is not None
        for whole, grad, mask in zip(self.gradients, (grad_a, grad_b), self.masks or (None, None), strict=True):
            whole.add_(grad if mask is None else grad.to(whole.dtype) * mask)

    @property
    def is_joinable(self) -> bool:
        """Whether several layers may read one input together, see `JoinedInput` in `ci_llm/lora/kernels.py`."""
        return self.stacked is not None and self.gradients is not None and self.tokens is None and not self.drops


def _is_part(tensor: Tensor | None, whole: Tensor, index: int) -> bool:
    """Whether `tensor` is the memory of `whole[index]`."""
    if tensor is None or tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return False
    return tensor.storage_offset() == whole.storage_offset() + index * whole.stride(0)


class InputDropout:
    """Dropout of the adapters' inputs, with a probability per agent.

    Agents with settings of their own draw for themselves. Others draw together in a pass of all agents, from the global
    generator. In a pass of one agent, the agent always draws for itself, as it does alone.

    Args:
        settings: the agents' dropout, seeds and indices.

    Attributes:
        micro_step: the key of the micro-step, which a training run sets before each forward pass. Without it (None)
            all draws come from the global generator.
    """

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        self.micro_step: tuple[int, ...] | None = None

    def apply(self, rows: Tensor, layer: str, agents: Sequence[int], reading: Reading) -> Tensor:
        """The rows after dropout.

        Args:
            rows: [n, N, in], the rows of n agents; if `reading` has spans, [1, N, in] with the tokens of `agents`.
            layer: the name of the layer. With step and agent it keys the draw, so that a layer recomputed by activation
                checkpointing draws the same.
            agents: the numbers of these agents.
            reading: whose tokens the input of the layer holds.
        """
        if not self._settings.agents and reading.agent is None:
            return nn.functional.dropout(rows, self._settings.dropout)
        given, spans = rows.detach(), reading.spans
        each = given.unbind(0) if spans is None else given[0].split([spans[k].stop - spans[k].start for k in agents])
        masks = [self._mask(own, layer, k) for k, own in zip(agents, each, strict=True)]
        return rows * (torch.stack(masks) if spans is None else torch.cat(masks))

    def _mask(self, like: Tensor, layer: str, agent: int) -> Tensor:
        """0 where an input [N, in] is dropped, and 1 / (1 - share) elsewhere."""
        own, generator = self._settings.of(agent), None
        if self.micro_step is not None:
            generator = generator_for(own.seed, "dropout", *self.micro_step, layer, own.index, device=like.device)
        keep = 1 - own.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=generator).div_(keep)


@dataclass(frozen=True)
class AgentLora:
    """The settings of one agent: its own, and the common ones for the rest.

    Attributes:
        seed, index: the key of everything random of the agent. An agent with its own seed has index 0 wherever it
            stands. The others have the common seed and their place as index, unless their entry names another index.
    """

    rank: int
    alpha: float
    dropout: float
    dropconnect: float
    target_modules: str | tuple[str, ...]
    layers: Layers
    use_rslora: bool
    seed: int
    index: int

    @property
    def scaling(self) -> float:
        """The factor of B A: alpha / r, or alpha / √r with `use_rslora`."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class LoraSettings:
    """Number and shape of the agents; the words are PEFT's.

    Args:
        num_agents: K; set to the number of `agents` if these are given.
        rank: r of each adapter.
        alpha: see `AgentLora.scaling`.
        dropout: probability of dropping an input of an adapter.
        dropconnect: probability of dropping a weight of an adapter.
        target_modules: "all-linear", a regular expression, or suffixes of module names.
        layers: "all", "upper_half", or numbers of the layers in which these modules are adapted.
        use_rslora: see `AgentLora.scaling`.
        initialize_adapters_rand: every agent draws its own start; otherwise all start as agent 0.
        seed: the seed of the starts and of the DropConnect masks.
        outputs: how many numbers each agent's head computes for a row; 0 for agents that predict tokens.
        agents: for each agent its own settings: any of rank, alpha, dropout, dropconnect, target_modules, layers,
            use_rslora, seed, index. Every agent then draws its dropout from its own generator.

    Raises:
        ConfigError: a value cannot be used.

    Examples:
        >>> settings = ci_llm.LoraSettings(num_agents=2, rank=4, alpha=8)
        >>> settings.num_agents, [agent.scaling for agent in settings.each()]
        (2, [2.0, 2.0])
    """

    num_agents: int = 4
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    dropconnect: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    layers: Layers = "all"
    use_rslora: bool = False
    initialize_adapters_rand: bool = True
    seed: int = 42
    outputs: int = 0
    agents: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.agents:
            object.__setattr__(self, "num_agents", len(self.agents))
        odd = sorted({key for own in self.agents for key in own} - OWN)
        if odd:
            raise BadInput(
                f"an agent has no {odd[0]} of its own",
                where="LoraSettings(agents=...)",
                hint=f"{', '.join(sorted(OWN))}",
            )

    def of(self, agent: int) -> AgentLora:
        """The settings of one agent."""
        own = self.agents[agent] if self.agents else {}
        values = {key: own.get(key, getattr(self, key)) for key in OWN - {"index"}}
        return AgentLora(**values, index=own.get("index", 0 if "seed" in own else agent))

    def each(self) -> list[AgentLora]:
        """The settings of every agent."""
        return [self.of(k) for k in range(self.num_agents)]

    def kinds(self) -> list[AgentLora]:
        """The settings of every agent, or only those of agent 0 if all are alike."""
        return self.each() if self.agents else [self.of(0)]

    def common_or_list(self, key: str) -> Any:
        """The agents' value of `key` for messages: one value if all agents have it, or else the list."""
        values = [getattr(agent, key) for agent in self.kinds()]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        return values[0] if all(value == values[0] for value in values) else values

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values for ci_llm_meta_config.json; `agents` is left out if it is empty."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "agents"}
        values = {name: value for name, value in values.items() if name != "outputs" or value}
        own = {"agents": [to_plain(agent) for agent in self.agents]} if self.agents else {}
        return to_plain(values) | own

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoraSettings:
        """The inverse of `to_dict`."""
        agents = tuple(from_plain(agent) for agent in values.get("agents", ()))
        return cls(**{**from_plain(values), "agents": agents})


#: The settings that an agent may have of its own.
OWN: Final = frozenset(field.name for field in fields(AgentLora))
#: A key of the configuration that an agent may have of its own -> its name here.
FIELD_OF_KEY: Final = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "dropconnect_p": "dropconnect",
    "lora_target_modules": "target_modules",
    "agent_layers": "layers",
    "use_rslora": "use_rslora",
    "seed": "seed",
}
#: Those of them that give an adapter its shape and scale.
SHAPE: Final = {key: FIELD_OF_KEY[key] for key in SHAPE_KEYS}


#: On a CPU, products of fewer rows round differently, so they are padded to this many, as in decoding single tokens.
LEAST_ROWS: Final = 4


class _FusedLinear(torch.autograd.Function):
    """y[k] = x[k] Wᵀ + b + s (z[k] A[k]ᵀ) B[k]ᵀ with W frozen; z is x, or x after dropout.

    It computes in the dtype of `cast`, which is a cast of x, and keeps only z and the rank-r product h = z Aᵀ for the
    backward pass. W is dequantised or cast once per pass for all agents, and again in the backward pass, because a
    copy of every layer would otherwise live until then. The gradients have the dtypes of x, A and B.

    `dropped` holds z for the groups that drop, one after the other. `parameters` hold the same numbers as the groups:
    for each group A agent by agent, then B agent by agent. They are arguments because autograd returns gradients to
    arguments only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cast: Tensor,
        dropped: Tensor | None,
        weight: Tensor | QuantizedLinear,
        bias: Tensor | None,
        groups: Sequence[AgentGroup],
        by_onednn: bool,
        *parameters: Tensor,
    ) -> Tensor:
        y, kept = _with_adapters(cast, dropped, weight, bias, groups, by_onednn)
        plain = cast if any(not group.drops for group in groups) else None
        quantized = isinstance(weight, QuantizedLinear)
        ctx.save_for_backward(plain, dropped, None if quantized else weight, *kept)
        ctx.quantized = weight if quantized else None
        ctx.groups, ctx.dtypes = groups, (x.dtype, parameters[0].dtype if parameters else None)
        ctx.by_onednn = by_onednn
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cast, dropped, weight, *kept = ctx.saved_tensors
        agents, rows, _ = grad.shape
        grad = grad.contiguous()
        grad_x, grads_z = None, []
        if ctx.needs_input_grad[0]:
            weight = dense(ctx.quantized or weight, grad.dtype)
            grad_x = product(grad.view(agents * rows, -1), weight.mT, by_onednn=ctx.by_onednn).view(agents, rows, -1)
        gradients: list[Tensor | None] = []
        for number, (group, z) in enumerate(_inputs(ctx.groups, cast, dropped)):
            a, b, h = kept[3 * number : 3 * number + 3]
            grad_h, grad_b = low_rank_gradients(group.of(grad), b, h, group.scaling)
            grad_a = torch.bmm(grad_h.mT, z)
            # Without dropout z is x, so both parts of the gradient belong to the same input.
            if group.drops:
                grads_z.append(torch.bmm(grad_h, a))
            elif grad_x is not None:
                group.of(grad_x).baddbmm_(grad_h, a)
            gradients += group.parameter_gradients(grad_a, grad_b, ctx.dtypes[1])
        grad_x = None if grad_x is None else grad_x.to(ctx.dtypes[0])
        return grad_x, None, _joined(grads_z, ctx.groups) if grads_z else None, None, None, None, None, *gradients


def _with_adapters(
    cast: Tensor,
    dropped: Tensor | None,
    weight: Tensor | QuantizedLinear,
    bias: Tensor | None,
    groups: Sequence[AgentGroup],
    by_onednn: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """y [K, N, out] of `_FusedLinear`, and A, B and h of each group, which the backward pass needs."""
    (agents, rows, width), dtype = cast.shape, cast.dtype
    # One product with W for the rows of all agents: this is where the fused pass saves time.
    bias = None if bias is None else bias.to(dtype)
    y = product(cast.reshape(agents * rows, width), dense(weight, dtype), bias, by_onednn=by_onednn)
    y, kept = y.view(agents, rows, -1), []
    for group, z in _inputs(groups, cast, dropped):
        a, b = group.effective(dtype)
        h = _add_low_rank(group.of(y), z, a, b, group.scaling)
        kept += [a, b, h]
    return y, kept


class _LowRank(torch.autograd.Function):
    """s (z[k] A[k]ᵀ) B[k]ᵀ alone for the z of one group, for base layers other than nn.Linear, such as Conv1D."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, group: AgentGroup, *parameters: Tensor) -> Tensor:
        a, b = group.effective(z.dtype)
        rows = z.shape[1]
        h = torch.bmm(nn.functional.pad(z, (0, 0, 0, max(0, LEAST_ROWS - rows))), a.mT)
        ctx.save_for_backward(z, a, b, h[:, :rows])
        ctx.group, ctx.dtype = group, parameters[0].dtype
        return torch.bmm(h, b.transpose(1, 2)).mul_(group.scaling)[:, :rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, a, b, h = ctx.saved_tensors
        grad = grad.contiguous()
        grad_h, grad_b = low_rank_gradients(grad, b, h, ctx.group.scaling)
        grad_a = torch.bmm(grad_h.mT, z)
        grad_z = torch.bmm(grad_h, a) if ctx.needs_input_grad[0] else None
        return grad_z, None, *ctx.group.parameter_gradients(grad_a, grad_b, ctx.dtype)


def _add_low_rank(y: Tensor, z: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
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


def dense(weight: Tensor | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of a frozen layer in `dtype`."""
    if not isinstance(weight, Tensor):
        return weight.dequantize(dtype)
    return weight if weight.dtype == dtype else weight.to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, by_onednn: bool) -> Tensor:
    """x Wᵀ + b for x [..., in] and a frozen weight [out, in].

    Args:
        weight: a plain or a packed one.
        by_onednn: compute fp32 products by oneDNN's operator. The operator is private to torch, so a trial at the start
            of a run finds out whether it exists and is right.
    """
    if weight.is_mkldnn or (by_onednn and x.dtype == torch.float32):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return nn.functional.linear(x, weight, bias)


def _inputs(
    groups: Sequence[AgentGroup], x: Tensor | None, dropped: Tensor | None
) -> Iterator[tuple[AgentGroup, Tensor]]:
    """Yield every group with the input of its adapters: its part of x [K, N, in] or of `dropped`."""
    start = 0
    for group in groups:
        whole = dropped if group.drops else x
        assert whole is not None
        if group.drops:
            yield group, whole.narrow(group.axis, start, group.extent)
            start += group.extent
        else:
            yield group, group.of(whole)


def _joined(parts: Sequence[Tensor], groups: Sequence[AgentGroup]) -> Tensor:
    """The parts of these groups concatenated along their axis."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), groups[0].axis)


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


class StackedLoRALinear(nn.Module):
    """A frozen linear layer with a low-rank adapter for each of K agents, or for some of them.

    Input [K·B, ..., in], agent-major (all rows of agent 0 first); output [K·B, ..., out].

    Args:
        base_layer: the frozen layer.
        num_agents: K.
        dropout: the dropout of the adapters' inputs, shared by all layers.
        casts: the casts of the current pass, shared by all layers.
        reading: whose tokens the inputs hold, shared by all layers.
        name: the name of the layer in the base.

    Attributes:
        lora_A, lora_B: parameters `agent<k>` [r, in] and [out, r], views of the crowd's storage.
        groups: the same numbers, stacked where neighbours have one shape; together the groups cover all agents.
        joined: the `JoinedInput` of the layer and its neighbours; None if it computes alone.
        by_onednn: whether training computes products with the frozen weight by oneDNN; see `product`.
    """

    def __init__(
        self, base_layer: nn.Module, num_agents: int, dropout: InputDropout, casts: Casts, reading: Reading, name: str
    ) -> None:
        super().__init__()
        self.name = name
        self.base_layer = base_layer
        self.num_agents, self.dropout, self.casts, self.reading = num_agents, dropout, casts, reading
        self.in_features, self.out_features = _features(base_layer)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self._groups: tuple[AgentGroup, ...] = ()
        self._alone: dict[int, tuple[AgentGroup, ...]] = {}
        self._rests: dict[int | None, tuple[AgentGroup, ...]] = {}
        self.joined: Any = None
        self.by_onednn = False

    @property
    def weight(self) -> WeightMetadata:
        return WeightMetadata(self.base_layer.weight, self.name)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]  # the same with and without agents

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or torch.is_grad_enabled()):
            at_rest = self._at_rest(x)
            if at_rest is not None:
                return at_rest
        if self.joined is not None:
            joined = self.joined.output(self, x)
            if joined is not None:
                return joined  # type: ignore[no-any-return]
        # One agent keeps a leading dimension of 1, so that the code below serves it as it serves K.
        first, agents = (0, self.num_agents) if self.reading.agent is None else (self.reading.agent, 1)
        if self.reading.agent is None and self.reading.spans is not None:
            agents = 1
        y = self._apply_both(x, (agents, -1, self.in_features), self.present_groups(), first)
        return y.view(*x.shape[:-1], self.out_features)

    def _at_rest(self, x: Tensor) -> Tensor | None:
        """The fast forward pass for inference; None if the base layer is neither nn.Linear nor quantised.

        A decoder calls it for every token, so each operator and each look-up counts.
        """
        base, reading, dtype = self.base_layer, self.reading, compute_dtype(x)
        quantized = isinstance(base, QuantizedLinear)
        if not (quantized or type(base) is nn.Linear):
            return None
        agents = self.num_agents if reading.agent is None and reading.spans is None else 1
        cast = x if x.dtype == dtype else self.casts.input(x, dtype)
        is_flat = x.dim() != 3 or x.shape[0] != agents
        if is_flat:
            cast = cast.reshape(agents, -1, self.in_features)
        weight: Any = base if quantized else base.weight
        bias: Any = base.bias
        bias = None if bias is None else bias.to(dtype)
        packed = reading.packed.get(self)
        y = product(cast, dense(weight, dtype) if packed is None else packed, bias, by_onednn=reading.by_onednn)
        if reading.spans is None:
            self._add_resting(reading.agent, y, cast)
        else:
            self._require_all_tokens(cast)
            for k, span in enumerate(reading.spans):
                if span.start < span.stop:
                    self._add_resting(k, y[:, span], cast[:, span])
        return y.view(*x.shape[:-1], self.out_features) if is_flat else y

    def _add_resting(self, agent: int | None, y: Tensor, z: Tensor) -> None:
        """Add the adapters of one agent (None: all agents) to y; the groups are made once and not in each pass."""
        if agent not in self._rests:
            groups = self._groups if agent is None else self._groups_of(agent)
            self._rests[agent] = tuple(group.at_rest() for group in groups if group.stacked is not None)
        for group in self._rests[agent]:
            _add_low_rank(group.of(y), group.of(z), *group.effective(z.dtype), group.scaling)

    def present_groups(self) -> tuple[AgentGroup, ...]:
        """The groups of the agents whose rows the input holds, in training or evaluation mode."""
        groups = self._groups
        if self.reading.agent is not None:
            groups = self._groups_of(self.reading.agent)
        elif self.reading.spans is not None:
            groups = tuple(own for group in groups for own in group.on(self.reading.spans))
        return groups if self.training else tuple(group.at_rest() for group in groups)

    @property
    def groups(self) -> tuple[AgentGroup, ...]:
        return self._groups

    @groups.setter
    def groups(self, groups: tuple[AgentGroup, ...]) -> None:
        self._groups, self._alone, self._rests = groups, {}, {}

    def _groups_of(self, agent: int) -> tuple[AgentGroup, ...]:
        """The groups for a pass of one agent alone, made once and not in each pass."""
        if agent not in self._alone:
            own = tuple(group.only(agent) for group in self._groups if group.first <= agent < group.end)
            self._alone[agent] = own or (AgentGroup(0, 1),)
        return self._alone[agent]

    def _apply_both(self, x: Tensor, rows: tuple[int, ...], groups: Sequence[AgentGroup], first: int) -> Tensor:
        base, dtype, whole = self.base_layer, compute_dtype(x), x
        # One tensor for the base and for dropout, so that their gradients are added before those of other layers.
        x = x.reshape(rows)
        self._require_all_tokens(x)
        if type(base) is nn.Linear or isinstance(base, QuantizedLinear):
            weight = base if isinstance(base, QuantizedLinear) else base.weight
            adapted = [group for group in groups if group.stacked is not None]
            dropped, cast = self._dropped(x, groups, first), self.casts.input(whole, dtype).reshape(rows)
            if not torch.is_grad_enabled():
                return _with_adapters(cast, dropped, weight, base.bias, adapted)[0]
            own = [self._parameters_of(group, first) for group in adapted]
            if not self.reading.in_storage:  # otherwise `begin_step` has put all gradients there
                adapted = [group.accumulating_in(each) for group, each in zip(adapted, own, strict=True)]
            parameters = [each for group in own for each in group]
            return _FusedLinear.apply(  # type: ignore[no-any-return]
                x, cast, dropped, weight, base.bias, adapted, self.by_onednn, *parameters
            )
        # Autocast, if it is on, casts the base's weights; `_LowRank` casts the adapters to the dtype of its input.
        x = x.to(dtype)
        y = base(x)
        parts = []
        for group, z in _inputs(groups, x, self._dropped(x, groups, first)):
            part = group.of(y)
            if group.stacked is not None:
                parameters = self._parameters_of(group, first)
                part = part + _LowRank.apply(z, group.accumulating_in(parameters), *parameters)
            parts.append(part)
        return _joined(parts, groups)

    def _dropped(self, x: Tensor, groups: Sequence[AgentGroup], first: int) -> Tensor | None:
        """The input after dropout of the agents that drop, one after the other; None if no agent drops."""
        dropping = [group for group in groups if group.drops]
        if not dropping:
            return None
        x = x.to(compute_dtype(x))
        own = x if dropping == list(groups) else _joined([group.of(x) for group in dropping], dropping)
        agents = [first + k for group in dropping for k in range(group.first, group.end)]
        return self.dropout.apply(own, self.name, agents, self.reading)

    def _require_all_tokens(self, rows: Tensor) -> None:
        """Refuse rows of agents with spans if they are not all tokens: it is not known whose they are."""
        spans = self.reading.spans
        if spans is None:
            return
        tokens = max(span.stop for span in spans)
        if rows.shape[1] != tokens:
            raise ModelError(
                f"{self.name} reads {rows.shape[1]} of {tokens} tokens: it is not known whose they are",
                where="agents with rows of their own",
                hint="name the layers to adapt by lora_target_modules, or let all agents train on the same rows",
            )

    def _parameters_of(self, group: AgentGroup, first: int) -> list[Tensor]:
        names = [f"agent{k}" for k in range(first + group.first, first + group.end)]
        return [owner[name] for owner in (self.lora_A, self.lora_B) for name in names]


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    assert isinstance(layer, nn.Linear | QuantizedLinear)
    return layer.in_features, layer.out_features
