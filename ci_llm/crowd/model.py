"""The crowd as a module: K agents on a frozen base, which read owned rows.

Functions that ask or score a crowd take a `CrowdModel`. `ci_llm.crowd.crowd.Crowd` adds their calls for users, and how
agents are saved.

Legend: K agents, N packed tokens, S targets, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Self, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.agents.agent import Agent
from ci_llm.agents.storage import AgentStorage
from ci_llm.base.quantized import stored_quantization
from ci_llm.crowd.lora_model import LoraModel
from ci_llm.crowd.next_token import BASE_ALONE
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.batches import Batch, MicroBatch, Owned
from ci_llm.data.prompts import Prompter
from ci_llm.errors import ModelError
from ci_llm.lora import passes
from ci_llm.lora.reading import compute_dtype
from ci_llm.lora.settings import LoraSettings


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
    """K LoRA agents on one frozen base, as a module. Arguments, errors and attributes are those of `Crowd`.

    Attributes:
        base_model: the base with the agents' adapters in it, through which rows go.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, base_name: str, pad_id: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.base_model = LoraModel(model, settings, base_name, pad_id)
        self._prompter: Prompter | None = None
        self.calibration: Calibration | None = None
        self.common_start = not settings.initialize_adapters_rand
        self._shared: _Shared | None = None
        self.heads = self.storage.heads
        self.classes: tuple[str, ...] = ()
        self.reads_pairs = False
        self.start: Tensor | None = None
        self.model = model

    def detach(self) -> PreTrainedModel:
        """Restore the base's own layers and attention, and return it. The crowd cannot be used afterwards."""
        return self.base_model.unload()

    @property
    def storage(self) -> AgentStorage:
        return self.base_model.storage

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
        """Continue with the agents at these places; see `AgentStorage.with_kept`."""
        self.base_model.storage = self.storage.with_kept(settings, kept)
        self.settings = settings
        self.names = [*names]
        self.heads = self.storage.heads
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
        states = self.base_model.states(rows)
        return [self._output(*own, each) for own, each in zip(rows, states, strict=True)]

    def for_all(self, batch: Batch) -> MicroBatch:
        """The micro-batch in which all agents that read now read this batch."""
        return [Owned(self.storage.reading.agents, batch)]

    def passes_of(self, rows: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the rows of each pass that a micro-batch takes: all, or those of one agent (`storage.pass_per_agent`).

        Agents with padded rows of their own always take a pass each. For each pass call the crowd, and run the
        backward pass, before the next one.
        """
        if not self.storage.pass_per_agent and (self.base_model.route == "packed" or len(rows) == 1):
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
        log_probs = states[:, :0, 0].float()
        values = None
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
        asked, head = states[:, batch.predict_from], self._cast_head(states)
        return passes.target_log_probs(asked, batch.targets, head, of_chunk or self.base_model.of_chunk)

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
                [states] = self.base_model.states([Owned((), batch)])
                known[id(batch)] = self.target_log_probs(states, batch, of_chunk)
            return known[id(batch)]
        with self.evaluating(), self.storage.reading_from(self.start):  # without dropout
            [states] = self.base_model.states([Owned(agents, batch)])
            return self.target_log_probs(states, batch, of_chunk)

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [n, N, D] of the n agents that read now, in packed order on either route."""
        return self.base_model.states_of_all(batch)

    def gradient_checkpointing_enable(self) -> None:
        """Switch activation checkpointing of the base's layers on."""
        passes.recompute_layers(self.model, self.storage.reading)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`. Reordered weights, which training does not use, are dropped."""
        if mode:
            self.base_model.reordered_weights = None
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

    def without_agents(self) -> AbstractContextManager[None]:
        """Make the crowd act as its base alone inside: a crowd of one agent that adapts nothing."""
        return self.base_model.read_by(BASE_ALONE)
