"""The decoder: it writes all open texts of a crowd together, one token per step.

    decoder = Decoder(crowd, slots=32)
    decoder.admit([Request(ids, Decoding(max_new_tokens=64, ends=ends)), Request(other, decoding, author=2)])
    while decoder.open:
        for request in decoder.step():      # the requests that have a new token
            request.chosen[-1], request.error

Texts of the crowd, of single agents and of the base are open side by side, each with settings of its own. They join
(`admit`) and leave (`release`, or by their ends) between two steps. A step takes the last token of every text and a
chunk of the new prompts through the base: in one pass for the texts of the crowd and of single agents, or one for each
of these where a common pass would do more work, and in one for those of the base. Requests of the crowd and of its
agents that are admitted together with the same prompt share the pass over it. The words are vLLM's: the groups are
scheduled, their tokens become batches, and keys and values are in `ci_llm.crowd.kv_cache`.

On one CPU thread the bits of a text do not depend on what else is open, because of four rules: every product has at
least four rows (`spare_tokens`, and the layers for each agent's own); attention takes each text by itself; a chunk of a
prompt begins at a multiple of `BLOCK` and is filled up to one; and only what was read as a prompt is used again.
Elsewhere, with several threads, and on a CPU without AVX2, kernels for other numbers of rows may round differently.

The base must read packed rows; `decodes` says whether it does. A decoder belongs to one thread, which must not use the
crowd for anything else during a step.

Legend: K agents, R rows of a pass (K, or 1), N its tokens, n texts, D hidden width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ci_llm.base.targets import text_model
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.kv_cache import BLOCK, CACHED_ATTENTION, Chunk, Chunks, KVCache, SequenceGroup, repack
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import BASE_ALONE, CROWD, Author, Decoding, Request, choose, free_positions, num_positions
from ci_llm.lora.onednn import ReorderedWeights
from ci_llm.lora.passes import agrees_by_norm, describe_error, distance, dtypes_of, spare_tokens, tolerance
from ci_llm.lora.reading import compute_dtype

logger = logging.getLogger(__name__)

#: The most spare tokens that are computed to save a pass, which would read every weight again.
_SPARE_AT_MOST: Final = 32
#: How many tokens of each group are read in a step.
Schedule = Mapping[SequenceGroup, int]


class InputBatch:
    """The tokens of one pass through the base.

    Args:
        kind: whose they are: of all agents at once, of agents by `spans`, or of the base.
        rows: R; 1 if all rows have the same tokens.

    Attributes:
        ids, positions: [R][N] of the tokens.
        chunks: the tokens of each group, with their places.
        spans: [K] the tokens of each agent.
    """

    def __init__(self, kind: Literal["crowd", "agents", "base"], rows: int = 1) -> None:
        self.kind = kind
        self.ids = [list[int]() for _ in range(rows)]
        self.positions = [list[int]() for _ in range(rows)]
        self.chunks: list[Chunk] = []
        self.spans: list[slice] = []

    @property
    def length(self) -> int:
        """The length of the longest row."""
        return max(map(len, self.ids))

    def add(self, scheduled: Schedule, row: int | None = None) -> None:
        """Append the next tokens of these groups to one row, or to all."""
        places = range(len(self.ids)) if row is None else range(row, row + 1)
        for group, count in scheduled.items():
            rows = range(len(group.rows)) if row is None else places
            at = len(self.ids[places[0]])
            chunk = Chunk(group, group.next_tokens(count), group.num_computed, at, rows)
            self.chunks.append(chunk)
            for place in places:
                self.ids[place] += chunk.ids
                self.positions[place] += range(chunk.start, chunk.end)

    def pad(self, length: int, pad_id: int) -> None:
        """Append spare tokens, which nothing reads, until every row has this length."""
        for ids, positions in zip(self.ids, self.positions, strict=True):
            spare = length - len(ids)
            ids += [pad_id] * spare
            positions += [0] * spare


class Decoder:
    """The texts that a crowd is writing; see the top of the module.

    Args:
        crowd: a crowd for which `decodes` is True.
        slots: how many requests are open at a time; the caller queues the rest.
        budget: how many tokens of prompts one step reads beside the open texts.

    A prompt takes over the keys and values of the longest common beginning with another prompt; those of ended texts
    stay until their slots are needed.

    Attributes:
        open: the requests that have a slot, in the order of admission.
        reused, read: how many tokens of prompts were taken over, and how many were computed.
    """

    def __init__(self, crowd: CrowdModel, slots: int = 32, *, budget: int = 512) -> None:
        assert min(slots, budget // BLOCK) >= 1
        self.slots = slots
        self.reused = 0
        self.read = 0
        self._crowd = crowd
        self._budget = budget
        self._open: list[Request] = []
        self._prefills: list[SequenceGroup] = []  # whose prompts are being read
        self._running: list[SequenceGroup] = []  # of one request each, whose text is being written
        self._cached: list[SequenceGroup] = []  # prompts of texts that have ended, the latest last
        self._reordered: ReorderedWeights | None = None

    @property
    def open(self) -> list[Request]:
        return [*self._open]

    @property
    def free(self) -> int:
        """Slots that are not in use."""
        return self.slots - len(self._open)

    def admit(self, requests: Sequence[Request]) -> None:
        """Give each of the requests a slot; the next steps read their prompts.

        Raises:
            DataError: the prompt of one is empty, or longer than the base can read. None is admitted then.
        """
        assert len(requests) <= self.free, "the caller queues the rest"
        for request in requests:
            free_positions(self._crowd.model, [request.prompt])
            assert request.author in (CROWD, BASE_ALONE, *range(self._crowd.num_agents))
            assert request not in self._open, "a request is admitted once"
            assert request.author is not CROWD or find_vote(request.decoding.aggregator) is None, "a text of each agent"
        together: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            together.setdefault(tuple(request.prompt), []).append(request)
        self._open += requests
        for prompt, alike in together.items():
            for reader, own in self._readers(alike):
                rows = self._crowd.settings.num_agents if reader is CROWD and self._is_spread else 1
                self._prefills.append(SequenceGroup(prompt, reader, own, KVCache(rows), range(rows)))
        self._forget()

    def release(self, request: Request) -> None:
        """Free the slot of a request; without effect if it has none."""
        if request not in self._open:
            return
        self._open.remove(request)
        ended = [group for group in self._running if request in group.requests]
        self._running = [group for group in self._running if group not in ended]
        for group in ended:
            self._leave(group)
        for group in self._prefills:
            group.requests = [other for other in group.requests if other is not request]
        self._prefills = [group for group in self._prefills if group.requests]
        self._forget()

    def step(self) -> list[Request]:
        """Read further chunks of prompts, and choose a token for every text whose prompt is read.

        A text that ends or fails is released; one that fails has its `error` and no new token.

        Returns:
            the requests of these texts.

        Raises:
            Exception: the base failed, perhaps because memory ran out. No text has changed, and the step can be
                repeated with fewer texts.
        """
        with self._crowd.evaluating(), torch.no_grad():
            return self._step()

    def _step(self) -> list[Request]:
        done = [(batch, self._hidden_states(batch)) for batch in self._batches(self._schedule())]
        found = [pair for batch, states in done for pair in self._logits(batch, states)]
        read = [chunk.group for complete, _ in found for chunk in complete if chunk.group.is_prefill]
        forked = {group: self._fork(group) for group in read}  # up to here memory may run out
        self._prefills = [group for group in self._prefills if group not in forked]
        for groups in forked.values():
            self._running += groups
        for chunk in (chunk for batch, _ in done for chunk in batch.chunks):
            if chunk.group.is_prefill:
                self.read += len(chunk.ids)
            chunk.group.num_computed = chunk.end
        return [request for complete, logits in found for request in self._sample(complete, logits, forked)]

    # Which requests share what they read

    @property
    def _is_spread(self) -> bool:
        """True if all agents read: every product holds the crowd's tokens once for each of them."""
        return len(self._crowd.storage.reading.agents) == self._crowd.settings.num_agents

    def _author(self, request: Request) -> Author:
        """The author of a request; under `active_agent` and `without_agents` there is only one."""
        return request.author if self._is_spread else CROWD

    def _readers(self, requests: Sequence[Request]) -> Iterator[tuple[Author, list[Request]]]:
        """Yield who reads the prompt of these requests, each with its requests.

        The base reads for itself. All agents read at once if the crowd is asked, or each of them.
        """
        by_author: dict[Author, list[Request]] = {}
        for request in requests:
            by_author.setdefault(self._author(request), []).append(request)
        if BASE_ALONE in by_author:
            yield BASE_ALONE, by_author.pop(BASE_ALONE)
        if CROWD in by_author or len(by_author) == self._crowd.num_agents > 1:
            yield CROWD, [request for own in by_author.values() for request in own]
        else:
            yield from by_author.items()

    def _fork(self, group: SequenceGroup) -> list[SequenceGroup]:
        """A group of its own for each request of a group whose prompt is read."""
        forked = []
        for request in group.requests:
            author = self._author(request)
            rows = group.rows_of(author)
            forked.append(SequenceGroup(group.prompt, author, [request], group.cache, rows, len(group.prompt)))
        # The crowd and single agents may write in passes of their own.
        repack([own for own in forked if own.author is CROWD], len(group.prompt))
        repack([own for own in forked if own.author is not CROWD], len(group.prompt))
        return forked

    def _leave(self, ended: SequenceGroup) -> None:
        """Free the rows of ended texts once they are half of all, and keep a prompt that no text beside it has.

        Both are savings that copy. Where memory has run out they are left, as this is called to free some.
        """
        beside = [group for group in self._running if group.cache is ended.cache]
        if 2 * sum(len(group.rows) for group in beside) <= ended.cache.rows:
            unless_out_of_memory(partial(repack, beside))
        if ended.author not in {group.author for group in beside}:
            _, complaint = unless_out_of_memory(partial(repack, [ended], len(ended.prompt)))
            if complaint is None:
                ended.requests = []
                self._cached.append(ended)

    def _forget(self) -> None:
        """Drop the oldest prompts of ended texts beyond the number of free slots."""
        del self._cached[: max(0, len(self._open) + len(self._cached) - self.slots)]

    # What a step reads

    def _schedule(self) -> Schedule:
        """How many tokens of each group the next passes read: the last one of every text, and prompts up to the budget.

        What remains of a prompt is read in whole blocks.
        """
        scheduled: dict[SequenceGroup, int] = dict.fromkeys(self._running, 1)
        prefills = list[SequenceGroup]()
        left = self._budget
        for group in self._prefills:
            if left < BLOCK or (not group.num_computed and not self._begin(group, prefills)):
                continue
            unread = len(group.prompt) - group.num_computed
            end = group.num_computed + left
            count = unread if unread <= left else end // BLOCK * BLOCK - group.num_computed
            if count > 0:
                scheduled[group] = count
                prefills.append(group)
                left -= count
        return scheduled

    def _begin(self, group: SequenceGroup, under_way: Sequence[SequenceGroup]) -> bool:
        """Take over the longest beginning that another prompt has; False if one under way will soon have much more."""
        others = (*self._running, *self._cached, *self._prefills)
        best = max(others, key=lambda other: other.num_shared(group, other.num_computed))
        count = best.num_shared(group, best.num_computed)
        coming = max((other.num_shared(group, len(other.prompt)) for other in under_way), default=0)
        if 2 * (coming - count) > len(group.prompt):
            return False
        if count:
            group.cache = best.cache.copy(best.rows_of(group.author), count)
            group.num_computed = count
            self.reused += count
        return True

    def _batches(self, scheduled: Schedule) -> Iterator[InputBatch]:
        """Lay the tokens out for as few passes as possible, with spare tokens for products of few rows."""
        model, pad_id, agents = self._crowd.model, self._crowd.base_model.pad_id, self._crowd.settings.num_agents

        def of(author: Author) -> Schedule:
            return {group: count for group, count in scheduled.items() if group.author == author}

        crowd, base = of(CROWD), of(BASE_ALONE)
        lanes = [of(k) for k in range(agents)]
        sizes = [sum(lane.values()) for lane in lanes]
        spare = agents * max(sizes) - sum(sizes)
        together = self._is_spread and spare <= _SPARE_AT_MOST and sum(map(bool, (crowd, *lanes))) > 1
        if crowd or together:
            batch = InputBatch("crowd", agents if together else 1)
            batch.add(crowd)
            if together:
                for k, lane in enumerate(lanes):
                    batch.add(lane, k)
            batch.pad(batch.length + spare_tokens(model, batch.length, agents if self._is_spread else 1), pad_id)
            yield batch
        if any(lanes) and not together:
            batch = InputBatch("agents")
            for lane, size in zip(lanes, sizes, strict=True):
                start = batch.length
                batch.add(lane)
                batch.pad(batch.length + (spare_tokens(model, size) if lane else 0), pad_id)
                batch.spans.append(slice(start, batch.length))
            yield batch
        if base:
            batch = InputBatch("base")
            batch.add(base)
            batch.pad(batch.length + spare_tokens(model, batch.length), pad_id)
            yield batch

    # Passes

    def _hidden_states(self, batch: InputBatch) -> Tensor:
        """Final hidden states [R, N, D]."""
        model, storage = self._crowd.model, self._crowd.storage
        ids, positions = self._on_device([batch.ids, batch.positions])
        dtype = compute_dtype(model.get_input_embeddings().weight)
        if self._reordered is None or self._reordered.dtype != dtype:
            self._reordered = self._crowd.base_model.reordered(dtype)
        copies = self._crowd.settings.num_agents if batch.kind == "crowd" and self._is_spread else 1
        with self._reading(batch, self._reordered), storage.ready(dtype, training=False):
            found = text_model(model)(
                input_ids=ids.expand(copies, -1),
                position_ids=positions,
                chunks=Chunks(batch.chunks, self._crowd.device),
                use_cache=False,
            )
        return found.last_hidden_state  # type: ignore[no-any-return]

    @contextmanager
    def _reading(self, batch: InputBatch, reordered: ReorderedWeights) -> Iterator[None]:
        """Set whose tokens the layers read, and attention over the cache."""
        config, reading = self._crowd.model.config, self._crowd.storage.reading
        before = config._attn_implementation
        config._attn_implementation = CACHED_ATTENTION
        reading.by_onednn = reordered.by_onednn
        reading.reordered = reordered.weights
        alone = [k for k, span in enumerate(batch.spans) if span.start < span.stop]
        sizes = [batch.spans[k].stop - batch.spans[k].start for k in alone] if len(alone) > 1 else None
        try:
            with reading.of(reading.agents if batch.kind == "crowd" else alone, sizes):
                yield
        finally:
            config._attn_implementation = before
            reading.by_onednn = False
            reading.reordered = {}

    def _logits(self, batch: InputBatch, states: Tensor) -> Iterator[tuple[list[Chunk], Tensor]]:
        """Yield the complete chunks with their logits: [R, n, V] of chunks in all rows, [1, n, V] of the others.

        One product serves all of them, and reads a large head once.
        """
        rows, width = states.shape[:2]
        complete = [chunk for chunk in batch.chunks if chunk.is_complete]
        common = [chunk for chunk in complete if len(chunk.rows) == rows]
        own = [chunk for chunk in complete if len(chunk.rows) != rows]
        places = [row * width + chunk.last for row in range(rows) for chunk in common]
        places += [chunk.rows.start * width + chunk.last for chunk in own]
        if not places:
            return
        spare = spare_tokens(self._crowd.model, len(places))
        asked = states.flatten(0, 1)[self._on_device([*places, *[places[0]] * spare])]
        dtype = compute_dtype(asked)
        assert self._reordered is not None
        head = self._reordered.head
        if self._reordered.dtype != dtype:
            head = replace(self._crowd.head.to(dtype), by_onednn=head.by_onednn)
        with torch.autocast(asked.device.type, enabled=False):
            found = head.logits(asked.to(dtype))
        count = rows * len(common)
        if common:
            yield common, found[:count].unflatten(0, (rows, -1))
        if own:
            yield own, found[None, count : count + len(own)]

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        """A tensor of integers on the device; the host does not wait for it, as it would for a list in an index."""
        return torch.tensor(numbers).to(self._crowd.device, non_blocking=True)

    def _sample(
        self, chunks: Sequence[Chunk], logits: Tensor, forked: Mapping[SequenceGroup, Sequence[SequenceGroup]]
    ) -> list[Request]:
        """Choose a token for each text, and for each request whose prompt is read, from the chunks' logits [R, n, V].

        Where all agents have read the prompt of a single agent's text, its own row is taken.
        """
        whole, single = list[tuple[Request, int]](), list[tuple[Request, int, int]]()
        for place, chunk in enumerate(chunks):
            for group in forked.get(chunk.group, [chunk.group]):
                [request] = group.requests
                if group.author is CROWD or chunk.group.author is not CROWD:
                    whole.append((request, place))
                else:
                    single.append((request, place, group.author))
        requests = [request for request, _ in whole]
        if whole:
            self._take(requests, logits[:, self._on_device([place for _, place in whole])])
        if single:
            places, agents = (self._on_device([each[n] for each in single]) for n in (1, 2))
            own = [request for request, _, _ in single]
            self._take(own, logits[agents, places][None])
            requests += own
        return requests

    def _take(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Give n requests the tokens chosen from logits [R, n, V], and release those that have ended."""
        limit = num_positions(self._crowd.model)
        for request, token in zip(requests, choose(logits, requests), strict=True):
            request.take(token, limit)
            if request.finish is not None:
                self.release(request)


#: The trial's prompt tokens (more than a block, and than a short attention window), new tokens and listed tokens.
_TRIAL: Final = (21, 3, 8)


def decodes(crowd: CrowdModel) -> bool:
    """True if a decoder computes the probabilities of the agents' full passes, by a short trial before the first text.

    A family may accept packed rows and a cache and still compute something else.
    """
    base = crowd.base_model
    if base.decodes is None:
        base.decodes = base.route == "packed" and _reproduces(crowd)
    return base.decodes


def _reproduces(crowd: CrowdModel) -> bool:
    length, count, listed = _TRIAL
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, crowd.head.weight.shape[0], (length,), generator=generator).tolist()
    requests = [Request(prompt, Decoding(count), k, top=listed) for k in range(crowd.num_agents)]
    decoder = Decoder(crowd, len(requests))
    try:
        decoder.admit(requests)
        while decoder.open:
            decoder.step()
        return all(_agrees(crowd, request) for request in requests)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind for what they do not support
        logger.debug("Transformers generates: %s", describe_error(error))
        return False


@torch.no_grad()
def _agrees(crowd: CrowdModel, request: Request) -> bool:
    """True if a full pass over the text gives the probabilities that were listed with its tokens."""
    if request.error is not None:
        return True  # an agent with NaN has none
    model = crowd.model
    everyone = len(crowd.storage.reading.agents) == crowd.settings.num_agents
    ids = torch.tensor([[*request.prompt, *request.tokens]], device=crowd.device)
    agent = request.author or 0 if everyone else None
    with crowd.evaluating(), crowd.base_model.active_agent(agent):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    wanted = logits.float().log_softmax(-1)
    pairs = []
    for row, chosen in zip(wanted, request.chosen, strict=True):
        places, found = (torch.tensor(each, device=row.device) for each in zip(*chosen.top, strict=True))
        pairs.append((found, row[places]))
    limit = tolerance(*dtypes_of(model, logits))
    if all(distance(*pair) <= limit for pair in pairs):
        return True
    # In 16 bits a single token may be far off by rounding; with a wrong column, all are.
    all_found, all_wanted = (torch.cat(each)[None] for each in zip(*pairs, strict=True))
    return agrees_by_norm(all_found, all_wanted, limit)
