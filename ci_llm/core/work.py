"""The progress of work with an end, such as tokenising rows: whoever does it counts, and whoever listens shows it.

As with `logging`, the two do not know each other. A run's log listens (logs/run_log.py); without one, counting costs
next to nothing and shows nothing. What Transformers shows by progress bars is counted here as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass
class Work:
    """Work that has begun.

    Attributes:
        what: a word for people: "tokenise".
        total: parts in all.
        parts: what is counted: "rows".
        done: parts that are done.
        ended: it is over, be it by an error.
        began_at: `time.monotonic()`.
    """

    what: str
    total: int
    parts: str
    done: int = 0
    ended: bool = False
    began_at: float = field(default_factory=time.monotonic)

    def advance_to(self, done: int) -> None:
        """Tell the listeners the number of parts that are done."""
        self.done = done
        _tell(self)


Listener: TypeAlias = Callable[[Work], None]
#: Each is called when work begins, after every part, and when it has ended; in the thread that works.
listeners: Final[list[Listener]] = []


@contextmanager
def working(what: str, total: int, parts: str) -> Iterator[Work]:
    """Announce work for as long as the block lasts; for the arguments see `Work`."""
    work = Work(what, total, parts)
    _tell(work)
    try:
        yield work
    finally:
        work.ended = True
        _tell(work)


def counted(items: Iterable[T], what: str, total: int, parts: str) -> Iterator[T]:
    """The items, announced as work of which each is a part; for the arguments see `Work`."""
    with working(what, total, parts) as work:
        for number, item in enumerate(items, start=1):
            yield item
            work.advance_to(number)


def _tell(work: Work) -> None:
    for listener in listeners:
        listener(work)


@contextmanager
def weights_counted() -> Iterator[None]:
    """Count the weights that Transformers loads or saves, and show none of its progress bars."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging as transformers_logging

    shown, hook = transformers_logging.is_progress_bar_enabled(), transformers_logging.set_tqdm_hook(_count)
    bar = gguf_reader.tqdm  # of tqdm itself, which knows neither hook nor switch
    gguf_reader.tqdm = lambda tensors, **_: counted(tensors, "dequantise", len(tensors), "tensors")
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        transformers_logging.set_tqdm_hook(hook)
        if shown:
            transformers_logging.enable_progress_bar()


def _count(bar: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The items of a progress bar of Transformers, counted where they are weights; other bars stay."""
    if len(arguments) == 1 and options.get("desc") == "Loading weights":
        return counted(arguments[0], "load", len(arguments[0]), "weights")
    return bar(*arguments, **options)
