"""The command of one attempt as a child: under its shim, ordered to stop, its end told as seen from outside.

Its output is passed on to that of this process byte for byte, through a pseudo-terminal if that is one. A terminal that
was stopped by Ctrl-S holds the child back, but not the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import psutil

from ci_llm.cluster.launch import STARTED
from ci_llm.core.typed_json import load_json
from ci_llm.interrupts import signal_number
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.output_scan import Evidence, LineSplitter
from ci_llm.supervisor.shim import start_shim

_READ_BYTES: Final = 1 << 16


class Channel:
    """One stream of the child, to a sink of this process: a thread notes what arrives, and passes it on.

    The thread alone waits for a reader. Meanwhile nothing is read, so that the child waits as for the terminal itself.

    Args:
        note: called with every piece that arrives, and with b"" at the end.

    Attributes:
        is_terminal: the sink is one, and so the child gets one.
        child_end: the file to which the child writes.
    """

    def __init__(self, sink: int, note: Callable[[bytes], None]) -> None:
        self._sink, self._note = sink, note
        self.is_terminal = os.isatty(sink)
        self._source, self.child_end = os.openpty() if self.is_terminal else os.pipe()
        if self.is_terminal:
            modes = termios.tcgetattr(self.child_end)
            modes[1] &= ~termios.OPOST  # \n stays \n on the way: the real terminal adds the \r
            termios.tcsetattr(self.child_end, termios.TCSANOW, modes)
        self._thread = threading.Thread(target=self._pass_on, name="ci_llm output", daemon=True)
        self.copy_window_size()

    def start(self) -> None:
        """Begin, once the child has its end: this process must not hold it, or the stream would never end."""
        os.close(self.child_end)
        self._thread.start()

    def has_ended(self, timeout: float) -> bool:
        """Wait for the end; return whether all that arrived was passed on."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def copy_window_size(self) -> None:
        """Give the child's terminal the size of the sink's."""
        if self.is_terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._sink, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, size)

    def _pass_on(self) -> None:
        data = b"?"
        while data:
            data = b""
            with contextlib.suppress(OSError):  # Linux reports the end of a pseudo-terminal as an error
                data = os.read(self._source, _READ_BYTES)
            self._note(data)
            self._write(data)
        os.close(self._source)

    def _write(self, data: bytes) -> None:
        """Write it all. A terminal that is gone, or a full disk, does not stop the training."""
        while data:
            try:
                data = data[os.write(self._sink, data) :]
            except BlockingIOError:  # whoever started this process has made its terminal so
                select.select([], [self._sink], [], _TURN_S)
            except OSError:
                return  # this much is lost; a full disk may have room for what comes later


_TURN_S: Final = 0.25  # the longest delay until a new window size or an order is noticed
_FLUSH_S: Final = 1.0
_SCARCE_FRACTION: Final = 0.03  # of the machine's memory; with less than that available it is short
_SHORT_FOR_S: Final = 30.0  # how long that, or a kill by the kernel, explains the end: it may have hit a part first


class StopOrder(NamedTuple):
    """An order to end an attempt, with its reason: ("SIGTERM", "nonfinite"). SIGKILL means at once, without a grace."""

    signal_name: str
    reason: str


@dataclass
class AttemptResult:
    """The end of an attempt, as seen from outside.

    Attributes:
        returncode: the command's exit code, or minus the number of the signal that killed it; None if its shim died.
        error: why the command could not be started.
        stop_reason: why the supervisor ended it ("signal:SIGTERM", "nonfinite", "hang"); None if it ended by itself.
        duration_s: how long the command ran.
        memory_pressure: right before the end memory was short, or the kernel killed a process for it.
        left_behind: processes that had to be killed.
    """

    evidence: Evidence
    returncode: int | None = None
    error: str | None = None
    stop_reason: str | None = None
    duration_s: float = 0.0
    memory_pressure: bool = False
    left_behind: list[str] = field(default_factory=list)


class Child:
    """A running command; a context manager that leaves no process behind.

    Args:
        evidence: collects what the output says.
        grace_s: seconds between the signal to stop and the kill.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, evidence: Evidence, grace_s: float
    ) -> None:
        self._note = threading.Lock()
        self._channels = [Channel(1, self._noting(evidence))]
        # If both are one terminal or file, the child gets one channel for both, so that its lines stay in their order.
        is_one = False
        with contextlib.suppress(OSError):  # one of them is closed
            is_one = os.path.sameopenfile(1, 2)
        if not is_one:
            self._channels.append(Channel(2, self._noting(evidence)))
        self._result = AttemptResult(evidence)
        self._started = time.monotonic()
        self._memory = _MemoryWatch()
        control_end, self._control = os.pipe()
        self._report, report_end = os.pipe()
        ends = control_end, report_end
        self._reported = b""
        self._shim = start_shim(
            command,
            _environment(environment, unbuffered=not self._channels[0].is_terminal),
            grace_s,
            ends,
            (self._channels[0].child_end, self._channels[-1].child_end),
        )
        # Only the shim may hold these: otherwise neither side would see the end of the other.
        for end in ends:
            os.close(end)
        for channel in self._channels:
            channel.start()

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
            self._memory.sample()
        return self._conclude(next_order)

    def stop(self, order: StopOrder) -> None:
        """Tell the shim to end the command. The reason of the first order stays."""
        self._result.stop_reason = self._result.stop_reason or order.reason
        with contextlib.suppress(BrokenPipeError):  # the shim is gone: `_conclude` ends what it has not ended
            os.write(self._control, bytes([signal_number(order.signal_name)]))

    def _shim_is_gone(self) -> bool:
        """Wait for news, for a moment; the end of the report pipe is the end of the shim."""
        ready, _, _ = select.select([self._report], [], [], _TURN_S)
        for channel in self._channels:
            channel.copy_window_size()
        if not ready:
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

    def _conclude(self, next_order: Callable[[], StopOrder | None]) -> AttemptResult:
        result = self._result
        self._note_end()
        told: dict[str, Any] = {}
        for line in self._reported.splitlines():
            told |= cast("dict[str, Any]", load_json(line))
        result.error, result.returncode = told.get("error"), told.get("returncode")
        result.left_behind += told.get("killed", [])
        self._shim.wait()
        result.left_behind += process_tree.end(0.0)  # something is left only if the shim itself was killed
        process_tree.reap()
        for channel in self._channels:
            while not channel.has_ended(_FLUSH_S) and next_order() is None:  # a slow reader, `less` for instance
                pass
        return result

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # a second Ctrl-C, for instance
            self.stop(StopOrder("SIGKILL", "abort"))
        os.close(self._control)
        self._shim.wait()
        process_tree.end(0.0)
        os.close(self._report)

    def _noting(self, evidence: Evidence) -> Callable[[bytes], None]:
        splitter = LineSplitter(evidence.note)

        def note(data: bytes) -> None:
            with self._note:  # both channels tell one evidence
                splitter.feed(data)

        return note


def _environment(given: Mapping[str, str], *, unbuffered: bool) -> dict[str, str]:
    # Python buffers what it writes into a pipe: a NaN would be seen minutes late.
    own = {name: value for name, value in given.items() if name != STARTED}  # by which the supervisor was started
    return {**({"PYTHONUNBUFFERED": "1"} if unbuffered else {}), **own}


class _MemoryWatch:
    """Watches whether memory runs short: a process that the kernel kills for it cannot report that.

    The kernel counts its kills for the whole machine, since it booted. Only a kill of the last moments says something
    about the attempt: an earlier one may belong to another job.
    """

    def __init__(self) -> None:
        self._kills = _out_of_memory_kills()
        self._short_at = -math.inf

    def sample(self) -> None:
        memory, kills = psutil.virtual_memory(), _out_of_memory_kills()
        if kills > self._kills or memory.available < _SCARCE_FRACTION * memory.total:
            self._kills, self._short_at = kills, time.monotonic()

    def was_short(self) -> bool:
        self.sample()
        return time.monotonic() - self._short_at < _SHORT_FOR_S


def _out_of_memory_kills() -> int:
    """The number of this kernel's kills for memory since it booted, control groups included; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
