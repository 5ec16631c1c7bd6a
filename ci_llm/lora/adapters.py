"""The storage of K LoRA agents on one frozen base: one tensor of all trainable numbers, with a row per agent.

Row k of `weights [K, P]` is agent k, and a second tensor holds the gradients. The parameters of every module are views
of these rows. So norms, clipping, reduction, snapshots and the optimizer work on rows, and an agent whose gradient is
None keeps its bits while the others change. The DropConnect masks lie beside the weights (`DropConnect`).
`attach` puts the agents on a base. The agents' files are PEFT's.

Legend: K agents, P parameters of the largest agent, r rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.base.load import on_same_weights
from ci_llm.base.quantized import replace_quantized_layers
from ci_llm.base.targets import find_targets, peft_targets
from ci_llm.core.determinism import generator_for
from ci_llm.errors import ForeignCheckpoint, ModelError
from ci_llm.lora.heads import SCORE, HeadShape, head_values, with_score
from ci_llm.lora.layer import AgentGroup, AgentLora, Casts, InputDropout, LoraSettings, Reading, StackedLoRALinear

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


class DropConnect:
    """The DropConnect masks in force; each agent's generators are keyed by its seed, index and the step.

    They do not change the weights themselves, which a save may read at any moment. A training pass computes with
    `weights * masks`.

    Args:
        weights: [K, P] the weights of the storage.
        sizes: [K] how many trainable numbers each agent has; the rest of its row is padding.
        on_new_memory: called when the masks get new memory, before anything is drawn into it.
        num_whole: how many numbers at the end of each agent no mask drops.

    Attributes:
        masks: [K, P] 0 where a weight is dropped, and 1 / (1 - share) elsewhere; None if no weight is dropped.
    """

    def __init__(
        self,
        settings: LoraSettings,
        weights: Tensor,
        sizes: Sequence[int],
        on_new_memory: Callable[[], None],
        num_whole: int = 0,
    ) -> None:
        self._settings, self._weights, self._sizes, self._num_whole = settings, weights, sizes, num_whole
        self._each, self._on_new_memory = settings.each(), on_new_memory
        self._masks_of_step = False
        self.masks: Tensor | None = None

    def draw_masks(self, step: int) -> None:
        """Draw the DropConnect masks of a step, if any agent drops weights."""
        if not self._drops:
            return
        if self.masks is None or not self._masks_of_step:
            self.masks, self._masks_of_step = torch.ones_like(self._weights), True
            self._on_new_memory()
        for agent, row in zip(self._each, self._own(self.masks), strict=True):
            if agent.dropconnect:
                keep = 1 - agent.dropconnect
                generator = generator_for(agent.seed, "dropconnect", step, agent.index, device=row.device)
                row.copy_(torch.empty(row.shape, device=row.device).bernoulli_(keep, generator=generator) / keep)
                row[len(row) - self._num_whole :] = 1

    def draw_masks_of_pass(self) -> None:
        """Draw the masks of one pass from the global generator, as dropout does, unless those of a step are in force.

        Loops that never call `AgentStorage.begin_step` get their masks here. New masks get new memory, because the
        backward pass of an earlier pass may need the old ones.
        """
        if not self._drops or self._masks_of_step:
            return
        self.masks = torch.ones_like(self._weights)
        # Agents without settings of their own draw together.
        own = self._own(self.masks) if self._settings.agents else [self.masks]
        for agent, part in zip(self._settings.kinds(), own, strict=True):
            part.bernoulli_(1 - agent.dropconnect).div_(1 - agent.dropconnect)
            part[..., part.shape[-1] - self._num_whole :] = 1
        self._on_new_memory()

    def applied(self, agents: slice) -> Tensor | None:
        """A copy of these agents' rows with the masks applied; None if there are none."""
        return None if self.masks is None else self._weights[agents] * self.masks[agents]

    @property
    def _drops(self) -> bool:
        return any(agent.dropconnect for agent in self._each)

    def _own(self, storage: Tensor) -> list[Tensor]:
        return [row[:size] for row, size in zip(storage, self._sizes, strict=True)]


class AgentStorage:
    """The crowd's trainable numbers and the modules that hold views of them.

    Each row holds one agent's numbers module by module, in the layout of an agent alone. Rows of smaller agents end in
    padding, which belongs to no parameter: gradients, moments, weight decay and clipping do not reach it.

    Attributes:
        layers: the adapted modules by their name in the base.
        dropout: the dropout of the modules' inputs.
        casts: the casts of the current pass.
        reading: whose tokens the modules' inputs hold.
        pass_per_agent: whether every agent takes passes of its own. All operations then have the shapes that they have
            for an agent alone, and so the agent has the bits that it has alone.
        each: the settings of every agent.
        drawn: the DropConnect masks of training.
        weights: [K, P], fp32, or fp64 on an fp64 base.
        gradients: [K, P], like `weights`.
        sizes: [K] how many trainable numbers each agent has.
        rows: K parameters [sizes[k]], views of the rows of `weights`, for the optimizer.
        head: the shape of the agents' heads.
        heads: each agent's head, a parameter [n, D]; empty if agents have no heads.
    """

    def __init__(
        self,
        layers: Mapping[str, StackedLoRALinear],
        settings: LoraSettings,
        dropout: InputDropout,
        casts: Casts,
        reading: Reading,
        adapted: Sequence[Collection[str]],
        head: HeadShape,
    ) -> None:
        self.layers, self.settings, self.head = dict(layers), settings, head
        self.heads = nn.ParameterDict()
        self.dropout, self.casts, self.reading = dropout, casts, reading
        self.pass_per_agent = False
        sizes = [self._size_of(agent, names) for agent, names in zip(settings.kinds(), adapted, strict=True)]
        first = next(iter(self.layers.values())).base_layer
        # Adapters stay in fp32 over a bf16 or fp16 base, as in PEFT: small updates would round away.
        dtype = torch.float64 if first.weight.dtype == torch.float64 else torch.float32
        device = torch.device(str(first.weight.device))
        try:
            self.weights = torch.zeros(settings.num_agents, max(sizes), dtype=dtype, device=device)
            self.gradients = torch.zeros_like(self.weights)
        except (RuntimeError, MemoryError) as error:  # allocators raise nothing narrower; only they run here
            raise _too_many(settings, max(sizes) * dtype.itemsize) from error
        repeats = settings.num_agents // len(sizes)  # agents without settings of their own are all of one kind
        self.each, self.sizes = settings.each(), sizes * repeats
        self._adapted = [frozenset(names) for names in adapted] * repeats
        self.drawn = self._draws()
        self._known_limits: tuple[tuple[float | None, ...], Tensor] | None = None
        self._bind_weights()
        self.rows = [nn.Parameter(row) for row in self._own(self.weights)]
        self._gradient_views = self._views_of_gradients()

    def _size_of(self, agent: AgentLora, adapted: Iterable[str]) -> int:
        widths = sum(self.layers[name].in_features + self.layers[name].out_features for name in adapted)
        return agent.rank * widths + self.head.size

    def _draws(self) -> DropConnect:
        return DropConnect(self.settings, self.weights, self.sizes, self._bind_groups, self.head.size)

    def _head(self, storage: Tensor, k: int) -> Tensor:
        """The head [n, D] of agent k, a view of the end of its row in `storage`."""
        end = self.sizes[k]
        return storage[k, end - self.head.size : end].view(self.head.outputs, -1)

    def _heads(self) -> list[int]:
        """The numbers of the agents with a head: all, or none."""
        return [*range(self.settings.num_agents)] if self.head.size else []

    def values(self, states: Tensor, first: int) -> Tensor:
        """What the heads of k agents compute for rows.

        Args:
            states: [k, R, D] the states of the rows' last tokens.
            first: the number of the first of these agents.

        Returns:
            [k, R, n]
        """
        return head_values(states, [self.heads[f"agent{first + at}"] for at in range(len(states))])

    def _own(self, storage: Tensor) -> list[Tensor]:
        """The rows of `storage` [K, P] without their padding."""
        return [row[:size] for row, size in zip(storage, self.sizes, strict=True)]

    def _places(self, k: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield (name, start, middle, end) for each module of agent k: its A lies at start to middle, its B behind."""
        start, rank = 0, self.each[k].rank
        for name in self.adapted_by(k):
            middle = start + rank * self.layers[name].in_features
            end = middle + rank * self.layers[name].out_features
            yield name, start, middle, end
            start = end

    def _views(self, storage: Tensor, k: int) -> Iterator[tuple[StackedLoRALinear, Tensor, Tensor]]:
        """(module, A [r, in], B [out, r]) for each module that agent k adapts; A and B are views of `storage`."""
        row, rank = storage[k], self.each[k].rank
        for name, start, middle, end in self._places(k):
            yield self.layers[name], row[start:middle].view(rank, -1), row[middle:end].view(-1, rank)

    def _alike(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) for each group of neighbouring agents whose adapters have one shape in every module."""
        kinds = [(a.rank, a.scaling, a.dropout > 0, own) for a, own in zip(self.each, self._adapted, strict=True)]
        end = 0
        for _, members in groupby(kinds):
            first, end = end, end + len(list(members))
            yield first, end

    def _bind_groups(self) -> None:
        """Give every module its groups, which hold views of the weights and of the masks in force."""
        groups: dict[str, list[AgentGroup]] = {name: [] for name in self.layers}
        for first, end in self._alike():
            adapters = {name: self._group(first, end, *place) for name, *place in self._places(first)}
            for name, found in groups.items():
                found.append(adapters.get(name, AgentGroup(first, end)))
        for name, module in self.layers.items():
            module.groups = tuple(groups[name])

    def _group(self, first: int, end: int, start: int, middle: int, stop: int) -> AgentGroup:
        """The group of agents `first` to `end - 1` on a module, whose place in the rows is as in `_places`."""
        agent, n = self.each[first], end - first

        def stacked(storage: Tensor) -> tuple[Tensor, Tensor]:
            a, b = storage[first:end, start:middle], storage[first:end, middle:stop]
            return a.view(n, agent.rank, -1), b.view(n, -1, agent.rank)

        masks = None if self.drawn.masks is None else stacked(self.drawn.masks)
        own = (stacked(self.weights), masks, self.casts, stacked(self.gradients))
        return AgentGroup(first, end, agent.scaling, agent.dropout > 0, *own)

    def _bind_weights(self) -> None:
        """Make the modules' parameters views of `weights`; parameters that exist keep their identity."""
        self.reading.in_storage = False
        self._bind_groups()
        for k in range(self.settings.num_agents):
            for module, a, b in self._views(self.weights, k):
                for owner, view in ((module.lora_A, a), (module.lora_B, b)):
                    self._bind(owner, k, view)
        for k in self._heads():
            self._bind(self.heads, k, self._head(self.weights, k))

    @staticmethod
    def _bind(owner: nn.ParameterDict, k: int, view: Tensor) -> None:
        name = f"agent{k}"
        if name in owner:
            owner[name].data = view
        else:
            owner[name] = nn.Parameter(view)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.restack()  # copy.deepcopy clones every parameter, and an average of weights begins with it

    @torch.no_grad()
    def restack(self) -> None:
        """Copy the parameters into one storage again, after `.to()` or a deep copy gave each its own memory."""
        example = next(iter(next(iter(self.layers.values())).lora_A.values()))
        fresh = torch.zeros(self.weights.shape, dtype=example.dtype, device=example.device)
        for k in range(self.settings.num_agents):
            for module, a, b in self._views(fresh, k):
                a.copy_(module.lora_A[f"agent{k}"])
                b.copy_(module.lora_B[f"agent{k}"])
        for k in self._heads():
            self._head(fresh, k).copy_(self.heads[f"agent{k}"])
        self.weights, self.gradients = fresh, torch.zeros_like(fresh)
        self.drawn = self._draws()
        self._known_limits = None
        self._bind_weights()
        # An optimizer may hold these parameters already, so they stay the same objects and only get new data.
        for row, data in zip(self.rows, self._own(self.weights), strict=True):
            row.data = data
        self._gradient_views = self._views_of_gradients()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw A uniformly as PEFT does (Kaiming, a = √5) and set B to zero.

        Each agent draws from its own generator, so that it starts the same for every K.
        """
        self.weights.zero_()
        for k, agent in enumerate(self.each):
            seed, index = self.settings.seed, 0
            if self.settings.initialize_adapters_rand:
                seed, index = agent.seed, agent.index
            generator = generator_for(seed, "adapter", index)
            for module, a, _ in self._views(self.weights, k):
                bound = 1 / math.sqrt(module.in_features)
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
            if self.head.size:
                self._head(self.weights, k).copy_(self.head.start(seed, index))

    def begin_step(self, step: int) -> None:
        """Zero the gradients, assign them to the parameters, and draw this step's DropConnect masks per agent.

        Args:
            step: the optimizer step, which keys the masks.
        """
        self.gradients.zero_()
        for layer in self.layers.values():
            if layer.joined is not None:
                layer.joined.forget()
        # Backward then accumulates into the views, and the gradients of all agents are in one tensor without a copy.
        for parameter, grad in self._gradient_views:
            parameter.grad = grad
        self.reading.in_storage = True
        self.drawn.draw_masks(step)

    @property
    def gradients_to_add(self) -> list[Tensor]:
        """The gradients in the parts that are all-reduced one by one: all in one, or one part for each agent.

        With three or more processes, the place of a number in its part decides the order of its sum. So agents with
        passes of their own have parts of their own, as an agent alone has.
        """
        return self._own(self.gradients) if self.pass_per_agent else [self.gradients]

    def take_gradients_away(self) -> None:
        """Zero the gradients, and set those of the parameters to None until the next `begin_step`."""
        self.gradients.zero_()
        self.reading.in_storage = False
        for parameter, _ in self._gradient_views:
            parameter.grad = None

    def begin_micro_step(self, *key: int) -> None:
        """Set the key of the next micro-step, which keys the dropout of agents with draws of their own.

        Args:
            key: optimizer step, process, number within the step.
        """
        self.dropout.micro_step = key

    def _views_of_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its part of `gradients`."""
        views = list(zip(self.rows, self._own(self.gradients), strict=True))
        for k in range(self.settings.num_agents):
            for module, a, b in self._views(self.gradients, k):
                views += [(module.lora_A[f"agent{k}"], a), (module.lora_B[f"agent{k}"], b)]
        return views + [(self.heads[f"agent{k}"], self._head(self.gradients, k)) for k in self._heads()]

    def ready(self, dtype: torch.dtype, *, training: bool) -> AbstractContextManager[None]:
        """Cast the weights once for all layers of the pass inside; for training with masks applied."""
        agent = self.reading.agent
        rows = slice(None) if agent is None else slice(agent, agent + 1)
        return self.casts.of_pass(self.weights[rows], self.drawn.applied(rows) if training else None, dtype)

    def clip(self, max_norms: Sequence[float | None]) -> Tensor:
        """Scale each agent's gradient to at most its norm in `max_norms`; None leaves the gradient as it is.

        Returns:
            [K] the norms before clipping, on the device; the call does not wait for the device.
        """
        norms = self.norms(self.gradients)
        if any(each is not None for each in max_norms):
            exact = norms.double()  # a factor is then rounded once, when it is cast back
            limit = self._limits(tuple(max_norms))
            factors = torch.where(exact > limit, (exact + 1e-6).reciprocal() * limit, 1.0)
            self.gradients.mul_(factors.to(self.gradients.dtype)[:, None])
        return norms

    def _limits(self, max_norms: tuple[float | None, ...]) -> float | Tensor:
        """The bounds as one number, or as [K] on the device, kept there because a copy waits for a GPU."""
        numbers = [math.inf if each is None else each for each in max_norms]
        if len({*numbers}) == 1:
            return numbers[0]
        if self._known_limits is None or self._known_limits[0] != max_norms:
            self._known_limits = max_norms, torch.tensor(numbers, dtype=torch.float64, device=self.weights.device)
        return self._known_limits[1]

    def norms(self, storage: Tensor) -> Tensor:
        """The norm [K] of every agent's numbers in `storage` [K, P].

        Agents are summed one by one where padding, or the rows of others on several threads, would change the order.
        """
        if min(self.sizes) == storage.shape[1] and not self.pass_per_agent:
            return torch.linalg.vector_norm(storage, dim=1)  # type: ignore[no-any-return]
        return torch.stack([torch.linalg.vector_norm(own) for own in self._own(storage)])

    @torch.no_grad()
    def of_agents(self, settings: LoraSettings, kept: Sequence[int]) -> AgentStorage:
        """A new storage on the same layers with the agents at these places; the old one keeps its numbers only.

        Args:
            settings: the settings of these agents.

        Raises:
            ModelError: memory does not hold the agents.
        """
        dropout = InputDropout(settings)
        for layer in self.layers.values():
            layer.num_agents, layer.dropout = settings.num_agents, dropout
            layer.lora_A, layer.lora_B = nn.ParameterDict(), nn.ParameterDict()
        adapted = [self._adapted[place] for place in kept[: len(settings.kinds())]]
        storage = AgentStorage(self.layers, settings, dropout, self.casts, self.reading, adapted, self.head)
        storage.pass_per_agent = self.pass_per_agent
        for row, place in zip(storage.rows, kept, strict=True):
            row.copy_(self.rows[place])
        return storage

    def leave_out(self, agents: Sequence[int]) -> None:
        """Keep the bits of these agents in the next optimizer step.

        Their gradients become None, because weight decay and moments would move them even with a zero gradient.
        """
        for k in agents:
            self.rows[k].grad = None

    def adapted_by(self, k: int) -> list[str]:
        """Names of the modules that agent k adapts, in the order of the base."""
        return [name for name in self.layers if name in self._adapted[k]]

    def agent_tensors(self, k: int) -> dict[str, Tensor]:
        """The content of agent k's `adapter_model.safetensors`: its tensors by PEFT's names, as views."""
        tensors = {}
        for name in self.adapted_by(k):
            module = self.layers[name]
            tensors[f"base_model.model.{name}.lora_A.weight"] = module.lora_A[f"agent{k}"].detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = module.lora_B[f"agent{k}"].detach()
        if self.head.size:
            tensors[SCORE] = self.heads[f"agent{k}"].detach()
        return tensors

    @torch.no_grad()
    def load_agent(self, k: int, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy PEFT tensors into agent k. Names and shapes must be exactly those of the agent.

        Args:
            tensors: the tensors by PEFT's names, see `agent_tensors`.
            where: the source, for the error.

        Raises:
            ForeignCheckpoint: names or shapes differ.
        """
        own = self.agent_tensors(k)
        odd = sorted(own.keys() ^ tensors.keys()) or sorted(n for n in own if own[n].shape != tensors[n].shape)
        if odd:
            raise ForeignCheckpoint(
                f"agent{k} does not fit: {len(odd)} tensors differ in name or shape, the first is {odd[0]}",
                where=where,
                hint="use the lora_rank, lora_target_modules, agent_layers and model_name it was trained with",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def attach(model: PreTrainedModel, settings: LoraSettings) -> AgentStorage:
    """Freeze `model`, replace its target modules by stacked ones, and return the initialised storage of the agents.

    Raises:
        ModelError: `target_modules` matches nothing in `layers`, or a module that is not a linear layer; or memory
            does not hold the agents.
    """
    replace_quantized_layers(model)
    model.requires_grad_(False)
    kinds = settings.kinds()
    wanted = dict.fromkeys((agent.target_modules, agent.layers) for agent in kinds)
    found = {each: find_targets(model, *each) for each in wanted}
    everything = {name for names in found.values() for name in names}
    dropout, casts, reading = InputDropout(settings), Casts(), Reading()
    layers = {}
    for name in [name for name, _ in model.named_modules() if name in everything]:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layers[name] = StackedLoRALinear(getattr(parent, child), settings.num_agents, dropout, casts, reading, name)
        setattr(parent, child, layers[name])
    adapted = [found[agent.target_modules, agent.layers] for agent in kinds]
    head = HeadShape.of(model, settings.outputs)
    storage = AgentStorage(layers, settings, dropout, casts, reading, adapted, head)
    storage.initialise()
    return storage


def _too_many(settings: LoraSettings, bytes_each: int) -> ModelError:
    needed = 2 * settings.num_agents * bytes_each
    return ModelError(
        f"{settings.num_agents:,} agents do not fit into memory: weights and gradients take {needed / 1e9:,.1f} GB",
        where=f"num_agents: {settings.num_agents}, lora_rank: {settings.rank}",
        hint="fewer agents, a smaller lora_rank, or fewer lora_target_modules",
    )


def peft_model(model: PreTrainedModel, agents: AgentStorage, k: int, base_name: str) -> PeftModel:
    """Agent k as a PEFT model, which shares the base's weights with the crowd and copies the agent's."""
    from peft import get_peft_model, set_peft_model_state_dict

    plain = on_same_weights(model, {id(layer): layer.base_layer for layer in agents.layers.values()})
    plain.config.use_cache = True
    if agents.head.size:
        plain = with_score(plain, agents.head.outputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # not about this call
        found = get_peft_model(plain, _lora_config(model, agents, k, base_name))
    set_peft_model_state_dict(found, agents.agent_tensors(k))
    return found.eval()


def adapter_config(model: PreTrainedModel, agents: AgentStorage, k: int, base_name: str) -> dict[str, Any]:
    """`adapter_config.json` of agent k as PEFT writes it, so that the folder opens with plain PEFT."""
    config = _lora_config(model, agents, k, base_name).to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    return {k: v for k, v in plain.items() if v is not None}


def _lora_config(model: PreTrainedModel, agents: AgentStorage, k: int, base_name: str) -> LoraConfig:
    from peft import LoraConfig, TaskType

    own = agents.each[k]
    conv = any(isinstance(agents.layers[name].base_layer, Conv1D) for name in agents.adapted_by(k))
    bias: Literal["none"] = "none"
    return LoraConfig(
        task_type=TaskType.SEQ_CLS if agents.head.size else TaskType.CAUSAL_LM,
        modules_to_save=["score"] if agents.head.size else None,
        base_model_name_or_path=base_name,
        inference_mode=True,
        r=own.rank,
        lora_alpha=own.alpha,
        lora_dropout=own.dropout,
        use_rslora=own.use_rslora,
        fan_in_fan_out=conv,
        bias=bias,
        **peft_targets(model, agents.adapted_by(k)),
    )
