"""The crowd as a module: K agents on a frozen base, which read owned rows.

Functions that ask or score a crowd take a `CrowdModel`. `ci_llm.crowd.crowd.Crowd` adds their calls for users, and how
agents are saved.

Legend: K agents, N packed tokens, S targets, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Self, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.agents.agent import Agent
from ci_llm.agents.storage import AgentStorage, attach
from ci_llm.base.quantized import stored_quantization
from ci_llm.base.targets import layer_list, layer_numbers
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.batches import Batch, MicroBatch, Owned
from ci_llm.data.prompts import Prompter
from ci_llm.errors import ModelError
from ci_llm.lora import kernels, passes
from ci_llm.lora.attention import Way, choose_way, name_of
from ci_llm.lora.kernels import Packed
from ci_llm.lora.reading import NOBODY, compute_dtype
from ci_llm.lora.settings import LoraSettings

Route = Literal["packed", "padded"]


@dataclass
class CrowdOutput:
    """The results of n agents for one batch.

    Attributes:
        agents: the places of these agents; empty for the base alone, which then is the one row of each tensor.
        batch: the rows.
        log_probs: [n, S] log-probability of every target under every agent, in nats; fp32, or fp64 on an fp64 base.
        states: [n, N, D] final hidden states, in packed order.
        values: [n, R, outputs] what the agents' heads compute for each row, if they have heads and the rows have
            labels; `log_probs` then is [n, 0], and of drawn completions as well: an agent has its own temperature.
    """

    agents: tuple[int, ...]
    batch: Batch
    log_probs: Tensor
    states: Tensor
    values: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The sum [] over agents of the mean cross-entropy, whose terms separate runs would minimise."""
        return -self.log_probs.mean(1).sum()


@dataclass
class _Shared:
    """The common part of the passes over one micro-batch: the cast head, and the base's log-probabilities."""

    head: passes.Head | None = None
    references: dict[int, Tensor] = field(default_factory=dict)


class CrowdModel(nn.Module):
    """K LoRA agents on one frozen base, as a module. Arguments, attributes and errors are those of `Crowd`."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, base_name: str, pad_id: int = 0) -> None:
        super().__init__()
        self.settings, self.base_name, self.pad_id = settings, base_name, pad_id
        self._prompter: Prompter | None = None
        self.calibration: Calibration | None = None
        self._packed: Packed | None = None
        self.common_start = not settings.initialize_adapters_rand
        self.storage: AgentStorage = attach(model, settings)
        self._shared: _Shared | None = None
        self.fast: tuple[str, ...] = ()
        numbers = layer_numbers(model, self.storage.layers).values()
        first = layer_list(model)[1][min(numbers)] if numbers else model
        self._kinds = {type(module) for module in first.modules()}
        self.heads = self.storage.heads
        self.classes: tuple[str, ...] = ()
        self.reads_pairs = False
        self.shares_prompts = False
        self.start: Tensor | None = None
        self.model = model
        self._head_rows = passes.give_head_contiguous_rows(model)
        self._native_attention = model.config._attn_implementation
        self.attention: Way = "rows"
        self.route = "packed"
        # True if our decoder writes the texts, and not Transformers' `generate`: tried before the first text.
        self.decodes: bool | None = None
        self.padding_invariant: bool | None = None  # measured before the first batch that needs padding

    def detach(self) -> PreTrainedModel:
        """Restore the base's own layers and attention, and return it. The crowd cannot be used afterwards."""
        for name, layer in self.storage.layers.items():
            self.model.set_submodule(name, layer.base_layer)
        self.compute_fast(())
        self._head_rows.remove()
        self.model.config._attn_implementation = self._native_attention
        passes.stop_recomputing(self.model)
        return self.model

    @property
    def route(self) -> Route:
        """The layout of rows in the base: "packed" end to end, or "padded" side by side in a rectangle."""
        return self._route

    @route.setter
    def route(self, route: Route) -> None:
        # The setting outlives the forward pass, because activation checkpointing recomputes the layers in the backward
        # pass, with the same attention.
        self._route = route
        own = name_of(self.attention) if route == "packed" else self._native_attention
        self.model.config._attn_implementation = own

    def choose_attention(self) -> str:
        """Take the fastest way of attention that is right on this GPU; returns a line about it."""
        config, like = self.model.config.get_text_config(), self.model.get_input_embeddings().weight
        self.attention, said = choose_way(config, self.device, compute_dtype(like))
        self.route = self._route
        return said

    @property
    def prompter(self) -> Prompter:
        """What words prompts as in training. Raises ModelError until it is set."""
        if self._prompter is None:
            raise ModelError(
                "this crowd has no tokenizer",
                where="Crowd.generate",
                hint="set crowd.prompter = ci_llm.Prompter(tokenizer), or take generate_ids (a vote: answers_of=)",
            )
        return self._prompter

    @prompter.setter
    def prompter(self, prompter: Prompter) -> None:
        self._prompter = prompter

    @property
    def num_agents(self) -> int:
        return self.settings.num_agents if self.storage.reading.agents else 1

    @property
    def agents(self) -> list[Agent]:
        """The agents, in the order of the storage."""
        return self.storage.agents

    @property
    def names(self) -> list[str]:
        """The agents' folders in a checkpoint; empty for a base alone."""
        return [agent.name for agent in self.agents if agent.name]

    @names.setter
    def names(self, names: Sequence[str]) -> None:
        for k, agent in enumerate(self.agents):
            agent.name = names[k] if names else ""

    def keep_agents(self, settings: LoraSettings, kept: Sequence[int], names: Sequence[str]) -> None:
        """Continue with the agents at these places; see `AgentStorage.of_agents`."""
        self.storage = self.storage.of_agents(settings, kept)
        self.settings, self.names, self.heads = settings, [*names], self.storage.heads
        if self.start is not None:
            self.start = self.start[[*kept], : self.storage.weights.shape[1]].contiguous()

    @property
    def head(self) -> passes.Head:
        return passes.Head.of(self.model)

    @property
    def device(self) -> torch.device:
        return self.storage.weights.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CrowdModel:
        if stored_quantization(self.model.config) and fn(torch.zeros(1)).dtype != torch.float32:
            raise ModelError(
                "a quantised base keeps its precision",
                where="Crowd.to",
                hint="load it with load_base(..., model_dtype=...), or move it to a device only",
            )
        super()._apply(fn, recurse)
        self.storage.restack()  # .to() moves every parameter separately; make them views of one storage again
        return self

    @overload
    def forward(self, rows: Batch) -> CrowdOutput: ...
    @overload
    def forward(self, rows: MicroBatch) -> list[CrowdOutput]: ...
    def forward(self, rows: Batch | MicroBatch) -> CrowdOutput | list[CrowdOutput]:
        """Run one pass over a batch that all agents read, or over a micro-batch: an output for each of its batches."""
        if self.training:
            self.storage.drawn.draw_masks_of_pass()
        if isinstance(rows, Batch):
            return self._output(self.storage.reading.agents, rows, self.states(rows))
        states = self.through.states(rows)
        return [self._output(*own, each) for own, each in zip(rows, states, strict=True)]

    def for_all(self, batch: Batch) -> MicroBatch:
        """The micro-batch in which all agents that read now read this batch."""
        return [Owned(self.storage.reading.agents, batch)]

    def parts(self, rows: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the passes that a micro-batch takes: itself, or one for each agent (`storage.pass_per_agent`).

        Agents with padded rows of their own always take a pass each. For each pass call the crowd, and run the
        backward pass, before the next one.
        """
        if not self.storage.pass_per_agent and (self._route == "packed" or len(rows) == 1):
            yield rows
            return
        each = [Owned((k,), own.batch) for own in rows for k in own.agents]
        self._shared = shared = _Shared()
        try:
            for own in sorted(each, key=lambda own: own.agents):
                yield [own]
        finally:
            if self._shared is shared:  # a pass that was given up may be forgotten after the next one has begun
                self._shared = None

    def _output(self, agents: tuple[int, ...], batch: Batch, states: Tensor) -> CrowdOutput:
        """The output of n agents for their states [n, N, D]."""
        log_probs, values = states[:, :0, 0].float(), None
        if self.settings.outputs and batch.labels is not None:
            values = self.storage.values(states[:, batch.last_tokens], agents)
        elif batch.advantages is None:
            log_probs = self.target_log_probs(states, batch)
        return CrowdOutput(agents, batch, log_probs, states, values)

    def _cast_head(self, states: Tensor) -> passes.Head:
        """The head of the base for these states, which the passes of single agents cast once for all."""
        if self._shared is None:
            return self.head
        if self._shared.head is None:
            self._shared.head = self.head.to(compute_dtype(states))
        return self._shared.head

    def target_log_probs(self, states: Tensor, batch: Batch, of_chunk: passes.OfChunk | None = None) -> Tensor:
        """The log-probability [n, S] of every target for states [n, N, D], by the arithmetic of a chunk if given."""
        of_chunk = of_chunk or (kernels.fast_chunk if "head" in self.fast else passes.plain_chunk)
        head = self._cast_head(states)
        return passes.target_log_probs(states[:, batch.predict_from], batch.targets, head, of_chunk)

    @torch.no_grad()
    def reference(self, agents: tuple[int, ...], batch: Batch, of_chunk: passes.OfChunk | None = None) -> Tensor:
        """The reference log-probability of every target, with which agents are compared.

        Args:
            of_chunk: the arithmetic of a chunk, if it is not the usual one; the result is not shared then.

        Returns:
            [1, S] under the base without agents, computed once for the passes of all agents; or, if agents are compared
            with their `start`, [n, S] under the start of each of these n agents.
        """
        if self.start is None:
            known: dict[int, Tensor] = {} if self._shared is None or of_chunk else self._shared.references
            if id(batch) not in known:
                known[id(batch)] = self.target_log_probs(self._states((), batch), batch, of_chunk)
            return known[id(batch)]
        with self.evaluating(), self.storage.reading_from(self.start):  # without dropout
            return self.target_log_probs(self._states(agents, batch), batch, of_chunk)

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [n, N, D] of the n agents that read now, in packed order on either route."""
        agents = self.storage.reading.agents
        if self.storage.pass_per_agent and len(agents) > 1:
            return torch.cat([self._states((k,), batch) for k in agents])
        return self._states(agents, batch)

    def _states(self, agents: tuple[int, ...], batch: Batch) -> Tensor:
        return self.through.states([Owned(agents, batch)])[0]

    @property
    def through(self) -> passes.Passes:
        """The way of rows through the base, as the crowd is set now."""
        return passes.Passes(
            self.model,
            self.storage.reading,
            self.storage.ready,
            self.pad_id,
            self._route == "packed",
            own_precision="precision" in self.fast,
            share_prompts=self.shares_prompts,
            fast_attention="attention" in self.fast,
        )

    def compute_fast(self, parts: Sequence[str]) -> None:
        """Compute these parts of `ci_llm.lora.kernels` by fast kernels, and no others.

        A trial must have approved them; see `ci_llm/run/one_layer.py`.
        """
        kernels.take(self.model, self.storage.layers.values(), parts, self._kinds)
        self.fast = tuple(parts)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Use the family's own code and whole rows inside, as a newly opened crowd does."""
        fast, shares = self.fast, self.shares_prompts
        self.compute_fast(())
        self.shares_prompts = False
        try:
            yield
        finally:
            self.compute_fast(fast)
            self.shares_prompts = shares

    def gradient_checkpointing_enable(self) -> None:
        """Switch activation checkpointing of the base's layers on."""
        passes.recompute_layers(self.model, self.storage.reading)

    def packed(self, dtype: torch.dtype, *, by_onednn: bool) -> Packed:
        """The frozen weights for the products of a decoder, kept until the crowd trains."""
        layers, head = self.storage.layers.values(), self.head
        if self._packed is None or not self._packed.is_of(layers, head, dtype):
            self._packed = None  # its memory is free before the next one takes its own
            self._packed = Packed.of(layers, head, dtype, by_onednn=by_onednn)
        return self._packed

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`. Packed weights, which training does not use, are dropped."""
        if mode:
            self._packed = None
        return super().train(mode)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside; training mode afterwards, if it was before."""
        training = self.training
        if training:  # the walk over all modules would cost a decoder time at every token
            self.eval()
        try:
            yield
        finally:
            if training:
                self.train()

    @contextmanager
    def active_agent(self, agent: int | None) -> Iterator[PreTrainedModel]:
        """Yield the plain model with its own attention, and with the adapter of `agent` active for every row.

        Args:
            agent: its place; None for those that read now, in equal parts.
        """
        config, route_attention = self.model.config, self.model.config._attn_implementation
        config._attn_implementation = self._native_attention
        try:
            with self.read_by(agent):
                yield self.model
        finally:
            config._attn_implementation = route_attention

    def read_by(self, who: int | None) -> AbstractContextManager[None]:
        """Let this agent, or the base alone (`NOBODY`), read all rows inside; None: those that read now."""
        reading = self.storage.reading
        return reading.of(reading.agents if who is None else () if who == NOBODY else (who,))

    @contextmanager
    def without_agents(self) -> Iterator[None]:
        """Make the crowd act as its base alone inside: a crowd of one agent that adapts nothing."""
        with self.read_by(NOBODY):
            yield
