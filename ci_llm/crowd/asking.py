"""Prompts to answers, whole or piece by piece, each with how sure the crowd is of it.

A prompt is a text or a chat.

Legend: K agents, T new tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypedDict, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from ci_llm.crowd import generation
from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, Generated, TokenIds, ends_of_base, free_positions
from ci_llm.crowd.uncertainty import TokenUncertainty, Uncertainty, agreement, calibrated, of_text, signals
from ci_llm.data.batches import Batch, in_order
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompt, Prompter, spoken
from ci_llm.errors import BadInput, ModelError

logger = logging.getLogger(__name__)
_DRAWING: Final = ("temperature", "top_p", "top_k")


#: The character in decoded text for bytes that are not a complete character.
_INCOMPLETE = "\ufffd"
#: How many tokens are decoded again with new ones, because a token's text may depend on those before it.
_WINDOW: Final = 16
#: A token that stands for one byte, as in Llama 2's vocabulary: several in a row are decoded together.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


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
    asking = _Asking(crowd, prompts, options)
    found = asking.generated(batch_size, include_agents=include_agents, uncertainty=True)
    yield from map(asking.answer, asking.prompts, found)


def texts(crowd: CrowdModel, prompts: Sequence[Prompt], options: Decoding, batch_size: int = 16) -> list[str]:
    """The text alone of the answer to each prompt, "" if it abstains; see `answers`."""
    if options.abstain_below is not None:
        found = answers(crowd, prompts, options, batch_size, include_agents=False)
        return ["" if answer.abstained else answer.answer for answer in found]
    asking = _Asking(crowd, prompts, options)
    return [asking.text(found.ids) for found in asking.generated(batch_size)]


def _pieces(asking: _Asking) -> Generator[str, None, Answer]:
    """Yield the pieces of the answer to the one prompt, and return the answer.

    Votes, abstentions, and the answers of bases that do not read packed rows come in one piece.
    """
    crowd, options, [prompt], [ids] = asking.crowd, asking.options, asking.prompts, asking.ids
    if find_vote(options.aggregator) or options.abstain_below is not None or not decodes(crowd):
        [found] = asking.generated(1, uncertainty=True)
        answer = asking.answer(prompt, found)
        if answer.answer and not answer.abstained:
            yield answer.answer
        return answer
    pieces: list[str] = []
    text = TextSoFar(asking.prompter.tokenizer, options.stop_strings, pieces.append)
    wanted = generation.Wanted(options, uncertainty=True)
    requests = generation.requests_of(crowd, 0, ids, wanted)
    decoder = Decoder(crowd, slots=1)
    decoder.admit(requests)
    while decoder.open:
        with generation.base_errors(crowd):
            decoder.step()
        for request in decoder.open:
            if text.update(request.ids):
                decoder.release(request)
        yield from pieces
        pieces.clear()
    found = generation.generated_of(crowd, requests, wanted)
    text.finish(found.ids)
    yield from pieces
    return asking.answer(prompt, found)


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


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer, which is written while it is read, with the answer at its end."""

    def __init__(self, crowd: CrowdModel, prompt: Prompt, options: Decoding) -> None:
        self._pieces = _pieces(_Asking(crowd, [prompt], options))
        self._result: Answer | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._result = self._result or end.value
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


class _Asking:
    """Prompts for a crowd. All of them are checked before anything is generated.

    Attributes:
        ids: the token ids of each prompt.
    """

    def __init__(self, crowd: CrowdModel, prompts: Sequence[Prompt], options: Decoding) -> None:
        self.crowd, self.prompts, self.options = crowd, prompts, options
        self.prompter = prompter_of(crowd)
        self.ids = [self.prompter.ids(prompt) for prompt in prompts]
        if self.ids:
            free_positions(crowd.model, self.ids)

    def generated(
        self, at_a_time: int, *, include_agents: bool = False, uncertainty: bool = False
    ) -> Iterator[Generated]:
        """Yield the texts for each prompt, in order: of all agents together, token by token or by a vote."""
        if at_a_time < 1:
            raise BadInput("batch_size must be at least 1", where="generation settings", hint="change the value named")
        wanted = generation.Wanted(
            self.options,
            include_agents=include_agents and bool(self.crowd.names),  # a base alone has no agents to include
            uncertainty=uncertainty,
            is_over=self._has_stopped if self.options.stop_strings else None,
            answers_of=lambda texts: generation.final_answers([self.text(ids) for ids in texts]),
        )
        return generation.generate_each(self.crowd, enumerate(self.ids), wanted, at_a_time)

    def _has_stopped(self, ids: TokenIds) -> bool:
        return TextSoFar(self.prompter.tokenizer, self.options.stop_strings).update(ids)

    def text(self, ids: TokenIds) -> str:
        """The text of token ids, cut before the first stop string in it."""
        return cut(self.prompter.text(ids), self.options.stop_strings)

    def answer(self, prompt: Prompt, found: Generated) -> Answer:
        """The answer to a prompt, with how sure the crowd is of it."""
        ids, uncertainties, options = found.ids, found.uncertainties, self.options
        text, *agents = map(self.text, [ids, *found.agents])
        right = calibrated(self.crowd.calibration, options.aggregator)
        probability = None if right is None else right(signals(uncertainties))
        return Answer(
            prompt=prompt,
            answer=text,
            agents=tuple(agents),
            agreement=agreement(text, agents) if agents else None,
            probability_right=probability,
            abstained=probability is not None and probability < (options.abstain_below or 0),
            agents_asked=len(self.crowd.names),
            complete=found.has_ended or len(text) < len(self.prompter.text(ids)),
            tokens=tuple(uncertainties),
            **vars(of_text(uncertainties)),
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


# Answers that are given


def answered_rows(crowd: CrowdModel, prompts: Sequence[Prompt], answers: str | Sequence[str]) -> list[Example]:
    """Tokenised rows of each prompt with its answer."""
    given = [answers] if isinstance(answers, str) else list(answers)
    if len(prompts) != len(given):
        raise BadInput(f"{len(prompts)} prompts and {len(given)} answers", where="answers", hint="give one for each")
    prompter = prompter_of(crowd)
    return [prompter.row(prompt, answer) for prompt, answer in zip(prompts, given, strict=True)]


def batches_of(rows: Sequence[Example], batch_size: int) -> Iterator[Batch]:
    if batch_size < 1:
        raise BadInput("batch_size must be at least 1", where="batch_size", hint="give 1 or more")
    return in_order(rows, batch_size)
