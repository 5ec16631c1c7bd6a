"""The base with the adapters of K agents in it: how rows go through it, by which attention and which kernels.

Nothing is assumed about a family of bases, which may accept packed rows and still compute something else. A trial at
the start sends one short batch both ways, and compares the logits with those of the base's own forward pass.

Legend: K agents, N packed tokens, R rows of the base's input (packed: K or 1), D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.agents.storage import AgentStorage, attach
from ci_llm.base.targets import layer_list, layer_numbers, text_model
from ci_llm.crowd.next_token import BASE_ALONE, Author
from ci_llm.data.batches import Batch, MicroBatch, Owned, pack, padded, without_repeats
from ci_llm.data.encoder import Example
from ci_llm.data.units import unit_of
from ci_llm.errors import ModelError
from ci_llm.lora import kernels, passes
from ci_llm.lora.attention import Segments, Way, choose_way, name_of
from ci_llm.lora.onednn import ReorderedWeights
from ci_llm.lora.products import joined
from ci_llm.lora.reading import compute_dtype
from ci_llm.lora.settings import LoraSettings

Route = Literal["packed", "padded"]

#: The standard deviation of the agents' weights in a trial. In SmolLM2-135M in bf16, rounding then gives a distance of
#: 0.02 to 0.10, mixed-up agents 0.13 or more, and a wrong mask 0.6; the limit is 0.088.
TRIAL_STD: Final = 0.02


class _Laid(NamedTuple):
    """Packed rows: their ids and positions, the arguments of `Segments`, and the place of each token's state."""

    ids: Tensor
    positions: Tensor
    bounds: tuple[int, ...]
    before: tuple[int, ...]
    places: Tensor | slice


class LoraModel:
    """A base with LoRA agents in it, as PEFT's `LoraModel` is one with a single adapter active.

    Args:
        model: the base; its target modules are replaced in place.
        settings, base_name, pad_id: see `Crowd`.

    Attributes:
        storage: the agents.
        route: the layout of rows in the base: "packed" end to end, or "padded" side by side in a rectangle.
        attention: the way of attention over packed rows.
        fast: the parts of `ci_llm.lora.kernels` that are computed by fast kernels.
        shares_prompts: true if the common beginning of a unit's rows is computed once; see `share_prompts`.
        decodes: true if our decoder writes the texts, and not Transformers' `generate`; None before the first text.
        padding_invariant: true if pads change no text; None before the first batch that needs pads.
        reordered_weights: the frozen weights for the products of a decoder, kept until the crowd trains.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, base_name: str, pad_id: int) -> None:
        self.base_name = base_name
        self.pad_id = pad_id
        self.storage: AgentStorage = attach(model, settings)
        self.model = model
        self.fast: tuple[str, ...] = ()
        self.shares_prompts = False
        self.decodes: bool | None = None
        self.padding_invariant: bool | None = None
        numbers = layer_numbers(model, self.storage.layers).values()
        first = layer_list(model)[1][min(numbers)] if numbers else model
        self._kinds = {type(module) for module in first.modules()}
        self.reordered_weights: ReorderedWeights | None = None
        self._head_rows = passes.give_head_contiguous_rows(model)
        self._native_attention = model.config._attn_implementation
        self.attention: Way = "rows"
        self.route = "packed"

    def unload(self) -> PreTrainedModel:
        """Restore the base's own layers and attention, and return it."""
        for name, layer in self.storage.layers.items():
            self.model.set_submodule(name, layer.base_layer)
        self.compute_fast(())
        self._head_rows.remove()
        self.model.config._attn_implementation = self._native_attention
        passes.stop_recomputing(self.model)
        return self.model

    def unusable(self, what: str) -> ModelError:
        """The error to raise for a base that cannot be used; `what` follows the name of its class."""
        return ModelError(
            f"{type(self.model).__name__} {what}",
            where=f"model_name: {self.base_name}",
            hint="use a base of another family; Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and GPT-2 are known to work",
        )

    @property
    def route(self) -> Route:
        return self._route

    @route.setter
    def route(self, route: Route) -> None:
        # The setting outlives the forward pass, because activation checkpointing recomputes the layers in the backward
        # pass, with the same attention.
        self._route = route
        own = name_of(self.attention) if route == "packed" else self._native_attention
        self.model.config._attn_implementation = own

    # Passes

    def states(self, rows: MicroBatch) -> list[Tensor]:
        """Final hidden states [n, N, D] of each batch for the n agents that read it, in packed order.

        Padded rows of several batches take a pass each: a common rectangle would pad rows to another length than alone.
        """
        if len(rows) == 1:
            return [self._of_one(*rows[0])]
        if self.route == "padded":
            return [self._of_one(*each) for each in rows]
        each = [one for own in rows for one in [self._laid(own.batch)] * len(own.agents)]
        sizes, bounds = [len(one.ids) for one in each], [0]
        for one in each:
            bounds += [bounds[-1] + bound for bound in one.bounds[1:]]
        ids, positions = torch.cat([one.ids for one in each]), torch.cat([one.positions for one in each])
        with self.storage.reading.of([k for own in rows for k in own.agents], sizes):
            states = self._end_to_end(ids[None], positions, bounds, [back for one in each for back in one.before])
        parts = iter(part[:, one.places] for part, one in zip(states.split(sizes, dim=1), each, strict=True))
        return [joined([*islice(parts, len(own.agents))]) for own in rows]

    def _of_one(self, agents: tuple[int, ...], batch: Batch) -> Tensor:
        """[n, N, D] of n agents that read one batch: the rows once for each."""
        copies = max(len(agents), 1)
        with self.storage.reading.of(agents):
            if self.route == "packed":
                laid = self._laid(batch)
                states = self._end_to_end(laid.ids.expand(copies, -1), laid.positions, laid.bounds, laid.before)
                return states[:, laid.places]
            inputs, (rows, columns) = self._rectangle(batch)
            states = self._hidden({name: each.repeat(copies, 1) for name, each in inputs.items()})
        return states.unflatten(0, (copies, batch.num_rows))[:, rows, columns]  # type: ignore[no-any-return]

    def _end_to_end(self, ids: Tensor, positions: Tensor, bounds: Sequence[int], before: Sequence[int]) -> Tensor:
        """Final hidden states [R, N, D] of ids [R, N]."""
        segments = Segments(bounds, before, fast="attention" in self.fast)
        return self._hidden({"input_ids": ids, "position_ids": positions[None], "segments": segments})

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        embedding = self.model.get_input_embeddings().weight
        dtype = compute_dtype(embedding)
        by_itself = "precision" in self.fast and dtype == embedding.dtype
        without_autocast = torch.autocast(embedding.device.type, enabled=False) if by_itself else nullcontext()
        with without_autocast, self.storage.ready(dtype, training=self.model.training):
            return text_model(self.model)(**inputs, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _laid(self, batch: Batch) -> _Laid:
        """The rows end to end; spare tokens are a further row, which nothing reads."""
        ids, positions, bounds, before = batch.input_ids, batch.position_ids, batch.bounds, (0,) * batch.num_rows
        places: Tensor | slice = slice(batch.num_tokens)
        if self.shares_prompts and any(batch.shared):
            kept, places, bounds, before = without_repeats(batch)
            ids, positions = ids[kept], positions[kept]
        spare = passes.spare_tokens(self.model, len(ids))
        if spare:
            ids = F.pad(ids, (0, spare), value=self.pad_id)
            positions = torch.cat([positions, positions.new_tensor(range(spare))])
            bounds, before = (*bounds, bounds[-1] + spare), (*before, 0)
        return _Laid(ids, positions, bounds, before, places)

    def _rectangle(self, batch: Batch) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        """The rows side by side, and the index of their tokens in packed order; see `padded`."""
        inputs, index = padded(batch, self.pad_id)
        spare = passes.spare_tokens(self.model, inputs["input_ids"].shape[1])
        if spare:
            inputs = {name: F.pad(each, (0, spare)) for name, each in inputs.items()}
        # No attention mask is given. Pads stand to the right of a row, where no token of a causal model attends. A
        # mask that leaves a pad no position to attend to makes its state NaN in some families, and NaN spreads.
        return {name: inputs[name] for name in ("input_ids", "position_ids")}, index

    def states_of_all(self, batch: Batch) -> Tensor:
        """Final hidden states [n, N, D] of the n agents that read now, in one pass or in passes of their own."""
        agents = self.storage.reading.agents
        owners = [(k,) for k in agents] if self.storage.pass_per_agent and len(agents) > 1 else [agents]
        return joined([self.states([Owned(each, batch)])[0] for each in owners])

    @property
    def of_chunk(self) -> passes.OfChunk:
        """The arithmetic of a chunk of log-probabilities."""
        return kernels.fast_chunk if "head" in self.fast else passes.plain_chunk

    def read_by(self, author: Author) -> AbstractContextManager[None]:
        """Let this agent, or the base alone, read all rows inside; CROWD: those that read now."""
        reading = self.storage.reading
        if author is None:
            return reading.of(reading.agents)
        return reading.of(() if author == BASE_ALONE else (author,))

    @contextmanager
    def active_agent(self, author: Author) -> Iterator[PreTrainedModel]:
        """Yield the plain model with its own attention, read by this agent; CROWD: by all of them, in equal parts."""
        config = self.model.config
        route_attention = config._attn_implementation
        config._attn_implementation = self._native_attention
        try:
            with self.read_by(author):
                yield self.model
        finally:
            config._attn_implementation = route_attention

    # Kernels

    def choose_attention(self) -> str:
        """Take the fastest way of attention that is right on this GPU; returns a line about it."""
        config, like = self.model.config.get_text_config(), self.model.get_input_embeddings().weight
        self.attention, said = choose_way(config, like.device, compute_dtype(like))
        self.route = self._route
        return said

    def compute_fast(self, parts: Sequence[str]) -> None:
        """Compute these parts of `ci_llm.lora.kernels` by fast kernels, and no others.

        A trial must have approved them; see `ci_llm/run/autotune.py`.
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

    def reordered(self, dtype: torch.dtype) -> ReorderedWeights:
        """The frozen weights for the products of a decoder."""
        layers, head = self.storage.layers.values(), passes.Head.of(self.model)
        if self.reordered_weights is None or not self.reordered_weights.is_of(layers, head, dtype):
            self.reordered_weights = None  # its memory is free before the next one takes its own
            self.reordered_weights = ReorderedWeights.of(layers, head, dtype)
        return self.reordered_weights

    # Trials at the start

    @torch.no_grad()
    def choose_route(self) -> str | None:
        """Compare one short batch through the base's own forward pass with both routes, and take the first that agrees.

        Returns:
            why the padded route was taken, or None for the packed one.

        Raises:
            ModelError: the base cannot run with agents, is not causal, or neither route reproduces its logits.
        """
        with _random_agents(self):
            batch = _probe(self.model, self.storage.weights.device)
            wanted = _reference(self, batch)
            _refuse_non_causal(self, batch)
            reason = None
            routes: tuple[Route, ...] = ("packed", "padded")
            for self.route in routes:
                try:
                    found = passes.Head.of(self.model).logits(self.states_of_all(batch))
                except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
                    reason = passes.describe_error(error)
                    continue
                gap, limit = passes.distance(found, wanted), passes.tolerance(*passes.dtypes_of(self.model, found))
                if gap <= limit or passes.agrees_by_norm(found, wanted, limit):
                    return reason
                reason = f"{self.route} rows change its logits by {gap:.1e}"
        what = f"computes its logits in a way this program does not reproduce ({reason})"
        raise self.unusable(what)

    @torch.no_grad()
    def share_prompts(self) -> str | None:
        """Compute the common beginning of a unit's rows once from now on, if a trial gives the same states.

        Returns:
            why not, or None.
        """
        if self.route != "packed":
            return "rows are padded"
        ids = _probe(self.model, self.storage.weights.device).input_ids.cpu().numpy()
        at = len(ids) // 2  # the longest row of the probe is longer than a short window
        rows = [Example(np.concatenate([ids[:at], own]), np.arange(at + len(own)) > 0) for own in (ids[:4], ids[-9:])]
        batch = pack([unit_of(rows), unit_of(rows[:1])], range(2)).to(self.storage.weights.device)
        with _random_agents(self):
            wanted = self.states_of_all(batch)
            self.shares_prompts = True
            before = self.fast
            try:
                found = [self.states_of_all(batch) for self.fast in ((), ("attention",))]
            except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
                reason: str | None = passes.describe_error(error)
            else:
                gap = passes.distance(torch.cat(found), torch.cat([wanted, wanted]))
                limit = passes.tolerance(*passes.dtypes_of(self.model, wanted))
                reason = None if gap <= limit else f"it changes states by {gap:.1e}"
        self.fast = before
        self.shares_prompts = reason is None
        return reason


@contextmanager
def _random_agents(base: LoraModel) -> Iterator[None]:
    """Evaluation mode and random weights inside: with B = 0 a mix-up of adapters would change nothing."""
    weights = base.storage.weights
    training = base.model.training
    kept = weights.clone()
    weights.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)) * TRIAL_STD)
    try:
        base.model.eval()
        yield
    finally:
        weights.copy_(kept)
        base.model.train(training)


def _reference(base: LoraModel, batch: Batch) -> Tensor:
    """The logits [K, N, V] of the model's own forward pass, for each agent and each row separately.

    Raises:
        ModelError: the base cannot run with agents, or its logits are NaN.
    """
    rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
    logits = []
    try:
        for k in range(len(base.storage.agents)):
            with base.active_agent(k) as model:
                logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    except Exception as error:
        what = f"cannot read a short batch with agents on it ({passes.describe_error(error)})"
        raise base.unusable(what) from error
    found = torch.stack(logits)
    if found.isnan().any():
        raise ModelError(
            f"{type(base.model).__name__} gives NaN for logits: some of its weights are not finite",
            where=f"model_name: {base.base_name}",
            hint="download or save the base again; if its weights are whole, take a wider model_dtype",
        )
    return found


def _refuse_non_causal(base: LoraModel, batch: Batch) -> None:
    """Change the last token of a row, and refuse the base if earlier logits change."""
    row = batch.input_ids[: batch.bounds[1]][None]
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % base.model.get_input_embeddings().weight.shape[0]
    with base.active_agent(0) as model:
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
    if passes.distance(first, second) > passes.tolerance(*passes.dtypes_of(base.model, first)):
        raise ModelError(
            f"{type(base.model).__name__} is not a causal language model: a later token changes earlier logits",
            where=f"model_name: {base.base_name}",
            hint="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
        )


def _probe(model: PreTrainedModel, device: torch.device) -> Batch:
    """Three short rows of random tokens; one is longer than a short attention window, if the model has one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    lengths = [7, 12, max(9, window + 5 if window < 64 else 0)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    rows = [own.numpy() for own in ids.split(lengths)]
    return pack([Example(own, np.arange(len(own)) > 0) for own in rows], range(len(rows))).to(device)
