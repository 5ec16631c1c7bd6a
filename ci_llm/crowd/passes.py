"""Rows through the frozen base, packed or padded: those of all agents, or the rows of each agent's own, in one pass.

Legend: K agents, N packed tokens, R rows of the base's input, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ci_llm.crowd.adapters import AgentStorage
from ci_llm.crowd.attention import Segments
from ci_llm.crowd.casting import compute_dtype
from ci_llm.data.batches import AgentBatches, Batch, padded

Laid = tuple[Tensor, Tensor, tuple[int, ...]]  # ids [N], positions [N] and bounds of packed rows


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

    @property
    def num_agents(self) -> int:
        return self.agents.settings.num_agents

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [K, N, D] of every agent on the same rows, in packed order."""
        if self.packed:
            ids, positions, bounds = self._laid(batch)
            with once_below(self.agents) as copies:
                states = self._end_to_end(ids.expand(copies, -1), positions, bounds)
            return states[:, : batch.num_tokens] if len(ids) > batch.num_tokens else states
        inputs, (rows, columns) = self._rectangle(batch)
        states = self._hidden({name: each.repeat(self.num_agents, 1) for name, each in inputs.items()})
        return states.unflatten(0, (self.num_agents, batch.num_rows))[:, rows, columns]  # type: ignore[no-any-return]

    def states_of_each(self, batches: AgentBatches) -> Sequence[Tensor]:
        """Final hidden states [1, N, D] of every agent on its own rows, in packed order; N is 0 without any.

        Packed rows of all agents go through the base at once, and an agent has the bits that it has alone. A rectangle
        of all rows would pad them to another length than alone, so padded rows take a pass per agent.
        """
        if self.packed:
            return self._agent_after_agent(batches)
        nothing = self.agents.weights.new_zeros(1, 0, 1)
        return [nothing if own is None else self._states_of_agent(k, own) for k, own in enumerate(batches.each)]

    def _agent_after_agent(self, batches: AgentBatches) -> list[Tensor]:
        laid = [None if batch is None else self._laid(batch) for batch in batches.each]
        sizes = [0 if own is None else len(own[0]) for own in laid]
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        bounds = [span.start + bound for span, own in zip(spans, laid, strict=True) if own for bound in own[2][1:]]
        ids, positions = torch.cat([own[0] for own in laid if own]), torch.cat([own[1] for own in laid if own])
        with reading(self.agents, spans):
            states = self._end_to_end(ids[None], positions, (0, *bounds))
        parts = zip(states.split(sizes, dim=1), batches.each, strict=True)
        return [part if batch is None else part[:, : batch.num_tokens] for part, batch in parts]

    def _states_of_agent(self, k: int, batch: Batch) -> Tensor:
        inputs, index = self._rectangle(batch)
        size = inputs["input_ids"].numel()
        with reading(self.agents, [slice(0, size if agent == k else 0) for agent in range(self.num_agents)]):
            return self._hidden(inputs)[index][None]

    def _end_to_end(self, ids: Tensor, positions: Tensor, bounds: Sequence[int]) -> Tensor:
        """Final hidden states [R, N, D] of ids [R, N]."""
        inputs = {"input_ids": ids, "position_ids": positions[None], "segments": Segments(bounds)}
        return self._hidden(inputs)

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        dtype = compute_dtype(self.model.get_input_embeddings().weight)
        with self.agents.ready(dtype, training=self.model.training):
            return self.model.base_model(**inputs, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

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
        """Tokens that have to be added, so that an agent's bits do not depend on how many agents there are.

        Each product with the base takes the tokens of all agents at once. On a CPU the kernels for the last rows of a
        product (1, 2 or 3 in fp64), and for products of fewer than 4 rows, round differently from the others.
        """
        return -tokens % 4 if self.model.dtype == torch.float64 else max(0, 4 - tokens)


@contextmanager
def once_below(agents: AgentStorage) -> Iterator[int]:
    """Run the trunk of the base once for all agents, which read the same rows, and every layer above it for each.

    Nothing in the trunk is trained, so autograd keeps nothing of it, and checkpointing does not compute it again.

    Yields:
        how many copies of the rows the base has to be given.
    """
    count, trunk = agents.settings.num_agents, agents.trunk
    if trunk is None:
        yield count
        return

    def spread(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda states: states.expand(count, *states.shape[1:]), output)

    handle = trunk.register_forward_hook(spread)
    try:
        yield 1
    finally:
        handle.remove()


@contextmanager
def reading(agents: AgentStorage, spans: Sequence[slice]) -> Iterator[None]:
    """Tell the layers whose tokens their input holds: those of each agent by itself."""
    layers = agents.layers.values()
    for layer in layers:
        layer.spans = spans
    try:
        yield
    finally:
        for layer in layers:
            layer.spans = None


def recompute_layers(model: PreTrainedModel, agents: AgentStorage) -> None:
    """Let autograd keep the inputs of the base's layers only; the backward pass computes the rest again."""
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": partial(_both_passes, agents)})
    # Transformers lets the embedded tokens have a gradient, which another form of checkpointing needs. Here it would
    # lead through the trunk, and have it computed again for nothing.
    model.disable_input_require_grads()


def stop_recomputing(model: PreTrainedModel) -> None:
    """Undo `recompute_layers`, by which the layers of the base hold the agents."""
    if model.is_activation_checkpointing:
        model.activation_checkpointing_disable()


def _both_passes(agents: AgentStorage) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a recomputed layer: of its pass, and of that in backward, which has to know whose tokens it reads."""
    spans = next(iter(agents.layers.values())).spans
    return nullcontext(), nullcontext() if spans is None else reading(agents, spans)
