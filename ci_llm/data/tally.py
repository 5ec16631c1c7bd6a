"""The rows of a data set as tokens: kept, cut or left out; and the tally of what became of them.

Many rows are encoded in several processes, with the same result. A plain text that is too long is cut into blocks,
another row at its end; rows with nothing left to learn are left out. A `Tally` counts all of these, for the lines and
errors that say so.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from ci_llm.core.work import counted
from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.rows import Chat, Completion, Labelled, Pair, Prompted, PromptForm, Rated, Row, Rows
from ci_llm.data.turns import RefusedRowError, Remark
from ci_llm.data.units import Unit, branches_of, label_of, number_of, prompt_of, unit_of, without_end
from ci_llm.errors import DataError

#: Why a row is left out.
Reason = Literal["lacking", "answer too far", "refused"]


@dataclass
class Tally:
    """Counts of rows kept and cut, and of those left out by their reason."""

    max_seq_length: int
    rows: int = 0
    kept_rows: int = 0
    cut: int = 0
    lost: int = 0
    split: int = 0
    blocks: int = 0
    left_out: Counter[Reason] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    remarks: Counter[Remark] = field(default_factory=Counter)
    lacking: str = "without an answer to learn"
    without_roles: int = 0
    marked: int = 0
    endless: int = 0
    end: str = ""
    longest: int = 0
    tokens: int = 0
    targets: int = 0
    good: int = 0
    learn_prompt: bool = False
    classes: tuple[str, ...] = ()
    pad: int | None = None
    labels: Counter[float] = field(default_factory=Counter)

    def kept(self, rows: Rows, encoder: Encoder) -> Iterator[tuple[int, Example]]:
        """The rows in which there is something to learn, cut, with their numbers."""
        kind: str = "good" if rows.are_answers and rows.form.kind == "rated" else rows.form.kind
        kind = "text" if kind == "single" and "text" in rows.form.columns else kind
        self.lacking = _LACKING.get(kind, self.lacking)
        every = counted(encoded(rows, encoder), "tokenise", len(rows), "rows")
        for number, (row, wholes) in enumerate(every):
            self.rows += 1
            branches = branches_of(row) if row else []
            if isinstance(wholes, RefusedRowError):
                if not any(isinstance(branch, Chat) and branch.needs_more for branch in branches):
                    raise _refusal(wholes, branches[0], rows.place(number)) from wholes
                self.left_out["refused"] += 1
                self.refused[str(wholes)] += 1
                continue
            is_labelled = isinstance(row, Labelled)
            is_bare = isinstance(row, Labelled | Prompted)
            taught = [len(whole.input_ids) if is_bare else whole.supervised.any() for whole in wholes]
            if row is None or not all(taught):
                self.left_out["lacking"] += 1
                continue
            if not is_bare:
                self._look_at(branches[0], wholes[0], encoder)
            self.longest = max(self.longest, *(len(whole.input_ids) for whole in wholes))
            if isinstance(row, Prompted):
                examples: Iterator[Example] = self._prompt(wholes[0], row)
            elif isinstance(row, Pair | Rated | Labelled):
                where = rows.place(number)
                label = number_of(row.label, self.classes, where) if isinstance(row, Labelled) else label_of(row)
                examples = self._unit(wholes, label, is_labelled)
            else:
                examples = self._within(row, wholes[0])
            for example in examples:
                self.kept_rows += 1
                self.tokens += len(example.input_ids)
                self.targets += int(example.supervised.sum())
                yield number, example

    def _within(self, row: Row, whole: Example) -> Iterator[Example]:
        """The examples of a row, of at most `max_seq_length` tokens each."""
        count, limit = len(whole.input_ids), self.max_seq_length
        if count <= limit:
            yield whole
        elif isinstance(row, Completion) and row.prompt is None:
            self.split += 1
            # A block begins with the last token of the one before, which it does not learn: all others follow one.
            for start in range(0, count - 1, limit - 1):
                self.blocks += 1
                yield _part(whole, start, start + limit)
        elif whole.supervised[:limit].any():
            self.cut += 1
            self.lost += count - limit
            yield _part(whole, 0, limit)
        else:
            self.left_out["answer too far"] += 1

    def _unit(self, wholes: Sequence[Example], label: float, is_labelled: bool) -> Iterator[Unit]:
        """A pair, a rated or a labelled row, whose branches are cut, or left out together."""
        limit, longest = self.max_seq_length, max(len(whole.input_ids) for whole in wholes)
        cut = [without_end(_part(whole, 0, limit), self.pad) for whole in wholes]
        if not (is_labelled or all(part.supervised.any() for part in cut)):
            self.left_out["answer too far"] += 1
        elif len(cut) == 2 and np.array_equal(cut[0].input_ids, cut[1].input_ids):
            self.left_out["lacking"] += 1  # they differ after the cut, or not at all as tokens
        else:
            self.cut += longest > limit
            self.lost += sum(max(0, len(whole.input_ids) - limit) for whole in wholes)
            self.good += label == 1
            self.labels[label] += is_labelled
            yield unit_of(cut, label, learn_prompt=self.learn_prompt)

    def _prompt(self, whole: Example, row: Prompted) -> Iterator[Unit]:
        """A prompt, which is never cut: it would ask something else."""
        if len(whole.input_ids) > self.max_seq_length:
            self.left_out["answer too far"] += 1
        else:
            yield prompt_of(whole, row)

    def _look_at(self, row: Row, whole: Example, encoder: Encoder) -> None:
        """Count answers that are marked, and chats that the template makes hard to learn."""
        self.marked += len(row.marked) if isinstance(row, Chat) else 0
        self.without_roles += encoder.lacks_roles(row)
        self.remarks.update(whole.remarks)
        if (end := encoder.unlearned_end(row, whole)) is not None:
            self.endless += 1
            self.end = self.end or end

    def lines(self) -> Iterator[str]:
        if self.classes:
            shown = [f"{name} {self.labels[number]}" for number, name in enumerate(self.classes[:20])]
            yield f"rows of each class: {', '.join(shown)}{', ...' if len(self.classes) > 20 else ''}"
        learned = "" if any(self.labels.values()) or not self.targets else f", {self.targets} of them learned"
        yield f"{self.tokens} tokens in {self.kept_rows} rows{learned}; the longest row has {self.longest}"
        if self.marked:
            why = "marked by weight or loss_weight 0, or by train, training or loss false"
            yield f"{self.marked} answers are not learned: they are {why}"
        if self.split:
            yield (
                f"{self.split} texts of more than max_seq_length {self.max_seq_length} tokens are cut into"
                f" {self.blocks} blocks, which together teach all of them"
            )
        if self.left_out:
            yield f"left out: {self._told_left_out()}"
        if self.prompts:
            begun = "opens a thought, and" if self.prompts == "chat without thoughts" else "ends a thought, and"
            yield (
                f"the prompt of the chat template {begun} {self.remarks[_BEGUN[self.prompts]]} answers begin"
                " otherwise: here and in generation the prompt ends where they begin"
            )

    @property
    def prompts(self) -> PromptForm | None:
        """The form of prompts, if it is not that of the template: most answers begin in another way."""
        return next((form for form, remark in _BEGUN.items() if 2 * self.remarks[remark] > self.kept_rows), None)

    def warnings(self) -> Iterator[str]:
        """The reasons why agents will not learn what these rows are meant to teach."""
        if self.cut:
            yield (
                f"{self.cut} rows cut at max_seq_length {self.max_seq_length}: {self.lost} of"
                f" {self.tokens + self.lost} tokens are never seen; the longest row has {self.longest}"
            )
        for remark in _HIDDEN:
            if self.remarks[remark]:
                yield f"the chat template leaves out the {remark} of {self.remarks[remark]} chats"
        if self.endless:
            follows = f"{self.end!r}, which follows, is not a special token" if self.end.strip() else "nothing follows"
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
        if self.left_out["answer too far"]:
            hint = f"raise max_seq_length (the longest row has {self.longest} tokens)"
        elif self.left_out["refused"]:
            hint = "take a base or a chat_template that shows such chats"
        else:
            hint = f"check that the columns hold text and the chats have assistant turns to learn; read are: {columns}"
        if evaluated:
            hint += "; or choose other rows to evaluate on: val_set_size= or eval_dataset_name="
        lost = "No row is left to evaluate" if evaluated else "No row is left to learn from"
        return DataError(f"{lost}: {self._told_left_out()}.", where=rows.where, hint=hint)

    def _told_left_out(self) -> str:
        reasons: dict[Reason, str] = {
            "lacking": self.lacking,
            "answer too far": f"whose answer begins after max_seq_length {self.max_seq_length}",
            "refused": "that the chat template cannot show"
            f" ({'; '.join(f'{count}: {why}' for why, count in self.refused.most_common(3))})",
        }
        told = ", ".join(
            f"{self.left_out[reason]} {words}" for reason, words in reasons.items() if self.left_out[reason]
        )
        return f"{self.left_out.total()} of {self.rows} rows: {told}"


#: Prompts that are not worded as the template words them, because answers begin so.
_BEGUN: Final[dict[PromptForm, Remark]] = {
    "chat without thoughts": "without thoughts",
    "chat with thoughts": "with thoughts",
}
_HIDDEN: Final[tuple[Remark, ...]] = ("thoughts", "system message", "descriptions of tools")

#: What a row lacks that is left out, where it is not an answer.
_LACKING: Final = {
    "text": "empty",
    "pairs": "without two different answers",
    "good": "without a good answer",
    "labelled": "without a text or a label",
    "prompts": "without a prompt",
}


def _part(whole: Example, start: int, end: int) -> Example:
    """Some tokens of a row, of which the first is not learned."""
    learned = whole.supervised[start:end].copy()
    learned[:1] = False
    return Example(whole.input_ids[start:end], learned)


def _refusal(error: RefusedRowError, row: Row | None, where: str) -> DataError:
    why = str(error).rstrip(".")
    if not isinstance(row, Chat):
        return DataError(
            f"This row cannot be used: {why}.",
            where=where,
            hint="tokenise the rows with the tokenizer of this base, or give them as text",
        )
    return DataError(
        f"The chat template cannot be used for this row: {why}.",
        where=where,
        hint="repair the row, choose another chat_template, or mark what the assistant says with {% generation %}",
    )


#: Rows that are worth the start of more processes, and that are sent to each of them at once.
MANY: Final = 5_000
SENT: Final = 64

Encoded = list[Example] | RefusedRowError
_of_process: Encoder


def encoded(rows: Rows, encoder: Encoder) -> Iterator[tuple[Row | None, Encoded]]:
    """The rows in their order, and of each its branches as tokens, or why there are none.

    Raises:
        DataError: a row is malformed, or a process was ended from outside.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if len(rows) < MANY or cores < 4 or multiprocessing.current_process().daemon:
        yield from ((row, _encoded(encoder, row)) for row in rows)
        return
    each = iter(rows)
    fork = multiprocessing.get_context("fork")  # a fork has the encoder, which cannot be sent
    try:
        with ProcessPoolExecutor(cores - 1, fork, _begin, (encoder,)) as pool:  # one reads and writes
            while part := [*islice(each, 16 * SENT * cores)]:
                yield from zip(part, pool.map(_encoded_there, part, chunksize=SENT), strict=True)
    except BrokenProcessPool as error:
        what, hint = "a process that tokenised rows was ended from outside", "see whether the memory is enough"
        raise DataError(what, where=rows.where, hint=hint) from error


def _begin(encoder: Encoder) -> None:
    global _of_process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    _of_process = encoder


def _encoded_there(row: Row | None) -> Encoded:
    return _encoded(_of_process, row)


def _encoded(encoder: Encoder, row: Row | None) -> Encoded:
    encode: Any = encoder.text if isinstance(row, Labelled) else encoder.encode
    encode = encoder.prompt if isinstance(row, Prompted) else encode
    try:
        return [encode(branch) for branch in branches_of(row)] if row else []
    except RefusedRowError as error:
        return error
