"""A data set as token ids with loss masks: tokenised once, kept as Arrow under its content, memory-mapped.

Only what an assistant says is learned, or all of a plain text; the first token of a row never is, as nothing comes
before it. `tally` says what becomes of rows that are too long, or teach nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from ci_llm.core.durable import make_folders, write_parts
from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.rows import PromptForm, Rows
from ci_llm.data.tally import Tally
from ci_llm.data.units import Unit
from ci_llm.errors import DataError

logger = logging.getLogger(__name__)

#: Raise it when the same rows and tokenizer give other tokens than before, or the file says other things about them:
#: old files are then not found.
FORMAT = 13
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.uint8())),
        ("spans", pa.list_(pa.int32())),  # of a pair, a rated or a labelled row; see `Unit`
        ("label", pa.float64()),
        ("row", pa.int64()),
        ("digest", pa.uint64()),  # xxh3-64 of the token ids, of a pair those of the chosen row
        ("check", pa.uint64()),  # xxh3-64 of the token ids, the loss mask, spans and label
    ]
)
ROWS_PER_CHUNK = 1000
#: The key of the metadata of the last record batch, which say what was found in all rows.
FACTS = b"ci_llm"
SHOWN_CHARACTERS = 1000


@dataclass(frozen=True)
class Facts:
    """What tokenising has found in all rows together.

    Attributes:
        fingerprint: xxh3-128 of all token ids and loss masks: what a run learns from, whatever file it came from.
        tokens, targets: how many there are, and how many are learned.
        longest: tokens of the longest row, as it is kept.
        cut: rows that are cut at their end.
        good: rated rows that are good.
        whole: true if no row was cut, or split into blocks.
        prompts: the form of prompts, if it is not that of the template.
        lines: for people, about the rows and their tokens.
        warnings: lines about what agents will not learn from these rows.
    """

    fingerprint: str
    tokens: int
    targets: int
    longest: int
    cut: int
    good: int
    whole: bool
    prompts: PromptForm | None
    lines: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class TokenizedRows:
    """Tokenised rows, memory-mapped: `[i]` is an `Example`, and no row is held in memory.

    Attributes:
        rows: the canonical rows they were made from.
        path: the Arrow file.
    """

    rows: Rows
    path: Path

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Example:
        """Example `number`.

        Raises:
            IndexError: there is no such row.
            DataError: it is not what was written. The file is removed then.
        """
        row, columns = range(len(self))[number], self._table
        example = Example(_numbers(columns["input_ids"][row].values), _numbers(columns["supervised"][row].values, bool))
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
        """See `Facts`."""
        return self.facts.fingerprint

    def whole_below(self, max_seq_length: int) -> int:
        """Rows of fewer tokens are whole: where none is cut, those of `max_seq_length` are as well."""
        return max_seq_length + self.facts.whole

    @property
    def description(self) -> list[str]:
        """Lines about the rows and their tokens, for people; the last one shows a row and its loss mask."""
        return [*self.rows.description, *self.facts.lines]

    @cached_property
    def row_numbers(self) -> list[int]:
        """The number in `rows` of each tokenised row."""
        return self._table["row"].to_pylist()  # type: ignore[no-any-return]

    def num_in(self, others: TokenizedRows) -> int:
        """The number of these rows that have the same token ids as one of the others, in all of their blocks."""
        numbers = np.array(self.row_numbers)
        return len(np.unique(numbers)) - len(np.unique(numbers[~np.isin(self._digests, others._digests)]))

    def require_below(self, count: int) -> None:
        """Refuse tokens that the base has no embedding for.

        Args:
            count: how many embeddings the base has.

        Raises:
            DataError: a row has such a token.
        """
        for chunk in self._table.to_batches():
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
        return np.concatenate([_numbers(digests, np.uint64) for digests in self._table["digest"].chunks])

    @cached_property
    def facts(self) -> Facts:
        """What is known of all rows together."""
        file = _opened(self.path)
        _, metadata = file.get_batch_with_custom_metadata(file.num_record_batches - 1)
        return Facts(**json.loads(metadata[FACTS]))

    @cached_property
    def _table(self) -> Any:
        return _opened(self.path).read_all()


def _opened(path: Path) -> Any:
    return pa.ipc.open_file(pa.memory_map(str(path)))


def tokenize(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_seq_length: int,
    cache_folder: Path | None = None,
    train_on_prompt: bool = False,
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
        learn_preferred: learn every token of the chosen row of a pair.
        classes: the names of the classes of labelled rows, by number; without any, labels are numbers.
        pad: leave out this token at the end of pairs, rated and labelled rows.
        evaluated: the rows are to evaluate on, for messages.
        chat_date: the day that the clock of a chat template says; None: that of the call.
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
    content += [*["train_on_prompt"] * train_on_prompt, *["learn_preferred"] * learn_preferred]
    content += [*classes, *([] if pad is None else [pad]), *([chat_date] if encoder.has_clock else [])]
    name = f"{xxhash.xxh3_128_hexdigest(json.dumps(content).encode())}.arrow"
    usual = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets"), "ci_llm").expanduser()
    path = (cache_folder or usual) / name
    with main_process_first or nullcontext():
        if not _is_whole(path):
            tally = Tally(max_seq_length, learn_prompt=learn_preferred, classes=(*classes,), pad=pad)
            _write(path, rows, encoder, tally, evaluated=evaluated)
    return TokenizedRows(rows, path)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 of vocabulary, rules and special tokens; not of padding and truncation, which a call sets."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["padding"] = rules["truncation"] = None
    whole = json.dumps([rules, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return str(xxhash.xxh3_128_hexdigest(whole.encode()))


def _is_whole(path: Path) -> bool:
    """True if the file is there, to its end, with the columns of this version. A row is checked when it is read."""
    try:
        file = _opened(path)
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
        write_parts(path, _arrow_file(chain([first], kept), partial(_facts, rows, encoder, tally, first)))
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


def _arrow_file(examples: Iterator[tuple[int, Example]], facts: Callable[[str], Facts]) -> Iterator[bytes]:
    """The bytes of an Arrow file: batches of rows, and last an empty one with the facts, known only after all rows.

    Args:
        facts: takes the fingerprint.
    """
    written, digest = _Written(), xxhash.xxh3_128()
    with pa.ipc.new_file(written, SCHEMA) as writer:
        while chunk := list(islice(examples, ROWS_PER_CHUNK)):
            writer.write_batch(_batch([*zip(*(_cells(*each, digest) for each in chunk), strict=True)]))
            yield written.take()
        found = json.dumps(asdict(facts(digest.hexdigest())))
        writer.write_batch(_batch([()] * len(SCHEMA)), custom_metadata={FACTS: found})
    yield written.take()


def _facts(rows: Rows, encoder: Encoder, tally: Tally, first: tuple[int, Example], fingerprint: str) -> Facts:
    lines = [
        encoder.describe(rows[first[0]]),
        *tally.lines(),
        f"first row, {_SHOWN_AS.get(rows.form.kind, 'learned in ⟦ ⟧')}: {_shown(first[1], encoder, tally.classes)}",
    ]
    return Facts(
        fingerprint=fingerprint,
        tokens=tally.tokens,
        targets=tally.targets,
        longest=min(tally.longest, tally.max_seq_length),
        cut=tally.cut,
        good=tally.good,
        whole=not tally.cut + tally.split,
        prompts=tally.prompts,
        lines=lines,
        warnings=[*tally.warnings()],
    )


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
_SHOWN_AS: Final = {"labelled": "with its label", "prompts": "which agents answer"}


def _shown(example: Example, encoder: Encoder, classes: Sequence[str] = ()) -> str:
    """The row as text in one line, what is learned in brackets; of a pair both rows, of others the label."""
    if isinstance(example, Unit):
        texts = [_shown(branch, encoder) for branch in example.branches]
        if len(texts) == 2:
            return " | rejected: ".join(texts)
        if example.is_prompt:
            return texts[0]
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


# `pyarrow.array` and the `to_numpy` of an array import pandas.


def _batch(columns: Sequence[Sequence[Any]]) -> Any:
    arrays = [_array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


def _array(values: Any, kind: Any) -> Any:
    """An array of numbers, or of lists of numbers."""
    if pa.types.is_list(kind):
        ends = pa.py_buffer(np.cumsum([0, *map(len, values)], dtype=np.int32))
        of_all = _array(np.concatenate([[], *values]), kind.value_type)
        return pa.Array.from_buffers(kind, len(values), [None, ends], children=[of_all])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.array(values, kind.to_pandas_dtype()))])


def _numbers(values: Any, kind: Any = np.int32) -> np.ndarray:
    """An array of numbers as it lies in memory."""
    return np.frombuffer(values.buffers()[1], kind, len(values), np.dtype(kind).itemsize * values.offset)
