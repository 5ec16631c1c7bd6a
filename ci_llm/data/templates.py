"""How one row becomes token ids, and which of them are learned: the chat template and its assistant spans."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ci_llm.data.rows import Chat, Completion, Message, Row
from ci_llm.errors import ModelError

#: For a tokenizer without a chat template: BOS if it has one, what the user says and a line break, what the
#: assistant says and EOS. It is saved with the adapters.
BUILT_IN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)

#: Takes the place of an answer, to find where a template puts it; private-use characters, in nobody's text.
_PROBE = "\ue000\ue001\ue000"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

#: What a template, a program written by strangers, may raise.
_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """One tokenised row.

    Attributes:
        input_ids: int32 [n].
        supervised: bool [n], True where the token is a target; never at 0, where nothing comes before it.
    """

    input_ids: np.ndarray[Any, Any]
    supervised: np.ndarray[Any, Any]


class RefusedRowError(Exception):
    """The chat template fails on a row, or does not show where its answers are; the text says why."""


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template in force: the tokenizer's own, else the built-in one.

    Raises:
        ModelError: it has several, and none of them is the default.
    """
    if not tokenizer.chat_template:
        return BUILT_IN_TEMPLATE
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ModelError(
            "The tokenizer has several chat templates and no default.",
            where=tokenizer.name_or_path,
            hint="name one of them default in its folder",
        ) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 of vocabulary, rules and special tokens; not of padding and truncation, which a call sets."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    whole = json.dumps([rules, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return str(xxhash.xxh3_128_hexdigest(whole.encode()))


class Encoder:
    """Turns canonical rows into examples, with one tokenizer and the chat template in force.

    Raises:
        ModelError: the tokenizer cannot tell which characters a token stands for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ModelError(
                "The tokenizer does not say which characters a token stands for: answers cannot be found.",
                where=tokenizer.name_or_path,
                hint="use a fast tokenizer: one with a tokenizer.json",
            )
        self._tokenizer = tokenizer
        self.template = chat_template(tokenizer)
        self._marks_answers = _GENERATION_TAG.search(self.template) is not None
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        ends = "|".join(map(re.escape, sorted(special, reverse=True)))  # the longer of two that begin alike
        self._end_of_turn = re.compile(rf"\s*(?:{ends})") if ends else None

    def encode(self, row: Row) -> Example:
        """The whole row, however long it is.

        Raises:
            RefusedRowError: the chat template fails on it, or does not show where the answers are.
        """
        if isinstance(row, Completion):
            return self._completion(row)
        if self._marks_answers and not row.trained_from:
            return self._marked(row.messages)
        return self._located(row)

    def said(self, row: Row | None) -> str:
        """Which template makes this row, in words."""
        if isinstance(row, Completion):
            return "no chat template: the text as it is"
        whose = "the tokenizer's own" if self._tokenizer.chat_template else "built in, as the tokenizer has none"
        return f"chat template: {whose}"

    def decode(self, input_ids: Any) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(input_ids))

    def _completion(self, row: Completion) -> Example:
        begin, end = self._tokenizer.bos_token or "", self._tokenizer.eos_token or ""
        given, learned = row.prompt or "", row.completion
        given = given if (given or learned).startswith(begin) else begin + given
        learned = learned if learned.endswith(end) else learned + end
        return self._tokens(given + learned, [(len(given), len(given) + len(learned))])

    def _marked(self, messages: Sequence[Message]) -> Example:
        """The template says itself what the assistant generates."""
        encoded = self._apply(messages, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False})
        return _example(encoded["input_ids"], encoded["assistant_masks"])

    def _located(self, row: Chat) -> Example:
        whole = self._render(row.messages)
        spans = [
            self._answer(row.messages, number, whole)
            for number, message in enumerate(row.messages)
            if message.role == "assistant" and number >= row.trained_from
        ]
        return self._tokens(whole, spans)

    def _answer(self, messages: Sequence[Message], number: int, whole: str) -> Span:
        """Where answer `number` is in the rendered chat.

        It begins where the prompt for it ends: the messages before it, rendered as for generation, must be
        what the chat begins with. It ends where another answer in its place would have ended, its end-of-turn
        token included; rendering up to it would not do, as some templates write a last answer in another way.
        """
        prompt = self._render(messages[:number], add_generation_prompt=True) if number else ""
        if not whole.startswith(prompt):
            raise RefusedRowError(
                "the prompt it makes for an answer is not what precedes the answer in the whole chat "
                f"(prompt ends {prompt[-40:]!r})"
            )
        other = self._render([*messages[:number], Message("assistant", _PROBE), *messages[number + 1 :]])
        if other == whole:
            raise RefusedRowError("it leaves out what the assistant says")
        begin = _common(whole, other)
        end = len(whole) - _common(whole[begin:][::-1], other[begin:][::-1])
        closing = self._end_of_turn.match(whole, end) if self._end_of_turn else None
        return len(prompt) or begin, closing.end() if closing else end

    def _tokens(self, text: str, learned: Sequence[Span]) -> Example:
        encoded = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        offsets = encoded["offset_mapping"]
        mask = [any(a < end and b > begin for begin, end in learned) for a, b in offsets]
        return _example(encoded["input_ids"], mask)

    def _render(self, messages: Sequence[Message], **how: Any) -> str:
        return str(self._apply(messages, tokenize=False, **how))

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(turns, chat_template=self.template, **how)
        except _TEMPLATE_FAILURES as error:
            raise RefusedRowError(f"it fails: {error}") from error


def _example(input_ids: Sequence[int], mask: Sequence[int | bool]) -> Example:
    supervised = np.array(mask, bool)
    supervised[:1] = False
    return Example(np.array(input_ids, np.int32), supervised)


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
