"""One frozen linear layer with K low-rank adapters: their settings, the module and its autograd Functions.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Rank-stabilised scaling: Kalajdzievski,
"A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.

Legend: K agents, N rows of activations per agent, r rank, in and out features. x, z [K, N, in], h [K, N, r],
A [K, r, in], B [K, out, r], W [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ci_llm.crowd.input_dropout import InputDropout
from ci_llm.crowd.quantized import QuantizedLinear
from ci_llm.errors import BadInput, ModelError


@dataclass(frozen=True)
class AgentLora:
    """One agent as `LoraSettings.of` gives it: the common settings with its own instead.

    Attributes:
        seed, index: key everything random of the agent. An agent with a seed of its own has index 0, wherever it
            stands; the others have the common seed and their place.
    """

    rank: int
    alpha: float
    dropout: float
    dropconnect: float
    target_modules: str | tuple[str, ...]
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
        num_agents: K; with `agents` it is their number.
        rank: r of each adapter.
        alpha: see `AgentLora.scaling`.
        dropout: probability of dropping an input of an adapter.
        dropconnect: probability of dropping a weight of an adapter.
        target_modules: "all-linear", a regular expression, or suffixes of module names.
        use_rslora: see `AgentLora.scaling`.
        initialize_adapters_rand: every agent draws its own start; otherwise all start as agent 0.
        seed: of the start and of the DropConnect masks.
        agents: for each agent what it has of its own: any of rank, alpha, dropout, dropconnect, target_modules,
            use_rslora, seed. Every agent then draws its dropout from a generator of its own.
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
    agents: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.agents:
            object.__setattr__(self, "num_agents", len(self.agents))
        if odd := sorted({key for own in self.agents for key in own} - OWN):
            raise BadInput(
                f"an agent has no {odd[0]} of its own",
                where="LoraSettings(agents=...)",
                hint=f"{', '.join(sorted(OWN))}",
            )

    def of(self, agent: int) -> AgentLora:
        """The settings of one agent."""
        own = self.agents[agent] if self.agents else {}
        values = {key: own.get(key, getattr(self, key)) for key in OWN}
        return AgentLora(**values, index=0 if "seed" in own else agent)

    def each(self) -> list[AgentLora]:
        """The settings of every agent."""
        return [self.of(k) for k in range(self.num_agents)]

    def kinds(self) -> list[AgentLora]:
        """The settings of every agent, or of the first if all are like it."""
        return self.each() if self.agents else [self.of(0)]

    def told(self, key: str) -> Any:
        """The value of `key` as a message says it: one for all agents, or the list of theirs where they differ."""
        values = [list(value) if isinstance(value := getattr(agent, key), tuple) else value for agent in self.kinds()]
        return values[0] if all(value == values[0] for value in values) else values

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ci_llm_meta_config.json holds them; without `agents` where none has settings of its own."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "agents"}
        own = {"agents": [_plain(agent) for agent in self.agents]} if self.agents else {}
        return _plain(values) | own

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoraSettings:
        """The inverse of `to_dict`."""
        agents = tuple(_tupled(agent) for agent in values.get("agents", ()))
        return cls(**{**_tupled(values), "agents": agents})


#: What an agent may have of its own.
OWN: Final = frozenset(field.name for field in fields(AgentLora)) - {"index"}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _tupled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


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
        tokens: of the only agent, in an input [1, N, in] of agents with rows of their own; else None.
    """

    first: int
    end: int
    scaling: float = 1.0
    drops: bool = False
    stacked: tuple[Tensor, Tensor] | None = None
    masks: tuple[Tensor, Tensor] | None = None
    tokens: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor` [K, ...] that belongs to these agents, or that of [1, N, ...] with their tokens."""
        return tensor[self.first : self.end] if self.tokens is None else tensor[:, self.tokens]

    def only(self, agent: int) -> AgentGroup:
        """The same for one of its agents, as the first and only one of a crowd."""
        part = slice(agent - self.first, agent - self.first + 1)
        stacked, masks = (pair and (pair[0][part], pair[1][part]) for pair in (self.stacked, self.masks))
        return replace(self, first=0, end=1, stacked=stacked, masks=masks)

    def on(self, spans: Sequence[slice]) -> Iterator[AgentGroup]:
        """Each of these agents by itself, if it has tokens in an input whose agents have rows of their own."""
        for k in range(self.first, self.end):
            if spans[k].start < spans[k].stop:
                yield replace(self.only(k), first=k, end=k + 1, tokens=spans[k])

    def at_rest(self) -> AgentGroup:
        """The same without dropout and DropConnect."""
        return replace(self, masks=None, drops=False) if self.drops or self.masks else self

    def effective(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and B with this step's DropConnect masks, in the dtype of the computation."""
        assert self.stacked is not None
        a, b = self.stacked
        if self.masks is not None:
            a, b = a * self.masks[0], b * self.masks[1]
        return a.to(dtype), b.to(dtype)

    def parameter_gradients(self, grad_a: Tensor, grad_b: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The gradients in the order of the parameters: A of every agent, then B of every agent."""
        grad_a, grad_b = grad_a.to(dtype), grad_b.to(dtype)
        if self.masks is not None:
            grad_a, grad_b = grad_a * self.masks[0], grad_b * self.masks[1]
        return (*grad_a.unbind(0), *grad_b.unbind(0))


class _FusedLinear(torch.autograd.Function):
    """y[k] = x[k] Wᵀ + b + s (z[k] A[k]ᵀ) B[k]ᵀ with W frozen; z is x, or x after dropout.

    It keeps only z and the rank-r product h = z Aᵀ for the backward pass. A quantised W is dequantised once per pass
    for all agents, and again in the backward pass. It computes in the dtype of x; the gradients of A and B have the
    dtype of A and B.

    `parameters` are the same numbers as the groups hold: of each group A agent by agent, then B agent by agent. They
    are arguments because autograd routes gradients to arguments, and the gradients are returned for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor | QuantizedLinear,
        bias: Tensor | None,
        groups: Sequence[AgentGroup],
        *parameters: Tensor,
    ) -> Tensor:
        agents, rows, width = x.shape
        # One product with W for the rows of all agents: this is where the fused pass saves time.
        y = nn.functional.linear(x.reshape(agents * rows, width), _dense(weight, x.dtype), bias).view(agents, rows, -1)
        kept = []
        for group in groups:
            a, b = group.effective(x.dtype)
            h = torch.bmm(group.of(_input(group, x, dropped)), a.mT)
            # In place, because y is the largest tensor here and autograd does not need its value before the sum.
            group.of(y).baddbmm_(h, b.transpose(1, 2), alpha=group.scaling)
            kept += [a, b, h]
        plain = x if any(not group.drops for group in groups) else None
        quantized = isinstance(weight, QuantizedLinear)
        ctx.save_for_backward(plain, dropped, None if quantized else weight, *kept)
        ctx.quantized = weight if quantized else None
        ctx.groups, ctx.dtype = groups, parameters[0].dtype if parameters else None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, dropped, weight, *kept = ctx.saved_tensors
        agents, rows, _ = grad.shape
        grad = grad.contiguous()
        grad_x, grads_z = None, []
        if ctx.needs_input_grad[0]:
            weight = _dense(ctx.quantized or weight, grad.dtype)
            grad_x = torch.mm(grad.view(agents * rows, -1), weight).view(agents, rows, -1)
        gradients: list[Tensor] = []
        for number, group in enumerate(ctx.groups):
            a, b, h = kept[3 * number : 3 * number + 3]
            z = group.of(_input(group, x, dropped))
            grad_a, grad_b, grad_h = _low_rank_gradients(group.of(grad), z, b, h, group.scaling)
            # Without dropout z is x, so both parts of the gradient belong to the same input.
            if group.drops:
                grads_z.append((group, torch.bmm(grad_h, a)))
            elif grad_x is not None:
                group.of(grad_x).baddbmm_(grad_h, a)
            gradients += group.parameter_gradients(grad_a, grad_b, ctx.dtype)
        return grad_x, _joined(grads_z, dropped), None, None, None, *gradients


class _LowRank(torch.autograd.Function):
    """s (z[k] A[k]ᵀ) B[k]ᵀ alone, for base layers that are no plain nn.Linear such as Conv1D; z is a group's."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, group: AgentGroup, *parameters: Tensor) -> Tensor:
        a, b = group.effective(z.dtype)
        h = torch.bmm(z, a.mT)
        ctx.save_for_backward(z, a, b, h)
        ctx.group, ctx.dtype = group, parameters[0].dtype
        return torch.bmm(h, b.transpose(1, 2)).mul_(group.scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, a, b, h = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a, grad_b, grad_h = _low_rank_gradients(grad, z, b, h, ctx.group.scaling)
        grad_z = torch.bmm(grad_h, a) if ctx.needs_input_grad[0] else None
        return grad_z, None, *ctx.group.parameter_gradients(grad_a, grad_b, ctx.dtype)


def _dense(weight: Tensor | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)


def _input(group: AgentGroup, x: Tensor, dropped: Tensor | None) -> Tensor:
    return x if dropped is None or not group.drops else dropped


def _joined(parts: Sequence[tuple[AgentGroup, Tensor]], like: Tensor | None) -> Tensor | None:
    """The parts of some groups in one tensor like `like` [K, N, in], which is 0 for all other agents."""
    if like is None or (len(parts) == 1 and parts[0][1].shape == like.shape):
        return parts[0][1] if parts else None
    whole = torch.zeros_like(like)
    for group, part in parts:
        group.of(whole).copy_(part)
    return whole


def _low_rank_gradients(grad: Tensor, z: Tensor, b: Tensor, h: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """Gradients of A [K, r, in], B [K, out, r] and h [K, N, r], where h = z Aᵀ and the output is s h Bᵀ."""
    # The longer dimension is the last one, in memory as well: MKL is up to four times slower otherwise.
    grad_h = torch.bmm(grad, b.mT.contiguous().mT).mul_(scaling)
    grad_b = torch.bmm(h.mT, grad).mul_(scaling).mT
    return torch.bmm(grad_h.mT, z), grad_b, grad_h


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
    """A frozen linear layer with a low-rank adapter for each of K agents, or for some of them.

    Input [K·B, ..., in], agent-major (all rows of agent 0 first); output [K·B, ..., out].

    Args:
        base_layer: the frozen layer.
        num_agents: K.
        dropout: of the adapters' inputs.
        name: of the layer in the base, for messages.

    Attributes:
        lora_A, lora_B: parameters `agent<k>` [r, in] and [out, r], views of the crowd's storage.
        groups: the same numbers, stacked where neighbours have one shape; together they cover all agents.
        active_agent: the agent to which all rows of the input belong; None: the input holds the rows of all K agents.
        spans: [K] the tokens of each agent in an input [1, N, in] of agents with rows of their own; else None.
    """

    def __init__(self, base_layer: nn.Module, num_agents: int, dropout: InputDropout, name: str) -> None:
        super().__init__()
        self.name = name
        self.base_layer = base_layer
        self.num_agents, self.dropout = num_agents, dropout
        self.in_features, self.out_features = _features(base_layer)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.groups: tuple[AgentGroup, ...] = ()
        self.active_agent: int | None = None
        self.spans: Sequence[slice] | None = None

    @property
    def weight(self) -> _WeightMetadata:
        return _WeightMetadata(self.base_layer.weight, self.name)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]  # the same with and without agents

    def forward(self, x: Tensor) -> Tensor:
        first, agents, groups = 0, self.num_agents, self.groups
        if self.active_agent is not None:
            # One agent keeps a leading dimension of 1, so that the code below serves it as it serves K.
            first, agents = self.active_agent, 1
            groups = tuple(group.only(first) for group in groups if group.first <= first < group.end)
        elif self.spans is not None:
            agents, groups = 1, tuple(own for group in groups for own in group.on(self.spans))
        if not self.training:
            groups = tuple(group.at_rest() for group in groups)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        rows = x.to(dtype).reshape(agents, -1, self.in_features)
        drops = any(group.drops for group in groups)
        self._require_all_tokens(rows)
        dropped = self.dropout.apply(rows, self.name, first, self.spans) if drops else None
        y = self._apply_both(rows, dropped, groups, first)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply_both(self, x: Tensor, dropped: Tensor | None, groups: Sequence[AgentGroup], first: int) -> Tensor:
        base = self.base_layer
        if type(base) is nn.Linear or isinstance(base, QuantizedLinear):
            bias = None if base.bias is None else base.bias.to(x.dtype)
            weight = base if isinstance(base, QuantizedLinear) else base.weight.to(x.dtype)
            adapted = [group for group in groups if group.stacked is not None]
            parameters = [each for group in adapted for each in self._parameters_of(group, first)]
            return _FusedLinear.apply(x, dropped, weight, bias, adapted, *parameters)  # type: ignore[no-any-return]
        # Autocast, if it is on, casts the base's weights; `_LowRank` casts the adapters to the dtype of its input.
        y = base(x)
        parts = []
        for group in groups:
            part = group.of(y)
            if group.stacked is not None:
                z = group.of(_input(group, x, dropped))
                part = part + _LowRank.apply(z, group, *self._parameters_of(group, first))
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=int(self.spans is not None))

    def _require_all_tokens(self, rows: Tensor) -> None:
        """A layer that reads other tokens than all of them cannot tell whose they are."""
        if self.spans is not None and rows.shape[1] != (tokens := max(span.stop for span in self.spans)):
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
