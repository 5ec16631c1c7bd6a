"""The watchdog ends a run without progress: the stacks of all its processes go into the log, the reason is `hang`.

Every process watches its own main thread, which gives a sign of life at each micro-step, batch of an evaluation and
generated token. The first process that is silent for too long creates `hang` in the attempt's folder. The
others see the folder, write their stacks into it, and all of them end. It works in a thread of its own, because no
other one can end a process whose main thread waits in a collective.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.errors import Hang
from ci_llm.logs.run_log import LOG_NAME
from ci_llm.run.attempt import Attempt

#: The limit until a step was measured: as long as a collective waits for a machine that went silent.
FIRST_S: Final = 1800.0
#: The learned limit is this many times the longest silence so far that ended, and at least LEAST_S.
TIMES: Final = 10.0
LEAST_S: Final = 300.0


class Heartbeat:
    """Signs of life of the main thread, which gives them at no cost, and the silence since the last one.

    The watchdog adds up the silence by its looks, so that time in a stopped process does not count.
    """

    def __init__(self) -> None:
        self._ticks = self._seen = self._rests = 0
        self.silent_s = self._longest_s = 0.0

    def tick(self) -> None:
        self._ticks += 1

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the limit within the block: the run waits for a full disk, for instance."""
        self._rests += 1
        try:
            yield
        finally:
            self._rests -= 1
            self.tick()

    def look(self, seconds: float) -> None:
        """Count the seconds since the last look as silence, unless there was a sign of life."""
        if self._rests or self._ticks != self._seen:
            self._longest_s = max(self._longest_s, 0.0 if self._rests else self.silent_s)
            self._seen, self.silent_s = self._ticks, 0.0
        else:
            self.silent_s += seconds

    def limit_s(self, *, step_measured: bool) -> float:
        """Seconds of silence that are a hang."""
        return max(LEAST_S, TIMES * self._longest_s) if step_measured else FIRST_S


TICK_S: Final = 1.0
#: How long a process that ends waits for the stacks of the others.
OTHERS_S: Final = 10.0


class Watchdog:
    """Watches a run from its own thread; a context manager around everything that trains.

    Args:
        heartbeat: the heartbeat of the main thread.
        step: returns the optimizer steps taken.
    """

    def __init__(self, attempt: Attempt, heartbeat: Heartbeat, step: Callable[[], int]) -> None:
        self._attempt, self._step = attempt, step
        self._processes = attempt.processes
        self._heartbeat = heartbeat
        self._meeting = attempt.folder / "hang"
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
            # The nominal second, not a clock: time in which a whole machine was suspended is not silence.
            self._heartbeat.look(TICK_S)
            # Until a step was measured, a longer silence is allowed.
            limit_s = self._heartbeat.limit_s(step_measured=bool(self._attempt.pace.steps_s))
            if self._heartbeat.silent_s >= limit_s:
                self._end(f"no progress for {limit_s:.0f} s")
            elif self._meeting.exists():
                self._end("another process of this run makes no progress")

    def _end(self, what: str) -> None:
        """End this process, whatever its main thread is doing; a disk that hangs or is full cannot prevent it."""
        at_the_latest = threading.Timer(2 * OTHERS_S, os._exit, [1])
        at_the_latest.daemon = True
        at_the_latest.start()
        try:
            self._report(what)
            self._wait_for_others()
        finally:
            os._exit(1)

    def _report(self, what: str) -> None:
        for write in self._reports(what):
            with contextlib.suppress(OSError):  # terminal and disk may be what fails: each is tried on its own
                write()

    def _reports(self, what: str) -> Iterator[Callable[[], object]]:
        index, step = self._processes.process_index, self._step()
        error = Hang(
            what,
            where=f"process {index}, step {step + 1}; the stacks of all processes are in {LOG_NAME}",
            hint="see where the main thread stands",
        )
        yield partial(os.write, 2, f"error: {error}\n".encode())
        yield partial(make_folders, self._meeting)  # from now on the other processes see that this one hangs
        of_process, of_attempt = self._attempt.records_of_failure(step, error)
        yield of_process
        stacks = f"hang: {what}; stacks of process {index}\n{_stacks()}\n"
        yield partial(self._append_to_log, stacks)
        yield partial(write_bytes, self._meeting / f"process_{index}.txt", stacks.encode())
        yield of_attempt

    def _append_to_log(self, text: str) -> None:
        """Append without `RunLog`, which writes on the main process only, and whose lock the main thread may hold."""
        with Path(self._attempt.config.run_folder, LOG_NAME).open("a", encoding="utf-8") as log:
            log.write(text)

    def _wait_for_others(self) -> None:
        # A launcher kills the others as soon as one process exits, and their stacks would be lost.
        until = time.monotonic() + OTHERS_S
        while len(list(self._meeting.glob("*.txt"))) < self._processes.num_processes and time.monotonic() < until:
            time.sleep(TICK_S / 10)


def _stacks() -> str:
    """The stacks of all threads of this process. It reads no file, not even sources: the disk may be what hangs."""
    names = {each.ident: each.name for each in threading.enumerate()}
    lines: list[str] = []
    for thread, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(thread, thread)}, innermost call first:")
        for at, number in traceback.walk_stack(frame):
            lines.append(f'  File "{at.f_code.co_filename}", line {number} in {at.f_code.co_name}')
    return "\n".join(lines)
