"""The decoder: it writes all open texts of a crowd together, one token per step.

    decoder = Decoder(crowd, slots=32)
    decoder.admit([Request(ids, Decoding(max_new_tokens=64, ends=ends)), Request(other, decoding, who=2)])
    while decoder.open:
        for request in decoder.step():      # the requests that have a new token
            request.chosen[-1], request.error

Texts of the crowd, of single agents and of the base are open side by side, each with settings of its own. They join
(`admit`) and leave (`release`, or by their ends) between two steps. A step takes the last token of every text and a
part of the new prompts through the base: in one pass for the texts of the crowd and of single agents, or one for each
of these where a common pass would do more work, and in one for those of the base. Requests of the crowd and of its
agents that are admitted together with the same prompt share the pass over it.

On one CPU thread the bits of a text do not depend on what else is open, because of four rules: every product has at
least four rows (`spare_tokens`, and the layers for each agent's own); attention takes each text by itself; a part of a
prompt begins at a multiple of `BLOCK` and is filled up to one; and only what was read as a prompt is used again.
Elsewhere, with several threads, and on a CPU without AVX2, kernels for other numbers of rows may round differently.

The base must read packed rows; `decodes` says whether it does. A decoder belongs to one thread, which must not use the
crowd for anything else during a step.

Keys and values are cached in `Columns`: position p of a text is column p. Texts that follow one prompt grow in step:
they lie in the rows of the same columns, and one call attends for all of them, as it would for each. Texts of different
lengths need no padding, so they join and leave a pass at any time, and their numbers do not depend on other texts.

Legend: K agents, R rows of a pass (K, or 1), N its tokens, n texts, D hidden width, V vocabulary. In attention: n texts
with one new token each, or R times as many, H heads, G key/value heads, T columns in blocks of `BLOCK`, C rows of
columns, D width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from ci_llm.base.targets import text_model
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import CROWD, Decoding, Request, Who, choose, free_positions, num_positions
from ci_llm.errors import BadInput
from ci_llm.lora.kernels import Packed, onednn_is_faster
from ci_llm.lora.passes import agrees_by_norm, describe_error, distance, dtypes_of, spare_tokens, tolerance
from ci_llm.lora.reading import NOBODY, compute_dtype

logger = logging.getLogger(__name__)


# The cache of keys and values, and attention over it

#: The name under which Transformers finds the attention of this module.
COLUMNS: Final = "ci_llm_columns"
#: How many fp32 numbers one AVX-512 register holds: sums over fewer columns have another order.
BLOCK: Final = 16
_GROWTH: Final = 1.25
_PLAIN: Final = nullcontext()


def whole_blocks(count: int) -> int:
    """The least multiple of `BLOCK` that is not below `count`."""
    return -(-count // BLOCK) * BLOCK


@dataclass(eq=False)
class Columns:
    """The keys and values of texts of equal length.

    Attributes:
        rows: C. A text has one row, or one for each agent.
        layers: for each layer number [2, C, G, T, D], keys first.
    """

    rows: int
    layers: dict[int, Tensor] = field(default_factory=dict)

    def extended(self, layer: int, start: int, new: Tensor) -> Tensor:
        """Write columns [2, C, G, t, D] from `start` on, and return all columns of the layer."""
        _, rows, groups, count, width = new.shape
        end, held = start + count, self.layers.get(layer)
        if held is None or held.shape[3] < end:
            room = whole_blocks(max(end, int(held.shape[3] * _GROWTH) if held is not None else 0))
            grown = new.new_zeros(2, rows, groups, room, width)
            if held is not None:
                grown[:, :, :, :start] = held[:, :, :, :start]
            self.layers[layer] = held = grown
        held.narrow(3, start, count).copy_(new)
        return held

    def copied(self, rows: Sequence[int], count: int | None = None) -> Columns:
        """A copy of the first `count` columns of these rows, or of all; a row may be named several times."""
        copies, places = {}, dict[torch.device, Tensor]()  # the host waits once for each device
        for layer, held in self.layers.items():
            if held.device not in places:
                places[held.device] = torch.tensor(rows, device=held.device)
            part = held[:, :, :, :count].index_select(1, places[held.device])
            copies[layer] = F.pad(part, (0, 0, 0, -part.shape[3] % BLOCK))
        return Columns(len(rows), copies)


@dataclass(frozen=True)
class Piece:
    """The tokens of one text in a pass.

    Attributes:
        columns: where the text lies.
        own: the rows of the columns that it has.
        start, end: the positions of these tokens in the text.
        at: where they begin in the rows of the pass.
        rows: the rows of the pass that have them, one for each of `own`.
    """

    columns: Columns
    own: Sequence[int]
    start: int
    end: int
    at: int
    rows: range

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def last(self) -> int:
        """The place of the last token in its row."""
        return self.at + self.count - 1


class Pieces:
    """The tokens of a pass: a keyword argument that the model's forward passes to its layers.

    Attributes:
        long: the pieces of several tokens, which are parts of prompts.
        together: by their columns, the pieces of one token.
        tokens: [2, n] row and place in the pass of the token of each row of these columns, one after the other. A row
            whose text has ended reads the first token, in vain.
        going_on: [n'] which of these are of texts that have not ended.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.long = [piece for piece in pieces if piece.count > 1]
        self.together: dict[Columns, list[Piece]] = {}
        for piece in pieces:
            if piece.count == 1:
                self.together.setdefault(piece.columns, []).append(piece)
        tokens, before = dict[int, tuple[int, int]](), 0
        for columns, alike in self.together.items():
            tokens |= {before + own: (row, p.at) for p in alike for own, row in zip(p.own, p.rows, strict=True)}
            before += columns.rows
        found = torch.tensor([tokens.get(n, (0, 0)) for n in range(before)], dtype=torch.long)
        self.tokens = found.view(-1, 2).T.to(device, non_blocking=True)
        self.going_on = torch.tensor([*tokens], dtype=torch.long).to(device, non_blocking=True)
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, piece: Piece, window: int | None, device: torch.device) -> Tensor:
        """The mask [t', T'] for several tokens of a prompt, True where visible; both dimensions are whole blocks."""
        key = piece.start, piece.end, window
        if key not in self._masks:
            # A kernel rounds blocks of one to three rows differently, so the tokens are padded to whole blocks.
            rows = torch.arange(piece.start, piece.start + whole_blocks(piece.count), device=device)[:, None]
            columns = torch.arange(whole_blocks(piece.end), device=device)
            seen = columns <= rows
            self._masks[key] = seen & (columns > rows - window) if window else seen
        return self._masks[key]


def column_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pieces: Pieces | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the tokens of each text to all of its columns, these tokens included.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H. They are written to the columns.
        pieces: the texts of the pass.
        scaling: the factor of the scores; None for 1/√D.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, or uses attention sinks.
    """
    if pieces is None or s_aux is not None:
        raise TypeError("attention over columns needs `pieces`, and supports no attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    new, layer = torch.stack([key, value]), int(module.layer_idx)  # type: ignore[arg-type]
    found = query.new_zeros(query.transpose(1, 2).shape)
    with torch.autocast(query.device.type, enabled=False) if torch.is_autocast_enabled(query.device.type) else _PLAIN:
        for piece in pieces.long:
            part = slice(piece.rows.start, piece.rows.stop), slice(None), slice(piece.at, piece.at + piece.count)
            held = piece.columns.extended(layer, piece.start, new[(slice(None), *part)])
            mask = pieces.mask(piece, sliding_window, query.device)
            k, v = held.narrow(3, 0, mask.shape[1])
            padded = F.pad(query[part], (0, 0, 0, mask.shape[0] - piece.count))
            own = _attend(padded, k, v, scale, softcap, mask).narrow(2, 0, piece.count)
            found[part[0], part[2]] = own.transpose(1, 2)
        if not pieces.together:
            return found, None
        (rows, places), sizes, done = pieces.tokens, [columns.rows for columns in pieces.together], []
        # For each of the columns [C, H, D] and [2, C, G, D].
        each = zip(query[rows, :, places].split(sizes), new[:, rows, :, places].split(sizes), strict=True)
        for (columns, alike), (q, added) in zip(pieces.together.items(), each, strict=True):
            end = alike[0].end
            first = max(0, end - sliding_window) if sliding_window else 0
            held = columns.extended(layer, end - 1, added.transpose(0, 1).unsqueeze(3))
            k, v = held.narrow(3, first, end - first)
            # The heads of a group act as so many queries.
            done.append(_attend(q.unflatten(1, (k.shape[1], -1)), k, v, scale, softcap, None).flatten(1, 2))
        found[rows[pieces.going_on], places[pieces.going_on]] = torch.cat(done)[pieces.going_on]
    return found, None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, mask: Tensor | None) -> Tensor:
    """q [R, H, t, D], k and v [R, G, T, D], mask [t, T] or None -> [R, H, t, D]."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.mT * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


# No mask is registered beside it: Transformers then makes none.
AttentionInterface.register(COLUMNS, column_attention)


# Texts and passes


@dataclass(eq=False)
class _Prompt:
    """A prompt that is being read for one or more requests.

    Attributes:
        who: the reader; `CROWD` for requests of the crowd and of single agents.
        rows: the rows of the columns that hold it.
        read: how many tokens of the prompt are in the columns.
    """

    ids: Sequence[int]
    who: Who
    members: list[Request]
    columns: Columns
    rows: Sequence[int]
    read: int = 0

    def shared_with(self, other: _Prompt, count: int) -> int:
        """How many of its first `count` tokens `other` can take over; always whole blocks."""
        if self.who != other.who and (self.who is not CROWD or other.who == NOBODY):
            return 0
        pairs = enumerate(zip(self.ids[:count], other.ids, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(count, len(other.ids)))
        return min(same, len(other.ids) - 1) // BLOCK * BLOCK


@dataclass(eq=False)
class _Text:
    """A text whose prompt is read; those of one prompt lie in rows of the same columns."""

    request: Request
    who: Who
    columns: Columns
    rows: Sequence[int]

    @property
    def prompt(self) -> _Prompt:
        """The part that another prompt can take over; the answer's columns have other bits than those of prompts."""
        return _Prompt(self.request.prompt, self.who, [], self.columns, self.rows, len(self.request.prompt))


@dataclass(frozen=True)
class _Part:
    """The tokens of one text, or of a part of a prompt, in a pass."""

    of: _Text | _Prompt
    ids: Sequence[int]
    start: int

    @property
    def is_ready(self) -> bool:
        """True if the next token is chosen after this part."""
        return isinstance(self.of, _Text) or self.start + len(self.ids) == len(self.of.ids)


class _Pass:
    """The tokens of one pass through the base.

    Args:
        kind: whose they are: of all agents at once, of agents by `spans`, or of the base.
        rows: R; 1 if all rows have the same tokens.

    Attributes:
        ids, positions: [R][N] of the tokens.
        laid: the parts laid out so far, each with its place for attention.
        spans: [K] the tokens of each agent.
    """

    def __init__(self, kind: Literal["crowd", "agents", "base"], rows: int = 1) -> None:
        self.kind = kind
        self.ids, self.positions = [list[int]() for _ in range(rows)], [list[int]() for _ in range(rows)]
        self.laid: list[tuple[_Part, Piece]] = []
        self.spans: list[slice] = []

    @property
    def length(self) -> int:
        """The length of the longest row."""
        return max(map(len, self.ids))

    def add(self, parts: Sequence[_Part], row: int | None = None) -> None:
        """Append parts to one row, or to all."""
        for part in parts:
            end, at = part.start + len(part.ids), len(self.ids[row or 0])
            for each in range(len(self.ids)) if row is None else [row]:
                self.ids[each] += part.ids
                self.positions[each] += range(part.start, end)
            own = part.of.rows
            rows = range(len(own)) if row is None else range(row, row + 1)
            self.laid.append((part, Piece(part.of.columns, own, part.start, end, at, rows)))

    def fill(self, length: int, pad_id: int) -> None:
        """Append spare tokens, which nothing reads, until every row has this length."""
        for ids, positions in zip(self.ids, self.positions, strict=True):
            spare = length - len(ids)
            ids += [pad_id] * spare
            positions += [0] * spare


#: At most so many spare tokens are computed to save a pass, which would read every weight again.
_SPARE_AT_MOST: Final = 32


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
        self.slots, self.reused, self.read = slots, 0, 0
        self._crowd, self._budget = crowd, budget
        self._prompts: list[_Prompt] = []
        self._texts: list[_Text] = []
        self._kept: list[_Prompt] = []  # prompts of texts that have ended, the latest last
        self._open: list[Request] = []
        self._packed: Packed | None = None
        self._by_onednn = crowd.model.device.type == "cpu" and onednn_is_faster()

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
            BadInput, DataError: one of them cannot be served. None is admitted then.
        """
        assert len(requests) <= self.free, "the caller queues the rest"
        for request in requests:
            self._require_servable(request)
        together: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            together.setdefault(tuple(request.prompt), []).append(request)
        self._open += requests
        for ids, members in together.items():
            for who, part in self._readers(members):
                rows = self._crowd.settings.num_agents if who is CROWD and self._is_spread else 1
                self._prompts.append(_Prompt(ids, who, part, Columns(rows), range(rows)))
        self._forget()

    def release(self, request: Request) -> None:
        """Free the slot of a request; without effect if it has none."""
        if request not in self._open:
            return
        self._open.remove(request)
        ended = [text for text in self._texts if text.request is request]
        self._texts = [text for text in self._texts if text.request is not request]
        for text in ended:
            self._leave(text)
        for prompt in self._prompts:
            prompt.members = [member for member in prompt.members if member is not request]
        self._prompts = [prompt for prompt in self._prompts if prompt.members]
        self._forget()

    def step(self) -> list[Request]:
        """Read further parts of prompts, and choose a token for every text whose prompt is read.

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
        done = [(each, self._states(each)) for each in self._passes([*self._parts()])]
        found = [pair for each, states in done for pair in self._logits(each, states)]
        read = [part.of for ready, _ in found for part in ready if isinstance(part.of, _Prompt)]
        opened = {prompt: self._opened(prompt) for prompt in read}  # up to here memory may run out
        self._prompts = [prompt for prompt in self._prompts if prompt not in opened]
        self._texts += [text for texts in opened.values() for text in texts]
        for part in (part for each, _ in done for part, _ in each.laid):
            if isinstance(part.of, _Prompt):
                self.read += len(part.ids)
                part.of.read += len(part.ids)
        return [request for ready, logits in found for request in self._tokens(ready, logits, opened)]

    # What is read

    def _require_servable(self, request: Request) -> None:
        free_positions(self._crowd.model, [request.prompt])
        assert request.who in (CROWD, NOBODY, *range(self._crowd.num_agents))
        assert request not in self._open, "a request is admitted once"
        if request.who is CROWD and find_vote(request.decoding.aggregator):
            what = f"{request.decoding.aggregator} decides between whole answers, and not token by token"
            hint = "request a text of each agent, and let `ci_llm.crowd.generation.elect` decide"
            raise BadInput(what, where="Request.decoding", hint=hint)

    def _readers(self, members: Sequence[Request]) -> Iterator[tuple[Who, list[Request]]]:
        """Yield each reader of these requests' prompt with its requests: all agents at once if several need it."""
        by_who: dict[Who, list[Request]] = {}
        for request in members:
            by_who.setdefault(self._who(request), []).append(request)
        base = by_who.pop(NOBODY, None)
        if base:
            yield NOBODY, base
        if CROWD in by_who or len(by_who) == self._crowd.num_agents > 1:
            yield CROWD, [request for part in by_who.values() for request in part]
        else:
            yield from by_who.items()

    def _who(self, request: Request) -> Who:
        """The writer of a request; under `active_agent` and `without_agents` there is only one."""
        return request.who if self._is_spread else CROWD

    def _leave(self, ended: _Text) -> None:
        """Free the rows of ended texts once they are half of all, and keep a prompt that no text beside it has.

        Both are savings that copy. Where memory has run out they are left, as this is called to free some.
        """
        beside = [text for text in self._texts if text.columns is ended.columns]
        if 2 * sum(len(text.rows) for text in beside) <= ended.columns.rows:
            unless_out_of_memory(partial(_move, beside))
        if ended.who not in {text.who for text in beside}:
            _, complaint = unless_out_of_memory(partial(_move, [ended], len(ended.request.prompt)))
            if complaint is None:
                self._kept.append(ended.prompt)

    def _forget(self) -> None:
        """Drop the oldest prompts of ended texts beyond the number of free slots."""
        del self._kept[: max(0, len(self._open) + len(self._kept) - self.slots)]

    def _begin(self, prompt: _Prompt, under_way: Sequence[_Prompt]) -> bool:
        """Take over the longest beginning that another prompt has; False if one under way will soon have much more."""
        left = (*(text.prompt for text in self._texts), *self._kept, *self._prompts)
        best = max(left, key=lambda other: other.shared_with(prompt, other.read))
        count = best.shared_with(prompt, best.read)
        coming = max((other.shared_with(prompt, len(other.ids)) for other in under_way), default=0)
        if 2 * (coming - count) > len(prompt.ids):
            return False
        if count:
            prompt.columns = best.columns.copied(_rows_for(prompt.who, best), count)
            prompt.read = count
            self.reused += count
        return True

    def _parts(self) -> Iterator[_Part]:
        """Yield the parts of the next pass: the last token of every text, and prompts up to the budget."""
        for text in self._texts:
            request = text.request
            at = len(request.prompt) + len(request.tokens) - 1
            yield _Part(text, request.tokens[-1:], at)
        left = self._budget
        under_way: list[_Prompt] = []
        for prompt in self._prompts:
            if left < BLOCK or (not prompt.read and not self._begin(prompt, under_way)):
                continue
            end = min(len(prompt.ids), prompt.read + left)
            end = end if end == len(prompt.ids) else end // BLOCK * BLOCK
            if end > prompt.read:
                yield _Part(prompt, prompt.ids[prompt.read : end], prompt.read)
                left -= end - prompt.read
                under_way.append(prompt)

    # How it is read

    @property
    def _is_spread(self) -> bool:
        """True if every product holds the crowd's tokens once for each agent."""
        return len(self._crowd.storage.reading.agents) == self._crowd.settings.num_agents

    def _passes(self, parts: Sequence[_Part]) -> Iterator[_Pass]:
        """Lay the parts out for as few passes as possible, with spare tokens for products of few rows."""
        model, pad_id, agents = self._crowd.model, self._crowd.pad_id, self._crowd.settings.num_agents
        crowd = [part for part in parts if part.of.who is CROWD]
        own = [[part for part in parts if part.of.who == k] for k in range(agents)]
        sizes = [sum(len(part.ids) for part in lane) for lane in own]
        spare = agents * max(sizes) - sum(sizes)
        together = self._is_spread and spare <= _SPARE_AT_MOST and sum(map(bool, (crowd, *own))) > 1
        if crowd or together:
            laid = _Pass("crowd", agents if together else 1)
            laid.add(crowd)
            for k in range(agents if together else 0):
                laid.add(own[k], k)
            laid.fill(laid.length + spare_tokens(model, laid.length, agents if self._is_spread else 1), pad_id)
            yield laid
        if any(own) and not together:
            laid = _Pass("agents")
            for lane, size in zip(own, sizes, strict=True):
                start = laid.length
                laid.add(lane)
                laid.fill(laid.length + (spare_tokens(model, size) if lane else 0), pad_id)
                laid.spans.append(slice(start, laid.length))
            yield laid
        if base := [part for part in parts if part.of.who == NOBODY]:
            laid = _Pass("base")
            laid.add(base)
            laid.fill(laid.length + spare_tokens(model, laid.length), pad_id)
            yield laid

    def _states(self, laid: _Pass) -> Tensor:
        """Final hidden states [R, N, D]."""
        model, storage = self._crowd.model, self._crowd.storage
        ids, positions = self._on_device([laid.ids, laid.positions])
        dtype = compute_dtype(model.get_input_embeddings().weight)
        if self._packed is None or self._packed.dtype != dtype:
            self._packed = self._crowd.packed(dtype, by_onednn=self._by_onednn)
        copies = self._crowd.settings.num_agents if laid.kind == "crowd" and self._is_spread else 1
        with self._reading(laid), storage.ready(dtype, training=False):
            found = text_model(model)(
                input_ids=ids.expand(copies, -1),
                position_ids=positions,
                pieces=Pieces([piece for _, piece in laid.laid], self._crowd.device),
                use_cache=False,
            )
        return found.last_hidden_state  # type: ignore[no-any-return]

    @contextmanager
    def _reading(self, laid: _Pass) -> Iterator[None]:
        """Set whose tokens the layers read, and attention over columns."""
        config, reading = self._crowd.model.config, self._crowd.storage.reading
        before, config._attn_implementation = config._attn_implementation, COLUMNS
        assert self._packed is not None
        reading.by_onednn, reading.packed = self._by_onednn, self._packed.weights
        alone = [k for k, span in enumerate(laid.spans) if span.start < span.stop]
        sizes = [laid.spans[k].stop - laid.spans[k].start for k in alone] if len(alone) > 1 else None
        try:
            with reading.of(reading.agents if laid.kind == "crowd" else alone, sizes):
                yield
        finally:
            config._attn_implementation, reading.by_onednn, reading.packed = before, False, {}

    def _logits(self, laid: _Pass, states: Tensor) -> Iterator[tuple[list[_Part], Tensor]]:
        """Yield the ready parts with their logits: [R, n, V] of parts that all rows have, [1, n, V] of the others.

        One product serves all of them, and reads a large head once.
        """
        rows, width = states.shape[:2]
        ready = [each for each in laid.laid if each[0].is_ready]
        common, own = ([each for each in ready if (len(each[1].rows) == rows) == of_all] for of_all in (True, False))
        places = [row * width + piece.last for row in range(rows) for _, piece in common]
        places += [piece.rows.start * width + piece.last for _, piece in own]
        if not places:
            return
        spare = spare_tokens(self._crowd.model, len(places))
        asked = states.flatten(0, 1)[self._on_device([*places, *[places[0]] * spare])]
        dtype = compute_dtype(asked)
        assert self._packed is not None
        head = self._packed.head if self._packed.dtype == dtype else self._crowd.head.to(dtype)
        with torch.autocast(asked.device.type, enabled=False):
            found = head.logits(asked.to(dtype), by_onednn=self._by_onednn)
        count = rows * len(common)
        if common:
            yield [part for part, _ in common], found[:count].unflatten(0, (rows, -1))
        if own:
            yield [part for part, _ in own], found[None, count : count + len(own)]

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        """A tensor of integers on the device; the host does not wait for it, as it would for a list in an index."""
        return torch.tensor(numbers).to(self._crowd.device, non_blocking=True)

    # What follows

    def _tokens(
        self, parts: Sequence[_Part], logits: Tensor, opened: Mapping[_Prompt, Sequence[_Text]]
    ) -> list[Request]:
        """Choose a token for each text and each request whose prompt is read, from logits [R, n, V]."""
        limit, moved = num_positions(self._crowd.model), list[Request]()
        asked: list[tuple[_Text, int, int | None]] = []  # with the row of its logits, and the agent if it is one of R
        for row, part in enumerate(parts):
            if isinstance(part.of, _Text):
                asked.append((part.of, row, None))
            else:
                asked += [(text, row, text.who if part.of.who is CROWD else None) for text in opened[part.of]]
        for of_agent in (False, True):
            rows = [each for each in asked if (each[2] is not None) == of_agent]
            if rows:
                at = self._on_device([row for _, row, _ in rows])
                own = logits[self._on_device([agent for *_, agent in rows]), at][None] if of_agent else logits[:, at]
                requests = [text.request for text, *_ in rows]
                for request, found in zip(requests, choose(own, requests), strict=True):
                    request.take(found, limit)
                    if request.finish is not None:
                        self.release(request)
                moved += requests
        return moved

    def _opened(self, prompt: _Prompt) -> list[_Text]:
        """The texts that follow a prompt."""
        readers = [(request, self._who(request)) for request in prompt.members]
        texts = [_Text(request, who, prompt.columns, _rows_for(who, prompt)) for request, who in readers]
        for of_all in (True, False):  # the crowd and single agents may write in passes of their own
            _move([text for text in texts if (text.who is CROWD) == of_all], len(prompt.ids))
        return texts


def _rows_for(who: Who, prompt: _Prompt) -> Sequence[int]:
    """The rows of a prompt that a writer needs: of what all agents have read, an agent takes its own."""
    return prompt.rows if who is CROWD or prompt.who is not CROWD else [prompt.rows[who]]


def _move(texts: Sequence[_Text], count: int | None = None) -> None:
    """Copy the first columns of texts that lie together, or all, into columns that only these texts have."""
    if not texts:
        return
    columns, end = texts[0].columns.copied([row for text in texts for row in text.rows], count), 0
    for text in texts:
        text.columns, text.rows = columns, range(end, end + len(text.rows))
        end = text.rows.stop


#: The trial's prompt tokens (more than a block, and than a short attention window), new tokens and listed tokens.
_TRIAL: Final = (21, 3, 8)


def decodes(crowd: CrowdModel) -> bool:
    """True if a decoder computes the probabilities of the agents' full passes, by a short trial before the first text.

    A family may accept packed rows and columns and still compute something else.
    """
    if crowd.decodes is None:
        crowd.decodes = crowd.route == "packed" and _reproduces(crowd)
    return crowd.decodes


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
    model, everyone = crowd.model, len(crowd.storage.reading.agents) == crowd.settings.num_agents
    ids = torch.tensor([[*request.prompt, *request.tokens]], device=crowd.device)
    with crowd.evaluating(), crowd.active_agent(request.who or 0 if everyone else None):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    wanted, pairs = logits.float().log_softmax(-1), []
    for row, chosen in zip(wanted, request.chosen, strict=True):
        places, found = (torch.tensor(each, device=row.device) for each in zip(*chosen.top, strict=True))
        pairs.append((found, row[places]))
    limit = tolerance(*dtypes_of(model, logits))
    if all(distance(*pair) <= limit for pair in pairs):
        return True
    # In 16 bits a single token may be far off by rounding; with a wrong column, all are.
    all_found, all_wanted = (torch.cat(each)[None] for each in zip(*pairs, strict=True))
    return agrees_by_norm(all_found, all_wanted, limit)
