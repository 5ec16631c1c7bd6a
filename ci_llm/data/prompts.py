"""The conversion of prompts to token ids, and of answers to text, in the wording of the training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from ci_llm.data.encoder import BUILT_IN_TEMPLATE, Encoder, Example, RefusedRowError, chat_template
from ci_llm.data.rows import Chat, Completion, Message, Rows, messages_of
from ci_llm.data.units import branches_of
from ci_llm.errors import DataError

PromptForm = Literal["chat", "text"]
Turns = Sequence[Mapping[str, Any]]
Prompt = str | Turns

#: Keys of a turn, of which it has one.
_SAID = {"content", "value", "tool_calls", "function_call"}

#: Placeholders for the answer: the tokens before one are the prompt. The prompt tokenised alone can have other ids.
#: The second placeholder is for templates whose prompt opens a <think> block.
_PLACEHOLDERS = (Message("assistant", "A"), Message("assistant", "<think>\nA\n</think>\n\nA"))


class Prompter:
    """Converts prompts to token ids and answers to text, with one tokenizer and its chat template.

    Args:
        tokenizer: of the base.
        form: what a plain string is: "chat", the message of a user, or "text", which the answer continues.

    Raises:
        ModelError: the tokenizer cannot tell which characters a token stands for.

    Examples:
        >>> prompter = ci_llm.Prompter(ci_llm.load_base("embedded").tokenizer)
        >>> ids = prompter.ids("Ann has 7 pens.")  # a list of numbers
        >>> prompter.text(ids)
        'Ann has 7 pens.\\n'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: PromptForm = "chat") -> None:
        self.tokenizer = tokenizer
        self.form = form
        self._encoder = Encoder(tokenizer)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Token ids that end an answer: EOS, and the end of an answer in the chat template.

        Raises:
            DataError: the template fails.
        """
        return self.ends_of([self._with_placeholder((Message("user", "Q"),))] if self.form == "chat" else [])

    @property
    def tells_turns_apart(self) -> bool:
        """Whether a prompt shows who said what, so that a conversation can have several turns."""
        return self.form == "chat" and self._encoder.template != BUILT_IN_TEMPLATE

    def ends_of(self, examples: Iterable[Example]) -> frozenset[int]:
        """EOS, and every special token at the end of the last answer of one of the examples."""
        added, end_of_text = self.tokenizer.added_tokens_decoder, self.tokenizer.eos_token_id
        lasts = {int(example.input_ids[last_answer(example).stop - 1]) for example in examples}
        special = {token for token in lasts if token in added and added[token].special}
        return frozenset(special if end_of_text is None else {*special, int(end_of_text)})

    def ends_among(self, stop_strings: Iterable[str]) -> frozenset[int]:
        """Ids of the stop strings that are special tokens: the text that is searched for the others has none."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in added if token.special}
        return frozenset(special[string] for string in stop_strings if string in special)

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a string, or a chat: messages with "role" and "content" that end with a user's turn.

        Raises:
            DataError: it is no chat, or the chat template fails on it.
        """
        if isinstance(prompt, str) and self.form == "text":
            return self._plain(prompt)
        example = self._with_placeholder(_messages(prompt))
        return [int(token) for token in example.input_ids[: last_answer(example).start]]

    def row(self, prompt: Prompt, answer: str) -> Example:
        """A prompt with its answer and the end of it, encoded as in training: the answer is what is learned.

        Raises:
            DataError: see `ids`.
        """
        if isinstance(prompt, str) and self.form == "text":
            return self._encoder.encode(Completion(prompt, answer))
        messages = _messages(prompt)
        try:
            whole = Chat((*messages, Message("assistant", answer)), trained_from=len(messages))
            return self._encoder.encode(whole)
        except RefusedRowError as error:
            raise _unusable(messages, error) from error

    def read(self, text: Prompt, *, is_answer: bool) -> Example:
        """A text or a chat that a head reads, encoded as in training; of a chat all turns, the last answer included.

        Args:
            is_answer: it ends as an answer does: the head was trained on pairs.

        Raises:
            DataError: it is neither, the template fails on it, or a text stands without the prompt that it answers.
        """
        if isinstance(text, str):
            if is_answer and self.form == "chat":
                hint = "give the prompts, and answers beside them; or chats that end with the answer"
                raise DataError("these heads judge answers, and a text has no prompt", where=text[:80], hint=hint)
            row = Completion(None, text)
            return self._encoder.encode(row) if is_answer else self._encoder.text(row)
        try:
            chat = Chat(messages_of(list(text)))
            return self._encoder.text(chat)
        except (ValueError, TypeError) as error:
            raise _no_prompt(text) from error
        except RefusedRowError as error:
            raise _unusable(chat.messages, error) from error

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _plain(self, text: str) -> list[int]:
        begin = self.tokenizer.bos_token or ""
        whole = text if text.startswith(begin) else begin + text
        return list(self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])

    def _with_placeholder(self, messages: tuple[Message, ...]) -> Example:
        """The chat with a placeholder for the answer, encoded as in training."""
        for placeholder in _PLACEHOLDERS:
            try:
                return self._encoder.encode(Chat((*messages, placeholder)))
            except RefusedRowError as error:
                refusal = error
        raise _unusable(messages, refusal) from refusal


def _unusable(messages: Sequence[Message], refusal: RefusedRowError) -> DataError:
    return DataError(
        f"The chat template cannot be used for this prompt: {refusal}.",
        where=f"{messages[-1].role}: {messages[-1].content[:60]!r}",
        hint="give a chat that the template accepts, or a tokenizer with another template",
    )


def last_answer(example: Example) -> slice:
    """The positions of a row's last answer: its last run of supervised tokens."""
    stop = int(np.flatnonzero(example.supervised)[-1]) + 1
    given = np.flatnonzero(~example.supervised[:stop])  # never empty: the first token is not supervised
    return slice(int(given[-1]) + 1, stop)


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of messages is one prompt; a list of strings or chats is many.

    Raises:
        DataError: it is neither.
    """
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    given = [prompts] if isinstance(prompts, str) else list(prompts)  # an iterator can be read once only
    return [given] if any(isinstance(part, Mapping) for part in given) else given  # type: ignore[list-item, return-value]


def form_of(rows: Rows) -> PromptForm:
    """What a string is for agents trained on these rows: "text" for plain text or completions, else "chat"."""
    first = branches_of(next(row for row in rows if row is not None))[0]
    return "chat" if isinstance(first, Chat) else "text"


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The files of a tokenizer by name, with the chat template that was in force."""
    tokenizer.chat_template = chat_template(tokenizer)
    with TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        return {str(path.relative_to(scratch)): path.read_bytes() for path in files}


def _messages(prompt: Prompt) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    try:
        messages = messages_of(list(prompt))  # as in training, with calls of tools and what else the template shows
    except (ValueError, TypeError) as error:
        raise _no_prompt(prompt) from error
    if not all(_SAID & {*turn} for turn in prompt):
        raise _no_prompt(prompt)
    if not messages or messages[-1].role == "assistant":
        raise DataError("a chat has nothing to answer", where=str(prompt)[:80], hint="end it with a user's turn")
    return messages


def _no_prompt(prompt: object) -> DataError:
    what, hint = "a prompt is neither text nor a chat", '[{"role": "user", "content": "..."}]'
    return DataError(what, where=str(prompt)[:80], hint=hint)
