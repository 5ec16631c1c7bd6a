"""Rows as they were found, and in canonical form: a chat, a completion, token ids, a pair, a rated or labelled row.

A raw row has named values. `Form` makes a canonical row of its cells; `Rows` are those of a data set.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import xxhash

from ci_llm.errors import DataError

if TYPE_CHECKING:
    from ci_llm.objectives import RowKind

RawRow = Mapping[str, Any]

#: JSON as rows hold it. NaN is nothing: pandas writes it where a value is missing.
DECODER: Final = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))

#: Names of splits to evaluate on, the first that exists is taken: whatever a run chooses by them, it leaves the test
#: rows for a last evaluation.
EVAL_SPLITS: Final = ("validation", "valid", "val", "dev", "eval", "test")


class ListedRows(list[Any]):
    """Rows in a list, which all have the same columns: the embedded ones need not load `datasets`."""

    @property
    def column_names(self) -> list[str]:
        return [*self[0]]

    def select(self, numbers: Sequence[int]) -> ListedRows:
        """Some of the rows."""
        return ListedRows(self[number] for number in numbers)

    def select_columns(self, names: Sequence[str]) -> ListedRows:
        """All rows with these columns only."""
        return ListedRows({name: row[name] for name in names} for row in self)


@dataclass(frozen=True)
class JsonRows:
    """Rows that are kept as JSON: each value has the type that is written, whatever the other rows hold.

    Attributes:
        texts: rows whose only column is `TEXT`, an object in JSON.
        column_names: the columns that are read; what a row lacks is None.
    """

    TEXT: ClassVar = "row"

    texts: Any
    column_names: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._decoded(self.texts[number])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._decoded, self.texts)

    def select(self, numbers: Sequence[int]) -> JsonRows:
        """Some of the rows."""
        return replace(self, texts=self.texts.select(numbers))

    def select_columns(self, names: Sequence[str]) -> JsonRows:
        """All rows with these columns only."""
        return replace(self, column_names=tuple(names))

    def _decoded(self, kept: RawRow) -> dict[str, Any]:
        row = DECODER.decode(kept[self.TEXT])
        return {name: row.get(name) for name in self.column_names}


def kept(rows: Any, row: RawRow) -> RawRow:
    """A row without what is NaN, or a key that Arrow adds because other rows have it; JSON is kept as it is."""
    cleaned: RawRow = row if isinstance(rows, JsonRows | ListedRows) else without_nothing(row)
    return cleaned


def from_json(value: Any) -> Any:
    """The value of a string that holds a JSON list or object; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:  # a text that begins with a bracket
        return value


def without_nothing(value: Any) -> Any:
    """Without the keys that Arrow adds as null, because other rows have them, and without what is NaN."""
    if isinstance(value, Mapping):
        return {key: without_nothing(part) for key, part in value.items() if part is not None and part == part}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):  # not each of many token ids
        return [without_nothing(part) for part in value]
    return value


def empty(where: str) -> DataError:
    """The error for a data set without a row."""
    return DataError("The data set is empty.", where=where, hint="give one with rows, or another split")


#: The label of a token that is not learned, as in PyTorch and Transformers.
NOT_LEARNED: Final = -100


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: "user", "assistant", "system", "tool", or what else the chat template knows.
        tool_calls: what the assistant calls, as Transformers' templates read it.
        more: further keys for the template, such as `reasoning_content`, or `tool_call_id` of an answer of a tool.
        learned: False for an answer that is marked as not to be learned.
    """

    role: str
    content: str
    tool_calls: tuple[Any, ...] = field(default=(), hash=False)
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    learned: bool = True

    def as_turn(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        calls = {"tool_calls": [*self.tool_calls]} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **calls, **self.more}


@dataclass(frozen=True)
class Chat:
    """A conversation; every assistant turn from message `trained_from` on is learned, unless it is marked.

    Attributes:
        tools: descriptions of the tools that the assistant may call, for the chat template.
    """

    messages: tuple[Message, ...]
    trained_from: int = 0
    tools: tuple[Any, ...] = field(default=(), hash=False)

    @property
    def marked(self) -> list[int]:
        """The numbers of the answers that are marked as not to be learned."""
        return [number for number, message in enumerate(self.messages) if not message.learned]

    @property
    def uses_tools(self) -> bool:
        """True if the template has to know tools to show the chat."""
        return bool(self.tools) or any(m.tool_calls or m.role == "tool" for m in self.messages)

    @property
    def needs_more(self) -> bool:
        """True if the template has to know more than users and assistants to show the chat."""
        return self.uses_tools or any(message.role not in ("user", "assistant") for message in self.messages)


@dataclass(frozen=True)
class Completion:
    """Text that no chat template touches: `completion` is learned, `prompt` is given; None for plain text."""

    prompt: str | None
    completion: str


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenised already; `labels` are the ids again, or -100 where nothing is learned."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is better, by at least a margin if there is one."""

    chosen: Chat | Completion
    rejected: Chat | Completion
    margin: float | None = None


@dataclass(frozen=True)
class Rated:
    """A row with an answer that is good, or not."""

    row: Chat | Completion
    good: bool


@dataclass(frozen=True)
class Labelled:
    """A text or a chat with the name or number of its class, or with a number that is to be predicted."""

    row: Chat | Completion
    label: str | float


@dataclass(frozen=True)
class Prompted:
    """A prompt that agents answer: a chat that ends before the answer, or a text.

    Attributes:
        digest: of the whole row, whose other columns rewards may read.
    """

    row: Chat | Completion
    digest: str = ""


SingleRow = Chat | Completion | Tokens
Row = SingleRow | Pair | Rated | Labelled | Prompted
TrainedOn = Literal["none", "some", "all"]
#: What a prompt is, if it is a string; and of a chat, whether it ends before a thought that the template begins.
PromptForm = Literal["chat", "text", "chat without thoughts", "chat with thoughts"]


@dataclass(frozen=True)
class Form:
    """How the rows of one data set are read.

    Attributes:
        name: the form in words, such as `question + answer`.
        kind: what the rows are: single ones, pairs, rated or labelled ones, or prompts.
        columns: the column of the data for each part that `reader` knows.
        reader: makes the canonical row of the parts; returns None for a row in which there is nothing to learn,
            and raises ValueError for a bad one.
        beside: columns of a prompt that are not read: their text has to stand in one that is.
    """

    name: str
    columns: Mapping[str, str]
    reader: Callable[[RawRow], Row | None]
    kind: RowKind = "single"
    beside: tuple[str, ...] = ()

    def read(self, raw: RawRow) -> Row | None:
        row = self.reader({part: raw.get(column) for part, column in self.columns.items()})
        if isinstance(row, Prompted):
            return replace(row, digest=xxhash.xxh3_64_hexdigest(json.dumps(raw, default=str, sort_keys=True).encode()))
        beside = [(name, text) for name in self.beside for text in _texts(raw.get(name))] if row is not None else []
        if beside:
            whole, *read = json.dumps(row, default=_attributes), *_texts([*map(raw.get, self.columns.values())])
            for name, text in beside:
                # Or it is the whole row in other words: Alpaca's `prompt` beside its instruction and its output.
                if json.dumps(text)[1:-1] not in whole and not all(each in text for each in read):
                    raise ValueError(
                        f"{name} holds {text[:40]!r}, which belongs to the prompt and is in none of the columns that"
                        f" are read, {', '.join(self.columns.values())}; write it into one of them, or remove it"
                    )
        return row


def _texts(value: Any) -> Iterator[str]:
    """The texts in a cell, without names of roles and types."""
    value = from_json(value)
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping):
        yield from _texts([part for key, part in value.items() if key not in ("role", "from", "type")])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


@dataclass(frozen=True)
class Rows:
    """Rows in canonical form.

    Attributes:
        raw: the rows as they were found: a `datasets.Dataset`, `JsonRows` or `ListedRows`.
        form: how they are read.
        where: the source, in words.
        description: what was found, in lines for people.
        numbers: the number of each row in its source, where only some rows were taken.
        num_trained_on: how many of these rows to evaluate on are among those to train on.
        are_of_test: true if some of these rows to evaluate on are a whole split that is called test.
        are_answers: true if the preferred answers of pairs and rated rows are read, as single rows.
    """

    raw: Any
    form: Form
    where: str
    description: tuple[str, ...] = ()
    numbers: Sequence[int] | None = None
    num_trained_on: int = 0
    are_of_test: bool = False
    are_answers: bool = False

    @property
    def trained_on(self) -> TrainedOn:
        """The share of these rows that are rows of the training: none, some or all."""
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
        with self._text_as_utf8():
            for number, row in enumerate(self.raw):
                yield self._read(number, row)

    def __getitem__(self, number: int) -> Row | None:
        with self._text_as_utf8():
            return self._read(number, self.raw[number])

    @contextmanager
    def _text_as_utf8(self) -> Iterator[None]:
        """Arrow takes any bytes of a file for text, and finds out when a row is read."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(f"the text is not UTF-8: {error}", where=self.where, hint="save it as UTF-8") from error

    def evaluated_although_trained_on(self, count: int) -> Rows:
        """These rows to evaluate on, of which `count` are rows to train on; the description ends with that."""
        note = f"{count} of the {len(self)} rows to evaluate on are rows to train on: scores show what is remembered"
        return replace(self, num_trained_on=count, description=(*self.description, note)) if count else self

    def counting_copies_of(self, trained: Iterable[Row | None]) -> Rows:
        """These rows to evaluate on, where the same rows among `trained` count as trained on."""
        own = {row for row in self if row is not None}
        copied = {row for row in trained if row in own}
        return self.evaluated_although_trained_on(sum(row in copied for row in self))

    def select(self, chosen: Sequence[int]) -> Rows:
        """Some of the rows, each under its old number."""
        return replace(self, raw=self.raw.select(chosen), numbers=self._numbers_of(chosen))

    def _numbers_of(self, chosen: Sequence[int]) -> Sequence[int]:
        return array("q", (self.numbers[row] for row in chosen)) if self.numbers else chosen

    def place(self, number: int) -> str:
        """The place of a row in its source, in words."""
        return f"{self.where}, row {self.numbers[number] if self.numbers else number} (counted from 0)"

    def cells(self, number: int) -> tuple[RawRow, str]:
        """All cells of a row by the names of their columns, and the column that holds its prompt."""
        return dict(self.raw[number]), next(iter(self.form.columns.values()))

    @property
    def column_sets(self) -> list[Sequence[str]]:
        """The columns of every data set among these."""
        return [self.raw.column_names]

    def _read(self, number: int, row: RawRow) -> Row | None:
        try:
            found = self.form.read(kept(self.raw, row))
            return preferred(found) if self.are_answers else found
        except ValueError as error:
            raise DataError(
                f"A row of the data set cannot be read as {self.form.name}: {error}.",
                where=self.place(number),
                hint="repair or remove the row, or name the columns: prompt_column=, answer_column=, text_column=",
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 of the canonical rows: the same data in another file format has the same."""
        digest = xxhash.xxh3_128()
        for row in self:
            digest.update(json.dumps(row, default=_attributes).encode())
        return digest.hexdigest()


def question_of(row: Row | None) -> str | None:
    """What a row asks, in words: of a chat the last words of the user before the last answer that is learned."""
    if isinstance(row, Pair | Rated):
        row = row.chosen if isinstance(row, Pair) else row.row
    elif isinstance(row, Prompted):
        return row.row.messages[-1].content if isinstance(row.row, Chat) else row.row.completion
    if not isinstance(row, Chat):
        return row.prompt if isinstance(row, Completion) else None
    backwards = iter(reversed(row.messages))
    answered = any(m.role == "assistant" and m.learned for m in backwards)
    return next((m.content for m in backwards if m.role == "user"), None) if answered else None


def preferred(row: Row | None) -> Row | None:
    """The row with the answer that is preferred; None for a rated row that is not good, and for a label or a prompt."""
    if isinstance(row, Labelled | Prompted):
        return None
    if isinstance(row, Rated):
        return row.row if row.good else None
    return row.chosen if isinstance(row, Pair) else row


def _attributes(part: Any) -> dict[str, Any]:
    """The fields of a row or a message; marks and margins only where they are set, so that old fingerprints stay."""
    usual = {"learned": True, "margin": None}
    return {name: value for name, value in vars(part).items() if name not in usual or value != usual[name]}
