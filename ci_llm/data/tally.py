"""Which rows are learned from, cut or left out, and the lines and errors that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ci_llm.core.work import counted
from ci_llm.data.encoder import Encoder, Example, RefusedRowError
from ci_llm.data.rows import Chat, Row, Rows
from ci_llm.errors import DataError


@dataclass
class Tally:
    """Counts of rows kept, cut and left out, by reason."""

    max_seq_length: int
    rows: int = 0
    kept_rows: int = 0
    cut: int = 0
    without_answer: int = 0
    lacking: str = "without an answer"
    answer_too_far: int = 0
    hidden_tools: int = 0
    without_roles: int = 0
    marked: int = 0
    endless: int = 0
    end: str = ""
    longest: int = 0
    tokens: int = 0
    targets: int = 0

    def kept(self, rows: Rows, encoder: Encoder) -> Iterator[tuple[int, Example]]:
        """The rows in which there is something to learn, cut, with their numbers."""
        if "text" in rows.form.columns:  # plain text has no answers
            self.lacking = "empty"
        for number, row in enumerate(counted(rows, "tokenise", len(rows), "rows")):
            self.rows += 1
            try:
                whole = encoder.encode(row) if row else None
            except RefusedRowError as error:
                if not isinstance(row, Chat) or not row.uses_tools:
                    raise _refusal(error, row, rows.place(number)) from error
                self.hidden_tools += 1
                continue
            if row is None or whole is None or not whole.supervised.any():
                self.without_answer += 1
                continue
            self._look_at(row, whole, encoder)
            self.longest = max(self.longest, len(whole.input_ids))
            example = Example(whole.input_ids[: self.max_seq_length], whole.supervised[: self.max_seq_length])
            if not example.supervised.any():
                self.answer_too_far += 1
                continue
            self.kept_rows += 1
            self.cut += len(whole.input_ids) > self.max_seq_length
            self.tokens += len(example.input_ids)
            self.targets += int(example.supervised.sum())
            yield number, example

    def _look_at(self, row: Row, whole: Example, encoder: Encoder) -> None:
        """Count answers that are marked, and chats that the template makes hard to learn."""
        self.marked += len(row.marked) if isinstance(row, Chat) else 0
        self.without_roles += encoder.lacks_roles(row)
        if (end := encoder.unlearned_end(row, whole)) is not None:
            self.endless += 1
            self.end = self.end or end

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.tokens} tokens in {self.kept_rows} rows, {self.targets} of them learned; "
            f"the longest row has {self.longest}"
        )
        if self.marked:
            yield f"{self.marked} answers are not learned: they are marked by weight 0, train false or training false"
        if self.cut:
            yield f"{self.cut} rows cut at max_seq_length {self.max_seq_length}"
        if self._num_left_out:
            yield f"left out: {self._left_out()}"

    def warnings(self) -> Iterator[str]:
        """Why agents will not learn what these rows are meant to teach."""
        if self.endless:
            follows = f"{self.end!r}, which follows, is no special token" if self.end.strip() else "nothing follows"
            yield (
                f"the end of turn is not learned in {self.endless} chats: {follows}, so that generation ends "
                "at its limit alone; make it a special token of the tokenizer, or set chat_template=roles"
            )
        if self.without_roles:
            yield (
                f"{self.without_roles} chats have several turns, and the template does not show who speaks; "
                "set chat_template=roles"
            )

    def nothing_left(self, rows: Rows, *, evaluated: bool) -> DataError:
        """The error when nothing is kept, with what to do about the commonest reason.

        Args:
            evaluated: the rows are to evaluate on.
        """
        columns = ", ".join(rows.form.columns.values())
        if self.answer_too_far:
            hint = f"raise max_seq_length (the longest row has {self.longest} tokens)"
        elif self.hidden_tools:
            hint = "take a base or a chat_template that shows calls of tools"
        else:
            hint = f"check that the columns hold text and the chats have assistant turns; read are: {columns}"
        if evaluated:
            hint += "; or choose other rows to evaluate on: val_set_size= or eval_dataset_name="
        lost = "No row is left to evaluate" if evaluated else "No row is left to learn from"
        return DataError(f"{lost}: {self._left_out()}.", where=rows.where, hint=hint)

    @property
    def _num_left_out(self) -> int:
        return self.without_answer + self.answer_too_far + self.hidden_tools

    def _left_out(self) -> str:
        reasons = {
            self.lacking: self.without_answer,
            f"whose answer begins after max_seq_length {self.max_seq_length}": self.answer_too_far,
            "whose tools the chat template cannot show": self.hidden_tools,
        }
        told = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
        return f"{self._num_left_out} of {self.rows} rows: {told}"


def _refusal(error: RefusedRowError, row: Row | None, where: str) -> DataError:
    if not isinstance(row, Chat):
        return DataError(
            f"This row cannot be used: {error}.",
            where=where,
            hint="tokenise the rows with the tokenizer of this base, or give them as text",
        )
    return DataError(
        f"The chat template cannot be used for this row: {error}.",
        where=where,
        hint="repair the row, choose another chat_template, or mark what the assistant says with {% generation %}",
    )
