"""A run without progress is ended: the stacks of all its processes go into the log, and the reason is `hang`.

Every process watches its own main thread: its micro-steps, the batches of its evaluations, the tokens it generates.
The first process that is stuck creates a folder in that of the attempt. The others see it, write their stacks there,
and all of them end. A process that waits in a collective cannot be reached in any other way.

`faulthandler` writes the stacks in C, so it works even when Python is stuck. Its handler and its file are inherited by
a fork: loader workers that start later write into the same file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.run_status import Failure, attempt_folder, write_failure
from ci_llm.errors import Hang
from ci_llm.interrupts import STACKS_SIGNAL
from ci_llm.logs.run_log import LOG_NAME
from ci_llm.run.context import Run
from ci_llm.run.heartbeat import SilenceTimer
from ci_llm.run.shutdown import command_line

TICK_S: Final = 1.0
#: How long a process that ends waits for the stacks of the others.
OTHERS_S: Final = 10.0


class Watchdog:
    """Watches a run from a thread of its own; a context manager around everything that trains.

    Args:
        attempt: its number, the same on every process.
        stacks: made before the loader's workers, whose stacks it knows as well.
    """

    def __init__(self, run: Run, attempt: int, stacks: Stacks) -> None:
        self._run, self._stacks = run, stacks
        self._attempt = attempt
        self._silence = SilenceTimer(run.heartbeat, run.config.hang_timeout)
        self._meeting = attempt_folder(run.config.run_folder, attempt) / "hang"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ci_llm watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            self._silence.advance(TICK_S)
            limit_s = self._silence.limit_s(step_measured=bool(self._run.pace.steps_s))
            if self._silence.seconds >= limit_s:
                self._end(f"no progress for {limit_s:.0f} s")
            elif self._meeting.exists():
                self._end("another process of this run makes no progress")

    def _end(self, what: str) -> None:
        """End this process out of whatever its main thread is in; a disk that hangs or is full cannot prevent it."""
        threading.Thread(target=self._leave_at_the_latest, name="ci_llm exit", daemon=True).start()
        try:
            self._tell(what)
            self._wait_for_others()
        finally:
            os._exit(1)

    def _leave_at_the_latest(self) -> None:
        time.sleep(2 * OTHERS_S)
        os._exit(1)

    def _tell(self, what: str) -> None:
        for tell in self._ways_to_tell(what):
            with contextlib.suppress(OSError):  # terminal and disk may be what fails: each is tried for itself
                tell()

    def _ways_to_tell(self, what: str) -> Iterator[Callable[[], object]]:
        run, index = self._run, self._run.processes.index
        error = Hang(
            what,
            where=f"process {index}, step {run.state.step + 1}; the stacks of all processes are in {LOG_NAME}",
            hint="see where the main thread stands; a hang_timeout that is longer if it was only slow",
        )
        yield partial(os.write, 2, f"error: {error}\n".encode())
        yield partial(make_folders, self._meeting)
        failure = Failure.of(error, error.reason, index, run.state.step)
        yield partial(write_failure, run.config.run_folder, self._attempt, index, failure)
        stacks = f"hang: {what}; stacks of process {index}\n{self._stacks.take()}\n"
        yield partial(self._append_to_log, stacks)
        yield partial(write_bytes, self._meeting / f"process_{index}.txt", stacks.encode())
        yield partial(run.status.finish, "failed", error.reason, command_line(run.processes.launch))

    def _append_to_log(self, text: str) -> None:
        """Past `RunLog`, which is silent on most processes, and whose lock the main thread may hold."""
        with Path(self._run.config.run_folder, LOG_NAME).open("a", encoding="utf-8") as log:
            log.write(text)

    def _wait_for_others(self) -> None:
        until = time.monotonic() + OTHERS_S
        while len(list(self._meeting.glob("*.txt"))) < self._run.processes.count and time.monotonic() < until:
            time.sleep(TICK_S / 10)


# ---------------------------------------------------------------------------------------------------- stacks


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
