"""Prompts: read from a file or a stream, made token ids, and answers made text, in the wording of the training.

A file holds one prompt per line, or rows with the columns that training recognises. An answer that a row has is left
out. A row may have no answer at all, only a question, a prompt, or messages. Texts to be scored are read in the same
way, and keep their answers. This file loads neither torch nor Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ci_llm.data.cells import is_unicode, messages_of, tools_of
from ci_llm.data.encoder import BUILT_IN_TEMPLATE, Encoder, Example, chat_template
from ci_llm.data.rows import Chat, Completion, Form, Message, Prompted, PromptForm, RawRow, Rows, kept
from ci_llm.data.turns import CALL, RefusedRowError
from ci_llm.data.units import branches_of
from ci_llm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Sequence[Mapping[str, Any]]
#: A text, a chat, or one with its tools: {"messages": [...], "tools": [...]}.
Prompt = str | Turns | Mapping[str, Any]

#: Keys of a turn, of which it has one.
_SAID = {"content", "value", "tool_calls", "function_call"}

#: A placeholder for the question.
_QUESTION = "What is asked here?"
#: For answers that do not begin as the template opens them: true if they have thoughts.
_THINKS: Final = {"chat with thoughts": True, "chat without thoughts": False}


class Prompter:
    """Converts prompts to token ids and answers to text, with one tokenizer and its chat template.

    Args:
        tokenizer: the tokenizer of the base.
        form: what a plain string is: "chat", the message of a user, or "text", which the answer continues; "chat with
            thoughts" and "chat without thoughts" for agents whose answers do not begin as the template opens them.

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
        if self.form == "text":
            return self.ends_of([])
        asked = Message("user", _QUESTION)
        examples = [self._encoder.encode(Chat((asked, Message("assistant", "A"))))]
        for calls in (2, 1):
            with suppress(RefusedRowError):  # the template shows no calls, or only one
                called = self._encoder.encode(Chat((asked, Message("assistant", "", (CALL,) * calls))))
                written = called.input_ids[last_answer(called)].tolist()
                if written.count(written[-1]) == 1:  # else it ends each call, and not the turn
                    examples.append(called)
                break
        return self.ends_of(examples)

    @property
    def tells_turns_apart(self) -> bool:
        """True if a prompt shows who said what, so that a conversation can have several turns."""
        return self.form != "text" and self._encoder.template != BUILT_IN_TEMPLATE

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

    def question(self, ids: Sequence[int]) -> str:
        """The text of a prompt for people, without what the chat template puts around a single message."""
        before, _, after = self.text(self.ids(_QUESTION)).rpartition(_QUESTION)
        return self.text(ids).removeprefix(before).removesuffix(after)

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a string, or a chat: messages with "role" and "content" that end with a user's turn, which may
                stand as "messages" beside "tools".

        Raises:
            DataError: it is not a chat, or the chat template fails on it.
        """
        if isinstance(prompt, str) and self.form == "text":
            return self.plain_ids(prompt)
        chat = _chat(prompt)
        with _shown(chat):
            return self._encoder.ids(self._encoder.turns.prompt(chat, thinks=_THINKS.get(self.form)))

    def row(self, prompt: Prompt, answer: str) -> Example:
        """A prompt with its answer and the end of it, encoded as in training: the answer is what is learned.

        Raises:
            DataError: see `ids`.
        """
        if isinstance(prompt, str) and self.form == "text":
            return self._encoder.encode(Completion(prompt, answer))
        chat = _chat(prompt)
        whole = replace(chat, messages=(*chat.messages, Message("assistant", answer)), trained_from=len(chat.messages))
        with _shown(chat):
            return self._encoder.encode(whole)

    def read(self, text: Prompt, *, is_answer: bool) -> Example:
        """A text or a chat that a head reads, encoded as in training; of a chat all turns, the last answer included.

        Args:
            is_answer: it ends as an answer does: the head was trained on pairs.

        Raises:
            DataError: it is neither, the template fails on it, or a text stands without the prompt that it answers.
        """
        if isinstance(text, str):
            if is_answer and self.form != "text":
                hint = "give the prompts, and answers beside them; or chats that end with the answer"
                raise DataError("these heads judge answers, and a text has no prompt", where=text[:80], hint=hint)
            row = Completion(None, text)
            return self._encoder.encode(row) if is_answer else self._encoder.text(row)
        chat = _read(text)
        with _shown(chat):
            return self._encoder.text(chat)

    def text(self, ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        return str(self.tokenizer.decode(spoken(self.tokenizer, ids), skip_special_tokens=True))

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a plain text, with the token that begins texts if the tokenizer has one."""
        return list(self.tokenizer(self._encoder.begun(text), add_special_tokens=False, verbose=False)["input_ids"])


def spoken(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Sequence[int]:
    """The ids without the headers within an answer: gpt-oss writes its role and its channel there, in plain tokens."""
    *opening, closing = tokenizer.convert_tokens_to_ids(["<|start|>", "<|channel|>", "<|message|>"])
    if closing is None or closing in opening:  # another template, whose tokenizer takes the words for unknown ones
        return ids
    kept, in_header = [], False
    for token in ids:
        in_header = token in opening or (in_header and token != closing)
        kept += [] if in_header else [token]
    return kept


@contextmanager
def _shown(chat: Chat) -> Iterator[None]:
    """The template's refusal of a chat as an error about it."""
    try:
        yield
    except RefusedRowError as refusal:
        raise DataError(
            f"The chat template cannot be used for this prompt: {refusal}.",
            where=f"{chat.messages[-1].role}: {chat.messages[-1].content[:60]!r}",
            hint="give a chat that the template accepts, or a tokenizer with another template",
        ) from refusal


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
    if isinstance(prompts, str) or _has_tools(prompts):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    given: list[Any] = list(prompts)  # an iterator can be read once only
    return [given] if any(isinstance(part, Mapping) and not _has_tools(part) for part in given) else given


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


def _has_tools(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and "messages" in prompt


def _read(prompt: Any) -> Chat:
    """A chat as in training, with calls of tools and what else the template shows."""
    given = prompt if _has_tools(prompt) else {"messages": prompt}
    try:
        return Chat(messages_of([*given["messages"]]), tools=tools_of(given.get("tools")))
    except (ValueError, TypeError) as error:
        raise _no_prompt(prompt) from error


def _chat(prompt: Any) -> Chat:
    """The chat that is to be answered."""
    if isinstance(prompt, str):
        return Chat((Message("user", prompt),))
    chat = _read(prompt)
    if not all(_SAID & {*turn} for turn in (prompt["messages"] if _has_tools(prompt) else prompt)):
        raise _no_prompt(prompt)
    if not chat.messages or chat.messages[-1].role == "assistant":
        raise DataError("a chat has nothing to answer", where=str(prompt)[:80], hint="end it with a user's turn")
    return chat


def _no_prompt(prompt: object) -> DataError:
    what, hint = "a prompt is neither text nor a chat", '[{"role": "user", "content": "..."}]'
    return DataError(what, where=str(prompt)[:80], hint=hint)


#: Rows, the names of their columns, and the source -> what is read of each.
ReadRows = Callable[[Sequence[RawRow], Sequence[str], str], Sequence[Any]]


def texts_of_rows(rows: Sequence[RawRow], columns: Sequence[str], where: str) -> list[Prompt | tuple[Prompt, str]]:
    """The text or the messages of each row; or of each its prompt and its answer.

    Raises:
        DataError: no column is recognised, or a row has no text.
    """
    from ci_llm.data.columns import SCORED, first_form

    hint = "name the column text or messages, or two columns prompt and completion"
    return [*_read_rows(first_form(SCORED, columns), rows, columns, where, "text", hint)]


def prompts_of_rows(rows: Sequence[RawRow], columns: Sequence[str], where: str) -> list[Prompt]:
    """The prompt of each row, without its answer.

    Raises:
        DataError: no column is recognised, or a row has no prompt.
    """
    from ci_llm.data.columns import ASKED, first_form

    hint = "name the column prompt, question, instruction, text or messages"
    return [*_read_rows(first_form(ASKED, columns), rows, columns, where, "prompt", hint)]


def _read_rows(
    form: Form | None, rows: Sequence[RawRow], columns: Sequence[str], where: str, what: str, hint: str
) -> Iterator[Any]:
    """What each row holds, as somebody gives it in a call.

    Args:
        what: what each row has.
        hint: for columns that have none.
    """
    if form is None:
        raise DataError(f"No column holds a {what}; the columns are: {', '.join(columns)}.", where=where, hint=hint)
    for number, row in enumerate(rows):
        place = f"{where}, row {number} (counted from 0)"
        try:
            found = form.reader({part: row.get(column) for part, column in form.columns.items()})
            given = None if found is None else _as_given(found, form)
        except ValueError as error:
            raise DataError(f"a row cannot be read: {error}", where=place, hint="repair it") from error
        if given is None:
            raise DataError(f"a row has no {what}", where=place, hint="leave it out, or write one")
        yield given


def _as_given(found: Any, form: Form) -> Prompt | tuple[Prompt, str]:
    """A prompt, or a text; or of a chat its prompt, and the answer that it ends with."""
    if isinstance(found, Prompted):
        return _typed(found.row)
    if "text" in form.columns:
        return _written(found)
    *asked, last = found.messages
    if last != Message("assistant", last.content):
        raise ValueError("what is scored is a text of the assistant, and the last message is something else")
    return _typed(replace(found, messages=(*asked,))), last.content


def _written(row: Chat | Completion) -> Prompt:
    """A text, or a chat as its messages."""
    if isinstance(row, Completion):
        return row.completion
    turns = [message.as_turn() for message in row.messages]
    return {"messages": turns, "tools": [*row.tools]} if row.tools else turns


def _typed(row: Chat | Completion) -> Prompt:
    """A prompt as somebody types it: a single message of a user is a text."""
    alone = isinstance(row, Chat) and not row.tools and [message.role for message in row.messages] == ["user"]
    return row.messages[0].content if alone else _written(row)  # type: ignore[union-attr]


_JSON_LINES = (".jsonl", ".ndjson")


def prompts_of_file(path: Path, of_rows: ReadRows | None = None) -> list[Any]:
    """The prompts of a file: JSON lines, another format that training reads, or else one prompt per line.

    Args:
        of_rows: what makes prompts of rows: `prompts_of_rows`, unless it is `texts_of_rows`.

    Raises:
        DataError: it cannot be read, holds no prompt, or a row of it has none.
    """
    if not path.is_file():
        what = "this is a folder" if path.is_dir() else "there is no such file"
        raise DataError(what, where=str(path.absolute()), hint="give a file with one prompt per line, or JSON lines")
    if path.suffix.lower() not in (".txt", *_JSON_LINES, ""):
        from ci_llm.data.formats import find_format  # loads `datasets`, which takes seconds

        if find_format(path) is not None:
            from ci_llm.data.sources import open_splits

            read = of_rows or prompts_of_rows
            splits = open_splits(str(path), None, "train", "--file").values()
            each = (read([kept(rows, row) for row in rows], rows.column_names, str(path)) for rows in splits)
            return [*chain.from_iterable(each)]
    return prompts_of_lines(_text(path).split("\n"), str(path), of_rows)


def prompts_of_lines(lines: Iterable[str], where: str, of_rows: ReadRows | None = None) -> list[Any]:
    """One prompt per line; or, if every line is a JSON object, one row per line. Blank lines are left out.

    Args:
        where: the source in words, for errors.
        of_rows: as for `prompts_of_file`.

    Raises:
        DataError: there is no prompt, or one of several rows is not a JSON object.
    """
    texts = [line.strip("\r\n") for line in lines if line.strip()]
    if not texts:
        raise DataError("there is no prompt", where=where, hint="give one prompt per line, or JSON lines")
    rows = [*map(_object, texts)]
    looks_like_rows = any(row is not None for row in rows) and all(text.lstrip().startswith("{") for text in texts)
    if not looks_like_rows and not where.lower().endswith(_JSON_LINES):
        return list(texts)
    found = list[RawRow]()
    for number, row in enumerate(rows):
        if row is None or not is_unicode(row):
            what = "a row is not a JSON object" if row is None else "a row holds half a character, a lone surrogate"
            raise DataError(what, where=f"{where}, row {number} (counted from 0)", hint="repair it")
        found.append(row)
    return list((of_rows or prompts_of_rows)(found, list(dict.fromkeys(chain.from_iterable(found))), where))


def _object(text: str) -> Mapping[str, Any] | None:
    """The JSON object that a line is; None if it is none."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8 text"
        if isinstance(error, UnicodeDecodeError):
            reason += f" in line {len(error.object[: error.start].splitlines()) or 1}"
        raise DataError(f"the file cannot be read: {reason}", where=str(path), hint="give a text file") from error
