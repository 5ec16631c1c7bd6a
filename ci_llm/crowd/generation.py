"""The generation of texts by the crowd, token by token for all agents at once, or by a vote on whole texts.

If the base reads packed rows, the decoder (`ci_llm.crowd.decoder`) writes all texts. For each prompt it writes a text
of the crowd, and on request one of each agent alone; they share the pass over the prompt. A prompt whose texts have
ended makes place for the next one. In a vote each agent writes a text, all agents read every text, and one of the texts
wins.

For other bases Transformers' own `generate` manages cache, positions and padding. Every prompt is in the batch once per
agent, agent-major as the stacked adapters expect, and once more for each text that an agent writes alone. A logits
processor replaces the K distributions of a row by the token that the crowd chose, so that all K copies of the row
continue with the same text. A batch ends with its longest text.

Legend: K agents, B prompts, F rows that each agent writes alone, S rows of
the crowd, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.metrics import AnswerStyle, final_answer
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import (
    Chosen,
    Decoding,
    Generated,
    Request,
    TokenIds,
    choose,
    free_positions,
    generate_key,
    without_nan,
)
from ci_llm.crowd.uncertainty import TokenUncertainty, of_text, token_uncertainty, tokens_of
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompter
from ci_llm.errors import BadInput
from ci_llm.lora.passes import describe_error, distance, dtypes_of, tolerance, unusable_base

#: The uncertainty of the failed token of a text whose agent had only NaN logits.
_NOT_SURE: Final = TokenUncertainty(0.0, 0.0, 0.0, 0.0)
#: Finds the final answers in the texts of one prompt, "" where a text has none.
Reading = Callable[[Sequence[TokenIds]], list[str]]


@dataclass(frozen=True)
class Wanted:
    """The texts that are wanted after each prompt.

    Attributes:
        decoding: the options of the crowd's text.
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
) -> list[Generated]:
    """Continue each of B prompts by the crowd, and on request also by each agent alone, all at the same time.

    A text ends at the latest when it has used up the base's positions.

    Args:
        prompts: B lists of token ids.
        numbers: the prompts' numbers in a longer list that is generated in parts, which key the generators; None for
            0, 1, ...
        **wanted: the other attributes of `Wanted`.

    Raises:
        BadInput: there is no such agent.
        DataError: a prompt is empty, or longer than the base can read.
        ModelError: the base cannot generate, or every agent's logits hold NaN or infinity.
    """
    agent = wanted.get("agent")
    if agent is not None and not 0 <= agent < crowd.num_agents:
        raise BadInput(f"there is no agent {agent}", where="agent", hint=f"give one of 0 to {crowd.num_agents - 1}")
    asked = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    if not asked:
        return []
    free_positions(crowd.model, prompts, numbers)
    return list(generate_each(crowd, asked, Wanted(decoding, **wanted), len(asked)))


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
            how, read = wanted.decoding, wanted.answers_of or _reading(crowd.prompter)
            text, sure = elect(crowd, prompt, generated.voters, how.aggregator, read)
            generated = replace(generated, text=[token for token in text if token not in how.ends], tokens=sure)
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
    """The requests of one prompt: the crowd's text unless it votes, and then the agents' texts."""
    decoding, votes, sure = wanted.decoding, find_vote(wanted.decoding.aggregator), wanted.uncertainty
    agents = range(crowd.num_agents) if wanted.agent is None else [wanted.agent]
    greedy = replace(decoding, do_sample=False)
    requests = [] if votes else [Request(prompt, decoding, wanted.agent, generate_key(number), sure)]
    if wanted.include_agents or votes:
        requests += [Request(prompt, greedy, k, uncertainty=sure) for k in agents]
    return requests


def _generated(crowd: CrowdModel, requests: Sequence[Request], wanted: Wanted) -> Generated:
    """The texts of one prompt from its requests, which have the order of `requests_of`."""
    votes = find_vote(wanted.decoding.aggregator) is not None
    sure = list[list[TokenUncertainty]]()
    for request in requests:
        if request.error is not None and request.who == wanted.agent:  # the text that was asked for
            raise request.error
        sure.append(request.sure if request.error is None else [*request.sure, _NOT_SURE])
    own = slice(0 if votes else 1, None)
    shown = own if wanted.include_agents else slice(0)
    return Generated(
        [] if votes else requests[0].text,
        [request.text for request in requests[shown]],
        [] if votes or not wanted.uncertainty else sure[0],
        sure[shown] if wanted.uncertainty else [],
        [request.tokens for request in requests[own]] if votes else [],
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
    wins = vote(answers_of(voters), [of_text(tokens).log_probability for tokens in read])
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


def write_batch(
    crowd: CrowdModel,
    requests: Sequence[Request],
    agent: int | None,
    *,
    stop: Callable[[], bool],
    is_over: Callable[[TokenIds], bool] | None,
) -> None:
    """Write the texts of a batch of requests, of which every agent has the same number.

    Args:
        agent: the only writer, as a crowd of one; None for the crowd.
        stop, is_over: as in `Wanted`.
    """
    model = crowd.model
    shared = [request for request in requests if request.who == agent]
    others = [request for request in requests if request.who != agent]
    own = [[request for request in others if request.who == k] for k in range(crowd.num_agents if agent is None else 1)]
    rows = [request for each in own for request in (*each, *shared)]
    prompts = [request.prompt for request in rows]
    free, open_ = free_positions(model, prompts), [*requests]

    def choice(_: Tensor, scores: Tensor) -> Tensor:
        """Logits [K·(F + S), V] in the same shape, with 0 at the chosen token of each row and -inf elsewhere."""
        logits, tokens = scores.unflatten(0, (len(own), -1)), dict[Request, int]()
        of_agents, of_crowd = logits[:, : len(own[0])].flatten(0, 1)[None], logits[:, len(own[0]) :]
        for asked, given in (([*chain(*own)], of_agents), (shared, of_crowd)):
            for request, found in zip(asked, choose(given, asked) if asked else [], strict=True):
                tokens[request] = found.id if isinstance(found, Chosen) else crowd.pad_id
                if request in open_:
                    request.take(found, len(request.prompt) + free)
        chosen = torch.tensor([[tokens[request]] for request in rows], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)

    def have_ended(ids: Tensor, _: Tensor, **__: object) -> Tensor:
        """True if all texts have ended, once for every row."""
        over = [each for each in open_ if each.finish is not None or (is_over and is_over(each.tokens))]
        open_[:] = [request for request in open_ if request not in over]
        return torch.full((len(ids),), stop() or not open_, device=ids.device)

    ids, mask = (x.to(model.device) for x in _left_padded(prompts, crowd.pad_id))
    # The processor leaves one token per row, which also holds for sampling.
    longest = min(free, max(request.decoding.max_new_tokens for request in requests))
    how = GenerationConfig(max_new_tokens=longest, pad_token_id=crowd.pad_id, do_sample=False, use_cache=True)
    with _blank_generation_config(model):
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=how,
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([have_ended]),
            synced_gpus=False,  # processes with a sharded base keep in step by themselves
        )


def is_padding_invariant(model: PreTrainedModel, num_agents: int, pad_id: int) -> bool:
    """True if the base continues a prompt beside a longer one as it does alone.

    Some families count pads as positions, or mix them into their states, and raise no error.
    """
    short, long = [[1, 2, 3]], [[1, 2, 3, 4, 5, 6, 7]]
    alone, beside = (_scores(model, num_agents, rows, pad_id) for rows in (short, short + long))
    return distance(beside, alone) <= tolerance(*dtypes_of(model, alone))  # False if one of them holds NaN


def _scores(model: PreTrainedModel, num_agents: int, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """The logits [V] of the first row's second new token, which depend on a full pass and on one with the cache."""
    ids, mask = (x.to(model.device).repeat(num_agents, 1) for x in _left_padded(rows, pad_id))
    wanted = GenerationConfig(
        max_new_tokens=2, pad_token_id=pad_id, use_cache=True, output_logits=True, return_dict_in_generate=True
    )
    with _blank_generation_config(model):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted, synced_gpus=False)
        return found.logits[1][0]  # type: ignore[no-any-return]


@contextmanager
def _blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the base's generation settings inside, because Transformers takes every missing value from them."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _left_padded(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, each [R, T]; pads are on the left, so that all rows end at the same column."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :] = torch.as_tensor(row)
        mask[number, length - len(row) :] = 1
    return ids, mask
