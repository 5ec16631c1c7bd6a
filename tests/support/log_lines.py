"""The lines that the package logs, as a list or by a call for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Handler(logging.Handler):
    def __init__(self, call: Callable[[str], object]) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        self._call(record.getMessage())


@contextmanager
def on_log(call: Callable[[str], object]) -> Iterator[None]:
    """Call it with every message of the level INFO and above that `ci_llm` logs, in the thread that logs."""
    logger, handler = logging.getLogger("ci_llm"), _Handler(call)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged in the block."""
    lines: list[str] = []
    with on_log(lines.append):
        yield lines
