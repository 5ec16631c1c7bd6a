"""One attempt: the command under its keeper, its output passed on, the orders given to it, and how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, cast

import psutil

from ci_llm.core.typed_json import load_json
from ci_llm.interrupts import signal_number
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.output_scan import Evidence, LineSplitter
from ci_llm.supervisor.relay import Relay
from ci_llm.supervisor.shim import start_keeper

_TURN_S: Final = 0.25  # how late a new window size or an order may be noticed
_FLUSH_S: Final = 1.0
_SCARCE: Final = 0.03  # share of memory below which there is pressure,
_SCARCE_FOR_S: Final = 10.0  # how long that is held against a command which then ends,
_KILLED_FOR_S: Final = 60.0  # and a kill for memory, which may have hit only a part of it; or somebody else


@dataclass
class AttemptResult:
    """How an attempt ended, as seen from outside.

    Attributes:
        returncode: of the command, minus the signal's number where one killed it; None if its keeper died.
        error: why the command could not be started.
        ordered: why the supervisor ended it ("signal:SIGTERM", "nonfinite", "hang"); None if it went by itself.
        memory_pressure: just before, the kernel killed for memory, or hardly any was left.
        left_behind: what had to be killed.
        at_line_start: the cursor of the terminal is at the left edge; otherwise a bar stands there.
    """

    evidence: Evidence
    returncode: int | None = None
    error: str | None = None
    ordered: str | None = None
    duration_s: float = 0.0
    memory_pressure: bool = False
    left_behind: list[str] = field(default_factory=list)
    at_line_start: bool = True


class Attempt:
    """A running command; a context manager at whose end nothing of it is left.

    Args:
        evidence: collects what the output says.
        grace_s: seconds between the signal to end and the kill.
        wake_fd: a file that becomes readable when `orders` have something new.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        evidence: Evidence,
        grace_s: float,
        wake_fd: int,
    ) -> None:
        self.evidence = evidence
        self.relay = Relay(self._splitter)
        self._wake_fd = wake_fd
        self._ending = AttemptResult(self.evidence)
        self._started = time.monotonic()
        self._memory = _MemoryWatch()
        control_end, self._control = os.pipe()
        self._report, report_end = os.pipe()
        self._reported = b""
        try:
            self._keeper = start_keeper(
                command,
                _environment(environment, unbuffered=not self.relay.stdout.is_terminal),
                grace_s=grace_s,
                control_fd=control_end,
                report_fd=report_end,
                stdout_fd=self.relay.stdout.child_end,
                stderr_fd=self.relay.stderr.child_end,
            )
        finally:
            os.close(control_end)
            os.close(report_end)
            self.relay.close_child_ends()

    def run(self, orders: Callable[[], tuple[str, str] | None]) -> AttemptResult:
        """Pass the output on until nothing of the command is left.

        Args:
            orders: asked several times per second; says by which signal the attempt shall end now, and why.
        """
        given: set[str] = set()
        while not self._is_over():
            order = orders()
            if order is not None and order[0] not in given:
                given.add(order[0])
                self.order(*order)
            self._memory.look()
        while self.relay.backlog and orders() is None:  # somebody reads slowly, `less` for instance
            self.relay.turn([], _TURN_S)
        return self._conclude()

    def order(self, signal_name: str, why: str) -> None:
        """Have the attempt ended: at once ("SIGKILL"), or by another signal and with its grace."""
        self._ending.ordered = self._ending.ordered or why
        with contextlib.suppress(BrokenPipeError):  # the keeper has gone: `_conclude` does what it has not done
            os.write(self._control, bytes([signal_number(signal_name)]))

    def _splitter(self) -> Callable[[bytes], None]:
        lines = LineSplitter(self.evidence.note)
        return lambda data: lines.feed(data, final=not data)

    def _is_over(self) -> bool:
        """One turn of the relay; whether the keeper has gone."""
        ready = self.relay.turn([self._report, self._wake_fd], _TURN_S)
        if self._wake_fd in ready:
            os.read(self._wake_fd, 1024)
        if self._report not in ready:
            return False
        data = os.read(self._report, 4096)
        self._reported += data
        if b"returncode" in data:
            self._note_end()
        return not data

    def _note_end(self) -> None:
        """The command has ended; what it has left behind does not count."""
        if not self._ending.duration_s:
            self._ending.duration_s = time.monotonic() - self._started
            self._ending.memory_pressure = self._memory.was_scarce()

    def _conclude(self) -> AttemptResult:
        ending = self._ending
        self._note_end()
        for line in self._reported.splitlines():
            fact = cast("dict[str, object]", load_json(line))
            if "error" in fact:
                ending.error = str(fact["error"])
            if "returncode" in fact:
                ending.returncode = cast("int | None", fact["returncode"])
            ending.left_behind += cast("list[str]", fact.get("killed", []))
        self._keeper.wait()
        ending.left_behind += process_tree.end(0.0)  # only where the keeper itself was killed
        process_tree.reap()
        self.relay.flush(_FLUSH_S)
        ending.at_line_start = self.relay.at_line_start
        return ending

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.order("SIGKILL", "abort")
        os.close(self._control)
        self._keeper.wait()
        process_tree.end(0.0)
        os.close(self._report)
        self.relay.close()


def _environment(given: Mapping[str, str], *, unbuffered: bool) -> dict[str, str]:
    return {**({"PYTHONUNBUFFERED": "1"} if unbuffered else {}), **given}


class _MemoryWatch:
    """Whether memory ran short a moment ago: a process that the kernel kills cannot tell.

    The kernel counts its kills for all of a machine, so that one of another job, days ago, says nothing.
    """

    def __init__(self) -> None:
        self._kills = _out_of_memory_kills()
        self._next_look = 0.0
        self._scarce_until = 0.0

    def look(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + 1.0
        memory = psutil.virtual_memory()
        if memory.available < _SCARCE * memory.total:
            self._scarce_until = max(self._scarce_until, now + _SCARCE_FOR_S)
        self._count_kills(now)

    def was_scarce(self) -> bool:
        self._count_kills(now := time.monotonic())
        return now < self._scarce_until

    def _count_kills(self, now: float) -> None:
        if (kills := _out_of_memory_kills()) > self._kills:
            self._kills, self._scarce_until = kills, now + _KILLED_FOR_S


def _out_of_memory_kills() -> int:
    """How often this kernel has killed for memory since it booted, control groups included; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
