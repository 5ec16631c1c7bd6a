"""Texts of the crowd: written token by token for all agents at once, or chosen by a vote.

The decoder (`ci_llm.crowd.decoder`) writes all texts, or `ci_llm.crowd.padded_generation` for bases that do not read
packed rows. For each prompt there is a text of the crowd, and on request one of each agent alone. A prompt whose texts
have ended makes place for the next one. In a vote each agent writes a text, all agents read every text, and one of the
texts wins.

Legend: K agents, B prompts, S targets, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.detokenizer import IncrementalDetokenizer, cut
from ci_llm.crowd.metrics import AnswerStyle, final_answer
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import (
    CROWD,
    Author,
    Decoding,
    Generated,
    Request,
    TokenIds,
    free_positions,
    generate_key,
    without_nan,
)
from ci_llm.crowd.padded_generation import padded_rows, write_batch
from ci_llm.crowd.uncertainty import TokenUncertainty, of_text, token_uncertainty, tokens_of
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.lora.passes import describe_error

#: Finds the final answers in the texts of one prompt, "" where a text has none.
Reading = Callable[[Sequence[TokenIds]], list[str]]


@dataclass(frozen=True)
class Wanted:
    """The texts that are wanted after each prompt.

    Attributes:
        decoding: the options of the text.
        author: the author of the text. Only the crowd votes, and only beside it the agents' own texts are written.
        include_agents: also continue every prompt by each agent alone, greedily.
        uncertainty, top: what else is computed for every token of the text; see `Request`.
        streams: decode the text while it is written; see `Request.detokenizer`.
        stop: called after every token; True ends all texts there.
        answers_of: the final answers in texts, for a crowd that votes; None where nothing is known of the task.
    """

    decoding: Decoding
    author: Author = CROWD
    include_agents: bool = False
    uncertainty: bool = False
    top: int = 0
    streams: bool = False
    stop: Callable[[], bool] = lambda: False
    answers_of: Reading | None = None

    @property
    def votes(self) -> bool:
        """True if the agents write, and a vote chooses one of their texts."""
        return self.author is CROWD and find_vote(self.decoding.aggregator) is not None


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
            write_batch(crowd, batch, stop)
            yield from batch
        return
    open_: deque[list[Request]] = deque()
    decoder = Decoder(crowd, most)
    more = True
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
        decoder.step()
        if stop():
            more = False
            for request in decoder.open:
                decoder.release(request)
        living = set(decoder.open)
        while open_ and not living.intersection(open_[0]):
            yield open_.popleft()


@contextmanager
def base_errors(crowd: CrowdModel) -> Iterator[None]:
    """Raise a ModelError for any error of the base in the block: families raise all kinds for what they lack."""
    try:
        yield
    except Exception as error:
        raise crowd.base_model.unusable(f"cannot generate ({describe_error(error)})") from error


def requests_of(crowd: CrowdModel, number: int, prompt: TokenIds, wanted: Wanted) -> list[Request]:
    """The requests of one prompt: the text unless the crowd votes, and then those of the agents, which are greedy."""
    decoding = wanted.decoding
    greedy = replace(decoding, do_sample=False)
    requests = []
    if not wanted.votes:
        text = Request(
            prompt,
            decoding,
            wanted.author,
            key=generate_key(number),
            uncertainty=wanted.uncertainty,
            top=wanted.top,
            detokenizer=detokenizer(crowd, decoding, streams=wanted.streams),
        )
        requests.append(text)
    agents = range(crowd.num_agents) if wanted.votes or wanted.include_agents else ()
    return requests + [Request(prompt, greedy, k, detokenizer=detokenizer(crowd, greedy)) for k in agents]


def generated_of(crowd: CrowdModel, requests: Sequence[Request], wanted: Wanted) -> Generated:
    """The texts of one prompt from its requests, which have the order of `requests_of` and have ended.

    Raises:
        ModelError: every agent's logits hold NaN or infinity.
    """
    how = wanted.decoding
    agents = [request for request in requests if request.author is not CROWD]
    shown = agents if wanted.include_agents else []
    texts, ended = [each.ids for each in shown], [each.finish == "stop" for each in shown]
    if wanted.votes:
        winner, sure = elect(crowd, agents[0].prompt, [each.tokens for each in agents], how, wanted.answers_of)
        ids = [token for token in winner if token not in how.ends]
        return Generated(ids, len(ids) < len(winner), sure, texts, ended)
    own = requests[0]
    if own.error is not None:
        raise own.error
    return Generated(own.ids, own.finish == "stop", own.uncertainties, texts, ended)


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
    with padded_rows(crowd):
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


def detokenizer(crowd: CrowdModel, decoding: Decoding, *, streams: bool = False) -> IncrementalDetokenizer | None:
    """What follows a text to find its stop strings, or to show it while it is written; None if it is not needed."""
    if not decoding.stop_strings and not streams:
        return None
    return IncrementalDetokenizer(crowd.prompter.tokenizer, decoding.stop_strings)


def text_of(crowd: CrowdModel, ids: TokenIds, decoding: Decoding) -> str:
    """The text of token ids, cut before the first stop string in it."""
    return cut(crowd.prompter.text(ids), decoding.stop_strings)
