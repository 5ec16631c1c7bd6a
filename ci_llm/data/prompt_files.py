"""Prompts from a file or a stream: one per line, or rows with the columns that training recognises.

An answer that a row has is left out. A row may have no answer at all, only a question, a prompt, or messages. Texts to
be scored are read in the same way, and keep their answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ci_llm.data.rows import Chat, Completion, Form, RawRow, Row, messages_of
from ci_llm.errors import DataError

#: Text, or messages with "role" and "content".
FilePrompt = str | list[Mapping[str, str]]

#: Rows, the names of their columns, and the source -> what is read of each.
ReadRows = Callable[[Sequence[RawRow], Sequence[str], str], Sequence[Any]]

_JSON_LINES = (".jsonl", ".ndjson")
#: Takes the place of the answer, which forms read as well and which is left out again.
_ANSWER = "?"
_ANSWERS: Mapping[str, Any] = {"answer": _ANSWER, "completion": _ANSWER, "answers": {"text": [_ANSWER]}}


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
    if path.suffix.lower() in (".txt", *_JSON_LINES, ""):
        return prompts_of_lines(_text(path).split("\n"), str(path), of_rows)
    from ci_llm.data.formats import find_format  # loads `datasets`, which takes seconds

    if find_format(path) is None:
        return prompts_of_lines(_text(path).split("\n"), str(path), of_rows)
    from ci_llm.data.sources import open_splits

    splits = open_splits(str(path), None, "train", "--file").values()
    read = of_rows or prompts_of_rows
    return [prompt for rows in splits for prompt in read(list(rows), rows.column_names, str(path))]


def prompts_of_lines(lines: Iterable[str], where: str, of_rows: ReadRows | None = None) -> list[Any]:
    """One prompt per line; or, if every line is a JSON object, one row per line. Blank lines are left out.

    Args:
        where: the source in words, for errors.
        of_rows: as for `prompts_of_file`.

    Raises:
        DataError: there is no prompt, or one of several rows is no JSON object.
    """
    texts = [line.strip("\r\n") for line in lines if line.strip()]
    if not texts:
        raise DataError("there is no prompt", where=where, hint="give one prompt per line, or JSON lines")
    rows = [_object(text) for text in texts]
    if any(row is None for row in rows):
        looks_like_rows = any(row is not None for row in rows) and all(text.lstrip().startswith("{") for text in texts)
        if looks_like_rows or where.lower().endswith(_JSON_LINES):
            number = rows.index(None)
            raise DataError(
                "a row is no JSON object", where=f"{where}, row {number} (counted from 0)", hint="repair it"
            )
        return list(texts)
    found: list[Mapping[str, Any]] = [row for row in rows if row is not None]
    read = of_rows or prompts_of_rows
    return list(read(found, list({column: None for row in found for column in row}), where))


#: Of rows whose prompt stands beside its answer.
_OF_PROMPTS: Final = ("prompt", "question", "instruction")
_OF_ANSWERS: Final = ("completion", "answer", "response", "output", "chosen")


def texts_of_rows(rows: Sequence[RawRow], columns: Sequence[str], where: str) -> list[FilePrompt | tuple[Any, str]]:
    """The text or the messages of each row; or of each its prompt and its answer.

    Raises:
        DataError: no column is recognised, or a row has no text.
    """
    by_name = {column.lower(): column for column in reversed(columns)}

    def found(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    text, prompt, answer = found(("text", "sentence", "messages")), found(_OF_PROMPTS), found(_OF_ANSWERS)
    if text is None and (prompt is None or answer is None):
        raise DataError(
            f"No column holds a text; the columns are: {', '.join(columns)}.",
            where=where,
            hint="name the column text or messages, or two columns prompt and completion",
        )
    texts: list[FilePrompt | tuple[Any, str]] = []
    for number, row in enumerate(rows):
        needed = [text] if text is not None else [prompt, answer]
        cells = [row.get(str(column)) for column in needed]
        if not all(cells):
            hint = "leave it out, or write one"
            raise DataError("a row has no text", where=f"{where}, row {number} (counted from 0)", hint=hint)
        texts.append(cells[0] if text is not None else (cells[0], str(cells[1])))  # type: ignore[arg-type]
    return texts


def prompts_of_rows(rows: Sequence[RawRow], columns: Sequence[str], where: str) -> list[FilePrompt]:
    """The prompt of each row, without its answer.

    Raises:
        DataError: no column is recognised, or a row has no prompt.
    """
    form = _form_of_prompts(columns, where)
    return [_prompt(form, row, f"{where}, row {number} (counted from 0)") for number, row in enumerate(rows)]


def _form_of_prompts(columns: Sequence[str], where: str) -> Form:
    """How rows with these columns are read, whether they have a column with the answer or not."""
    from ci_llm.data.columns import find_form

    for wider in (columns, *([*columns, name] for name in ("answers", "answer"))):
        if (form := find_form(wider)) is not None:
            return form
    raise DataError(
        f"No column holds a prompt; the columns are: {', '.join(columns)}.",
        where=where,
        hint="name the column prompt, question, instruction, text or messages",
    )


def _prompt(form: Form, raw: RawRow, where: str) -> FilePrompt:
    parts = {part: raw.get(column) for part, column in form.columns.items()}
    parts |= {part: value for part, value in _ANSWERS.items() if part in parts}
    try:
        if "messages" in parts:
            parts["messages"] = [*_asked(parts["messages"]), {"role": "assistant", "content": _ANSWER}]
        elif isinstance(parts.get("prompt"), list) and "completion" in parts:
            parts["completion"] = [{"role": "assistant", "content": _ANSWER}]
        prompt = _without_answer(form.reader(parts))
    except ValueError as error:
        raise DataError(f"a row cannot be read: {error}", where=where, hint="repair it") from error
    if not prompt:
        raise DataError("a row has no prompt", where=where, hint="leave it out, or write one")
    return prompt


def _asked(value: Any) -> list[dict[str, Any]]:
    """The messages of a row without the answer at their end."""
    messages = messages_of(value)
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    return [message.as_turn() for message in messages]


def _without_answer(row: Row | None) -> FilePrompt | None:
    if isinstance(row, Chat):
        *asked, _answer = row.messages
        if len(asked) == 1 and asked[0].role == "user":
            return asked[0].content.strip() and asked[0].content  # text, as if somebody typed it
        return [message.as_turn() for message in asked]
    if isinstance(row, Completion):
        return row.completion if row.prompt is None else row.prompt
    if row is not None:
        raise ValueError("it holds token ids, and a prompt is text")
    return None


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
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"the file cannot be read: {reason}", where=str(path), hint="give a text file") from error
