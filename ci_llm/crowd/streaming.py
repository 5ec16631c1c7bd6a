"""The text of an answer while it is generated: whole characters only, and nothing that a stop string may still cut."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from ci_llm.errors import BadInput

T = TypeVar("T")

#: What a decoder writes for bytes that are no character, or not yet.
_INCOMPLETE = "\ufffd"
#: A token that stands for one byte, as in Llama 2's vocabulary: several in a row are decoded together.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def stop_strings_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """One stop string, several or None, as a tuple.

    Raises:
        BadInput: one is empty: every text would end before it begins.
    """
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in strings:
        raise BadInput("a stop string is empty", where="stop_strings", hint="leave it out")
    return strings


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [at for at in (text.find(string) for string in stop_strings) if at >= 0]
    return text[: min(found)] if found else text


def held_back(text: str, stop_strings: Sequence[str]) -> int:
    """How many characters at the end of `text` a stop string may begin with."""
    longest = max(map(len, stop_strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in stop_strings)), 0)


class TextSoFar:
    """The text of an answer that still grows: what its token ids have settled, and pieces of it; joined, the pieces
    are the whole text.

    Args:
        tokenizer: decodes the ids; special tokens are left out.
        stop_strings: the text ends before the first of them.
        emit: called with each piece.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        emit: Callable[[str], None] = lambda piece: None,
    ) -> None:
        self._tokenizer, self._stop_strings, self._emit = tokenizer, stop_strings, emit
        self._emitted = ""

    def update(self, ids: Sequence[int]) -> bool:
        """Emit what all ids so far have settled; True if a stop string is in it."""
        text = self._decode(self._settled(ids)).rstrip(_INCOMPLETE)
        kept = cut(text, self._stop_strings)
        if len(kept) < len(text):
            self._advance(kept)
            return True
        if self._tokenizer.clean_up_tokenization_spaces:  # a sign that follows takes the space away
            text = text[: max(0, text.rfind(" "))]
        self._advance(text[: len(text) - held_back(text, self._stop_strings)])
        return False

    def finish(self, ids: Sequence[int]) -> None:
        """Emit what is left of the text of all ids."""
        self._advance(cut(self._decode(ids), self._stop_strings))

    def _advance(self, text: str) -> None:
        if len(text) > len(self._emitted):
            self._emit(text[len(self._emitted) :])
            self._emitted = text

    def _settled(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids without a run of byte tokens at their end: one more byte may change what all of them mean."""
        end = len(ids)
        while end and _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(int(ids[end - 1])))):
            end -= 1
        return ids[:end]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Stream(Generic[T]):
    """An iterator over the pieces of a text that a thread produces, with a result at the end.

    Args:
        produce: runs in the thread; it is given a function that takes a piece, and one that says whether to stop.

    The thread stops when the iterator is closed: by `close`, at the end of a `with` block, or when it is collected.
    """

    def __init__(self, produce: Callable[[Callable[[str], None], Callable[[], bool]], T]) -> None:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        stopping = threading.Event()
        outcome: list[T | BaseException] = []

        def run() -> None:
            # The thread holds no reference to the iterator, so the iterator can be collected while the thread runs.
            try:
                outcome.append(produce(pieces.put, stopping.is_set))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that iterates
                outcome.append(error)
            finally:
                pieces.put(None)

        self._pieces, self._stopping, self._outcome = pieces, stopping, outcome
        self._thread = threading.Thread(target=run, name="ci_llm answer", daemon=True)
        self._thread.start()

    @property
    def result(self) -> T:
        """What was produced, once it is; this waits for the end.

        Raises:
            Exception: what the thread raised.
        """
        self._thread.join()
        [outcome] = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ask the thread to stop after the present token, and wait for it."""
        self._stopping.set()
        self._thread.join()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._thread.is_alive() or not self._pieces.empty():
            piece = self._pieces.get()
            if piece is not None:
                return piece
        _ = self.result
        raise StopIteration

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._stopping.set()
