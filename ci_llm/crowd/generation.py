"""The generation of a text by the crowd, chosen token by token for all agents at once, or by a vote on whole texts.

Every prompt stands in the batch once per agent, agent-major, as the stacked adapters expect it; where agents also
answer alone, or vote, once more for each of these texts. Transformers' own `generate` manages cache, positions and
padding for every family. One logits processor (`ci_llm.crowd.decoding`) replaces the K distributions of a row by the
token that the crowd chose, so that all K copies of the row go on with the same text. A crowd that votes lets each agent
write: then every text is read by all agents, and one of the texts wins.

Legend: K agents, B prompts, n texts that each agent draws for a vote, R rows per agent, of which the first F are the
agent's own, T tokens, V vocabulary.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ci_llm.base.load import positions_of
from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.answers import AnswerStyle, TokenUncertainty, final_answer, of_text, token_uncertainty, tokens_of
from ci_llm.crowd.decoding import CrowdChoice, Decoding, LiveRows, TextEnds, without_nan
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.batches import pack
from ci_llm.data.prompts import Prompter
from ci_llm.errors import BadInput, DataError
from ci_llm.lora.passes import describe_error, distance, dtypes_of, tolerance, unusable_base

T = TypeVar("T")

#: What a decoder writes for bytes that are no character, or not yet.
_INCOMPLETE = "\ufffd"
#: A token that stands for one byte, as in Llama 2's vocabulary: several in a row are decoded together.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def stop_strings_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop string, several or None, as a tuple.

    Raises:
        BadInput: one is empty: every text would end before it begins.
    """
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in strings:
        raise BadInput("a stop string is empty", where="stop_strings", hint="leave it out")
    return strings


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [at for at in (text.find(string) for string in stop_strings) if at >= 0]
    return text[: min(found)] if found else text


def held_back(text: str, stop_strings: Sequence[str]) -> int:
    """How many characters at the end of `text` a stop string may begin with."""
    longest = max(map(len, stop_strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in stop_strings)), 0)


class TextSoFar:
    """The text of an answer that still grows: what its token ids have settled, and pieces of it; joined, the pieces
    are the whole text.

    A piece has whole characters only, and nothing that a stop string may still cut.

    Args:
        tokenizer: decodes the ids; special tokens are left out.
        stop_strings: the text ends before the first of them.
        emit: called with each piece.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        emit: Callable[[str], None] = lambda piece: None,
    ) -> None:
        self._tokenizer, self._stop_strings, self._emit = tokenizer, stop_strings, emit
        self._emitted = ""

    def update(self, ids: Sequence[int]) -> bool:
        """Emit what all ids so far have settled; True if a stop string is in it."""
        text = self._decode(self._settled(ids)).rstrip(_INCOMPLETE)
        kept = cut(text, self._stop_strings)
        if len(kept) < len(text):
            self._advance(kept)
            return True
        if self._tokenizer.clean_up_tokenization_spaces:  # a sign that follows takes the space away
            text = text[: max(0, text.rfind(" "))]
        self._advance(text[: len(text) - held_back(text, self._stop_strings)])
        return False

    def finish(self, ids: Sequence[int]) -> None:
        """Emit what is left of the text of all ids."""
        self._advance(cut(self._decode(ids), self._stop_strings))

    def _advance(self, text: str) -> None:
        if len(text) > len(self._emitted):
            self._emit(text[len(self._emitted) :])
            self._emitted = text

    def _settled(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids without a run of byte tokens at their end: one more byte may change what all of them mean."""
        end = len(ids)
        while end and _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(int(ids[end - 1])))):
            end -= 1
        return ids[:end]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Stream(Generic[T]):
    """An iterator over the pieces of a text that a thread produces, with a result at the end.

    Args:
        produce: runs in the thread; it is given a function that takes a piece, and one that says whether to stop.

    The thread stops when the iterator is closed: by `close`, at the end of a `with` block, or when it is collected.
    """

    def __init__(self, produce: Callable[[Callable[[str], None], Callable[[], bool]], T]) -> None:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        stopping = threading.Event()
        outcome: list[T | BaseException] = []

        def run() -> None:
            # The thread holds no reference to the iterator, so the iterator can be collected while the thread runs.
            try:
                outcome.append(produce(pieces.put, stopping.is_set))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that iterates
                outcome.append(error)
            finally:
                pieces.put(None)

        self._pieces, self._stopping, self._outcome = pieces, stopping, outcome
        self._thread = threading.Thread(target=run, name="ci_llm answer", daemon=True)
        self._thread.start()

    @property
    def result(self) -> T:
        """What was produced, once it is; this waits for the end.

        Raises:
            Exception: what the thread raised.
        """
        self._thread.join()
        [outcome] = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ask the thread to stop after the present token, and wait for it."""
        self._stopping.set()
        self._thread.join()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._thread.is_alive() or not self._pieces.empty():
            piece = self._pieces.get()
            if piece is not None:
                return piece
        _ = self.result
        raise StopIteration

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._stopping.set()


TokenIds = Sequence[int]
#: The final answers in the texts of one prompt, "" for none.
Reading = Callable[[Sequence[TokenIds]], list[str]]


@dataclass(frozen=True)
class Generated:
    """What follows each of the B prompts: token ids without the end.

    Attributes:
        crowd: [B] texts of the crowd; not there yet if it has to vote.
        agents: [K][B] greedy texts of each agent alone; empty without `include_agents`.
        tokens: [B] how sure the crowd was of every token of its text, and of the end if it chose one; empty without
            `uncertainty`.
        agents_tokens: [K][B] how sure each agent was of its own text; empty as well.
        voters: texts that the crowd votes on, their ends included: [K][B], or [K·n][B] of which the first n are drawn
            by agent 0; empty if it does not vote.
    """

    crowd: list[list[int]]
    agents: list[list[list[int]]]
    tokens: list[list[TokenUncertainty]] = field(default_factory=list)
    agents_tokens: list[list[list[TokenUncertainty]]] = field(default_factory=list)
    voters: list[list[list[int]]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Generated]) -> Generated:
        """The texts of all parts, in order; every part has the same agents."""

        def of_each(lists: Iterable[list[list[T]]]) -> list[list[T]]:
            return [[text for part in each for text in part] for each in zip(*lists, strict=True)]

        return cls(
            crowd=[text for part in parts for text in part.crowd],
            agents=of_each(part.agents for part in parts),
            tokens=[tokens for part in parts for tokens in part.tokens],
            agents_tokens=of_each(part.agents_tokens for part in parts),
            voters=of_each(part.voters for part in parts),
        )


def generate_ids(
    crowd: CrowdModel,
    prompts: Sequence[TokenIds],
    decoding: Decoding,
    *,
    include_agents: bool = False,
    uncertainty: bool = False,
    agent: int | None = None,
    numbers: Sequence[int] | None = None,
    stop: Callable[[], bool] = lambda: False,
    is_over: Callable[[TokenIds], bool] | None = None,
    answers_of: Reading | None = None,
) -> Generated:
    """Continue every prompt by the crowd, and on request also by each agent alone, all in one batch.

    All texts end when the longest prompt has used up the base's positions.

    Args:
        prompts: B lists of token ids.
        include_agents: also continue every prompt by each agent alone, greedily.
        uncertainty: also return how sure the crowd and the agents were of each token, from the same distributions.
        agent: ask this one alone, as a crowd of one.
        numbers: of the prompts in a longer list that is generated in parts; they key the generators. None: 0, 1, ...
        stop: called before every token; True ends all texts at that point.
        is_over: called with each text that has not ended, after each of its tokens; True ends this text there.
        answers_of: the final answers in texts, for a crowd that votes.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
        ModelError: the base cannot generate, or every agent's logits hold NaN.
    """
    numbers = numbers or range(len(prompts))
    how: Any = {"include_agents": include_agents, "uncertainty": uncertainty, "stop": stop, "is_over": is_over}
    try:
        with _as_in_generation(crowd):
            if crowd.padding_invariant is None and len({*map(len, prompts)}) > 1:
                crowd.padding_invariant = is_padding_invariant(crowd.model, crowd.num_agents, crowd.pad_id)
            size = 1 if crowd.padding_invariant is False else max(1, len(prompts))
            with nullcontext() if agent is None else crowd.active_agent(agent):
                batches = [slice(at, at + size) for at in range(0, len(prompts), size)]
                parts = [_generate_batch(crowd, prompts[at], decoding, numbers[at], agent, **how) for at in batches]
    except Exception as error:  # families raise errors of every kind for what they do not support
        raise unusable_base(crowd.model, crowd.base_name, f"cannot generate ({describe_error(error)})") from error
    found = Generated.joined(parts)
    return elect(crowd, prompts, found, decoding, answers_of or _reading(crowd.prompter)) if found.voters else found


@contextmanager
def _as_in_generation(crowd: CrowdModel) -> Iterator[None]:
    """Evaluation mode and padded rows: packed attention has no cache of keys and values; the model's own has."""
    route, training = crowd.route, crowd.training
    crowd.route = "padded"
    crowd.eval()
    try:
        yield
    finally:
        crowd.route = route
        crowd.train(training)


def _generate_batch(
    crowd: CrowdModel,
    prompts: Sequence[TokenIds],
    decoding: Decoding,
    numbers: Sequence[int],
    agent: int | None,
    *,
    include_agents: bool,
    uncertainty: bool,
    stop: Callable[[], bool],
    is_over: Callable[[TokenIds], bool] | None,
) -> Generated:
    """One batch of `generate_ids`; of a crowd that votes, the texts that it votes on."""
    model, reading = crowd.model, crowd.agents.reading
    num_agents, learned = (crowd.num_agents, crowd.learned) if agent is None else (1, None)
    free = free_positions(model, prompts, numbers)
    prompt_rows, first = _rows(prompts, decoding, include_agents=include_agents)
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(prompt_rows, crowd.pad_id))
    end, cache = ids.shape[1] + min(decoding.max_new_tokens, free), _selectable_cache(model)
    rows = LiveRows(num_agents, first, len(prompt_rows) - first)
    choice = CrowdChoice(rows, decoding, numbers, uncertainty=uncertainty, learned=learned)
    ends = TextEnds(rows, ids.shape[1], decoding.ends, is_over, stop, cache is not None)
    # The processor leaves one token per row, which also holds for sampling.
    how: Any = {"pad_token_id": crowd.pad_id, "do_sample": False, "use_cache": True}
    kept: Any = {} if cache is None else {"past_key_values": cache}
    spans = None
    with _blank_generation_config(model):
        while True:
            with reading.of(reading.agent, spans=spans):
                ids = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=GenerationConfig(max_new_tokens=end - ids.shape[1], **how),
                    logits_processor=LogitsProcessorList([choice]),
                    stopping_criteria=StoppingCriteriaList([ends]),
                    synced_gpus=False,  # processes with a sharded base keep in step by themselves
                    **kept,
                )
            if cache is None or not ends.may_go_on or ids.shape[1] == end:
                break
            places = ends.leaving().to(ids.device)
            cache.batch_select_indices(places)
            ids, mask = ids[places], F.pad(mask[places], (0, ids.shape[1] - mask.shape[1]), value=1)
            spans = rows.spans  # one token of each row is read from here on
    ends.end(ids)
    return _generated([ends.texts[text] for text in range(rows.num_texts)], rows, len(prompts), decoding, choice)


def _selectable_cache(model: PreTrainedModel) -> DynamicCache | None:
    """A cache of keys and values whose rows can be selected; None: this base has a state of another kind."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return cache if {*map(type, cache.layers)} <= {DynamicLayer, DynamicSlidingWindowLayer} else None


def _reading(prompter: Prompter | None) -> Reading:
    """The final answers as they are written, without knowledge of the task."""
    return lambda texts: final_answers([prompter.text(ids) if prompter else str(list(ids)) for ids in texts])


def _rows(prompts: Sequence[TokenIds], decoding: Decoding, *, include_agents: bool) -> tuple[list[TokenIds], int]:
    """The R rows of every agent, of which the first F are its own: R rows and F.

    Every prompt stands there for each text of an agent alone, the greedy one first, and then for the crowd.
    """
    vote = find_vote(decoding.aggregator)
    if vote is None:
        return list(prompts) * (1 + include_agents), include_agents * len(prompts)
    rows = list(prompts) * (1 + (vote.samples or 0))
    return rows, len(rows)


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """Whether the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(*dtypes_of(model, alone))  # False if one of them holds NaN


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """Logits [V] of the second new token of the first row, which depend on a full pass and on a pass over the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _blank_generation_config(model):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted, synced_gpus=False)
        return found.logits[1][0]  # type: ignore[no-any-return]


def num_positions(model: PreTrainedModel) -> int:
    """The largest number of tokens that the base can read; `sys.maxsize` if its family has no limit."""
    limit = positions_of(model.config)
    return sys.maxsize if limit is None else limit


def ends_of_base(model: PreTrainedModel) -> frozenset[int]:
    """Token ids that end a text by the base's own generation settings, often more than the tokenizer's EOS."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def free_positions(model: PreTrainedModel, prompts: Sequence[TokenIds], numbers: Sequence[int] | None = None) -> int:
    """How many new tokens the base has positions for after the longest prompt.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
    """
    lengths, limit = [len(prompt) for prompt in prompts], num_positions(model)
    longest = max(lengths)

    def where(length: int) -> str:
        at = lengths.index(length)
        return f"prompt {at if numbers is None else numbers[at]} (counted from 0)"

    if not min(lengths):
        raise DataError("a prompt is empty", where=where(0), hint="leave it out")
    if longest >= limit:
        raise DataError(
            f"a prompt has {longest} tokens, and the base reads {limit}", where=where(longest), hint="shorten it"
        )
    return limit - longest


def _generated(
    whole: Sequence[list[int]], rows: LiveRows, prompts: int, decoding: Decoding, choice: CrowdChoice
) -> Generated:
    """Sort the texts, which are numbered as in `LiveRows` and have their ends."""
    vote, own, count = find_vote(decoding.aggregator), rows.num_own, rows.num_agents
    texts = [_until(decoding.ends, tokens) for tokens in whole]
    sure = [numbers[: len(tokens)] for numbers, tokens in zip(choice.recorded(), whole, strict=False)]
    voters = _of_agents(whole[:own], count, prompts)[bool(vote.samples)] if vote else []
    agents, _ = _of_agents(texts[:own], count, prompts)
    agents_tokens, _ = _of_agents(sure[:own], count, prompts)
    return Generated(texts[own:], agents, sure[own:], agents_tokens, voters)


def _of_agents(rows: Sequence[T], num_agents: int, prompts: int) -> tuple[list[list[T]], list[list[T]]]:
    """What the K·F rows of the agents hold, agent-major: the greedy texts [K][B], and the drawn ones [K·n][B]."""
    lists = [list(rows[at : at + prompts]) for at in range(0, len(rows), prompts)]
    each = len(lists) // num_agents
    return lists[:: each or 1], [part for number, part in enumerate(lists) if number % each]


@contextmanager
def _blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the base's own generation settings: Transformers fills every value that is not given from them."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _left_padded(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, each [R, T]; pads stand to the left, so that all rows end at the same column."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.as_tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask


def _until(ends: frozenset[int], tokens: list[int]) -> list[int]:
    """The tokens before the first end."""
    end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:end]


def elect(
    crowd: CrowdModel, prompts: Sequence[TokenIds], generated: Generated, decoding: Decoding, answers_of: Reading
) -> Generated:
    """What was generated for B prompts, with the winners of the vote as texts of the crowd.

    Args:
        generated: with the voters' texts.
    """
    vote = find_vote(decoding.aggregator)
    assert vote is not None, "the caller asked for it"
    texts, sure = [], []
    for number, prompt in enumerate(prompts):
        voters = [voter[number] for voter in generated.voters]
        read = read_texts(crowd, prompt, voters, decoding.aggregator)
        wins = vote.winner(answers_of(voters), [of_text(tokens).log_probability for tokens in read])
        texts.append([token for token in voters[wins] if token not in decoding.ends])
        sure.append(read[wins])
    return replace(generated, crowd=texts, tokens=sure)


def final_answers(texts: Sequence[str]) -> list[str]:
    """The final answers: what follows the mark "####" if one text has it, else the whole texts."""
    style: AnswerStyle = "marked" if any("####" in text for text in texts) else "text"
    return [final_answer(text, style) for text in texts]


@torch.no_grad()
def read_texts(
    crowd: CrowdModel, prompt: TokenIds, texts: Sequence[TokenIds], aggregator: str
) -> list[list[TokenUncertainty]]:
    """How sure the crowd is of every token of given texts after one prompt, by one pass over all of them."""
    distinct = list(dict.fromkeys(map(tuple, texts)))  # agents often write the same
    batch = pack([Continuation.after(prompt, text) for text in distinct], range(len(distinct))).to(crowd.device)
    with _as_in_generation(crowd):
        states = crowd.states(batch)[:, batch.predict_from]
    numbers = []
    for chunk in crowd.head.chunks(batch.num_targets, crowd.num_agents):
        finite, learned = without_nan(crowd.head.logits(states[:, chunk]), crowd.learned)
        log_probs = finite.log_softmax(-1)
        mixture = aggregate(log_probs, aggregator, learned)
        numbers.append(token_uncertainty(log_probs, mixture, batch.targets[chunk], is_mean=is_mean(aggregator)))
    tokens = iter(tokens_of(torch.cat(numbers, dim=1)))
    read = {text: [next(tokens) for _ in text] for text in distinct}
    return [read[tuple(text)] for text in texts]


@dataclass(frozen=True)
class Continuation:
    """A prompt and what follows it, which are the targets, as a tokenised row."""

    input_ids: NDArray[np.int64]
    supervised: NDArray[np.bool_]

    @classmethod
    def after(cls, prompt: TokenIds, text: TokenIds) -> Continuation:
        ids = np.asarray([*prompt, *text])
        return cls(ids, np.arange(len(ids)) >= len(prompt))
