"""Texts of the crowd: written token by token for all agents at once, or chosen by a vote, and cut where they stop.

If the base reads packed rows, the decoder (`ci_llm.crowd.decoder`) writes all texts. For each prompt it writes a text
of the crowd, and on request one of each agent alone; they share the pass over the prompt. A prompt whose texts have
ended makes place for the next one. In a vote each agent writes a text, all agents read every text, and one of the texts
wins.

For other bases Transformers' own `generate` manages cache, positions and padding, for one writer after the other. A
text of the crowd is in the batch once per agent, agent-major as the stacked adapters expect. A logits processor
replaces the K distributions of a row by the token that the crowd chose, so that all K copies of the row continue with
the same text. A batch ends with its longest text.

Legend: K agents, B prompts, n texts of one writer, S targets, T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.metrics import AnswerStyle, final_answer
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import (
    CROWD,
    Chosen,
    Decoding,
    Generated,
    Request,
    TokenIds,
    Who,
    choose,
    free_positions,
    generate_key,
    without_nan,
)
from ci_llm.crowd.uncertainty import TokenUncertainty, of_text, token_uncertainty, tokens_of
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import spoken
from ci_llm.lora.passes import describe_error, distance, dtypes_of, tolerance, unusable_base

#: Finds the final answers in the texts of one prompt, "" where a text has none.
Reading = Callable[[Sequence[TokenIds]], list[str]]
#: The character in decoded text for bytes that are not a complete character.
_INCOMPLETE = "\ufffd"
#: How many tokens are decoded again with new ones, because a token's text may depend on those before it.
_WINDOW: Final = 16
#: A token that stands for one byte, as in Llama 2's vocabulary: several in a row are decoded together.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Wanted:
    """The texts that are wanted after each prompt.

    Attributes:
        decoding: the options of the crowd's text.
        include_agents: also continue every prompt by each agent alone, greedily.
        uncertainty: also compute how sure the crowd is of every token; see `Request`.
        stop: called after every token; True ends all texts there.
        answers_of: the final answers in texts, for a crowd that votes; None where nothing is known of the task.
    """

    decoding: Decoding
    include_agents: bool = False
    uncertainty: bool = False
    stop: Callable[[], bool] = lambda: False
    answers_of: Reading | None = None


def generate_ids(crowd: CrowdModel, prompts: Sequence[TokenIds], decoding: Decoding, **wanted: Any) -> list[Generated]:
    """Continue each of B prompts by the crowd, and on request also by each agent alone, all at the same time.

    A text ends at the latest when it has used up the base's positions.

    Args:
        prompts: B lists of token ids. Their numbers key the samples.
        **wanted: the other attributes of `Wanted`.

    Raises:
        DataError: a prompt is empty, or longer than the base can read.
        ModelError: the base cannot generate, or every agent's logits hold NaN or infinity.
    """
    if not prompts:
        return []
    free_positions(crowd.model, prompts)
    return list(generate_each(crowd, enumerate(prompts), Wanted(decoding, **wanted), len(prompts)))


def generate_each(
    crowd: CrowdModel, asked: Iterable[tuple[int, TokenIds]], wanted: Wanted, at_a_time: int
) -> Iterator[Generated]:
    """Yield the texts after each prompt as soon as they and those of the prompts before it have ended.

    Args:
        asked: prompts with their numbers, taken when there is place for them.
        at_a_time: the number of prompts continued at the same time; a finished one makes place for the next.

    Yields:
        the texts of one prompt, in order.

    Raises:
        DataError, ModelError: as `generate_ids`.
    """
    size = len(requests_of(crowd, 0, [0], wanted))
    groups = (requests_of(crowd, number, prompt, wanted) for number, prompt in asked)
    found = written(crowd, groups, size, at_a_time * size, wanted.stop)
    while True:
        with base_errors(crowd):
            requests = next(found, None)
        if requests is None:
            return
        yield generated_of(crowd, requests, wanted)


def written(
    crowd: CrowdModel, groups: Iterable[list[Request]], size: int, most: int, stop: Callable[[], bool] = lambda: False
) -> Iterator[list[Request]]:
    """Write the texts of all groups of requests, and yield each group once it and those before it have ended.

    Args:
        groups: taken when there is place for them.
        size: the number of requests in a group.
        most: the number of texts written at the same time.
        stop: as in `Wanted`.
    """
    waiting = iter(groups)
    if not decodes(crowd):
        while batch := list(islice(waiting, max(1, most // size))):
            _write_batch(crowd, batch, stop)
            yield from batch
        return
    open_: deque[list[Request]] = deque()
    decoder, more = Decoder(crowd, most), True
    while more or open_:
        joining: list[Request] = []
        while more and decoder.free - len(joining) >= size:
            taken = next(waiting, None)
            if taken is None:
                more = False
            else:
                joining += taken
                open_.append(taken)
        decoder.admit(joining)
        for request in decoder.step():
            if request.finish is None and _has_stopped(crowd, request):
                decoder.release(request)
        if stop():
            more = False
            for request in decoder.open:
                decoder.release(request)
        living = set(decoder.open)
        while open_ and not living.intersection(open_[0]):
            yield open_.popleft()


@contextmanager
def base_errors(crowd: CrowdModel) -> Iterator[None]:
    """An error of the base in the block is a ModelError: families raise errors of every kind for what they lack."""
    try:
        yield
    except Exception as error:
        raise unusable_base(crowd.model, crowd.base_name, f"cannot generate ({describe_error(error)})") from error


def requests_of(crowd: CrowdModel, number: int, prompt: TokenIds, wanted: Wanted) -> list[Request]:
    """The requests of one prompt: the crowd's text unless it votes, and then those of the agents, which are greedy."""
    decoding = wanted.decoding
    votes, greedy = find_vote(decoding.aggregator) is not None, replace(decoding, do_sample=False)
    own = [] if votes else [Request(prompt, decoding, key=generate_key(number), uncertainty=wanted.uncertainty)]
    agents = range(crowd.num_agents) if votes or wanted.include_agents else ()
    return own + [Request(prompt, greedy, k) for k in agents]


def generated_of(crowd: CrowdModel, requests: Sequence[Request], wanted: Wanted) -> Generated:
    """The texts of one prompt from its requests, which have the order of `requests_of` and have ended.

    Raises:
        ModelError: every agent's logits hold NaN or infinity.
    """
    how, agents = wanted.decoding, requests
    if find_vote(how.aggregator):
        winner, uncertainties = elect(crowd, agents[0].prompt, [each.tokens for each in agents], how, wanted.answers_of)
        ids = [token for token in winner if token not in how.ends]
        has_ended = len(ids) < len(winner)
    else:
        own, *agents = requests
        if own.error is not None:
            raise own.error
        ids, uncertainties, has_ended = own.ids, own.uncertainties, own.finish == "stop"
    shown = agents if wanted.include_agents else []
    ended = [each.finish == "stop" for each in shown]
    return Generated(ids, has_ended, uncertainties, [each.ids for each in shown], ended)


def elect(
    crowd: CrowdModel, prompt: TokenIds, voters: Sequence[TokenIds], how: Decoding, answers_of: Reading | None = None
) -> tuple[TokenIds, list[TokenUncertainty]]:
    """The winner among texts after one prompt, which include their ends, and how sure the crowd is of its tokens."""
    vote = find_vote(how.aggregator)
    assert vote is not None, "the aggregator votes"
    answers = answers_of(voters) if answers_of else final_answers([text_of(crowd, ids, how) for ids in voters])
    read = read_texts(crowd, prompt, voters, how.aggregator)
    wins = vote(answers, [of_text(tokens).log_probability for tokens in read])
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
            log_probs = without_nan(found)
            mixture = aggregate(log_probs, aggregator)
            numbers.append(token_uncertainty(log_probs, mixture, targets, is_mean=is_mean(aggregator)))
    tokens = iter(tokens_of(torch.cat(numbers, dim=1)))
    read = {text: [next(tokens) for _ in text] for text in distinct}
    return [read[tuple(text)] for text in texts]


def targets_of(crowd: CrowdModel, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the agents' log-probabilities [K, S', V] and the targets [S'], in parts that fit into memory.

    Args:
        crowd: a crowd in evaluation mode.
    """
    for batch in (batch.to(crowd.device) for batch in batches):
        states = crowd.states(batch)[:, batch.predict_from]
        for chunk in crowd.head.chunks(batch.num_targets, crowd.num_agents):
            yield crowd.head.logits(states[:, chunk]).log_softmax(-1), batch.targets[chunk]


def continuation(prompt: TokenIds, text: TokenIds) -> Example:
    """A prompt and a text after it, as a tokenised row whose targets are the text."""
    ids = np.asarray([*prompt, *text], np.int32)
    return Example(ids, np.arange(len(ids)) >= len(prompt))


# Texts from token ids


def text_of(crowd: CrowdModel, ids: TokenIds, decoding: Decoding) -> str:
    """The text of token ids, cut before the first stop string in it."""
    return cut(crowd.prompter.text(ids), decoding.stop_strings)


def _has_stopped(crowd: CrowdModel, request: Request) -> bool:
    """True if there is a stop string in the text of a request."""
    stops = request.decoding.stop_strings
    return bool(stops) and TextSoFar(crowd.prompter.tokenizer, stops).update(request.tokens)


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
        text = self._so_far(self._settled(spoken(self._tokenizer, ids))).rstrip(_INCOMPLETE)
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
        self._advance(cut(self._decode(spoken(self._tokenizer, ids)), self._stop_strings))

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


# Bases that do not read packed rows


@contextmanager
def as_in_generation(crowd: CrowdModel) -> Iterator[None]:
    """Evaluation mode and padded rows inside, because only the model's own attention has a cache."""
    route, crowd.route = crowd.route, "padded"
    try:
        with crowd.evaluating():
            yield
    finally:
        crowd.route = route


def _write_batch(crowd: CrowdModel, groups: Sequence[list[Request]], stop: Callable[[], bool]) -> None:
    """Write the texts of these groups by Transformers' `generate`; all wait for the longest one."""
    with as_in_generation(crowd):
        if crowd.padding_invariant is None and len({len(requests[0].prompt) for requests in groups}) > 1:
            crowd.padding_invariant = is_padding_invariant(crowd)
        each = 1 if crowd.padding_invariant is False else len(groups)
        for at in range(0, len(groups), each):
            together = [request for requests in groups[at : at + each] for request in requests]
            for who in dict.fromkeys(request.who for request in together):
                _write_texts(crowd, who, [one for one in together if one.who == who], stop)


def _write_texts(crowd: CrowdModel, who: Who, requests: Sequence[Request], stop: Callable[[], bool]) -> None:
    """Write n texts of one writer."""
    prompts, copies = [request.prompt for request in requests], crowd.num_agents if who is CROWD else 1
    free, open_ = free_positions(crowd.model, prompts), [*requests]

    def choice(_: Tensor, scores: Tensor) -> Tensor:
        """Logits [K·n, V] in the same shape, with 0 at the chosen token of each row and -inf elsewhere."""
        tokens = list[int]()
        for request, found in zip(requests, choose(scores.unflatten(0, (copies, -1)), requests), strict=True):
            tokens.append(found.id if isinstance(found, Chosen) else crowd.pad_id)
            if request in open_:
                request.take(found, len(request.prompt) + free)
        chosen = torch.tensor(tokens * copies, device=scores.device)[:, None]
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)

    def have_ended(ids: Tensor, _: Tensor, **__: object) -> Tensor:
        """True if all texts have ended, once for every row."""
        over = [each for each in open_ if each.finish is not None or _has_stopped(crowd, each)]
        open_[:] = [request for request in open_ if request not in over]
        return torch.full((len(ids),), stop() or not open_, device=ids.device)

    longest = min(free, max(request.decoding.max_new_tokens for request in requests))
    with crowd.active_agent(who):
        _generate(crowd, prompts * copies, longest, choice, have_ended)


def _generate(crowd: CrowdModel, prompts: Sequence[TokenIds], longest: int, *steps: Callable[..., Tensor]) -> None:
    """Let Transformers generate after prompts, padded on the left, so that all rows end at the same column.

    Args:
        steps: a logits processor, which leaves one token per row where it chooses, and a stopping criterion if any.
    """
    model = crowd.model
    ids = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    rows = pad_sequence(ids, batch_first=True, padding_value=crowd.pad_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left")
    how = GenerationConfig(max_new_tokens=longest, pad_token_id=crowd.pad_id, do_sample=False, use_cache=True)
    # Transformers takes every missing value from the base's own settings.
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.generate(
            input_ids=rows.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=how,
            logits_processor=LogitsProcessorList(steps[:1]),
            stopping_criteria=StoppingCriteriaList(steps[1:]),
            synced_gpus=False,  # processes with a sharded base keep in step by themselves
        )
    finally:
        model.generation_config = kept


def is_padding_invariant(crowd: CrowdModel) -> bool:
    """True if the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """

    def second(prompts: Sequence[TokenIds]) -> Tensor:
        """The logits [V] of the first row's second new token, which depend on a full pass and on one with the cache."""
        seen = list[Tensor]()

        def keep(_: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores[0])
            return scores

        _generate(crowd, [*prompts] * crowd.num_agents, 2, keep)
        return seen[1]

    alone, beside = second([[1, 2, 3]]), second([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
    return distance(beside, alone) <= tolerance(*dtypes_of(crowd.model, alone))  # False if one of them holds NaN
