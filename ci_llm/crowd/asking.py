"""The way from prompts in words to answers in words, each with how sure the crowd is of it.

Legend: K agents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict

import torch

from ci_llm.crowd import generation
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.answers import Calibration, Logistic, TokenUncertainty, Uncertainty, agreement, of_text, signals
from ci_llm.crowd.decoding import Decoding, Generated, TokenIds, ends_of_base, free_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.prompts import Prompt, Prompter
from ci_llm.errors import BadInput, ModelError

logger = logging.getLogger(__name__)
_DRAWING: Final = ("temperature", "top_p", "top_k")


class Choices(TypedDict, total=False):
    """How tokens are chosen and which answers are given, by the names that `Crowd.generate` describes."""

    max_new_tokens: int
    aggregator: str
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None
    abstain_below: float | None
    agents_per_prompt: float | None


@dataclass(frozen=True)
class GenerationOptions:
    """How prompts are answered.

    Attributes:
        decoding: how tokens are chosen.
        stop_strings: an answer ends before the first of them.
        abstain_below: an answer that is less probably right is not given; None: every answer is.
        agents_per_prompt: one agent is asked first, and all of them where it is unsure, so that a prompt takes so many
            agents on average; None: all are asked.
    """

    decoding: Decoding
    stop_strings: tuple[str, ...] = ()
    abstain_below: float | None = None
    agents_per_prompt: float | None = None

    def __post_init__(self) -> None:
        wrong = []
        if self.abstain_below is not None and not 0 <= self.abstain_below <= 1:
            wrong.append("abstain_below must be a probability, from 0 to 1")
        if self.agents_per_prompt is not None and self.agents_per_prompt < 1:
            wrong.append("agents_per_prompt must be at least 1: one agent always answers")
        if self.agents_per_prompt is not None and self.decoding.do_sample:
            wrong.append("agents_per_prompt takes the most probable tokens: leave sampling out")
        if wrong:
            raise BadInput("; ".join(wrong), where="generation settings", hint="change the values named")


@dataclass(frozen=True, kw_only=True)
class Answer(Uncertainty):
    """One answer of the crowd and how sure it is, from the pass that generated it.

    The numbers of `Uncertainty` are about the tokens of `answer`: those that the crowd chose, its end included.

    Attributes:
        prompt: as it was given.
        answer: the crowd's.
        agents: each agent's own answer to the same prompt, generated greedily; empty if they were not asked for,
            and with `agents_per_prompt`, which saves them.
        agreement: the share of agents whose own answer is the crowd's, see `uncertainty.agreement`; None without them.
        probability_right: that the answer is right, as validation rows had it; None before a calibration, and for
            another aggregator than that of the calibration.
        abstained: whether `probability_right` is below `abstain_below`, so that the answer should not be given.
        agents_asked: how many agents wrote it: K, or with `agents_per_prompt` 1 or 1 + K; 0: the base alone.
        complete: whether the crowd ended the answer, or a stop string did; False if `max_new_tokens` or the base's
            positions cut it.
        tokens: how sure the crowd was of each token.
    """

    prompt: Prompt
    answer: str
    agents: tuple[str, ...]
    agreement: float | None
    probability_right: float | None
    abstained: bool
    agents_asked: int
    complete: bool
    tokens: tuple[TokenUncertainty, ...]


def prompter_of(crowd: CrowdModel) -> Prompter:
    """The crowd's prompter. Raises ModelError: it has none."""
    if crowd.prompter is None:
        raise ModelError(
            "this crowd has no tokenizer",
            where="Crowd.generate",
            hint="set crowd.prompter = ci_llm.Prompter(tokenizer), or take Crowd.generate_ids",
        )
    return crowd.prompter


def ends_of_answers(crowd: CrowdModel, stop_strings: Sequence[str] = ()) -> frozenset[int]:
    """Token ids that end an answer: those of the prompter, of the base, and stop strings that are special tokens.

    Raises:
        ModelError: the crowd has no prompter.
        DataError: its chat template fails.
    """
    prompter = prompter_of(crowd)
    return prompter.ends | ends_of_base(crowd.model) | prompter.ends_among(stop_strings)


def decoding_of(ends: frozenset[int], *, seed: int | None = None, **choices: Any) -> Decoding:
    """How tokens are chosen; without a `seed`, one is drawn.

    Raises:
        BadInput: a value is out of range.
    """
    return Decoding(ends=ends, seed=torch.Generator().seed() if seed is None else seed, **choices)


def options_of(
    crowd: CrowdModel,
    stop_strings: Sequence[str] = (),
    *,
    abstain_below: float | None = None,
    agents_per_prompt: float | None = None,
    **choices: Any,
) -> GenerationOptions:
    """How a crowd answers, from the arguments of `Crowd.generate`.

    Raises:
        ModelError: the crowd has no prompter, or its agents have heads and write nothing.
        BadInput: a value is out of range, or it needs a calibration that the crowd does not have.
    """
    require_writers(crowd)
    if choices.get("temperature") == 0:  # the limit of drawing is the most probable token
        choices = {name: value for name, value in choices.items() if name not in (*_DRAWING, "do_sample")}
    decoding = decoding_of(ends_of_answers(crowd, stop_strings), **choices)
    if not decoding.do_sample and (ignored := [name for name in _DRAWING if choices.get(name) not in (None, 1)]):
        logger.warning(f"{', '.join(ignored)} without effect: tokens are drawn only with do_sample=True")
    options = GenerationOptions(decoding, tuple(stop_strings), abstain_below, agents_per_prompt)
    if abstain_below is not None or agents_per_prompt is not None:
        _require_calibration(crowd, decoding.aggregator, abstains=abstain_below is not None)
    return options


def require_writers(crowd: CrowdModel) -> None:
    """Refuse agents with heads, which were not trained to predict tokens.

    Raises:
        ModelError: they have heads.
    """
    if crowd.settings.outputs:
        raise ModelError(
            "these agents have heads: they score texts and write none",
            where="the crowd",
            hint="ci-llm score RUN, or Crowd.score",
        )


def texts(crowd: CrowdModel, prompts: Sequence[Prompt], options: GenerationOptions, batch_size: int = 16) -> list[str]:
    """The crowd's answer to each prompt, and nothing else, "" where it abstains; see `answers`."""
    if options.abstain_below is not None or options.agents_per_prompt is not None:
        found = answers(crowd, prompts, options, batch_size, include_agents=False)
        return ["" if answer.abstained else answer.answer for answer in found]
    asked = _asked(crowd, prompts, batch_size)
    return [text for found in _generated(crowd, asked, options) for text in _texts(asked, found.crowd, options)]


def answers(
    crowd: CrowdModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions,
    batch_size: int = 16,
    *,
    include_agents: bool = True,
) -> Iterator[Answer]:
    """Answer the prompts in order, `batch_size` at a time; an answer comes when it and those before it are ready.

    Raises:
        ModelError: the crowd has no prompter.
        BadInput: before anything is generated: a prompt cannot be used, or `batch_size` is below 1.
    """
    yield from _answered(crowd, _asked(crowd, prompts, batch_size), options, include_agents=include_agents)


def stream(crowd: CrowdModel, prompt: Prompt, options: GenerationOptions) -> generation.Stream[Answer]:
    """Answer one prompt piece by piece; see `Crowd.stream`. What is decided about a whole answer comes in one piece."""
    asked = _asked(crowd, [prompt], 1)

    def produce(emit: Callable[[str], None], stop: Callable[[], bool]) -> Answer:
        stoppable, decoding = replace(asked, stop=stop), options.decoding
        if options.abstain_below is not None or options.agents_per_prompt is not None or find_vote(decoding.aggregator):
            [answer] = _answered(crowd, stoppable, options, include_agents=False)
            if answer.answer and not answer.abstained:
                emit(answer.answer)
            return answer
        text = generation.TextSoFar(asked.prompter.tokenizer, options.stop_strings, emit)
        [found] = _generated(crowd, stoppable, options, uncertainty=True, is_over=text.update)
        text.finish(found.crowd[0])
        return _worded(crowd, asked, options, 0, found)

    kind = crowd.device.type
    # Autocast is a state of the thread, so that of the caller is handed on.
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    return generation.Stream(autocast(produce))


@dataclass(frozen=True)
class _Asked:
    """Prompts that are answered.

    Attributes:
        numbers: of these among all.
        at_a_time: how many of them at the same time.
        stop: called before every token; True ends all texts at that point.
    """

    prompter: Prompter
    prompts: Sequence[Prompt]
    ids: Sequence[TokenIds]
    numbers: Sequence[int]
    at_a_time: int
    stop: Callable[[], bool] = lambda: False

    def only(self, places: Sequence[int]) -> _Asked:
        """Some of them."""
        return replace(
            self,
            prompts=[self.prompts[n] for n in places],
            ids=[self.ids[n] for n in places],
            numbers=[self.numbers[n] for n in places],
        )


def _asked(crowd: CrowdModel, prompts: Sequence[Prompt], batch_size: int) -> _Asked:
    """The prompts in token ids; all of them are checked before anything is generated."""
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="generation settings", hint="change the value named")
    prompter = prompter_of(crowd)
    rows = [prompter.ids(prompt) for prompt in prompts]
    if rows:
        free_positions(crowd.model, rows)
    return _Asked(prompter, prompts, rows, range(len(rows)), batch_size)


def _generated(
    crowd: CrowdModel,
    asked: _Asked,
    options: GenerationOptions,
    decoding: Decoding | None = None,
    is_over: Callable[[TokenIds], bool] | None = None,
    **wanted: Any,
) -> Iterator[Generated]:
    """What follows each of the prompts; `decoding` and `is_over` are those of `options` unless they are given."""
    how = generation.Wanted(
        decoding or options.decoding,
        stop=asked.stop,
        is_over=is_over or _is_over(asked.prompter, options.stop_strings),
        answers_of=lambda texts: generation.final_answers(_texts(asked, texts, options)),
        **wanted,
    )
    return generation.generate_each(crowd, zip(asked.numbers, asked.ids, strict=True), how, asked.at_a_time)


def _answered(
    crowd: CrowdModel, asked: _Asked, options: GenerationOptions, *, include_agents: bool
) -> Iterator[Answer]:
    if options.agents_per_prompt is None:
        yield from _ask_all(crowd, asked, options, include_agents=include_agents)
        return
    for at in range(0, len(asked.ids), asked.at_a_time):
        yield from _ask_one_first(crowd, asked.only(range(len(asked.ids))[at : at + asked.at_a_time]), options)


def _ask_all(crowd: CrowdModel, asked: _Asked, options: GenerationOptions, *, include_agents: bool) -> Iterator[Answer]:
    """All agents answer, token by token or by a vote."""
    include_agents = include_agents and bool(crowd.names)  # a base has none
    each = _generated(crowd, asked, options, include_agents=include_agents, uncertainty=True)
    for place, found in enumerate(each):
        yield _worded(crowd, asked, options, place, found, include_agents=include_agents)


def _ask_one_first(crowd: CrowdModel, asked: _Asked, options: GenerationOptions) -> Iterator[Answer]:
    """One agent answers, and all of them where it is unsure."""
    calibration = _require_calibration(crowd, options.decoding.aggregator, abstains=False)
    limit = calibration.escalates_below(options.agents_per_prompt or 1)
    decoding = replace(options.decoding, aggregator="probability")  # of one agent, every mean is its own distribution
    alone = _generated(crowd, asked, options, decoding, agent=calibration.agent, uncertainty=True)
    found = [
        replace(_worded(crowd, asked, options, place, each, right=calibration.agent_right), agents_asked=1)
        for place, each in enumerate(alone)
    ]
    unsure = [place for place, answer in enumerate(found) if (answer.probability_right or 0) < limit]
    if unsure:
        second = _ask_all(crowd, asked.only(unsure), options, include_agents=False)
        for place, answer in zip(unsure, second, strict=True):
            found[place] = replace(answer, agents_asked=1 + crowd.num_agents)
    yield from found


def _is_over(prompter: Prompter, stop_strings: Sequence[str]) -> Callable[[TokenIds], bool] | None:
    if not stop_strings:
        return None
    return lambda ids: generation.TextSoFar(prompter.tokenizer, stop_strings).update(ids)


def _texts(asked: _Asked, all_ids: Sequence[TokenIds], options: GenerationOptions) -> list[str]:
    return [generation.cut(asked.prompter.text(ids), options.stop_strings) for ids in all_ids]


def _worded(
    crowd: CrowdModel,
    asked: _Asked,
    options: GenerationOptions,
    place: int,
    found: Generated,
    *,
    include_agents: bool = False,
    right: Logistic | None = None,
) -> Answer:
    """The answer to the prompt at this place of those asked.

    Args:
        right: how probably an answer is right; None: as the calibration has it of the crowd, if it fits.
    """
    [ids], [tokens], calibration = found.crowd, found.tokens, crowd.calibration
    [text] = _texts(asked, [ids], options)
    agents = tuple(_texts(asked, [own for [own] in found.agents], options)) if include_agents else ()
    if right is None and calibration and calibration.aggregator == options.decoding.aggregator:
        right = calibration.right
    probability = None if right is None else right(signals(tokens))
    return Answer(
        prompt=asked.prompts[place],
        answer=text,
        agents=agents,
        agreement=agreement(text, agents) if agents else None,
        probability_right=probability,
        abstained=probability is not None and options.abstain_below is not None and probability < options.abstain_below,
        agents_asked=len(crowd.names),
        complete=len(tokens) > len(ids) or len(text) < len(asked.prompter.text(ids)),
        tokens=tuple(tokens),
        **vars(of_text(tokens)),
    )


def _require_calibration(crowd: CrowdModel, aggregator: str, *, abstains: bool) -> Calibration:
    """The crowd's calibration. Raises BadInput: it has none, or one of another aggregator."""
    found = crowd.calibration
    if found is None:
        what = "this crowd has no calibration: nothing says how probably an answer is right"
        hint = "ci-llm evaluate RUN --calibrate, on validation rows"
        raise BadInput(what, where="abstain_below, agents_per_prompt", hint=hint)
    if abstains and found.aggregator != aggregator:
        raise BadInput(
            f"the calibration is of aggregator {found.aggregator} and not {aggregator}",
            where="abstain_below",
            hint=f"take {found.aggregator}, or: ci-llm evaluate RUN --calibrate aggregator={aggregator}",
        )
    return found
