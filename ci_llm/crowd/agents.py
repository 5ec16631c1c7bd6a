"""K LoRA agents on one frozen base: one storage, per-agent parameters, one fused pass, PEFT's files.

All trainable numbers of the crowd live in ONE tensor `weights [K, P]`, row k being agent k; the gradients in one more.
Every module's parameters are views into it, so that norms, clipping, reduction, snapshots and the optimizer work on
rows, and an agent whose gradient is None keeps its bits while the others move.

Legend: K agents, P parameters of one agent, N rows of activations per agent, r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.errors import ForeignCheckpoint, ModelError
from ci_llm.rng import generator_for


@dataclass(frozen=True)
class LoraSettings:
    """What every agent looks like, in PEFT's words."""

    num_agents: int = 4
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    dropconnect: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    initialize_adapters_rand: bool = True
    seed: int = 42

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class _FusedLinear(torch.autograd.Function):
    """y[k] = x[k] Wᵀ + b + s (z[k] A[k]ᵀ) B[k]ᵀ with W frozen; z is x, or x after dropout.

    Saves x and the rank-r product only. Works in the dtype of x; gradients come back in the dtype of A and B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        scaling: float,
        *parameters: Tensor,
    ) -> Tensor:
        agents, rows, width = x.shape
        a, b = _effective(stacked, masks, x.dtype)
        z = x if dropped is None else dropped
        h = torch.bmm(z, a.mT)
        y = nn.functional.linear(x.reshape(agents * rows, width), weight, bias)
        y = y.view(agents, rows, -1).baddbmm_(h, b.transpose(1, 2), alpha=scaling)
        ctx.save_for_backward(z, weight, a, b, h)
        ctx.scaling, ctx.masks, ctx.dropped, ctx.dtype = (
            scaling,
            masks,
            dropped is not None,
            parameters[0].dtype,
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, a, b, h = ctx.saved_tensors
        agents, rows, _ = grad.shape
        grad = grad.contiguous()
        grad_a, grad_b, grad_h = _low_rank_gradients(grad, z, b, h, ctx.scaling)
        grad_x = grad_z = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad.view(agents * rows, -1), weight).view(agents, rows, -1)
        if ctx.dropped:
            grad_z = torch.bmm(grad_h, a)
        elif grad_x is not None:
            grad_x.baddbmm_(grad_h, a)
        return grad_x, grad_z, None, None, None, None, None, *_per_agent(ctx, grad_a, grad_b)


class _LowRank(torch.autograd.Function):
    """s (z[k] A[k]ᵀ) B[k]ᵀ alone, for bases that are not a plain nn.Linear (Conv1D, quantised)."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        scaling: float,
        *parameters: Tensor,
    ) -> Tensor:
        a, b = _effective(stacked, masks, z.dtype)
        h = torch.bmm(z, a.mT)
        ctx.save_for_backward(z, a, b, h)
        ctx.scaling, ctx.masks, ctx.dtype = scaling, masks, parameters[0].dtype
        return torch.bmm(h, b.transpose(1, 2)).mul_(scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, a, b, h = ctx.saved_tensors
        grad = grad.contiguous()
        grad_a, grad_b, grad_h = _low_rank_gradients(grad, z, b, h, ctx.scaling)
        grad_z = torch.bmm(grad_h, a) if ctx.needs_input_grad[0] else None
        return grad_z, None, None, None, *_per_agent(ctx, grad_a, grad_b)


def _effective(
    stacked: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    a, b = stacked
    if masks is not None:
        a, b = a * masks[0], b * masks[1]
    return a.to(dtype), b.to(dtype)


def _low_rank_gradients(grad: Tensor, z: Tensor, b: Tensor, h: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """Gradients of A and B and of h = z Aᵀ, of s h Bᵀ."""
    # The long side last, in memory as well: MKL is up to four times slower the other way round.
    grad_h = torch.bmm(grad, b.mT.contiguous().mT).mul_(scaling)
    grad_b = torch.bmm(h.mT, grad).mul_(scaling).mT
    return torch.bmm(grad_h.mT, z), grad_b, grad_h


def _per_agent(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, ...]:
    grad_a, grad_b = grad_a.to(ctx.dtype), grad_b.to(ctx.dtype)
    if ctx.masks is not None:
        grad_a, grad_b = grad_a * ctx.masks[0], grad_b * ctx.masks[1]
    return (*grad_a.unbind(0), *grad_b.unbind(0))


class StackedLoRALinear(nn.Module):
    """A frozen linear layer with K low-rank adapters, one per agent.

    Input [K·B, ..., in], agent-major (all rows of agent 0 first); output [K·B, ..., out]. With `solo` set to k, all
    rows belong to agent k. The module's parameters `lora_A.agent<k> [r, in]` and `lora_B.agent<k> [out, r]` are views
    into the crowd's storage; `stacked` are the same numbers as [K, r, in] and [K, out, r].
    """

    def __init__(self, base_layer: nn.Module, settings: LoraSettings) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.settings = settings
        self.in_features, self.out_features = _features(base_layer)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.stacked: tuple[Tensor, Tensor] | None = None
        self.masks: tuple[Tensor, Tensor] | None = None
        self.solo: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.stacked is not None
        stacked, masks = self.stacked, self.masks if self.training else None
        parameters = (*self.lora_A.values(), *self.lora_B.values())
        if self.solo is not None:
            k, agents = self.solo, self.settings.num_agents
            stacked = (stacked[0][k : k + 1], stacked[1][k : k + 1])
            masks = None if masks is None else (masks[0][k : k + 1], masks[1][k : k + 1])
            parameters = (parameters[k], parameters[agents + k])
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        rows = x.to(dtype).reshape(stacked[0].shape[0], -1, self.in_features)
        dropout = self.settings.dropout if self.training else 0.0
        dropped = nn.functional.dropout(rows, dropout) if dropout else None
        with torch.autocast(x.device.type, enabled=False):
            y = self._apply_both(rows, dropped, stacked, masks, parameters)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply_both(
        self,
        x: Tensor,
        dropped: Tensor | None,
        stacked: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor] | None,
        parameters: tuple[Tensor, ...],
    ) -> Tensor:
        base, scaling = self.base_layer, self.settings.scaling
        if type(base) is nn.Linear:
            bias = None if base.bias is None else base.bias.to(x.dtype)
            weight = base.weight.to(x.dtype)
            return _FusedLinear.apply(x, dropped, weight, bias, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]
        z = x if dropped is None else dropped
        return base(x) + _LowRank.apply(z, stacked, masks, scaling, *parameters)  # type: ignore[no-any-return]


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features


class AgentStorage:
    """The crowd's trainable numbers, `weights [K, P]` and `gradients [K, P]`, and the modules that look into them."""

    def __init__(self, layers: Mapping[str, StackedLoRALinear], settings: LoraSettings) -> None:
        self.layers = dict(layers)
        self.settings = settings
        first = next(iter(self.layers.values())).base_layer
        # Adapters stay in fp32 over a bf16 or fp16 base, as in PEFT: small updates would round away.
        dtype = torch.float64 if first.weight.dtype == torch.float64 else torch.float32
        size = sum(settings.rank * (m.in_features + m.out_features) for m in self.layers.values())
        device = torch.device(str(first.weight.device))
        self.weights = torch.zeros(settings.num_agents, size, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.weights)
        self._mask: Tensor | None = None
        self._name_views()
        self.rows = [nn.Parameter(row) for row in self.weights]

    def _views(self, storage: Tensor) -> Iterator[tuple[StackedLoRALinear, Tensor, Tensor]]:
        """(module, A [K, r, in], B [K, out, r]) for every module, in order, as views of `storage [K, P]`."""
        start, k, r = 0, self.settings.num_agents, self.settings.rank
        for module in self.layers.values():
            middle = start + r * module.in_features
            end = middle + module.out_features * r
            yield (
                module,
                storage[:, start:middle].view(k, r, module.in_features),
                storage[:, middle:end].view(k, module.out_features, r),
            )
            start = end

    def _name_views(self) -> None:
        for module, a, b in self._views(self.weights):
            module.stacked = (a, b)
            for k in range(self.settings.num_agents):
                for owner, stacked in ((module.lora_A, a), (module.lora_B, b)):
                    name = f"agent{k}"
                    if name in owner:
                        owner[name].data = stacked[k]
                    else:
                        owner[name] = nn.Parameter(stacked[k])

    @torch.no_grad()
    def restack(self) -> None:
        """Gather the parameters into one storage again, after `.to()` gave each a storage of its own."""
        module = next(iter(self.layers.values()))
        example = module.lora_A["agent0"]
        fresh = torch.empty(self.weights.shape, dtype=example.dtype, device=example.device)
        for layer, a, b in self._views(fresh):
            for k in range(self.settings.num_agents):
                a[k].copy_(layer.lora_A[f"agent{k}"])
                b[k].copy_(layer.lora_B[f"agent{k}"])
        self.weights, self.gradients = fresh, torch.zeros_like(fresh)
        self._mask = None
        self._name_views()
        for row, data in zip(self.rows, self.weights, strict=True):
            row.data = data

    @torch.no_grad()
    def initialise(self) -> None:
        """A uniform as in PEFT (kaiming, a = √5), B zero; agent k draws from its own generator, whatever K is."""
        self.weights.zero_()
        for k in range(self.settings.num_agents):
            agent = k if self.settings.initialize_adapters_rand else 0
            generator = generator_for(self.settings.seed, "adapter", agent)
            for module, a, _ in self._views(self.weights):
                bound = 1 / math.sqrt(module.in_features)
                a[k].copy_(torch.empty(a[k].shape).uniform_(-bound, bound, generator=generator))

    def begin_step(self, step: int) -> None:
        """Zero the gradients, hang them into the parameters, and draw this step's DropConnect masks per agent."""
        self.gradients.zero_()
        for module, a, b in self._views(self.gradients):
            for k in range(self.settings.num_agents):
                module.lora_A[f"agent{k}"].grad, module.lora_B[f"agent{k}"].grad = a[k], b[k]
        for row, grad in zip(self.rows, self.gradients, strict=True):
            row.grad = grad
        if self.settings.dropconnect:
            self._draw_masks(step)

    def _draw_masks(self, step: int) -> None:
        keep = 1 - self.settings.dropconnect
        if self._mask is None:
            self._mask = torch.empty_like(self.weights)
            for module, a, b in self._views(self._mask):
                module.masks = (a, b)
        for k, row in enumerate(self._mask):
            generator = generator_for(self.settings.seed, "dropconnect", step, k)
            row.copy_(torch.empty(row.shape).bernoulli_(keep, generator=generator) / keep)

    def clip(self, norms: Sequence[float], max_norm: float | None) -> list[int]:
        """Scale each agent's gradient to at most `max_norm`; an agent with a non-finite norm gets None.

        Returns:
            the agents that were left out.
        """
        sick = []
        for k, norm in enumerate(norms):
            if not math.isfinite(norm):
                self.rows[k].grad = None
                sick.append(k)
            elif max_norm and norm > max_norm:
                self.gradients[k].mul_(max_norm / (norm + 1e-6))
        return sick

    def agent_tensors(self, k: int) -> dict[str, Tensor]:
        """Agent k under PEFT's names, as views: what `adapter_model.safetensors` holds."""
        tensors = {}
        for name, module in self.layers.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = module.lora_A[f"agent{k}"].detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = module.lora_B[f"agent{k}"].detach()
        return tensors

    @torch.no_grad()
    def load_agent(self, k: int, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy PEFT tensors into agent k; every tensor must be there, with its shape, and no other.

        Raises:
            ForeignCheckpoint: names or shapes differ.
        """
        own = self.agent_tensors(k)
        odd = sorted(set(own) ^ set(tensors)) or sorted(n for n in own if own[n].shape != tensors[n].shape)
        if odd:
            raise ForeignCheckpoint(
                f"agent{k} does not fit: {len(odd)} tensors differ in name or shape, the first is {odd[0]}",
                where=where,
                cure="use the lora_rank, lora_target_modules and model_name it was trained with",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def attach(model: PreTrainedModel, settings: LoraSettings) -> AgentStorage:
    """Freeze `model`, replace its target modules by stacked ones and return their storage, initialised.

    Raises:
        ModelError: `target_modules` matches nothing, or something that is not a linear layer.
    """
    model.requires_grad_(False)
    layers = {}
    for name in _targets(model, settings.target_modules):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layers[name] = StackedLoRALinear(getattr(parent, child), settings)
        setattr(parent, child, layers[name])
    storage = AgentStorage(layers, settings)
    storage.initialise()
    return storage


def _targets(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> list[str]:
    """Names of the modules to adapt, by PEFT's rules: a list of suffixes, a regular expression, or all-linear."""
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    matches: Callable[[str], bool]
    if wanted == "all-linear":
        return [n for n, m in linear.items() if m is not head]
    if isinstance(wanted, str):
        pattern = re.compile(wanted)
        matches = lambda name: pattern.fullmatch(name) is not None  # noqa: E731
    else:
        matches = lambda name: any(name == w or name.endswith(f".{w}") for w in wanted)  # noqa: E731
    found = [n for n, _ in model.named_modules() if matches(n)]
    odd = [n for n in found if n not in linear or linear[n] is head]
    if odd or not found:
        offered = sorted({n.rpartition(".")[2] for n, m in linear.items() if m is not head})
        problem = f"matches {odd[0]}, which cannot carry an adapter" if odd else "matches nothing in this model"
        raise ModelError(
            f"lora_target_modules {problem}",
            where=f"lora_target_modules: {wanted if isinstance(wanted, str) else list(wanted)}",
            cure=f"choose from {', '.join(offered)}, or all-linear",
        )
    return found


def adapter_config(model: PreTrainedModel, settings: LoraSettings, base_name: str) -> dict[str, Any]:
    """`adapter_config.json` as PEFT writes it, so that the folder opens with plain PEFT."""
    from peft import LoraConfig, TaskType

    targets = settings.target_modules
    conv = any(isinstance(m.base_layer, Conv1D) for m in model.modules() if isinstance(m, StackedLoRALinear))
    bias: Literal["none"] = "none"
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_name,
        inference_mode=True,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.use_rslora,
        fan_in_fan_out=conv,
        bias=bias,
        target_modules=targets if isinstance(targets, str) else list(targets),
    ).to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    return {k: v for k, v in plain.items() if v is not None}
