"""Prompts to answers, whole or piece by piece, each with how sure the crowd is of it.

A prompt is a text or a chat.

Legend: K agents, T new tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias, TypedDict, Unpack

import torch

from ci_llm.crowd import generation
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, Generated, TokenIds, ends_of_base, free_positions
from ci_llm.crowd.uncertainty import (
    TokenUncertainty,
    Uncertainty,
    agreement,
    calibrated,
    of_text,
    signals,
    uncalibrated,
)
from ci_llm.data.batches import Batch, in_order
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompt
from ci_llm.errors import BadInput, ModelError

logger = logging.getLogger(__name__)
_DRAWING: Final = ("temperature", "top_p", "top_k")
#: One prompt or several.
Prompts: TypeAlias = Prompt | Sequence[Prompt]


class Choices(TypedDict, total=False):
    """The options of `Crowd.generate` that say how tokens are chosen, where an answer ends, and which are given."""

    stop_strings: str | Sequence[str] | None
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
        agreement: the share of agents whose own answer is the crowd's, see `ci_llm.crowd.uncertainty.agreement`; None
            if there are no own answers.
        probability_right: the calibrated probability that the answer is right; None without a calibration, and with
            another aggregator than the calibration's.
        abstained: True if `probability_right` is below `abstain_below`, so that the answer should not be given.
        agents_asked: the number of agents that wrote the answer: K, or 0 for a base alone.
        complete: True if the crowd or a stop string ended the answer; False if `max_new_tokens` or the base's
            positions cut it.
        tokens: the uncertainty of the crowd about each token.
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


def ends_of_answers(crowd: CrowdModel, stop_strings: Sequence[str] = ()) -> frozenset[int]:
    """The token ids that end an answer: the prompter's, the base's, and stop strings that are special tokens.

    Raises:
        ModelError: the crowd has no prompter.
        DataError: its chat template fails.
    """
    prompter = crowd.prompter
    return prompter.ends | ends_of_base(crowd.model) | prompter.ends_among(stop_strings)


def options_of(crowd: CrowdModel, **choices: Unpack[Choices]) -> Decoding:
    """The options of a generation, from the arguments of `Crowd.generate`; without a `seed`, one is drawn.

    Raises:
        ModelError: the crowd has no prompter, or its agents have heads and write nothing.
        BadInput: a value is out of range, or it needs a calibration that the crowd does not have.
    """
    require_writers(crowd)
    if unknown := {*choices} - {*Choices.__annotations__}:
        raise TypeError(f"no option of a generation: {', '.join(sorted(unknown))}")
    given_stops = choices.pop("stop_strings", None)
    stops = (given_stops,) if isinstance(given_stops, str) else tuple(given_stops or ())
    if "" in stops:  # every text would end before it begins
        raise BadInput("a stop string is empty", where="stop_strings", hint="leave it out")
    given: dict[str, Any] = {"seed": torch.Generator().seed()}
    given |= {name: value for name, value in choices.items() if value is not None}
    if given.get("temperature") == 0:  # the limit of drawing is the most probable token
        given = {name: value for name, value in given.items() if name not in (*_DRAWING, "do_sample")}
    options = Decoding(ends=ends_of_answers(crowd, stops), stop_strings=stops, **given)
    ignored = [name for name in _DRAWING if given.get(name, 1) != 1]
    if ignored and not options.do_sample:
        logger.warning(f"{', '.join(ignored)} without effect: tokens are drawn only with do_sample=True")
    if options.abstain_below is not None and (reason := uncalibrated(crowd.calibration, options.aggregator)):
        hint = f"calibrate it on validation rows, with aggregator={options.aggregator}"
        raise BadInput(reason, where="abstain_below", hint=hint)
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
    ids = _ids(crowd, prompts)
    found = _generated(crowd, ids, options, batch_size, include_agents=include_agents, uncertainty=True)
    for prompt, each in zip(prompts, found, strict=True):
        yield _answer(crowd, prompt, each, options)


def texts(crowd: CrowdModel, prompts: Sequence[Prompt], options: Decoding, batch_size: int = 16) -> list[str]:
    """The text alone of the answer to each prompt, "" if it abstains; see `answers`."""
    if options.abstain_below is not None:
        each = answers(crowd, prompts, options, batch_size, include_agents=False)
        return ["" if answer.abstained else answer.answer for answer in each]
    found = _generated(crowd, _ids(crowd, prompts), options, batch_size)
    return [generation.text_of(crowd, one.ids, options) for one in found]


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer, which is written while it is read, with the answer at its end."""

    def __init__(self, crowd: CrowdModel, prompt: Prompt, options: Decoding) -> None:
        self._result: Answer | None = None
        self._pieces = _written(crowd, prompt, _ids(crowd, [prompt]), options)

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._result = end.value or self._result
            raise

    @property
    def result(self) -> Answer:
        """The answer; what is left of it is written now.

        Raises:
            RuntimeError: the stream was closed before its end.
        """
        for _ in self:
            pass
        if self._result is None:
            raise RuntimeError("the stream was closed before the answer was complete")
        return self._result

    def close(self) -> None:
        """Write no further token."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _written(
    crowd: CrowdModel, prompt: Prompt, ids: Sequence[TokenIds], options: Decoding
) -> Generator[str, None, Answer]:
    """Yield the pieces of the answer to one prompt, and return it.

    Votes, abstentions, and the answers of bases that do not read packed rows come in one piece.
    """
    if find_vote(options.aggregator) or options.abstain_below is not None or not decodes(crowd):
        [found] = _generated(crowd, ids, options, 1, uncertainty=True)
        answer = _answer(crowd, prompt, found, options)
        if answer.answer and not answer.abstained:
            yield answer.answer
        return answer
    wanted = generation.Wanted(options, uncertainty=True, streams=True)
    [request] = generation.requests_of(crowd, 0, ids[0], wanted)
    assert request.detokenizer is not None, "it streams"
    decoder = Decoder(crowd, slots=1)
    decoder.admit([request])
    while decoder.open:
        with generation.base_errors(crowd):
            decoder.step()
        if piece := request.detokenizer.next_text():
            yield piece
    return _answer(crowd, prompt, generation.generated_of(crowd, [request], wanted), options)


def _ids(crowd: CrowdModel, prompts: Sequence[Prompt]) -> list[TokenIds]:
    """The token ids of all prompts, which are checked before anything is generated."""
    ids: list[TokenIds] = [crowd.prompter.ids(prompt) for prompt in prompts]
    free_positions(crowd.model, ids)
    return ids


def _generated(
    crowd: CrowdModel,
    ids: Sequence[TokenIds],
    options: Decoding,
    at_a_time: int,
    *,
    include_agents: bool = False,
    uncertainty: bool = False,
) -> Iterator[Generated]:
    """Yield the texts for each prompt, in order: of all agents together, token by token or by a vote."""
    if at_a_time < 1:
        raise BadInput("batch_size must be at least 1", where="generation settings", hint="change the value named")
    shown = include_agents and bool(crowd.names)  # a base alone has no agents to include
    wanted = generation.Wanted(options, include_agents=shown, uncertainty=uncertainty)
    return generation.generate_each(crowd, enumerate(ids), wanted, at_a_time)


def _answer(crowd: CrowdModel, prompt: Prompt, found: Generated, options: Decoding) -> Answer:
    """The answer to a prompt, with how sure the crowd is of it."""
    text, *agents = (generation.text_of(crowd, ids, options) for ids in [found.ids, *found.agents])
    right = calibrated(crowd.calibration, options.aggregator)
    probability = None if right is None else right(signals(found.uncertainties))
    return Answer(
        prompt=prompt,
        answer=text,
        agents=tuple(agents),
        agreement=agreement(text, agents) if agents else None,
        probability_right=probability,
        abstained=probability is not None and probability < (options.abstain_below or 0),
        agents_asked=len(crowd.names),
        complete=found.has_ended or len(text) < len(crowd.prompter.text(found.ids)),
        tokens=tuple(found.uncertainties),
        **vars(of_text(found.uncertainties)),
    )


# Answers that are given


def answered_rows(crowd: CrowdModel, prompts: Sequence[Prompt], answers: str | Sequence[str]) -> list[Example]:
    """Tokenised rows of each prompt with its answer."""
    given = [answers] if isinstance(answers, str) else list(answers)
    if len(prompts) != len(given):
        raise BadInput(f"{len(prompts)} prompts and {len(given)} answers", where="answers", hint="give one for each")
    prompter = crowd.prompter
    return [prompter.row(prompt, answer) for prompt, answer in zip(prompts, given, strict=True)]


def batches_of(rows: Sequence[Example], batch_size: int) -> Iterator[Batch]:
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="batch_size", hint="give 1 or more")
    return in_order(rows, batch_size)
