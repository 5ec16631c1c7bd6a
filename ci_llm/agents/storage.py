"""The storage of K LoRA agents on one frozen base: one tensor of all trainable numbers, with a row per agent.

Row k of `weights [K, P]` is agent k, and a second tensor holds the gradients. The parameters of agents and modules are
views of these rows. So norms, clipping, reduction, snapshots and the optimizer work on rows, and an agent whose
gradient is None keeps its bits while the others change. The DropConnect masks lie beside the weights (`DropConnect`).
`attach` puts the agents on a base.

Legend: K agents, P parameters of the largest agent, r rank, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.agents.agent import Agent
from ci_llm.base.quantized import replace_quantized_layers
from ci_llm.base.targets import find_targets
from ci_llm.core.determinism import generator_for
from ci_llm.errors import ModelError
from ci_llm.lora.heads import HeadShape, head_values
from ci_llm.lora.layer import AdaptedLinear
from ci_llm.lora.products import Stack
from ci_llm.lora.reading import Casts, InputDropout, Reading
from ci_llm.lora.settings import AgentLora, LoraSettings


class DropConnect:
    """The DropConnect masks in force; each agent's generators are keyed by its seed, index and the step.

    They do not change the weights themselves, which a save may read at any moment. A training pass computes with
    `weights * masks`.

    Args:
        agents: the agents of the rows; the rest of a row is padding.
        has_own: true if agents have settings of their own.
        weights: [K, P] the weights of the storage.
        on_new_memory: called when the masks get new memory, before anything is drawn into it.
        num_whole: how many numbers at the end of each agent no mask drops.

    Attributes:
        masks: [K, P] 0 where a weight is dropped, and 1 / (1 - share) elsewhere; None if no weight is dropped.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        has_own: bool,
        weights: Tensor,
        on_new_memory: Callable[[], None],
        num_whole: int = 0,
    ) -> None:
        self._agents, self._has_own, self._weights, self._num_whole = agents, has_own, weights, num_whole
        self._on_new_memory = on_new_memory
        self._masks_of_step = False
        self.masks: Tensor | None = None

    def draw_masks(self, step: int) -> None:
        """Draw the DropConnect masks of a step, if any agent drops weights."""
        if not self._drops:
            return
        if self.masks is None or not self._masks_of_step:
            self.masks, self._masks_of_step = torch.ones_like(self._weights), True
            self._on_new_memory()
        for agent, row in zip((each.settings for each in self._agents), _own(self.masks, self._agents), strict=True):
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
        own = _own(self.masks, self._agents) if self._has_own else [self.masks]
        for agent, part in zip(self._agents, own, strict=False):
            keep = 1 - agent.settings.dropconnect
            part.bernoulli_(keep).div_(keep)
            part[..., part.shape[-1] - self._num_whole :] = 1
        self._on_new_memory()

    def applied(self, numbers: Tensor, agents: slice) -> Tensor | None:
        """A copy of these agents' rows of [K, P] numbers with the masks applied; None if there are none."""
        return None if self.masks is None else numbers[agents] * self.masks[agents]

    @property
    def _drops(self) -> bool:
        return any(agent.settings.dropconnect for agent in self._agents)


def _own(storage: Tensor, agents: Sequence[Agent]) -> list[Tensor]:
    """The rows of `storage` [K, P] without their padding."""
    return [row[: agent.size] for row, agent in zip(storage, agents, strict=True)]


class AgentStorage:
    """The crowd's trainable numbers: one tensor of which the agents, and the modules of the base, hold views.

    Each row holds one agent's numbers module by module, in the layout of an agent alone. Rows of smaller agents end in
    padding, which belongs to no parameter: gradients, moments, weight decay and clipping do not reach it.

    Args:
        agents: in the order of the rows; they get new views.

    Attributes:
        agents: the agents.
        layers: the adapted modules by their name in the base.
        dropout: the dropout of the modules' inputs.
        casts: the casts of the current pass.
        reading: whose tokens the modules' inputs hold.
        pass_per_agent: true if every agent takes passes of its own. All operations then have the shapes that they have
            for an agent alone, and so the agent has the bits that it has alone.
        drawn: the DropConnect masks of training.
        weights: [K, P], fp32, or fp64 on an fp64 base.
        gradients: [K, P], like `weights`.
        head: the shape of the agents' heads.
        heads: each agent's head, a parameter [n, D]; empty if agents have no heads.
    """

    def __init__(
        self,
        layers: Mapping[str, AdaptedLinear],
        agents: Sequence[Agent],
        settings: LoraSettings,
        casts: Casts,
        reading: Reading,
        head: HeadShape,
    ) -> None:
        self.layers, self.agents, self.settings, self.head = dict(layers), [*agents], settings, head
        self.heads = nn.ParameterDict()
        self.dropout, self.casts, self.reading = InputDropout(settings), casts, reading
        reading.agents = tuple(range(len(agents)))
        self.pass_per_agent = False
        for layer in self.layers.values():
            layer.dropout, layer.lora_A, layer.lora_B = self.dropout, nn.ParameterDict(), nn.ParameterDict()
        ends = [[end for *_, end in self._places(agent)] for agent in agents]
        sizes = [max(own) + head.size for own in ends]
        first = next(iter(self.layers.values())).base_layer
        # Adapters stay in fp32 over a bf16 or fp16 base, as in PEFT: small updates would round away.
        dtype = torch.float64 if first.weight.dtype == torch.float64 else torch.float32
        device = torch.device(str(first.weight.device))
        try:
            self.weights = torch.zeros(len(agents), max(sizes), dtype=dtype, device=device)
            self.gradients = torch.zeros_like(self.weights)
        except (RuntimeError, MemoryError) as error:  # allocators raise nothing narrower; only they run here
            raise _too_many(settings, max(sizes) * dtype.itemsize) from error
        for place, (agent, size) in enumerate(zip(agents, sizes, strict=True)):
            agent.place, agent.weights = place, nn.Parameter(self.weights[place, :size])
        self._bind()

    @property
    def rows(self) -> list[nn.Parameter]:
        """The numbers of every agent, for an optimizer."""
        return [agent.weights for agent in self.agents]

    @property
    def sizes(self) -> list[int]:
        """[K] how many trainable numbers each agent has."""
        return [agent.size for agent in self.agents]

    def values(self, states: Tensor, agents: Sequence[int]) -> Tensor:
        """What the heads of agents compute for rows.

        Args:
            states: [n, R, D] the states of the rows' last tokens.
            agents: the places of these n agents.

        Returns:
            [n, R, outputs]
        """
        return head_values(states, [self.heads[f"agent{k}"] for k in agents])

    def _places(self, agent: Agent) -> Iterator[tuple[str, int, int, int]]:
        """Yield (name, start, middle, end) for each module of an agent: its A lies at start to middle, its B behind."""
        rank = agent.settings.rank
        start = 0
        for name in agent.adapted:
            middle = start + rank * self.layers[name].in_features
            end = middle + rank * self.layers[name].out_features
            yield name, start, middle, end
            start = end

    def _views(self, row: Tensor, agent: Agent) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(module, A [r, in], B [out, r]) for each module that an agent adapts; views of its row of a storage."""
        rank = agent.settings.rank
        for name, start, middle, end in self._places(agent):
            yield name, row[start:middle].view(rank, -1), row[middle:end].view(-1, rank)

    def _head(self, row: Tensor, agent: Agent) -> Tensor:
        """The head [n, D] of an agent, a view of the end of its row of a storage."""
        return row[agent.size - self.head.size : agent.size].view(self.head.outputs, -1)

    def _bind(self) -> None:
        """Give modules and agents views of the storage; parameters that exist keep their identity."""
        self.reading.in_storage = False
        has_own = bool(self.settings.agents)
        self.drawn = DropConnect(self.agents, has_own, self.weights, self._bind_stacks, self.head.size)
        self._gradient_views: list[tuple[nn.Parameter, Tensor]] = []
        self._bind_stacks()
        for agent, weights, gradients in zip(self.agents, self.weights, self.gradients, strict=True):
            name = f"agent{agent.place}"
            agent.gradients = gradients[: agent.size]
            agent.weights.data = weights[: agent.size]
            self._gradient_views.append((agent.weights, agent.gradients))
            views = zip(self._views(weights, agent), self._views(gradients, agent), strict=True)
            for (module, own_a, own_b), (_, *grads) in views:
                layer = self.layers[module]
                pair = _bound(layer.lora_A, own_a, name), _bound(layer.lora_B, own_b, name)
                agent.adapters[module] = pair
                self._gradient_views += zip(pair, grads, strict=True)
            if self.head.size:
                agent.head = _bound(self.heads, self._head(weights, agent), name)
                self._gradient_views.append((agent.head, self._head(gradients, agent)))

    def _bind_stacks(self) -> None:
        """Give every module its stacks, which hold views of the weights and of the masks in force."""
        stacks: dict[str, list[Stack]] = {name: [] for name in self.layers}
        for _, members in groupby(self.agents, lambda agent: (*_shape(agent.settings), *agent.adapted)):
            alike = [*members]
            for name, *place in self._places(alike[0]):
                stacks[name].append(self._stack(alike, *place))
        for name, module in self.layers.items():
            module.bind(tuple(stacks[name]))

    def _stack(self, agents: Sequence[Agent], start: int, middle: int, stop: int) -> Stack:
        """The stack of neighbouring agents on a module, whose place in the rows is as in `_places`."""
        settings, first, end = agents[0].settings, agents[0].place, agents[-1].place + 1

        def stacked(storage: Tensor) -> tuple[Tensor, Tensor]:
            a, b = storage[first:end, start:middle], storage[first:end, middle:stop]
            return a.view(len(agents), settings.rank, -1), b.view(len(agents), -1, settings.rank)

        masks = None if self.drawn.masks is None else stacked(self.drawn.masks)
        own = (*stacked(self.weights), self.casts, stacked(self.gradients), masks)
        return Stack(first, end, settings.scaling, settings.dropout > 0, *own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.restack()  # copy.deepcopy clones every parameter, and an average of weights begins with it

    @torch.no_grad()
    def restack(self) -> None:
        """Copy the parameters into one storage again, after `.to()` or a deep copy gave each its own memory.

        An optimizer may hold these parameters already, so they stay the same objects and only get new data.
        """
        example = next(iter(self.layers[self.agents[0].adapted[0]].lora_A.values()))
        fresh = torch.zeros(self.weights.shape, dtype=example.dtype, device=example.device)
        for agent, row in zip(self.agents, fresh, strict=True):
            name = f"agent{agent.place}"
            for module, a, b in self._views(row, agent):
                a.copy_(self.layers[module].lora_A[name])
                b.copy_(self.layers[module].lora_B[name])
            if self.head.size:
                self._head(row, agent).copy_(self.heads[name])
        self.weights, self.gradients = fresh, torch.zeros_like(fresh)
        self._bind()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw A uniformly as PEFT does (Kaiming, a = √5) and set B to zero.

        Each agent draws from its own generator, so that it starts the same for every K.
        """
        self.weights.zero_()
        for agent, row in zip(self.agents, self.weights, strict=True):
            seed, index = self.settings.seed, 0
            if self.settings.initialize_adapters_rand:
                seed, index = agent.settings.seed, agent.settings.index
            generator = generator_for(seed, "adapter", index)
            for name, a, _ in self._views(row, agent):
                bound = 1 / math.sqrt(self.layers[name].in_features)
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
            if self.head.size:
                self._head(row, agent).copy_(self.head.start(seed, index))

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
        return _own(self.gradients, self.agents) if self.pass_per_agent else [self.gradients]

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

    def ready(self, dtype: torch.dtype, *, training: bool) -> AbstractContextManager[None]:
        """Cast the weights once for all layers of the pass inside; for training with masks applied."""
        agents = self.reading.agents
        rows = slice(min(agents), max(agents) + 1) if agents else slice(0, 0)
        numbers = self.weights if self.reading.numbers is None else self.reading.numbers
        return self.casts.of_pass(numbers[rows], self.drawn.applied(numbers, rows) if training else None, dtype)

    @contextmanager
    def reading_from(self, numbers: Tensor) -> Iterator[None]:
        """Let the adapters in the passes inside have these numbers; those of heads stay.

        The weights themselves do not change, because a save may read them at any moment.

        Args:
            numbers: [K, P] in the layout, the dtype and the memory order of the weights.
        """
        before = self.reading.numbers
        self.reading.numbers = numbers
        try:
            yield
        finally:
            self.reading.numbers = before

    def clip(self, max_norms: Sequence[float | None]) -> Tensor:
        """Scale each agent's gradient to at most its norm in `max_norms`; None leaves the gradient as it is.

        Returns:
            [K] the norms before clipping, on the device; the call does not wait for the device.
        """
        norms = self.norms(self.gradients)
        if any(each is not None for each in max_norms):
            exact = norms.double()  # a factor is then rounded once, when it is cast back
            limit = _limits(tuple(max_norms), norms.device)
            factors = torch.where(exact > limit, (exact + 1e-6).reciprocal() * limit, 1.0)
            self.gradients.mul_(factors.to(self.gradients.dtype)[:, None])
        return norms

    def norms(self, storage: Tensor) -> Tensor:
        """The norm [K] of every agent's numbers in `storage` [K, P].

        Agents are summed one by one where padding, or the rows of others on several threads, would change the order.
        """
        if min(self.sizes) == storage.shape[1] and not self.pass_per_agent:
            return torch.linalg.vector_norm(storage, dim=1)  # type: ignore[no-any-return]
        return torch.stack([torch.linalg.vector_norm(own) for own in _own(storage, self.agents)])

    @torch.no_grad()
    def with_kept(self, settings: LoraSettings, kept: Sequence[int]) -> AgentStorage:
        """A new storage on the same layers with the agents at these places; the old one keeps its numbers only.

        Args:
            settings: the settings of these agents.

        Raises:
            ModelError: memory does not hold the agents.
        """
        agents = [self.agents[place] for place in kept]
        numbers = _own(self.weights, self.agents)
        storage = AgentStorage(self.layers, agents, settings, self.casts, self.reading, self.head)
        storage.pass_per_agent = self.pass_per_agent
        for agent, place in zip(agents, kept, strict=True):
            agent.weights.copy_(numbers[place])
        return storage

    def leave_out(self, agents: Sequence[int]) -> None:
        """Keep the bits of these agents in the next optimizer step.

        Their gradients become None, because weight decay and moments would move them even with a zero gradient.
        """
        for k in agents:
            self.rows[k].grad = None


@lru_cache(maxsize=4)
def _limits(max_norms: tuple[float | None, ...], device: torch.device) -> float | Tensor:
    """The bounds as one number, or as [K] on the device, kept there because a copy waits for a GPU."""
    numbers = [math.inf if each is None else each for each in max_norms]
    return numbers[0] if len({*numbers}) == 1 else torch.tensor(numbers, dtype=torch.float64, device=device)


def _bound(owner: nn.ParameterDict, view: Tensor, name: str) -> nn.Parameter:
    """The parameter of this name, with `view` as its numbers."""
    if name not in owner:
        owner[name] = nn.Parameter(view)
    found: nn.Parameter = owner[name]
    found.data = view
    return found


def _shape(agent: AgentLora) -> tuple[object, ...]:
    """The settings that neighbours must have in common for one batched product, beside their modules."""
    return agent.rank, agent.scaling, agent.dropout > 0


def attach(model: PreTrainedModel, settings: LoraSettings) -> AgentStorage:
    """Freeze `model`, replace its target modules by stacked ones, and return the initialised storage of the agents.

    Raises:
        ModelError: `target_modules` matches nothing in `layers`, or a module that is not a linear layer; or memory
            does not hold the agents.
    """
    replace_quantized_layers(model)
    model.requires_grad_(False)
    wanted = dict.fromkeys((agent.target_modules, agent.layers) for agent in settings.each())
    found = {each: find_targets(model, *each) for each in wanted}
    everything = {name for names in found.values() for name in names}
    casts, reading, layers = Casts(), Reading(()), {}
    for name in [name for name, _ in model.named_modules() if name in everything]:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layers[name] = AdaptedLinear(getattr(parent, child), InputDropout(settings), casts, reading, name)
        setattr(parent, child, layers[name])
    agents = []
    for k, own in enumerate(settings.each()):
        adapted = found[own.target_modules, own.layers]
        agents.append(Agent(own, [name for name in layers if name in adapted], f"agent{k}"))
    storage = AgentStorage(layers, agents, settings, casts, reading, HeadShape.of(model, settings.outputs))
    storage.initialise()
    return storage


def _too_many(settings: LoraSettings, bytes_each: int) -> ModelError:
    needed = 2 * settings.num_agents * bytes_each
    return ModelError(
        f"{settings.num_agents:,} agents do not fit into memory: weights and gradients take {needed / 1e9:,.1f} GB",
        where=f"num_agents: {settings.num_agents}, lora_rank: {settings.rank}",
        hint="fewer agents, a smaller lora_rank, or fewer lora_target_modules",
    )
