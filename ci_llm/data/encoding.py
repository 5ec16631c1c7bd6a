"""All rows of a data set, encoded; many of them in several processes, with the same result."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, Final

from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.rows import Labelled, Prompted, Row, Rows
from ci_llm.data.turns import RefusedRowError
from ci_llm.data.units import branches_of
from ci_llm.errors import DataError

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
    each, fork = iter(rows), multiprocessing.get_context("fork")  # a fork has the encoder, which cannot be sent
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
