"""The token ids of one row, marked where they are learned, by the chat template in force.

In a chat the answers of the assistant are learned. Their spans are found in the text that the template renders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jinja2 import TemplateError

from ci_llm.data.rows import NOT_LEARNED, Chat, Completion, Labelled, Message, Row, SingleRow, Tokens
from ci_llm.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: For a tokenizer without a chat template: BOS if it has one, what the user says and a line break, what the
#: assistant says and EOS. It is saved with the adapters.
BUILT_IN_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)

#: A header says who speaks, so that the turns of a long chat can be told apart; needs no special token but EOS.
_ROLES: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' ~ message['role'] | capitalize ~ ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] ~ '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] ~ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] ~ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: The built-in templates by the name that `chat_template` takes.
BUILT_IN: Final[Mapping[str, str]] = {"plain": BUILT_IN_TEMPLATE, "roles": _ROLES, "chatml": _CHATML}


#: The line about a template that is not one of these. It is kept with the tokens, which do not know where it is from.
OWN_TEMPLATE: Final = "chat template: the tokenizer's own"


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
            hint=f"choose one by chat_template: {', '.join(tokenizer.chat_template)}",
        ) from error


def use_chat_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> None:
    """Give the tokenizer the template that `wanted` names, for training, generation and its saved files.

    Args:
        wanted: one of the tokenizer's own by name, a built-in one by name, a file, or the template itself;
            None: what the tokenizer has.

    Raises:
        DataError: it is not one of these, or the file cannot be read.
    """
    if wanted is None:
        return
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    tokenizer.chat_template = {**BUILT_IN, **own}.get(wanted) or _written(wanted)


def naming_template(line: str, wanted: str | None) -> str:
    """A line about rows; if it says that the template is the tokenizer's own, and it is another, it says which.

    Args:
        wanted: what `use_chat_template` was given.
    """
    if line != OWN_TEMPLATE or wanted is None:
        return line
    return "chat template: the text that the configuration gives" if _is_text(wanted) else f"chat template: {wanted}"


def _is_text(wanted: str) -> bool:
    return "{{" in wanted or "{%" in wanted


def _written(wanted: str) -> str:
    """The template in a file, or the text of one."""
    if _is_text(wanted):
        return wanted
    try:
        return Path(os.path.expanduser(wanted)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            "There is no such chat template: neither a name, nor a readable file, nor a text with {{ }} or {% %}.",
            where=f"chat_template: {wanted}",
            hint=f"give one of {', '.join(BUILT_IN)}, a file such as chat_template.jinja, or the template itself",
        ) from error


#: Takes the place of an answer, to find where a template puts it. No text contains these private-use characters.
_PROBE = "\ue000\ue001\ue000"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

#: What a template may raise: it is a program that comes with the tokenizer.
_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

#: How many tokens behind an answer are shown when its end is not learned.
_SHOWN_TOKENS = 8

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
    """The row cannot be encoded: the chat template fails on it or hides its answers; the text says why."""


class Encoder:
    """Turns canonical rows into examples, with one tokenizer and the chat template in force.

    Args:
        train_on_prompt: learn every token of a row but answers that are marked, and not only what the assistant says.

    Raises:
        ModelError: the tokenizer cannot tell which characters a token stands for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, train_on_prompt: bool = False) -> None:
        if not tokenizer.is_fast:
            what = "The tokenizer does not say which characters a token stands for: answers cannot be found."
            raise ModelError(what, where=tokenizer.name_or_path, hint="use a fast tokenizer: one with a tokenizer.json")
        self._tokenizer = tokenizer
        self.train_on_prompt = train_on_prompt
        self.template = chat_template(tokenizer)
        self._marks_answers = _GENERATION_TAG.search(self.template) is not None
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content for _, token in added if token.special}
        ends = "|".join(map(re.escape, sorted(special, reverse=True)))  # the longer of two that begin alike
        self._end_of_turn = re.compile(rf"\s*(?:{ends})") if ends else None
        self._special_ids = {number for number, token in added if token.special} | {tokenizer.eos_token_id}

    def encode(self, row: SingleRow) -> Example:
        """The whole row, however long it is.

        Raises:
            RefusedRowError: the chat template fails on it, or does not show where the answers are; or its token
                ids are not those of the tokenizer.
        """
        example = self._encode(row)
        if self.train_on_prompt and example.supervised.any():
            learned = np.ones(len(example.input_ids), bool)
            if isinstance(row, Chat) and row.marked:
                learned = ~self._located(row, row.marked).supervised
            return _example(example.input_ids, learned)
        return example

    def text(self, row: Chat | Completion) -> Example:
        """A text as the tokenizer alone makes it, or a chat by the template; nothing of it is learned.

        Raises:
            RefusedRowError: the chat template fails on it.
        """
        if isinstance(row, Chat):
            return self._tokenized(self._render(row), [])
        ids = self._tokenizer(row.completion, verbose=False)["input_ids"]
        return _example(ids, [False] * len(ids))

    def describe(self, row: Row | None) -> str:
        """Which template makes this row, in words."""
        if isinstance(row, Tokens):
            return "no chat template: the rows are tokens already"
        row = row.row if isinstance(row, Labelled) else row
        if isinstance(row, Completion):
            return "no chat template: the text as it is"
        if not self._tokenizer.chat_template:
            return "chat template: built in, as the tokenizer has none"
        name = next((name for name, template in BUILT_IN.items() if template == self.template), None)
        return f"chat template: {name}, built in" if name else OWN_TEMPLATE

    def decode(self, input_ids: Any) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(input_ids))

    def lacks_roles(self, row: Row) -> bool:
        """Whether the row is a chat of several turns, and the template does not show who speaks."""
        if not isinstance(row, Chat) or self.template != BUILT_IN_TEMPLATE:
            return False
        return sum(message.role == "user" for message in row.messages) > 1

    def unlearned_end(self, row: Row, example: Example) -> str | None:
        """What follows the last answer of a chat, if no token is learned that could end it; None if one is.

        Generation stops at special tokens alone: an agent that learns none of them never ends its turn.
        """
        learned = np.flatnonzero(example.supervised)
        last = int(learned[-1])
        possible = example.input_ids[learned] if self.train_on_prompt else example.input_ids[[last]]
        if not isinstance(row, Chat) or not self._special_ids.isdisjoint(possible.tolist()):
            return None
        return self.decode(example.input_ids[last + 1 : last + 1 + _SHOWN_TOKENS])

    def _encode(self, row: SingleRow) -> Example:
        if isinstance(row, Tokens):
            return self._given(row)
        if isinstance(row, Completion):
            return self._completion(row)
        if row.uses_tools:
            self._require_tools_shown(row)
        if self._marks_answers and not row.trained_from and not row.marked:
            return self._marked(row)
        answers = [n for n, m in enumerate(row.messages) if m.role == "assistant" and m.learned]
        return self._located(row, [number for number in answers if number >= row.trained_from])

    def _given(self, row: Tokens) -> Example:
        """A row that was tokenised elsewhere."""
        size = len(self._tokenizer)
        if odd := [token for token in row.input_ids if not 0 <= token < size]:
            raise RefusedRowError(f"token id {odd[0]} is none of the tokenizer's {size}")
        labels = row.input_ids if row.labels is None else row.labels
        return _example(row.input_ids, [label != NOT_LEARNED for label in labels])

    def _completion(self, row: Completion) -> Example:
        begin, end = self._tokenizer.bos_token or "", self._tokenizer.eos_token or ""
        given, learned = row.prompt or "", row.completion
        given = given if (given or learned).startswith(begin) else begin + given
        learned = learned if learned.endswith(end) else learned + end
        return self._tokenized(given + learned, [(len(given), len(given) + len(learned))])

    def _marked(self, chat: Chat) -> Example:
        """The row by a template that marks what the assistant generates."""
        encoded = self._apply(chat, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False})
        return _example(encoded["input_ids"], encoded["assistant_masks"])

    def _located(self, chat: Chat, answers: Sequence[int]) -> Example:
        """The row, and of it the answers with these numbers."""
        whole = self._render(chat)
        return self._tokenized(whole, [self._answer(chat, number, whole) for number in answers])

    def _answer(self, chat: Chat, number: int, whole: str) -> Span:
        """Where answer `number` is in the rendered chat.

        It begins where the prompt for it ends: the messages before it, rendered as for generation, must be
        what the chat begins with. It ends where another answer in its place would have ended, its end-of-turn
        token included; rendering up to it would not do, as some templates write a last answer in another way.
        """
        before, after = chat.messages[:number], chat.messages[number + 1 :]
        prompt = self._render(replace(chat, messages=before), add_generation_prompt=True) if number else ""
        if not whole.startswith(prompt):  # templates may show the thoughts before an answer until the answer follows
            bare = tuple(replace(message, more={}) if message.role == "assistant" else message for message in before)
            prompt = self._render(replace(chat, messages=bare), add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise RefusedRowError(
                "the prompt it makes for an answer is not what precedes the answer in the whole chat "
                f"(prompt ends {prompt[-40:]!r})"
            )
        other = self._render(replace(chat, messages=(*before, Message("assistant", _PROBE), *after)))
        if other == whole:
            raise RefusedRowError("it leaves out what the assistant says")
        begin = _common(whole, other)
        end = len(whole) - _common(whole[begin:][::-1], other[begin:][::-1])
        closing = self._end_of_turn.match(whole, end) if self._end_of_turn else None
        return len(prompt) or begin, closing.end() if closing else end

    def _require_tools_shown(self, chat: Chat) -> None:
        """Without this a template that knows no tools would teach empty answers."""
        whole = self._render(chat)
        for number, message in enumerate(chat.messages):
            bare = replace(message, tool_calls=())
            others = (*chat.messages[:number], bare, *chat.messages[number + 1 :])
            if message.tool_calls and self._render(replace(chat, messages=others)) == whole:
                raise RefusedRowError("it leaves out the calls of tools")

    def _tokenized(self, text: str, learned: Sequence[Span]) -> Example:
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), bool)
        for begin, end in learned:
            mask |= (starts < end) & (ends > begin)
        return _example(encoded["input_ids"], mask)

    def _render(self, chat: Chat, **options: Any) -> str:
        return str(self._apply(chat, tokenize=False, **options))

    def _apply(self, chat: Chat, **options: Any) -> Any:
        turns = [message.as_turn() for message in chat.messages]
        tools = list(chat.tools) or None
        try:
            return self._tokenizer.apply_chat_template(turns, tools=tools, chat_template=self.template, **options)
        except _TEMPLATE_FAILURES as error:
            raise RefusedRowError(f"it fails: {error}") from error


def _example(input_ids: Any, mask: Any) -> Example:
    supervised = np.array(mask, bool)
    supervised[:1] = False
    return Example(np.array(input_ids, np.int32), supervised)


def _common(one: str, other: str) -> int:
    """Characters that both begin with. By bisection: a long chat has many answers, and a loop over them is slow."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
