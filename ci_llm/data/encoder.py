"""The token ids of one row, marked where they are learned, by the chat template in force.

In a chat the answers of the assistant are learned; `turns` says where they are in the text that the template renders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ci_llm.data.rows import NOT_LEARNED, Chat, Completion, Labelled, Pair, Prompted, Rated, Row, SingleRow, Tokens
from ci_llm.data.turns import RefusedRowError, Remark, Span, Turns
from ci_llm.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _built_in(name: str) -> str:
    """A template of this package; in its file it has line breaks that are none of its text."""
    file = Path(__file__).with_name("chat_templates") / f"{name}.jinja"
    return "".join(file.read_text(encoding="utf-8").splitlines())


#: The built-in templates by the name that `chat_template` takes. `plain`: BOS if the tokenizer has one, what the user
#: says and a line break, what the assistant says and EOS. `roles` says who speaks, so that the turns of a long chat can
#: be told apart, and needs no special token but EOS.
BUILT_IN: Final[Mapping[str, str]] = {name: _built_in(name) for name in ("plain", "roles", "chatml")}
#: For a tokenizer without a chat template. It is saved with the adapters.
BUILT_IN_TEMPLATE: Final = BUILT_IN["plain"]


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


def _written(wanted: str) -> str:
    """The template in a file, or the text of one."""
    if "{{" in wanted or "{%" in wanted:
        return wanted
    try:
        return Path(os.path.expanduser(wanted)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            "There is no such chat template: neither a name, nor a readable file, nor a text with {{ }} or {% %}.",
            where=f"chat_template: {wanted}",
            hint=f"give one of {', '.join(BUILT_IN)}, a file such as chat_template.jinja, or the template itself",
        ) from error


#: How many tokens behind an answer are shown when its end is not learned.
_SHOWN_TOKENS = 8


@dataclass(frozen=True)
class Example:
    """One tokenised row.

    Attributes:
        input_ids: int32 [n].
        supervised: bool [n], True where the token is a target; never at 0, where nothing comes before it.
        remarks: what the chat template does to this chat.
    """

    input_ids: np.ndarray[Any, Any]
    supervised: np.ndarray[Any, Any]
    remarks: tuple[Remark, ...] = field(default=(), kw_only=True)


class Encoder:
    """Turns canonical rows into examples, with one tokenizer and the chat template in force.

    Args:
        train_on_prompt: learn every token of a row but answers that are marked, and not only what the assistant says.
        chat_date: what the clock of a chat template says, as YYYY-MM-DD; None: the time of the call.

    Raises:
        ModelError: the tokenizer cannot tell which characters a token stands for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, train_on_prompt: bool = False, chat_date: str | None = None
    ) -> None:
        if not tokenizer.is_fast:
            what = "The tokenizer does not say which characters a token stands for: answers cannot be found."
            raise ModelError(what, where=tokenizer.name_or_path, hint="use a fast tokenizer: one with a tokenizer.json")
        self._tokenizer = tokenizer
        self.train_on_prompt = train_on_prompt
        self.template = chat_template(tokenizer)
        self.has_clock = "strftime_now" in self.template
        self.turns = Turns(tokenizer, self.template, datetime.fromisoformat(chat_date) if chat_date else None)
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {number for number, token in added if token.special} | {tokenizer.eos_token_id}

    def encode(self, row: SingleRow) -> Example:
        """The whole row, however long it is.

        Raises:
            RefusedRowError: the chat template fails on it, or does not show where the answers are; or its token
                ids are not those of the tokenizer.
        """
        if isinstance(row, Chat):
            return self._chat(row)
        example = self._given(row) if isinstance(row, Tokens) else self._completion(row)
        if self.train_on_prompt and example.supervised.any():
            return _example(example.input_ids, np.ones(len(example.input_ids), bool))
        return example

    def text(self, row: Chat | Completion) -> Example:
        """A text as the tokenizer alone makes it, or a chat by the template; nothing of it is learned.

        Raises:
            RefusedRowError: the chat template fails on it.
        """
        if isinstance(row, Chat):
            return self._tokenized(self.turns.text(row), [])
        ids = self._tokenizer(row.completion, verbose=False)["input_ids"]
        return _example(ids, [False] * len(ids))

    def prompt(self, row: Chat | Completion) -> Example:
        """A prompt that is answered: a chat with what the template puts before an answer, or a text; with BOS.

        Raises:
            RefusedRowError: the chat template fails on it.
        """
        if isinstance(row, Chat):
            return self._tokenized(self.turns.prompt(row), [])
        return self._tokenized(self.begun(row.completion), [])

    def begun(self, text: str) -> str:
        """A text with the token that begins texts, if the tokenizer has one."""
        begin = self._tokenizer.bos_token or ""
        return text if text.startswith(begin) else begin + text

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that begins as it says itself."""
        return self._ids(text)[0]

    def describe(self, row: Row | None) -> str:
        """The template that makes this row, in words."""
        if isinstance(row, Tokens):
            return "no chat template: the rows are tokens already"
        if isinstance(row, Rated | Labelled | Prompted):
            row = row.row
        if isinstance(row.chosen if isinstance(row, Pair) else row, Completion):
            return "no chat template: the text as it is"
        if not self._tokenizer.chat_template:
            return "chat template: built in, as the tokenizer has none"
        known = (f"{name}, built in" for name, template in BUILT_IN.items() if template == self.template)
        return "chat template: " + next(known, "the tokenizer's, or that of chat_template")

    def decode(self, input_ids: Any) -> str:
        """Token ids as text, special tokens included."""
        return str(self._tokenizer.decode(input_ids))

    def lacks_roles(self, row: Row) -> bool:
        """True if the row is a chat of several turns, and the template does not show who speaks."""
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

    def _given(self, row: Tokens) -> Example:
        """A row that was tokenised elsewhere."""
        size = len(self._tokenizer)
        if odd := [token for token in row.input_ids if not 0 <= token < size]:
            raise RefusedRowError(f"token id {odd[0]} is none of the tokenizer's {size}")
        labels = row.input_ids if row.labels is None else row.labels
        return _example(row.input_ids, [label != NOT_LEARNED for label in labels])

    def _completion(self, row: Completion) -> Example:
        end, learned = self._tokenizer.eos_token or "", row.completion
        learned = learned if learned.endswith(end) else learned + end
        text = self.begun((row.prompt or "") + learned)
        return self._tokenized(text, [(len(text) - len(learned), len(text))])

    def _chat(self, row: Chat) -> Example:
        placed = self.turns.place(row)
        learned = [n for n, message in enumerate(row.messages) if message.learned and n >= row.trained_from]
        marked = [span for number in row.marked for span in placed.answers.get(number, ())]
        spans = [span for number in learned for span in placed.answers.get(number, ())]
        if self.train_on_prompt and spans:
            edges = [0, *(edge for span in marked for edge in span), len(placed.text)]
            spans = [*zip(edges[::2], edges[1::2], strict=True)]
        return replace(self._tokenized(placed.text, spans, placed.prompt), remarks=placed.remarks)

    def _tokenized(self, text: str, learned: Sequence[Span], prompt: int | None = None) -> Example:
        """A text, of which some spans are learned.

        Args:
            prompt: where a prompt ends, which generation has as it is: no token goes across.
        """
        ids, (starts, ends) = self._ids(text)
        if prompt is not None and ((starts < prompt) & (ends > prompt)).any():
            parts = [self._ids(text[:prompt]), self._ids(text[prompt:])]
            ids = parts[0][0] + parts[1][0]
            starts, ends = np.concatenate([parts[0][1], parts[1][1] + prompt], axis=1)
        mask = np.zeros(len(starts), bool)
        for begin, end in learned:
            mask[np.searchsorted(ends, begin, "right") : np.searchsorted(starts, end)] = True
        return _example(ids, mask)

    def _ids(self, text: str) -> tuple[list[int], Any]:
        """Token ids, and the first characters of the tokens and those behind them."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        edges = chain.from_iterable(encoded["offset_mapping"])  # an array of pairs takes three times as long
        return encoded["input_ids"], np.fromiter(edges, np.int64, 2 * len(encoded["input_ids"])).reshape(-1, 2).T


def _example(input_ids: Any, mask: Any) -> Example:
    supervised = np.array(mask, bool)
    supervised[:1] = False
    return Example(np.array(input_ids, np.int32), supervised)
