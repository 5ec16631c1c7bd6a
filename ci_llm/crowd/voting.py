"""A crowd that votes: every text of an agent is read by all agents, and one of the texts wins.

Legend: K agents, B prompts, n texts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ci_llm.crowd.aggregators import aggregate, find_vote, is_mean
from ci_llm.crowd.answers import AnswerStyle, TokenUncertainty, final_answer, of_text, token_uncertainty, tokens_of
from ci_llm.crowd.decoding import Decoding, without_nan
from ci_llm.data.batches import pack

if TYPE_CHECKING:
    from ci_llm.crowd.generation import Generated
    from ci_llm.crowd.model import Crowd

TokenIds = Sequence[int]

#: The final answers in the texts of one prompt, "" for none.
Reading = Callable[[Sequence[TokenIds]], list[str]]


def elect(
    crowd: Crowd, prompts: Sequence[TokenIds], generated: Generated, decoding: Decoding, answers_of: Reading
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
    crowd: Crowd, prompt: TokenIds, texts: Sequence[TokenIds], aggregator: str
) -> list[list[TokenUncertainty]]:
    """How sure the crowd is of every token of given texts after one prompt, by one pass over all of them."""
    distinct = list(dict.fromkeys(map(tuple, texts)))  # agents often write the same
    batch = pack([Continuation.after(prompt, text) for text in distinct], range(len(distinct))).to(crowd.device)
    route, training = crowd.route, crowd.training
    crowd.route = "padded"  # as in generation
    crowd.eval()
    try:
        states = crowd.states(batch)[:, batch.predict_from]
    finally:
        crowd.route = route
        crowd.train(training)
    numbers = []
    for chunk in crowd.head.chunks(batch.num_targets):
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
