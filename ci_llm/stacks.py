"""Where every thread of this process and of its loader workers stands, written by C code even when Python is stuck.

The handler of `faulthandler` is inherited by a fork, and its file with it: workers forked after `listen` write what
they are doing into the same file when they are asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import time
from typing import Final

import psutil

from ci_llm.interrupts import STACKS_SIGNAL

#: For all children together, one after the other: they write into one file, and at once their lines would mix.
_ANSWERS_S: Final = 4.0
#: A process that is silent for as long has said all: a busy machine may take the processor from it in mid-sentence.
_LOOK_S: Final = 0.2


class Stacks:
    """Stacks on demand. Make it before the workers are forked; a context manager."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this does
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True, chain=False)

    def __enter__(self) -> Stacks:
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        self._file.close()

    def take(self) -> str:
        """The stacks of all threads, here and in every child process that answers within its share of a moment."""
        end = self._end()
        faulthandler.dump_traceback(self._file)
        told = [f"process {os.getpid()}:", self._since(end)]
        until, children = time.monotonic() + _ANSWERS_S, psutil.Process().children(recursive=True)
        for left, child in zip(range(len(children), 0, -1), children, strict=True):
            end, now = self._end(), time.monotonic()
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(STACKS_SIGNAL)
            if self._has_answered(end, now + (until - now) / left):
                told += [f"its child process {child.pid}:", self._since(end)]
        return "\n".join(told)

    def _has_answered(self, end: int, until: float) -> bool:
        """Whether the file has grown beyond `end` in time; returns when it grows no more."""
        seen = end
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            before, seen = seen, self._end()
            if end < seen == before:
                break
        return seen > end

    def _end(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _since(self, end: int) -> str:
        return os.pread(self._file.fileno(), self._end() - end, end).decode(errors="replace").rstrip()
