"""A data set as token ids with loss masks: tokenised once, kept as Arrow under its content, memory-mapped.

Only what an assistant says is learned, or all of a plain text; the first token of a row never is, as nothing comes
before it. Rows too long are cut into blocks, cut at the end or left out; rows with nothing left to learn are left out.
A `Tally` counts all of these, for the lines and errors that say so.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from ci_llm.core.durable import make_folders, write_parts
from ci_llm.core.work import counted
from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.encoding import encoded
from ci_llm.data.rows import Chat, Completion, Labelled, Pair, PromptForm, Rated, Row, Rows
from ci_llm.data.turns import RefusedRowError, Remark
from ci_llm.data.units import Unit, branches_of, label_of, number_of, unit_of, without_end
from ci_llm.errors import DataError

logger = logging.getLogger(__name__)

_MARKED = "marked by weight or loss_weight 0, or by train, training or loss false"


#: Why a row is left out.
Reason = Literal["lacking", "unlearned", "answer too far", "too long", "refused"]


@dataclass
class Tally:
    """Counts of rows kept and cut, and of those left out by their reason."""

    max_seq_length: int
    long_rows: str = "truncate"
    rows: int = 0
    kept_rows: int = 0
    cut: int = 0
    lost: int = 0
    split: int = 0
    blocks: int = 0
    left_out: Counter[Reason] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    remarks: Counter[Remark] = field(default_factory=Counter)
    lacking: str = "without an answer"
    without_roles: int = 0
    marked: int = 0
    endless: int = 0
    end: str = ""
    longest: int = 0
    tokens: int = 0
    targets: int = 0
    rated: bool = False
    good: int = 0
    learn_prompt: bool = False
    classes: tuple[str, ...] = ()
    pad: int | None = None
    labels: Counter[float] = field(default_factory=Counter)

    def kept(self, rows: Rows, encoder: Encoder) -> Iterator[tuple[int, Example]]:
        """The rows in which there is something to learn, cut, with their numbers."""
        if "text" in rows.form.columns:  # plain text has no answers
            self.lacking = "empty"
        self.rated = rows.form.kind == "rated" and not rows.are_answers
        if rows.form.kind in _LACKING:
            self.lacking = _LACKING[rows.form.kind]
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
            taught = [len(whole.input_ids) if is_labelled else whole.supervised.any() for whole in wholes]
            if row is None or not all(taught):
                self.left_out["unlearned" if row is None and rows.is_marked(number) else "lacking"] += 1
                continue
            if not is_labelled:
                self._look_at(branches[0], wholes[0], encoder)
            self.longest = max(self.longest, *(len(whole.input_ids) for whole in wholes))
            if isinstance(row, Pair | Rated | Labelled):
                where = rows.place(number)
                label = number_of(row.label, self.classes, where) if isinstance(row, Labelled) else label_of(row)
                examples: Iterator[Example] = self._unit(wholes, label, is_labelled)
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
        elif self.long_rows == "drop":
            self.left_out["too long"] += 1
        elif self.long_rows == "split" and isinstance(row, Completion) and row.prompt is None:
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
        if longest > limit and self.long_rows == "drop":
            self.left_out["too long"] += 1
        elif not (is_labelled or all(part.supervised.any() for part in cut)):
            self.left_out["answer too far"] += 1
        elif len(cut) == 2 and np.array_equal(cut[0].input_ids, cut[1].input_ids):
            self.left_out["lacking"] += 1  # they differ after the cut, or not at all as tokens
        else:
            self.cut += longest > limit
            self.lost += sum(max(0, len(whole.input_ids) - limit) for whole in wholes)
            self.good += label == 1
            self.labels[label] += is_labelled
            yield unit_of(cut, label, learn_prompt=self.learn_prompt)

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
        elif +self.labels:
            numbers = sorted(self.labels.elements())
            yield f"labels from {numbers[0]:g} to {numbers[-1]:g}, in the mean {fmean(numbers):g}"
        if self.rated:
            yield f"{self.good} rows are good, and {self.kept_rows - self.good} are bad"
        learned = "" if any(self.labels.values()) else f", {self.targets} of them learned"
        yield f"{self.tokens} tokens in {self.kept_rows} rows{learned}; the longest row has {self.longest}"
        if self.marked:
            yield f"{self.marked} answers are not learned: they are {_MARKED}"
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
        """How prompts are worded, if not as the template words them: most answers begin in another way."""
        return next((form for form, remark in _BEGUN.items() if 2 * self.remarks[remark] > self.kept_rows), None)

    def warnings(self) -> Iterator[str]:
        """Why agents will not learn what these rows are meant to teach."""
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
        if self.left_out["answer too far"] or self.left_out["too long"]:
            hint = f"raise max_seq_length (the longest row has {self.longest} tokens)"
        elif self.left_out["unlearned"]:
            hint = "weight 1, or no weight, lets an answer be learned"
        elif self.left_out["refused"]:
            hint = "take a base or a chat_template that shows such chats"
        else:
            hint = f"check that the columns hold text and the chats have assistant turns; read are: {columns}"
        if evaluated:
            hint += "; or choose other rows to evaluate on: val_set_size= or eval_dataset_name="
        lost = "No row is left to evaluate" if evaluated else "No row is left to learn from"
        return DataError(f"{lost}: {self._told_left_out()}.", where=rows.where, hint=hint)

    def _told_left_out(self) -> str:
        reasons: dict[Reason, str] = {
            "lacking": self.lacking,
            "unlearned": f"whose answers are all {_MARKED}",
            "answer too far": f"whose answer begins after max_seq_length {self.max_seq_length}",
            "too long": f"of more than max_seq_length {self.max_seq_length} tokens",
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
_LACKING: Final = {"pairs": "without two different answers", "labelled": "without a text or a label"}


def _part(whole: Example, start: int, end: int) -> Example:
    """Some tokens of a row, of which the first is not learned."""
    learned = whole.supervised[start:end].copy()
    learned[:1] = False
    return Example(whole.input_ids[start:end], learned)


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


#: Raise it when the same rows and tokenizer give other tokens than before, or the file says other things about them:
#: old files are then not found.
FORMAT = 11
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("spans", pa.list_(pa.int32())),  # of a pair, a rated or a labelled row; see `Unit`
        ("label", pa.float64()),
        ("row", pa.int64()),
        ("digest", pa.uint64()),  # xxh3-64 of the token ids, of a pair those of the chosen row
        ("check", pa.uint64()),  # xxh3-64 of the token ids, the loss mask, spans and label
    ]
)
ROWS_PER_CHUNK = 1000
#: A read leaves about 16 kB resident.
READS_PER_MAPPING = 1000
#: The key of the metadata of the last record batch, which say what was found in all rows.
FACTS = b"ci_llm"
SHOWN_CHARACTERS = 1000


@dataclass(frozen=True)
class TokenizedRows:
    """Tokenised rows, memory-mapped: `[i]` is an `Example`, and no row is held in memory.

    The file is mapped again from time to time: what was read of it would stay resident, in the end all of it.

    Attributes:
        rows: the canonical rows they were made from.
        path: the Arrow file.
    """

    rows: Rows
    path: Path
    _reads: Iterator[int] = field(default_factory=lambda: count(1), init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> Example:
        """Example `number`.

        Raises:
            IndexError: there are not so many.
            DataError: it is not what was written. The file is removed then.
        """
        chunk, row = divmod(range(len(self))[number], self._chunk_rows)
        if next(self._reads) % READS_PER_MAPPING == 0:
            self.__dict__.pop("_file", None)
        columns = self._file.get_batch(chunk)
        example = Example(_numbers(columns["input_ids"][row].values), _flags(columns["supervised"][row].values))
        if flat := columns["spans"][row].as_py():
            spans = tuple(zip(flat[::2], flat[1::2], strict=True))
            example = Unit(example.input_ids, example.supervised, spans, columns["label"][row].as_py())
        if xxhash.xxh3_64_intdigest(_content(example)) != columns["check"][row].as_py():
            with contextlib.suppress(OSError):  # so that the next attempt makes it again
                self.path.unlink()
            hint = "call the same again: the file is made again, and a run resumes from its newest checkpoint"
            raise DataError(f"row {number} of the tokens is damaged", where=str(self.path), hint=hint)
        return example

    def __reduce__(self) -> Any:
        """Loader workers that are not forked open the file themselves."""
        return TokenizedRows, (self.rows, self.path)

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of all token ids and loss masks: what a run learns from, whatever file it came from."""
        return str(self._facts["fingerprint"])

    @property
    def num_targets(self) -> int:
        """Tokens that are learned, of all rows."""
        return int(self._facts["targets"])

    @property
    def num_cut(self) -> int:
        """How many of the rows are cut at their end."""
        return int(self._facts["cut"])

    @property
    def num_good(self) -> int:
        """How many of the rated rows are good."""
        return int(self._facts["good"])

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows together."""
        return int(self._facts["tokens"])

    @property
    def longest(self) -> int:
        """Tokens of the longest row, as it is kept."""
        return int(self._facts["longest"])

    def whole_below(self, max_seq_length: int) -> int:
        """Rows of fewer tokens are whole: where none is cut, those of `max_seq_length` are as well."""
        return max_seq_length + bool(self._facts["whole"])

    @property
    def prompts(self) -> PromptForm | None:
        """How prompts are worded, if not as the template words them."""
        form: PromptForm | None = self._facts["prompts"]
        return form

    @property
    def description(self) -> list[str]:
        """Lines about the rows and their tokens, for people; the last one shows a row and its loss mask."""
        return [*self.rows.description, *self._facts["lines"]]

    @property
    def warnings(self) -> list[str]:
        """Lines about what agents will not learn from these rows."""
        return list(self._facts["warnings"])

    @cached_property
    def row_numbers(self) -> list[int]:
        """The number in `rows` of each tokenised row."""
        return [
            number for chunk in range(self._num_chunks) for number in self._file.get_batch(chunk)["row"].to_pylist()
        ]

    def num_in(self, others: TokenizedRows) -> int:
        """How many of these rows have the same token ids as one of the others, in all of their blocks."""
        numbers = np.array(self.row_numbers)
        return len(np.unique(numbers)) - len(np.unique(numbers[~np.isin(self._digests, others._digests)]))

    def require_below(self, count: int) -> None:
        """Refuse tokens that the base has no embedding for.

        Args:
            count: how many embeddings the base has.

        Raises:
            DataError: a row has such a token.
        """
        for chunk in map(self._file.get_batch, range(self._num_chunks)):
            ids = _numbers(chunk["input_ids"].flatten())
            beyond = np.flatnonzero(ids >= count)
            if len(beyond):
                row = chunk["row"][chunk["input_ids"].value_parent_indices()[int(beyond[0])].as_py()].as_py()
                raise DataError(
                    f"a row has token {ids[beyond[0]]}, and the base has embeddings for tokens 0 to {count - 1} only",
                    where=self.rows.place(row),
                    hint="take the tokenizer that belongs to the base; if tokens were added to it, resize the base "
                    "(model.resize_token_embeddings) and save it with the tokenizer",
                )

    @property
    def _digests(self) -> np.ndarray:
        chunks = (self._file.get_batch(chunk)["digest"] for chunk in range(self._num_chunks))
        return np.concatenate([_numbers(digests, np.uint64) for digests in chunks])

    @property
    def _num_chunks(self) -> int:
        return int(self._file.num_record_batches) - 1  # the last batch says what was found in all rows

    @cached_property
    def _chunk_rows(self) -> int:
        """Rows of every chunk, except that the last one may have fewer."""
        return int(self._file.get_batch(0).num_rows)

    @cached_property
    def _num_rows(self) -> int:
        last = self._num_chunks - 1
        return last * self._chunk_rows + int(self._file.get_batch(last).num_rows)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        _, metadata = self._file.get_batch_with_custom_metadata(self._file.num_record_batches - 1)
        facts: dict[str, Any] = json.loads(metadata[FACTS])
        return facts

    @cached_property
    def _file(self) -> Any:
        return pa.ipc.open_file(pa.memory_map(str(self.path)))


def _default_cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets"), "ci_llm").expanduser()


def tokenize(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_seq_length: int,
    cache_folder: Path | None = None,
    train_on_prompt: bool = False,
    long_rows: str = "truncate",
    learn_preferred: bool = False,
    classes: Sequence[str] = (),
    pad: int | None = None,
    evaluated: bool = False,
    chat_date: str | None = None,
    main_process_first: AbstractContextManager[Any] | None = None,
) -> TokenizedRows:
    """Tokenise the rows, unless the cache folder holds the same rows by the same tokenizer already.

    Args:
        max_seq_length: tokens per row, at least 2.
        cache_folder: made if it is missing; may be shared by runs, processes and machines. None: that in the cache of
            `datasets`, which HF_DATASETS_CACHE or HF_HOME may have moved.
        train_on_prompt: learn every token of a row, and not only what the assistant says.
        long_rows: what becomes of longer rows: truncate, drop or split; see the key of this name.
        learn_preferred: learn every token of the chosen row of a pair.
        classes: the names of the classes of labelled rows, by number; without any, labels are numbers.
        pad: leave out this token at the end of pairs, rated and labelled rows.
        evaluated: the rows are to evaluate on, for messages.
        chat_date: what the clock of a chat template says; see the key of this name.
        main_process_first: a context that the main process enters and leaves before the others enter it.

    Raises:
        DataError: the chat template fails on a row, nothing is left to learn, or the cache cannot be written.
        ModelError: the tokenizer cannot tell which characters a token stands for.

    Examples:
        >>> rows = ci_llm.load_rows(ci_llm.Config(max_train_samples=20, eval_samples=9), "train")
        >>> tokenizer = ci_llm.load_base("embedded").tokenizer
        >>> tokens = ci_llm.tokenize(rows, tokenizer, max_seq_length=256, cache_folder=folder)
        >>> len(tokens), tokens[0].input_ids.dtype
        (20, dtype('int32'))
    """
    encoder = Encoder(tokenizer, train_on_prompt=train_on_prompt, chat_date=chat_date)
    content = [FORMAT, rows.fingerprint, tokenizer_fingerprint(tokenizer), encoder.template, max_seq_length]
    content += [*["train_on_prompt"] * train_on_prompt, *["learn_preferred"] * learn_preferred, long_rows]
    content += [*classes, *([] if pad is None else [pad]), *([chat_date] if encoder.has_clock else [])]
    name = f"{xxhash.xxh3_128_hexdigest(json.dumps(content).encode())}.arrow"
    path = (cache_folder or _default_cache()) / name
    with main_process_first or nullcontext():
        if not _is_whole(path):
            tally = Tally(max_seq_length, long_rows, learn_prompt=learn_preferred, classes=(*classes,), pad=pad)
            _write(path, rows, encoder, tally, evaluated=evaluated)
    return TokenizedRows(rows, path)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 of vocabulary, rules and special tokens; not of padding and truncation, which a call sets."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    whole = json.dumps([rules, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return str(xxhash.xxh3_128_hexdigest(whole.encode()))


def _is_whole(path: Path) -> bool:
    """Whether the file is there, to its end, with the columns of this version. A row is checked when it is read."""
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        _, metadata = file.get_batch_with_custom_metadata(file.num_record_batches - 1)
        return FACTS in (metadata or {}) and file.schema.equals(SCHEMA)
    except FileNotFoundError:
        return False
    except (OSError, pa.ArrowException) as error:
        logger.warning(f"the tokens of an earlier run are damaged and made again: {path}: {error}")
        return False


def _content(example: Example) -> bytes:
    content = example.input_ids.tobytes() + example.supervised.tobytes()
    if not isinstance(example, Unit):
        return content
    label = int(example.label) if float(example.label).is_integer() else example.label
    if len(example.spans) == 2:  # -1 comes first, as in the fingerprints of pairs before there were margins
        return content + repr((example.spans, -1, *([label] if label else []))).encode()
    return content + repr((example.spans, label)).encode()


def _write(path: Path, rows: Rows, encoder: Encoder, tally: Tally, *, evaluated: bool) -> None:
    kept = tally.kept(rows, encoder)
    first = next(kept, None)
    if first is None:
        raise tally.nothing_left(rows, evaluated=evaluated)
    try:
        make_folders(path.parent)
        write_parts(path, _arrow_file(_batches(rows, encoder, tally, first, kept)))
    except OSError as error:
        raise DataError(
            f"The tokenised rows cannot be kept: {error.strerror}.",
            where=str(path.parent),
            hint="make the folder writable and free some space on its disk",
        ) from error


class _Written(io.BytesIO):
    """A file for Arrow to write to. `take` gives what was written since the last call, so memory holds no more."""

    _taken = 0

    def tell(self) -> int:
        return self._taken + super().tell()

    def take(self) -> bytes:
        part = self.getvalue()
        self._taken += len(part)
        self.seek(0)
        self.truncate()
        return part


def _arrow_file(batches: Iterator[tuple[Any, dict[bytes, str] | None]]) -> Iterator[bytes]:
    """The bytes of an Arrow file of record batches with their metadata."""
    written = _Written()
    with pa.ipc.new_file(written, SCHEMA) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
            yield written.take()
    yield written.take()


def _batches(
    rows: Rows, encoder: Encoder, tally: Tally, first: tuple[int, Example], rest: Iterator[tuple[int, Example]]
) -> Iterator[tuple[Any, dict[bytes, str] | None]]:
    """Batches of rows, and last an empty one with what is known only when all rows are tokenised."""
    digest = xxhash.xxh3_128()
    for chunk in _chunks(chain([first], rest), digest):
        yield chunk, None
    lines = [
        encoder.describe(rows[first[0]]),
        *tally.lines(),
        f"first row, {_SHOWN_AS.get(rows.form.kind, 'learned in ⟦ ⟧')}: {_shown(first[1], encoder, tally.classes)}",
    ]
    facts = {"fingerprint": digest.hexdigest(), "targets": tally.targets, "cut": tally.cut, "lines": lines}
    facts |= {"tokens": tally.tokens, "longest": min(tally.longest, tally.max_seq_length), "good": tally.good}
    facts |= {"whole": not tally.cut + tally.split, "warnings": [*tally.warnings()], "prompts": tally.prompts}
    yield pa.RecordBatch.from_pylist([], schema=SCHEMA), {FACTS: json.dumps(facts)}


def _chunks(examples: Iterator[tuple[int, Example]], digest: Any) -> Iterator[Any]:
    while chunk := list(islice(examples, ROWS_PER_CHUNK)):
        columns = zip(*(_cells(number, example, digest) for number, example in chunk), strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
        yield pa.record_batch(arrays, schema=SCHEMA)


def _cells(number: int, example: Example, digest: Any) -> tuple[Any, ...]:
    """A row as `SCHEMA` has it; the digest takes it in."""
    content = _content(example)
    digest.update(len(example.input_ids).to_bytes(8, "little"))
    digest.update(content)
    unit = example if isinstance(example, Unit) else None
    first = unit.branches[0] if unit else example
    spans = [at for span in unit.spans for at in span] if unit else []
    prints = [xxhash.xxh3_64_intdigest(each) for each in (first.input_ids.tobytes(), content)]
    return example.input_ids, example.supervised, spans, unit.label if unit else 0, number, *prints


#: How the first row is shown, where nothing of it is learned.
_SHOWN_AS: Final = {"labelled": "with its label"}


def _shown(example: Example, encoder: Encoder, classes: Sequence[str] = ()) -> str:
    """The row as text in one line, what is learned in brackets; of a pair both rows, of others the label."""
    if isinstance(example, Unit):
        texts = [_shown(branch, encoder) for branch in example.branches]
        if len(texts) == 2:
            return " | rejected: ".join(texts)
        label = "good" if example.label else "bad"
        if not example.supervised.any():
            label = classes[int(example.label)] if classes else f"{example.label:g}"
        return f"{label}: {texts[0]}"
    parts = []
    for learned, run in groupby(range(len(example.input_ids)), key=lambda at: bool(example.supervised[at])):
        text = encoder.decode(example.input_ids[list(run)])
        parts.append(f"⟦{text}⟧" if learned else text)
    shown = "".join(parts).replace("\n", "⏎")
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + " ..."


# An array's own `to_numpy` imports pandas.


def _numbers(values: Any, kind: Any = np.int32) -> np.ndarray:
    """An array of numbers as it lies in memory."""
    return np.frombuffer(values.buffers()[1], kind, len(values), np.dtype(kind).itemsize * values.offset)


def _flags(values: Any) -> np.ndarray:
    """An array of booleans, which takes a bit for each."""
    first, bits = divmod(values.offset, 8)
    packed = np.frombuffer(values.buffers()[1], np.uint8, -(-(bits + len(values)) // 8), first)
    return np.unpackbits(packed, count=bits + len(values), bitorder="little")[bits:].view(bool)
