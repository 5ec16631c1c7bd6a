"""Ask the crowd in words: prompts become token ids, and what is generated becomes answers with how sure the crowd is.

Legend: K agents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ci_llm.crowd.decoding import Decoding
from ci_llm.crowd.generation import Generated, TokenIds, free_positions
from ci_llm.crowd.prompts import Prompt, Prompter
from ci_llm.crowd.streaming import Stream, TextSoFar, cut
from ci_llm.crowd.uncertainty import TokenUncertainty, Uncertainty, agreement, of_text
from ci_llm.errors import BadInput, ModelError

if TYPE_CHECKING:
    from ci_llm.crowd.model import Crowd


class Choices(TypedDict, total=False):
    """How tokens are chosen, by the names that `Crowd.generate` describes."""

    max_new_tokens: int
    aggregator: str
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Answer(Uncertainty):
    """One answer of the crowd and how sure it is, from the pass that generated it.

    The numbers of `Uncertainty` are about the tokens of `answer`: those that the crowd chose, its end included.

    Attributes:
        prompt: as it was given.
        answer: the crowd's.
        agents: each agent's own answer to the same prompt, generated greedily; empty if they were not asked for.
        agreement: the share of agents whose own answer is the crowd's, see `uncertainty.agreement`; None without them.
        complete: whether the crowd ended the answer, or a stop string did; False if `max_new_tokens` or the base's
            positions cut it.
        tokens: how sure the crowd was of each token.
    """

    prompt: Prompt
    answer: str
    agents: tuple[str, ...]
    agreement: float | None
    complete: bool
    tokens: tuple[TokenUncertainty, ...]


def prompter_of(crowd: Crowd) -> Prompter:
    """The crowd's prompter. Raises ModelError: it has none."""
    if crowd.prompter is None:
        raise ModelError(
            "this crowd has no tokenizer",
            where="Crowd.generate",
            hint="set crowd.prompter = ci_llm.Prompter(tokenizer), or take Crowd.generate_ids",
        )
    return crowd.prompter


def decoding_of(prompter: Prompter, *, seed: int | None = None, **choices: Any) -> Decoding:
    """How tokens are chosen; without a `seed`, one is drawn.

    Raises:
        BadInput: a value is out of range.
    """
    return Decoding(ends=prompter.ends, seed=torch.Generator().seed() if seed is None else seed, **choices)


def texts(
    crowd: Crowd, prompts: Sequence[Prompt], decoding: Decoding, stop_strings: Sequence[str] = (), batch_size: int = 16
) -> list[str]:
    """The crowd's answer to each prompt, and nothing else; see `answers`."""
    prompter = prompter_of(crowd)
    batches = _generate(crowd, prompts, decoding, stop_strings, batch_size)
    return [cut(prompter.text(ids), stop_strings) for _, generated in batches for ids in generated.crowd]


def answers(
    crowd: Crowd,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    stop_strings: Sequence[str] = (),
    batch_size: int = 16,
    *,
    include_agents: bool = True,
) -> Iterator[Answer]:
    """Answer the prompts in order, `batch_size` at a time; an answer comes as soon as its batch is ready.

    Raises:
        ModelError: the crowd has no prompter.
        BadInput: before anything is generated: a prompt cannot be used, or `batch_size` is below 1.
    """
    prompter = prompter_of(crowd)
    for batch, generated in _generate(
        crowd, prompts, decoding, stop_strings, batch_size, include_agents=include_agents, uncertainty=True
    ):
        for number, prompt in enumerate(batch):
            yield _answer(prompter, prompt, generated, number, stop_strings)


def stream(crowd: Crowd, prompt: Prompt, decoding: Decoding, stop_strings: Sequence[str] = ()) -> Stream[Answer]:
    """Answer one prompt piece by piece; see `Crowd.stream`."""
    prompter = prompter_of(crowd)
    ids = prompter.ids(prompt)
    free_positions(crowd.model, [ids])

    def produce(emit: Callable[[str], None], stop: Callable[[], bool]) -> Answer:
        text = TextSoFar(prompter.tokenizer, stop_strings, emit)
        generated = crowd.generate_ids([ids], decoding, uncertainty=True, stop=stop, is_over=text.update)
        text.finish(generated.crowd[0])
        return _answer(prompter, prompt, generated, 0, stop_strings)

    return Stream(produce)


def _generate(
    crowd: Crowd,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    stop_strings: Sequence[str],
    batch_size: int,
    **what: Any,
) -> Iterator[tuple[Sequence[Prompt], Generated]]:
    """Batches of prompts with what follows them; all prompts are checked before the first is answered."""
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="generation settings", hint="change the value named")
    prompter = prompter_of(crowd)
    rows = [prompter.ids(prompt) for prompt in prompts]
    if rows:
        free_positions(crowd.model, rows)
    is_over = _is_over(prompter, stop_strings)
    for at in range(0, len(rows), batch_size):
        part = slice(at, at + batch_size)
        yield prompts[part], crowd.generate_ids(rows[part], decoding, first_prompt=at, is_over=is_over, **what)


def _is_over(prompter: Prompter, stop_strings: Sequence[str]) -> Callable[[TokenIds], bool] | None:
    if not stop_strings:
        return None
    return lambda ids: TextSoFar(prompter.tokenizer, stop_strings).update(ids)


def _answer(
    prompter: Prompter, prompt: Prompt, generated: Generated, number: int, stop_strings: Sequence[str]
) -> Answer:
    ids, tokens = generated.crowd[number], generated.tokens[number]
    whole = prompter.text(ids)
    text = cut(whole, stop_strings)
    agents = tuple(cut(prompter.text(agent[number]), stop_strings) for agent in generated.agents)
    return Answer(
        prompt=prompt,
        answer=text,
        agents=agents,
        agreement=agreement(text, agents) if agents else None,
        complete=len(tokens) > len(ids) or len(text) < len(whole),
        tokens=tuple(tokens),
        **vars(of_text(tokens)),
    )
