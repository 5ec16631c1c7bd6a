"""K LoRA agents on one frozen base: one storage, per-agent parameters, PEFT's files.

All trainable numbers of the crowd are in ONE tensor `weights [K, P]`, whose row k is agent k; the gradients are in a
second one. Every module's parameters are views of it. So norms, clipping, reduction, snapshots and the optimizer work
on rows, and an agent whose gradient is None keeps its bits while the others change.

Legend: K agents, P parameters of one agent, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.core.determinism import generator_for
from ci_llm.crowd.lora import LoraSettings, StackedLoRALinear
from ci_llm.crowd.quantized import take_over_products
from ci_llm.crowd.targets import find_targets, shortest_names
from ci_llm.errors import ForeignCheckpoint, ModelError


class AgentStorage:
    """The crowd's trainable numbers and the modules that hold views of them.

    Attributes:
        layers: the adapted modules by their name in the base.
        weights: [K, P], fp32, or fp64 on an fp64 base.
        gradients: [K, P], like `weights`.
        rows: K parameters [P], views of the rows of `weights`, for the optimizer.
    """

    def __init__(self, layers: Mapping[str, StackedLoRALinear], settings: LoraSettings) -> None:
        self.layers = dict(layers)
        self.settings = settings
        first = next(iter(self.layers.values())).base_layer
        # Adapters stay in fp32 over a bf16 or fp16 base, as in PEFT: small updates would round away.
        dtype = torch.float64 if first.weight.dtype == torch.float64 else torch.float32
        size = sum(settings.rank * (m.in_features + m.out_features) for m in self.layers.values())
        device = torch.device(str(first.weight.device))
        try:
            self.weights = torch.zeros(settings.num_agents, size, dtype=dtype, device=device)
            self.gradients = torch.zeros_like(self.weights)
        except (RuntimeError, MemoryError) as error:  # allocators raise nothing narrower; only they run here
            raise _too_many(settings, size * dtype.itemsize) from error
        self._mask: Tensor | None = None
        self._bind_weights()
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

    def _bind_weights(self) -> None:
        """Make the modules' parameters views of `weights`; parameters that exist keep their identity."""
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
        """Copy the parameters into one storage again, after `.to()` gave each a storage of its own."""
        module = next(iter(self.layers.values()))
        example = module.lora_A["agent0"]
        fresh = torch.empty(self.weights.shape, dtype=example.dtype, device=example.device)
        for layer, a, b in self._views(fresh):
            for k in range(self.settings.num_agents):
                a[k].copy_(layer.lora_A[f"agent{k}"])
                b[k].copy_(layer.lora_B[f"agent{k}"])
        self.weights, self.gradients = fresh, torch.zeros_like(fresh)
        self._mask = None
        self._bind_weights()
        # An optimizer may hold these parameters already, so they stay the same objects and only get new data.
        for row, data in zip(self.rows, self.weights, strict=True):
            row.data = data

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw A uniformly as PEFT does (Kaiming, a = √5) and set B to zero.

        Agent k draws from a generator of its own, so that it starts the same whatever K is.
        """
        self.weights.zero_()
        for k in range(self.settings.num_agents):
            agent = k if self.settings.initialize_adapters_rand else 0
            generator = generator_for(self.settings.seed, "adapter", agent)
            for module, a, _ in self._views(self.weights):
                bound = 1 / math.sqrt(module.in_features)
                a[k].copy_(torch.empty(a[k].shape).uniform_(-bound, bound, generator=generator))

    def begin_step(self, step: int) -> None:
        """Zero the gradients, assign them to the parameters, and draw this step's DropConnect masks per agent.

        Args:
            step: the optimizer step, which keys the masks.
        """
        self.gradients.zero_()
        # Backward then accumulates into the views, and the gradients of all agents are in one tensor without a copy.
        for module, a, b in self._views(self.gradients):
            for k in range(self.settings.num_agents):
                module.lora_A[f"agent{k}"].grad, module.lora_B[f"agent{k}"].grad = a[k], b[k]
        for row, grad in zip(self.rows, self.gradients, strict=True):
            row.grad = grad
        if self.settings.dropconnect:
            self._draw_masks(step)

    def _draw_masks(self, step: int) -> None:
        if self._mask is None:
            self._mask = torch.empty_like(self.weights)
            self._bind_masks(self._mask)
        for k, row in enumerate(self._mask):
            generator = generator_for(self.settings.seed, "dropconnect", step, k)
            row.copy_(torch.empty(row.shape).bernoulli_(self._keep, generator=generator) / self._keep)

    def draw_masks_of_pass(self) -> None:
        """Draw DropConnect masks for one forward pass, from the global generator as dropout does.

        This serves loops that never call `begin_step`; after `begin_step`, the masks of that step stay in force.
        """
        if self.settings.dropconnect and self._mask is None:
            # A fresh tensor, because the backward pass of an earlier forward pass may still need the old masks.
            self._bind_masks(torch.empty_like(self.weights).bernoulli_(self._keep).div_(self._keep))

    @property
    def _keep(self) -> float:
        return 1 - self.settings.dropconnect

    def _bind_masks(self, masks: Tensor) -> None:
        for module, a, b in self._views(masks):
            module.masks = (a, b)

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale each agent's gradient to a norm of at most `max_norm`; None leaves the gradients as they are.

        Returns:
            [K] the norms before clipping, on the device; the call does not wait for the device.
        """
        norms: Tensor = torch.linalg.vector_norm(self.gradients, dim=1)
        if max_norm is not None:
            exact = norms.double()  # a factor is then rounded once, when it is cast back
            factors = torch.where(exact > max_norm, max_norm / (exact + 1e-6), 1.0)
            self.gradients.mul_(factors.to(self.gradients.dtype)[:, None])
        return norms

    def leave_out(self, agents: Sequence[int]) -> None:
        """Keep the bits of these agents in the next optimizer step: weight decay and moments would change them even
        with a zero gradient."""
        for k in agents:
            self.rows[k].grad = None

    def agent_tensors(self, k: int) -> dict[str, Tensor]:
        """The tensors of agent k by PEFT's names, as views: the content of `adapter_model.safetensors`."""
        tensors = {}
        for name, module in self.layers.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = module.lora_A[f"agent{k}"].detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = module.lora_B[f"agent{k}"].detach()
        return tensors

    @torch.no_grad()
    def load_agent(self, k: int, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy PEFT tensors into agent k. Names and shapes must be exactly those of the agent.

        Args:
            k: index of the agent.
            tensors: by PEFT's names, see `agent_tensors`.
            where: the source, for the error.

        Raises:
            ForeignCheckpoint: names or shapes differ.
        """
        own = self.agent_tensors(k)
        odd = sorted(set(own) ^ set(tensors)) or sorted(n for n in own if own[n].shape != tensors[n].shape)
        if odd:
            raise ForeignCheckpoint(
                f"agent{k} does not fit: {len(odd)} tensors differ in name or shape, the first is {odd[0]}",
                where=where,
                hint="use the lora_rank, lora_target_modules and model_name it was trained with",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def attach(model: PreTrainedModel, settings: LoraSettings) -> AgentStorage:
    """Freeze `model`, replace its target modules by stacked ones and return their storage, initialised.

    Raises:
        ModelError: `target_modules` matches nothing, or something that is not a linear layer; or memory does not hold
            the agents.
    """
    take_over_products(model)
    model.requires_grad_(False)
    layers = {}
    for name in find_targets(model, settings.target_modules):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layers[name] = StackedLoRALinear(getattr(parent, child), settings, name)
        setattr(parent, child, layers[name])
    storage = AgentStorage(layers, settings)
    storage.initialise()
    return storage


def _too_many(settings: LoraSettings, bytes_each: int) -> ModelError:
    needed = 2 * settings.num_agents * bytes_each
    return ModelError(
        f"{settings.num_agents:,} agents do not fit into memory: weights and gradients take {needed / 1e9:,.1f} GB",
        where=f"num_agents: {settings.num_agents}, lora_rank: {settings.rank}",
        hint="fewer agents, a smaller lora_rank, or fewer lora_target_modules",
    )


def adapter_config(model: PreTrainedModel, settings: LoraSettings, base_name: str) -> dict[str, Any]:
    """`adapter_config.json` as PEFT writes it, so that the folder opens with plain PEFT."""
    from peft import LoraConfig, TaskType

    adapted = {n: m for n, m in model.named_modules() if isinstance(m, StackedLoRALinear)}
    conv = any(isinstance(m.base_layer, Conv1D) for m in adapted.values())
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
        target_modules=list(shortest_names(model, adapted.keys())),
    ).to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    return {k: v for k, v in plain.items() if v is not None}
