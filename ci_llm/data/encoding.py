"""All rows of a data set, encoded; in several processes where that takes long, with the same result."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.rows import Labelled, Row, Rows
from ci_llm.data.turns import RefusedRowError
from ci_llm.data.units import branches_of
from ci_llm.errors import DataError

#: Rows that tell how long the others take.
LOOKED_AT: Final = 64
#: Seconds that are worth the start of more processes.
LONG: Final = 3.0
#: More would wait for the one that reads and writes.
MOST: Final = 16

Encoded = list[Example] | RefusedRowError


def encoded(rows: Rows, encoder: Encoder) -> Iterator[tuple[Row | None, Encoded]]:
    """The rows in their order, and of each its branches as tokens, or why there are none.

    Raises:
        DataError: a row is malformed, or a process was ended from outside.
    """
    began, others = time.monotonic(), None
    try:
        for number, row in enumerate(rows):
            if number == LOOKED_AT:
                others = _others(rows, encoder, number, time.monotonic() - began)
            yield row, next(others) if others else _encoded(row, encoder)
    finally:
        if others:
            others.close()


def _encoded(row: Row | None, encoder: Encoder) -> Encoded:
    encode: Any = encoder.text if isinstance(row, Labelled) else encoder.encode
    try:
        return [encode(branch) for branch in branches_of(row)] if row else []
    except RefusedRowError as error:
        return error


def _others(rows: Rows, encoder: Encoder, first: int, seconds: float) -> Any:
    """The rows from `first` on as several processes encode them; None if one is as good."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = min(cores - 1, MOST)  # one reads and writes: on two cores, two more processes are no faster
    is_long = seconds / first * (len(rows) - first) > LONG
    return _from_processes(rows, encoder, first, count) if is_long and count > 1 and _may_fork() else None


def _may_fork() -> bool:
    return not multiprocessing.current_process().daemon and "fork" in multiprocessing.get_all_start_methods()


def _from_processes(rows: Rows, encoder: Encoder, first: int, count: int) -> Iterator[Encoded]:
    """Each process takes every `count`th row, and writes to a pipe of its own, which bounds how far it is ahead.

    They are forked: rows are not sent. A process that loses its reader ends, and the pipe of one that was ended is
    empty: a pool would wait in both cases.
    """
    fork, readers, workers = multiprocessing.get_context("fork"), list[Any](), list[Any]()
    try:
        for place in range(count):
            reader, writer = fork.Pipe(duplex=False)
            workers.append(
                fork.Process(target=_work, args=(writer, rows, encoder, range(first + place, len(rows), count)))
            )
            workers[-1].daemon = True
            workers[-1].start()
            writer.close()
            readers.append(reader)
        for number in range(first, len(rows)):
            yield readers[(number - first) % count].recv()
    except EOFError as error:
        what, hint = "a process that tokenised rows was ended from outside", "see whether the memory is enough"
        raise DataError(what, where=rows.where, hint=hint) from error
    finally:
        for worker, reader in zip(workers, readers, strict=False):
            worker.kill()
            worker.join()
            reader.close()


def _work(writer: Any, rows: Rows, encoder: Encoder, numbers: Sequence[int]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    for number in numbers:
        try:
            row = rows[number]
        except DataError:  # the reader of the results meets it as well, and says so
            return
        writer.send(_encoded(row, encoder))
