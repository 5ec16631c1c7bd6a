"""Prompts as text to answers as text, each with how sure the crowd is of it.

Legend: K agents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypedDict, Unpack

import torch

from ci_llm.crowd import generation
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.answers import TokenUncertainty, Uncertainty, agreement, calibrated, of_text, signals
from ci_llm.crowd.decoding import Decoding, Generated, TokenIds, ends_of_base, free_positions
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.prompts import Prompt, Prompter
from ci_llm.errors import BadInput, ModelError

logger = logging.getLogger(__name__)
_DRAWING: Final = ("temperature", "top_p", "top_k")


class Choices(TypedDict, total=False):
    """The options of `Crowd.generate` that say how tokens are chosen and which answers are given."""

    max_new_tokens: int
    aggregator: str
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None
    abstain_below: float | None


@dataclass(frozen=True, kw_only=True)
class Answer(Uncertainty):
    """One answer of the crowd and how sure it is, from the pass that generated it.

    The numbers of `Uncertainty` are about the tokens of `answer` that the crowd chose, including its end.

    Attributes:
        prompt: the prompt as it was given.
        answer: the crowd's answer.
        agents: each agent's own answer to the same prompt, generated greedily; empty if these were not asked for.
        agreement: the share of agents whose own answer is the crowd's, see `ci_llm.crowd.answers.agreement`; None if
            there are no own answers.
        probability_right: the calibrated probability that the answer is right; None without a calibration, and with
            another aggregator than the calibration's.
        abstained: whether `probability_right` is below `abstain_below`, so that the answer should not be given.
        agents_asked: how many agents wrote the answer: K, or 0 for a base alone.
        complete: whether the crowd or a stop string ended the answer; False if `max_new_tokens` or the base's
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
    """The crowd's prompter. Raises ModelError if it does not have one."""
    if crowd.prompter is None:
        raise ModelError(
            "this crowd has no tokenizer",
            where="Crowd.generate",
            hint="set crowd.prompter = ci_llm.Prompter(tokenizer), or take Crowd.generate_ids",
        )
    return crowd.prompter


def ends_of_answers(crowd: CrowdModel, stop_strings: Sequence[str] = ()) -> frozenset[int]:
    """The token ids that end an answer: the prompter's, the base's, and stop strings that are special tokens.

    Raises:
        ModelError: the crowd has no prompter.
        DataError: its chat template fails.
    """
    prompter = prompter_of(crowd)
    return prompter.ends | ends_of_base(crowd.model) | prompter.ends_among(stop_strings)


def options_of(crowd: CrowdModel, stop_strings: Sequence[str] = (), **choices: Unpack[Choices]) -> Decoding:
    """The options of a generation, from the arguments of `Crowd.generate`; without a `seed`, one is drawn.

    Raises:
        ModelError: the crowd has no prompter, or its agents have heads and write nothing.
        BadInput: a value is out of range, or it needs a calibration that the crowd does not have.
    """
    require_writers(crowd)
    given: dict[str, Any] = {"seed": torch.Generator().seed()}
    given |= {name: value for name, value in choices.items() if value is not None}
    if given.get("temperature") == 0:  # the limit of drawing is the most probable token
        given = {name: value for name, value in given.items() if name not in (*_DRAWING, "do_sample")}
    options = Decoding(ends=ends_of_answers(crowd, stop_strings), stop_strings=tuple(stop_strings), **given)
    ignored = [name for name in _DRAWING if given.get(name, 1) != 1]
    if ignored and not options.do_sample:
        logger.warning(f"{', '.join(ignored)} without effect: tokens are drawn only with do_sample=True")
    if options.abstain_below is not None:
        _require_calibration(crowd, options.aggregator)
    return options


def require_writers(crowd: CrowdModel) -> None:
    """Refuse agents with heads, which were not trained to predict tokens.

    Raises:
        ModelError: they have heads.
    """
    if crowd.settings.outputs:
        raise ModelError(
            "these agents have heads: they score texts and do not write any",
            where="the crowd",
            hint="ci-llm score RUN, or Crowd.score",
        )


def texts(crowd: CrowdModel, prompts: Sequence[Prompt], options: Decoding, batch_size: int = 16) -> list[str]:
    """Only the text of the crowd's answer to each prompt, "" where it abstains; see `answers`."""
    if options.abstain_below is not None:
        found = answers(crowd, prompts, options, batch_size, include_agents=False)
        return ["" if answer.abstained else answer.answer for answer in found]
    asking = _Asking(crowd, prompts, options, batch_size)
    return [text for found in asking.generated(asking.places) for text in asking.texts(found.crowd)]


def answers(
    crowd: CrowdModel,
    prompts: Sequence[Prompt],
    options: Decoding,
    batch_size: int = 16,
    *,
    include_agents: bool = True,
) -> Iterator[Answer]:
    """Answer the prompts, `batch_size` at a time, and yield each answer when it and those before it are ready.

    Raises:
        ModelError: the crowd has no prompter.
        BadInput: before anything is generated: a prompt cannot be used, or `batch_size` is below 1.
    """
    yield from _Asking(crowd, prompts, options, batch_size).answers(include_agents=include_agents)


def stream(crowd: CrowdModel, prompt: Prompt, options: Decoding) -> generation.Stream[Answer]:
    """Answer one prompt piece by piece; see `Crowd.stream`. Votes and abstentions come in one piece."""
    asking = _Asking(crowd, [prompt], options, 1)
    whole = find_vote(options.aggregator) is not None or options.abstain_below is not None

    def produce(emit: Callable[[str], None], stop: Callable[[], bool]) -> Answer:
        asking.stop = stop
        if whole:
            (answer,) = asking.answers(include_agents=False)
            if answer.answer and not answer.abstained:
                emit(answer.answer)
            return answer
        text = generation.TextSoFar(asking.prompter.tokenizer, options.stop_strings, emit)
        (found,) = asking.generated(asking.places, uncertainty=True, is_over=text.update)
        text.finish(found.crowd[0])
        return asking.answer(0, found)

    kind = crowd.device.type
    # Autocast is a state of the thread, so the caller's is passed on.
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    return generation.Stream(autocast(produce))


class _Asking:
    """Prompts for a crowd. All of them are checked before anything is generated.

    Args:
        at_a_time: how many prompts are answered at the same time.

    Attributes:
        ids: the token ids of each prompt.
        places: the indices of all prompts.
        stop: called before every token; True ends all texts there.
    """

    def __init__(self, crowd: CrowdModel, prompts: Sequence[Prompt], options: Decoding, at_a_time: int) -> None:
        if at_a_time < 1:
            raise BadInput("batch_size must be at least 1", where="generation settings", hint="change the value named")
        self.crowd, self.prompts, self.options, self.at_a_time = crowd, prompts, options, at_a_time
        self.prompter = prompter_of(crowd)
        self.ids, self.places = [self.prompter.ids(prompt) for prompt in prompts], range(len(prompts))
        if self.ids:
            free_positions(crowd.model, self.ids)
        self.stop: Callable[[], bool] = lambda: False

    def generated(self, places: Iterable[int], **wanted: Any) -> Iterator[Generated]:
        """Generate after the prompts at these places; `wanted` are attributes of `generation.Wanted`."""
        how = generation.Wanted(
            self.options,
            stop=self.stop,
            is_over=self._has_stopped if self.options.stop_strings else None,
            answers_of=lambda texts: generation.final_answers(self.texts(texts)),
        )
        asked = ((place, self.ids[place]) for place in places)
        return generation.generate_each(self.crowd, asked, replace(how, **wanted), self.at_a_time)

    def answers(self, *, include_agents: bool) -> Iterator[Answer]:
        """Yield an answer for each prompt, in order: of all agents together, token by token or by a vote."""
        wanted = include_agents and bool(self.crowd.names)  # a base alone has no agents to include
        found = self.generated(self.places, include_agents=wanted, uncertainty=True)
        return (self.answer(*each) for each in zip(self.places, found, strict=True))

    def _has_stopped(self, ids: TokenIds) -> bool:
        return generation.TextSoFar(self.prompter.tokenizer, self.options.stop_strings).update(ids)

    def texts(self, all_ids: Iterable[TokenIds]) -> list[str]:
        """The texts of token ids, each cut before the first stop string in it."""
        return [generation.cut(self.prompter.text(ids), self.options.stop_strings) for ids in all_ids]

    def answer(self, place: int, found: Generated) -> Answer:
        """The answer to the prompt at this place."""
        [ids], [tokens], options = found.crowd, found.tokens, self.options
        text, *agents = self.texts([ids, *(own for [own] in found.agents)])
        right = calibrated(self.crowd.calibration, options.aggregator)
        probability = None if right is None else right(signals(tokens))
        return Answer(
            prompt=self.prompts[place],
            answer=text,
            agents=tuple(agents),
            agreement=agreement(text, agents) if agents else None,
            probability_right=probability,
            abstained=probability is not None and probability < (options.abstain_below or 0),
            agents_asked=len(self.crowd.names),
            complete=len(tokens) > len(ids) or len(text) < len(self.prompter.text(ids)),
            tokens=tuple(tokens),
            **vars(of_text(tokens)),
        )


def _require_calibration(crowd: CrowdModel, aggregator: str) -> None:
    """Raise BadInput if the crowd has no calibration of this aggregator, which abstaining needs."""
    found = crowd.calibration
    if found is None:
        what = "this crowd has no calibration: nothing says how probably an answer is right"
        hint = "ci-llm evaluate RUN --calibrate, on validation rows"
        raise BadInput(what, where="abstain_below", hint=hint)
    if found.aggregator != aggregator:
        raise BadInput(
            f"the calibration is of aggregator {found.aggregator} and not {aggregator}",
            where="abstain_below",
            hint=f"take {found.aggregator}, or: ci-llm evaluate RUN --calibrate aggregator={aggregator}",
        )
