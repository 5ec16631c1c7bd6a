"""Rows as people write them, and what each becomes here: a chat, or a prompt with its completion.

Form                    columns                                     becomes
messages                messages: [{role, content}, ...]            Chat
conversations           conversations: [{from, value}, ...]         Chat
prompt + completion     two strings, or two lists of messages       Completion, or Chat trained on its end
question + answer       two strings                                 Chat of two messages
instruction + output    three strings, input may be missing         Chat of two messages
SQuAD                   context, question, answers.text             Chat of two messages
text                    a string                                    Completion of nothing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import xxhash

from ci_llm.errors import DataError

RawRow = Mapping[str, Any]

#: Names of speakers, as in ShareGPT and its relatives, and the roles that chat templates know.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Message:
    """One turn: `role` is "user", "assistant", "system", or what else the chat template knows."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation; every assistant turn from message `trained_from` on is learned."""

    messages: tuple[Message, ...]
    trained_from: int = 0

    @property
    def question(self) -> str | None:
        """What was said last before the last answer."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), None)

    @property
    def answer(self) -> str | None:
        """The last assistant turn."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), None)


@dataclass(frozen=True)
class Completion:
    """Text that no chat template touches: `completion` is learned, `prompt` is given; None for plain text."""

    prompt: str | None
    completion: str

    @property
    def question(self) -> str | None:
        return self.prompt

    @property
    def answer(self) -> str | None:
        return None if self.prompt is None else self.completion


Row = Chat | Completion
TrainedOn = Literal["none", "some", "all"]


class RawRows(Protocol):
    """A data set or a list: rows of named values, in an order that does not change."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Form:
    """A way to write training rows: each needs all `columns` and may have `optional` ones.

    `read` returns None for a row in which there is nothing to learn, and raises ValueError for a bad one.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[RawRow], Row | None]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Rows in canonical form.

    Attributes:
        raw: the rows as they were found.
        form: how they are read.
        where: the source, in words.
        description: what was found, in lines for people.
        num_trained_on: of rows to evaluate on: how many of them are among those to train on.
    """

    raw: RawRows
    form: Form
    where: str
    description: tuple[str, ...] = ()
    num_trained_on: int = 0

    @property
    def trained_on(self) -> TrainedOn:
        """How many of these rows are rows of the training, in a word."""
        if not self.num_trained_on:
            return "none"
        return "all" if self.num_trained_on == len(self) else "some"

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Row | None]:
        """The canonical rows; None stands for a row without an answer.

        Raises:
            DataError: a row is malformed.
        """
        return (self._read(number, row) for number, row in enumerate(self.raw))

    def __getitem__(self, number: int) -> Row | None:
        return self._read(number, self.raw[number])

    def _read(self, number: int, row: RawRow) -> Row | None:
        try:
            return self.form.read(row)
        except ValueError as error:
            raise DataError(
                f"A row of the data set cannot be read as {self.form.name}: {error}.",
                where=f"{self.where}, row {number} (counted from 0)",
                hint="repair or remove the row",
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 of the canonical rows: the same data in another file format has the same."""
        digest = xxhash.xxh3_128()
        for row in self:
            digest.update(json.dumps(row, default=vars).encode())
        return digest.hexdigest()


def find_form(columns: Sequence[str]) -> Form | None:
    """The first form whose columns are all there."""
    return next((form for form in FORMS if set(form.columns) <= set(columns)), None)


def _text(value: Any) -> str:
    """A cell as text: numbers as they print, the text parts of a list of parts, and "" for nothing."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(_text(part.get("text")) for part in value)
    raise ValueError(f"expected text, found {type(value).__name__}: {str(value)[:60]}")


def _message(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise ValueError(f"expected a message with role and content, found {str(raw)[:60]!r}")
    if raw.get("tool_calls"):
        raise ValueError("a message calls tools, which cannot be learned here")
    role = _text(raw.get("role") or raw.get("from"))
    if not role:
        raise ValueError(f"a message has no role; its keys are {', '.join(raw)}")
    return Message(ROLES.get(role, role), _text(raw.get("content", raw.get("value"))))


def _messages(raw: Any) -> tuple[Message, ...]:
    if raw is not None and not isinstance(raw, list):
        raise ValueError(f"expected a list of messages, found {type(raw).__name__}")
    return tuple(_message(message) for message in raw or ())


def _chat(messages: tuple[Message, ...], trained_from: int = 0) -> Chat | None:
    answers = [m for m in messages[trained_from:] if m.role == "assistant" and m.content.strip()]
    return Chat(messages, trained_from) if answers else None


def _two(question: str, answer: str) -> Chat | None:
    return _chat((Message("user", question), Message("assistant", answer))) if question.strip() else None


def _read_messages(row: RawRow) -> Row | None:
    return _chat(_messages(row["messages"]))


def _read_conversations(row: RawRow) -> Row | None:
    return _chat(_messages(row["conversations"]))


def _read_prompt_and_completion(row: RawRow) -> Row | None:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        given = _messages(prompt)
        return _chat((*given, *_messages(completion)), trained_from=len(given))
    return Completion(_text(prompt), _text(completion)) if _text(completion).strip() else None


def _read_question_and_answer(row: RawRow) -> Row | None:
    return _two(_text(row["question"]), _text(row["answer"]))


def _read_instruction(row: RawRow) -> Row | None:
    parts = (_text(row["instruction"]), _text(row.get("input")))
    return _two("\n\n".join(part for part in parts if part), _text(row["output"]))


def _read_squad(row: RawRow) -> Row | None:
    answers = row["answers"]
    texts = answers.get("text") if isinstance(answers, Mapping) else answers
    if texts is not None and not isinstance(texts, list):
        raise ValueError(f"expected answers.text to be a list, found {type(texts).__name__}")
    return _two(f"{_text(row['context'])}\n\n{_text(row['question'])}", _text(texts[0]) if texts else "")


def _read_text(row: RawRow) -> Row | None:
    text = _text(row["text"])
    return Completion(None, text) if text.strip() else None


#: Looked for in this order.
FORMS = (
    Form("messages", ("messages",), _read_messages),
    Form("conversations", ("conversations",), _read_conversations),
    Form("prompt + completion", ("prompt", "completion"), _read_prompt_and_completion),
    Form("question + answer", ("question", "answer"), _read_question_and_answer),
    Form("instruction + output", ("instruction", "output"), _read_instruction, optional=("input",)),
    Form("SQuAD", ("context", "question", "answers"), _read_squad),
    Form("text", ("text",), _read_text),
)
