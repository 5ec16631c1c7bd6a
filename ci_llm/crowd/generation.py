"""The generation of texts by the crowd, token by token for all agents at once, or by a vote on whole texts.

If the base reads packed rows, the decoder (`ci_llm.crowd.decoder`) writes all texts. For each prompt it writes a text
of the crowd, and on request one of each agent alone; they share the pass over the prompt. A prompt whose texts have
ended makes place for the next one. Other bases keep Transformers' `generate` (`ci_llm.crowd.padded`). In a vote each
agent writes a text, all agents read every text, and one of the texts wins.

Legend: K agents, B prompts, n texts that each agent draws for a vote.
"""

from __future__ import annotations

import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.answers import TokenUncertainty, of_text, token_uncertainty, tokens_of
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.decoding import (
    Decoding,
    Generated,
    Request,
    TokenIds,
    free_positions,
    generate_key,
    vote_key,
    without_nan,
)
from ci_llm.crowd.metrics import AnswerStyle, final_answer
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.padded import as_in_generation, is_padding_invariant, write_batch
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompter
from ci_llm.errors import BadInput
from ci_llm.lora.passes import describe_error, unusable_base

T = TypeVar("T")

#: The character in decoded text for bytes that are not a complete character.
_INCOMPLETE = "\ufffd"
#: How many tokens are decoded again with new ones, because a token's text may depend on those before it.
_WINDOW: Final = 16
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
    """The length of the longest end of `text` with which a stop string begins, or 0."""
    longest = max(map(len, stop_strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in stop_strings)), 0)


class TextSoFar:
    """The text of an answer that still grows, emitted in pieces whose sum is the whole text.

    A piece has whole characters only, and nothing that a stop string may still cut off.

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
        self._start, self._read, self._before, self._context = 0, 0, "", ""

    def update(self, ids: Sequence[int]) -> bool:
        """Emit the text that further ids cannot change; True if a stop string is in it."""
        text = self._so_far(self._settled(ids)).rstrip(_INCOMPLETE)
        kept = cut(text, self._stop_strings)
        if len(kept) < len(text):
            self._advance(kept)
            return True
        if self._tokenizer.clean_up_tokenization_spaces:  # a sign that follows takes the space away
            text = text[: max(0, text.rfind(" "))]
        self._advance(text[: len(text) - held_back(text, self._stop_strings)])
        return False

    def _so_far(self, ids: Sequence[int]) -> str:
        """The text of all ids, of which only the last are decoded: decoding all every time would take T² steps."""
        fresh = self._decode(ids[self._start :])
        text = self._before + fresh[len(self._context) :]
        is_settled = not fresh.endswith(_INCOMPLETE) and not self._tokenizer.clean_up_tokenization_spaces
        if not is_settled or len(ids) - self._read < _WINDOW:
            return text
        context = self._decode(ids[self._read :])
        if context.strip():
            self._start, self._read, self._before, self._context = self._read, len(ids), text, context
        return text

    def finish(self, ids: Sequence[int]) -> None:
        """Emit the rest of the text of all ids."""
        self._advance(cut(self._decode(ids), self._stop_strings))

    def _advance(self, text: str) -> None:
        if len(text) > len(self._emitted):
            self._emit(text[len(self._emitted) :])
            self._emitted = text

    def _settled(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids without the byte tokens at their end, whose characters one more byte may change."""
        end = len(ids)
        while end and _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(int(ids[end - 1])))):
            end -= 1
        return ids[:end]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Stream(Generic[T]):
    """An iterator over the pieces of a text that a thread produces, with a result at the end.

    Args:
        produce: runs in the thread. Its arguments are a function that takes a piece, and one that says whether to stop.

    The thread stops when the iterator is closed: by `close`, at the end of a `with` block, or by garbage collection.
    """

    def __init__(self, produce: Callable[[Callable[[str], None], Callable[[], bool]], T]) -> None:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        stopping = threading.Event()
        outcome = Future[T]()

        def run() -> None:
            # The thread holds no reference to the iterator, so the iterator can be collected while the thread runs.
            try:
                outcome.set_result(produce(pieces.put, stopping.is_set))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that iterates
                outcome.set_exception(error)
            finally:
                pieces.put(None)

        self._pieces, self._stopping, self._outcome = pieces, stopping, outcome
        self._thread = threading.Thread(target=run, name="ci_llm answer", daemon=True)
        self._thread.start()

    @property
    def result(self) -> T:
        """The result of `produce`; this waits for the thread's end.

        Raises:
            Exception: what the thread raised.
        """
        self._thread.join()
        return self._outcome.result()

    def close(self) -> None:
        """Ask the thread to stop after the current token, and wait for it."""
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


#: The uncertainty of the failed token of a text whose agent had only NaN logits.
_NOT_SURE: Final = TokenUncertainty(0.0, 0.0, 0.0, 0.0)
#: Finds the final answers in the texts of one prompt, "" where a text has none.
Reading = Callable[[Sequence[TokenIds]], list[str]]


@dataclass(frozen=True)
class Wanted:
    """The texts that are wanted after each prompt.

    Attributes:
        decoding: how tokens are chosen.
        include_agents: also continue every prompt by each agent alone, greedily.
        uncertainty: also compute how sure the crowd and the agents were of each token, from the same distributions.
        agent: ask this agent alone, as a crowd of one.
        stop: called before every token; True ends all texts there.
        is_over: called with each text that has not ended, after each of its tokens; True ends this text there.
        answers_of: the final answers in texts, for a crowd that votes.
    """

    decoding: Decoding
    include_agents: bool = False
    uncertainty: bool = False
    agent: int | None = None
    stop: Callable[[], bool] = lambda: False
    is_over: Callable[[TokenIds], bool] | None = None
    answers_of: Reading | None = None


def generate_ids(
    crowd: CrowdModel,
    prompts: Sequence[TokenIds],
    decoding: Decoding,
    *,
    numbers: Sequence[int] | None = None,
    **wanted: Any,
) -> Generated:
    """Continue every prompt by the crowd, and on request also by each agent alone, all at the same time.

    A text ends at the latest when it has used up the base's positions.

    Args:
        prompts: B lists of token ids.
        numbers: the prompts' numbers in a longer list that is generated in parts, which key the generators; None for
            0, 1, ...
        **wanted: the other attributes of `Wanted`.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
        ModelError: the base cannot generate, or every agent's logits hold NaN.
    """
    asked = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    if not asked:
        return Generated([], [])
    free_positions(crowd.model, prompts, numbers)
    return Generated.joined(list(generate_each(crowd, asked, Wanted(decoding, **wanted), len(asked))))


def generate_each(
    crowd: CrowdModel, asked: Iterable[tuple[int, TokenIds]], wanted: Wanted, at_a_time: int
) -> Iterator[Generated]:
    """Yield the texts after each prompt as soon as they and those of the prompts before it have ended.

    Args:
        asked: prompts with their numbers, taken when there is place for them.
        at_a_time: how many prompts are continued at the same time; a finished one makes place for the next.

    Yields:
        the texts of one prompt, in order.

    Raises:
        DataError, ModelError: as `generate_ids`.
    """
    if crowd.decodes is None:
        crowd.decodes = decodes(crowd)
    write = _written if crowd.decodes else _written_by_transformers
    found = write(crowd, iter(asked), wanted, at_a_time)
    while True:
        try:
            prompt, generated = next(found)
        except StopIteration:
            return
        except Exception as error:  # families raise errors of every kind for what they do not support
            raise unusable_base(crowd.model, crowd.base_name, f"cannot generate ({describe_error(error)})") from error
        if generated.voters:
            voters, how = [text for [text] in generated.voters], wanted.decoding
            text, sure = elect(crowd, prompt, voters, how.aggregator, wanted.answers_of or _reading(crowd.prompter))
            text = [token for token in text if token not in how.ends]
            generated = replace(generated, crowd=[text], tokens=[sure])
        yield generated


def _written_by_transformers(
    crowd: CrowdModel, asked: Iterator[tuple[int, TokenIds]], wanted: Wanted, at_a_time: int
) -> Iterator[tuple[TokenIds, Generated]]:
    """Yield prompts and texts by Transformers' `generate`, in batches that wait for their longest text."""
    while batch := list(islice(asked, at_a_time)):
        found = [(prompt, requests_of(crowd, number, prompt, wanted)) for number, prompt in batch]
        with as_in_generation(crowd), nullcontext() if wanted.agent is None else crowd.active_agent(wanted.agent):
            if crowd.padding_invariant is None and len({len(prompt) for prompt, _ in found}) > 1:
                crowd.padding_invariant = is_padding_invariant(crowd.model, crowd.num_agents, crowd.pad_id)
            size = 1 if crowd.padding_invariant is False else len(found)
            for at in range(0, len(found), size):
                together = [request for _, requests in found[at : at + size] for request in requests]
                write_batch(crowd, together, wanted.agent, stop=wanted.stop, is_over=wanted.is_over)
        yield from ((prompt, _generated(crowd, requests, wanted)) for prompt, requests in found)


def _written(
    crowd: CrowdModel, asked: Iterator[tuple[int, TokenIds]], wanted: Wanted, at_a_time: int
) -> Iterator[tuple[TokenIds, Generated]]:
    """Yield prompts and texts by the decoder; a prompt is taken as soon as there are free slots for its texts."""
    open_: deque[tuple[TokenIds, list[Request]]] = deque()
    each = len(requests_of(crowd, 0, [0], wanted))
    decoder, more = Decoder(crowd, at_a_time * each), True
    while more or open_:
        while more and decoder.free >= each:
            taken = next(asked, None)
            if taken is None:
                more = False
                break
            number, prompt = taken
            requests = requests_of(crowd, number, prompt, wanted)
            decoder.admit(requests)
            open_.append((prompt, requests))
        for request in decoder.step():
            if wanted.is_over and request.finish is None and wanted.is_over(request.tokens):
                decoder.release(request)
        if wanted.stop():
            more = False
            for request in decoder.open:
                decoder.release(request)
        living = set(decoder.open)
        while open_ and not living.intersection(open_[0][1]):
            prompt, requests = open_.popleft()
            yield prompt, _generated(crowd, requests, wanted)


def requests_of(crowd: CrowdModel, number: int, prompt: TokenIds, wanted: Wanted) -> list[Request]:
    """The requests of one prompt: the crowd's text unless it votes, the agents' texts, and those drawn for a vote."""
    decoding, vote, sure = wanted.decoding, find_vote(wanted.decoding.aggregator), wanted.uncertainty
    agents = range(crowd.num_agents) if wanted.agent is None else [wanted.agent]
    greedy = replace(decoding, do_sample=False)
    requests = [] if vote else [Request(prompt, decoding, wanted.agent, generate_key(number), sure)]
    if wanted.include_agents or (vote and not vote.samples):
        requests += [Request(prompt, greedy, k, uncertainty=sure) for k in agents]
    if vote and vote.samples:
        drawing = replace(decoding, do_sample=True, temperature=vote.temperature)
        times = [(k, place * vote.samples + n) for place, k in enumerate(agents) for n in range(vote.samples)]
        requests += [Request(prompt, drawing, k, vote_key(number, time)) for k, time in times]
    return requests


def _generated(crowd: CrowdModel, requests: Sequence[Request], wanted: Wanted) -> Generated:
    """The texts of one prompt from its requests, which have the order of `requests_of`."""
    vote, count = find_vote(wanted.decoding.aggregator), crowd.num_agents if wanted.agent is None else 1
    sure = [request.sure for request in requests]
    for request, tokens in zip(requests, sure, strict=True):
        if request.error is not None:
            if request.who == wanted.agent:  # the text that was asked for
                raise request.error
            tokens.append(_NOT_SURE)
    first = 0 if vote else 1
    own = slice(first, first + count if wanted.include_agents or (vote and not vote.samples) else first)
    voters = [] if vote is None else requests[own.stop :] if vote.samples else requests[own]
    shown = own if wanted.include_agents else slice(0)
    return Generated(
        [request.text for request in requests[:first]],
        [[request.text] for request in requests[shown]],
        sure[:first] if wanted.uncertainty else [],
        [[tokens] for tokens in sure[shown]] if wanted.uncertainty else [],
        [[request.tokens] for request in voters],
    )


def _reading(prompter: Prompter | None) -> Reading:
    """A function that finds final answers without knowledge of the task."""
    return lambda texts: final_answers([prompter.text(ids) if prompter else str(list(ids)) for ids in texts])


def elect(
    crowd: CrowdModel, prompt: TokenIds, voters: Sequence[TokenIds], aggregator: str, answers_of: Reading
) -> tuple[TokenIds, list[TokenUncertainty]]:
    """The winner among texts after one prompt, which include their ends, and how sure the crowd is of its tokens."""
    vote = find_vote(aggregator)
    assert vote is not None, "the aggregator votes"
    read = read_texts(crowd, prompt, voters, aggregator)
    wins = vote.winner(answers_of(voters), [of_text(tokens).log_probability for tokens in read])
    return voters[wins], read[wins]


def final_answers(texts: Sequence[str]) -> list[str]:
    """The final answers: the texts after the mark "####" if one text has it, or else the whole texts."""
    style: AnswerStyle = "marked" if any("####" in text for text in texts) else "text"
    return [final_answer(text, style) for text in texts]


@torch.no_grad()
def read_texts(
    crowd: CrowdModel, prompt: TokenIds, texts: Sequence[TokenIds], aggregator: str
) -> list[list[TokenUncertainty]]:
    """The uncertainty of the crowd at every token of given texts after one prompt, by one pass over all texts."""
    distinct = list(dict.fromkeys(map(tuple, texts)))  # agents often write the same
    batch = pack([continuation(prompt, text) for text in distinct], range(len(distinct)))
    numbers = []
    with as_in_generation(crowd):
        for found, targets in targets_of(crowd, [batch]):
            log_probs, learned = without_nan(found, crowd.learned)
            mixture = aggregate(log_probs, aggregator, learned)
            numbers.append(token_uncertainty(log_probs, mixture, targets, is_mean=is_mean(aggregator)))
    tokens = iter(tokens_of(torch.cat(numbers, dim=1)))
    read = {text: [next(tokens) for _ in text] for text in distinct}
    return [read[tuple(text)] for text in texts]


def targets_of(crowd: CrowdModel, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the agents' log-probabilities [K, S', V] and the targets [S'], in parts that fit into memory.

    Args:
        crowd: in evaluation mode.
    """
    for batch in (batch.to(crowd.device) for batch in batches):
        states = crowd.states(batch)[:, batch.predict_from]
        for chunk in crowd.head.chunks(batch.num_targets, crowd.num_agents):
            yield crowd.head.logits(states[:, chunk]).log_softmax(-1), batch.targets[chunk]


def continuation(prompt: TokenIds, text: TokenIds) -> Example:
    """A prompt and a text after it, as a tokenised row whose targets are the text."""
    ids = np.asarray([*prompt, *text], np.int32)
    return Example(ids, np.arange(len(ids)) >= len(prompt))
