"""One attempt: the command under its shim, its output passed on, an order to stop, and how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, cast

import psutil

from ci_llm.core.typed_json import load_json
from ci_llm.interrupts import signal_number
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.output_scan import Evidence, LineSplitter
from ci_llm.supervisor.relay import Relay
from ci_llm.supervisor.shim import start_shim

_TURN_S: Final = 0.25  # the longest delay until a new window size or an order is noticed
_FLUSH_S: Final = 1.0
_SCARCE_FRACTION: Final = 0.03  # of the machine's memory; with less than that available it is short
_SCARCE_FOR_S: Final = 10.0  # how long short memory explains the end of a command
_KILLED_FOR_S: Final = 60.0  # and how long a kill by the kernel does: it may have hit a part of the command first


class StopOrder(NamedTuple):
    """How to end an attempt, and why: ("SIGTERM", "nonfinite"). SIGKILL means at once, without a grace."""

    signal_name: str
    reason: str


@dataclass
class AttemptResult:
    """How an attempt ended, as seen from outside.

    Attributes:
        returncode: of the command, or minus the number of the signal that killed it; None if its shim died.
        error: why the command could not be started.
        stop_reason: why the supervisor ended it ("signal:SIGTERM", "nonfinite", "hang"); None if it ended by itself.
        duration_s: how long the command ran.
        memory_pressure: right before the end memory was short, or the kernel killed a process for it.
        left_behind: processes that had to be killed.
        at_line_start: the terminal's cursor is at the left edge; otherwise a progress bar stands there.
    """

    evidence: Evidence
    returncode: int | None = None
    error: str | None = None
    stop_reason: str | None = None
    duration_s: float = 0.0
    memory_pressure: bool = False
    left_behind: list[str] = field(default_factory=list)
    at_line_start: bool = True


class Attempt:
    """A running command; a context manager that leaves no process behind.

    Args:
        evidence: collects what the output says.
        grace_s: seconds between the signal to stop and the kill.
        wake_fd: a file that becomes readable when there may be a new order.
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
        self._relay = Relay(lambda: _line_reader(evidence))
        self._wake_fd = wake_fd
        self._result = AttemptResult(evidence)
        self._started = time.monotonic()
        self._memory = _MemoryWatch()
        control_end, self._control = os.pipe()
        self._report, report_end = os.pipe()
        self._reported = b""
        try:
            self._shim = start_shim(
                command,
                _environment(environment, unbuffered=not self._relay.stdout.is_terminal),
                grace_s=grace_s,
                control_fd=control_end,
                report_fd=report_end,
                stdout_fd=self._relay.stdout.child_end,
                stderr_fd=self._relay.stderr.child_end,
            )
        finally:
            # Only the shim may hold these ends: otherwise neither side would see the end of the other.
            os.close(control_end)
            os.close(report_end)
            self._relay.close_child_ends()

    def run(self, next_order: Callable[[], StopOrder | None]) -> AttemptResult:
        """Pass the output on until nothing of the command is left.

        Args:
            next_order: asked several times per second; returns an order to stop the attempt now.
        """
        # An order holds until the attempt has ended, so it is sent once. A later one, KILL after TERM, is sent too.
        signals_sent: set[str] = set()
        while not self._shim_is_gone():
            order = next_order()
            if order is not None and order.signal_name not in signals_sent:
                signals_sent.add(order.signal_name)
                self.stop(order)
            self._memory.look()
        while self._relay.backlog and next_order() is None:  # a slow reader, `less` for instance
            self._relay.turn([], _TURN_S)
        return self._conclude()

    def stop(self, order: StopOrder) -> None:
        """Tell the shim to end the command. The reason of the first order stays."""
        self._result.stop_reason = self._result.stop_reason or order.reason
        with contextlib.suppress(BrokenPipeError):  # the shim is gone: `_conclude` ends what it has not ended
            os.write(self._control, bytes([signal_number(order.signal_name)]))

    def _shim_is_gone(self) -> bool:
        """Do one turn of the relay; the end of the report pipe is the end of the shim."""
        ready = self._relay.turn([self._report, self._wake_fd], _TURN_S)
        if self._wake_fd in ready:  # a signal: `next_order` knows what it means
            os.read(self._wake_fd, 1024)
        if self._report not in ready:
            return False
        data = os.read(self._report, 4096)
        self._reported += data
        if b"returncode" in data:
            self._note_end()
        return not data

    def _note_end(self) -> None:
        """The command itself has ended. The time that its left processes take to end does not count."""
        if not self._result.duration_s:
            self._result.duration_s = time.monotonic() - self._started
            self._result.memory_pressure = self._memory.was_short()

    def _conclude(self) -> AttemptResult:
        result = self._result
        self._note_end()
        for line in self._reported.splitlines():
            fact = cast("dict[str, object]", load_json(line))
            if "error" in fact:
                result.error = str(fact["error"])
            if "returncode" in fact:
                result.returncode = cast("int | None", fact["returncode"])
            result.left_behind += cast("list[str]", fact.get("killed", []))
        self._shim.wait()
        result.left_behind += process_tree.end(0.0)  # something is left only if the shim itself was killed
        process_tree.reap()
        self._relay.flush(_FLUSH_S)
        result.at_line_start = self._relay.at_line_start
        return result

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # a second Ctrl-C, for instance
            self.stop(StopOrder("SIGKILL", "abort"))
        os.close(self._control)
        self._shim.wait()
        process_tree.end(0.0)
        os.close(self._report)
        self._relay.close()


def _line_reader(evidence: Evidence) -> Callable[[bytes], None]:
    lines = LineSplitter(evidence.note)
    return lambda data: lines.feed(data, final=not data)


def _environment(given: Mapping[str, str], *, unbuffered: bool) -> dict[str, str]:
    # Python buffers what it writes into a pipe: a NaN would be seen minutes late.
    return {**({"PYTHONUNBUFFERED": "1"} if unbuffered else {}), **given}


class _MemoryWatch:
    """Whether memory ran short a moment ago. A process that the kernel kills for it cannot report that.

    The kernel counts its kills for the whole machine, since it booted. Only a kill of the last moments says something
    about the attempt: an earlier one may belong to another job.
    """

    def __init__(self) -> None:
        self._kills = _out_of_memory_kills()
        self._next_look = 0.0
        self._short_until = 0.0

    def look(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + 1.0
        memory = psutil.virtual_memory()
        if memory.available < _SCARCE_FRACTION * memory.total:
            self._short_until = max(self._short_until, now + _SCARCE_FOR_S)
        self._count_kills(now)

    def was_short(self) -> bool:
        self._count_kills(now := time.monotonic())
        return now < self._short_until

    def _count_kills(self, now: float) -> None:
        if (kills := _out_of_memory_kills()) > self._kills:
            self._kills, self._short_until = kills, now + _KILLED_FOR_S


def _out_of_memory_kills() -> int:
    """How often this kernel has killed for memory since it booted, control groups included; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
