"""One attempt: the command runs under its shim, can be ordered to stop, and its end is told as seen from outside.

Its output is passed on to that of this process byte for byte, through a pseudo-terminal if that is one. The relay never
waits for a reader: a terminal that was stopped by Ctrl-S holds the child back, but not the supervisor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, cast

import psutil

from ci_llm.cluster.launch import STARTED
from ci_llm.core.typed_json import load_json
from ci_llm.interrupts import signal_number
from ci_llm.supervisor import process_tree
from ci_llm.supervisor.output_scan import Evidence, LineSplitter
from ci_llm.supervisor.shim import start_shim

_READ_BYTES: Final = 1 << 16
_WRITE_BYTES: Final = select.PIPE_BUF  # a pipe that is ready takes this much without blocking
#: Errors of a sink that nobody reads any more.
_GONE: Final = frozenset({errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO})


@dataclass
class Channel:
    """One stream of the child.

    Attributes:
        source: the file from which its output is read.
        child_end: the file to which the child writes; closed in this process once the child runs.
        sink: the file of this process to which the output goes; None once nobody reads it any more.
        note: called with every piece that arrives, and with b"" at the end.
        backlog: what has arrived and is not written yet.
        at_line_start: the last byte that arrived ended a line.
        ended: the child has closed its end.
    """

    source: int
    child_end: int
    sink: int | None
    is_terminal: bool
    note: Callable[[bytes], None]
    backlog: bytearray = field(default_factory=bytearray)
    at_line_start: bool = True
    ended: bool = False

    def read(self) -> None:
        """Take what has arrived."""
        data = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a pseudo-terminal as an error
            data = os.read(self.source, _READ_BYTES)
        self.ended = not data
        self.note(data)
        if data and self.sink is not None:
            self.backlog += data
            self.at_line_start = data[-1:] == b"\n"

    def write(self) -> None:
        """Write some of the backlog. A terminal that is gone, or a full disk, does not stop the training."""
        assert self.sink is not None
        try:
            del self.backlog[: os.write(self.sink, self.backlog[:_WRITE_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _GONE:
                self.sink = None
            self.backlog.clear()  # this much is lost; a full disk may have room for what comes later

    def copy_window_size(self) -> None:
        """Give the child's terminal the size of the sink's."""
        if self.is_terminal and self.sink is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self.sink, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)


class Relay:
    """The channels of one child.

    Args:
        note_for: returns the `note` of a channel; called once for each.

    Their sinks are standard output and standard error of this process. If both are the same terminal or file, the child
    gets one channel for both, so that its lines stay in their order.
    """

    def __init__(self, note_for: Callable[[], Callable[[bytes], None]]) -> None:
        self.stdout = _open(1, note_for())
        self.stderr = self.stdout if _same_file(1, 2) else _open(2, note_for())
        self.channels = [self.stdout] if self.stderr is self.stdout else [self.stdout, self.stderr]

    @property
    def backlog(self) -> bool:
        """Whether output waits for a reader."""
        return any(channel.backlog for channel in self.channels)

    @property
    def at_line_start(self) -> bool:
        """Whether the next line that this process writes would begin at the left edge of the terminal."""
        return all(channel.at_line_start for channel in self.channels)

    def close_child_ends(self) -> None:
        """Close the ends that the child has got: a channel ends only when nobody holds its other end."""
        for channel in self.channels:
            os.close(channel.child_end)

    def turn(self, others: Sequence[int], timeout: float) -> set[int]:
        """Wait until something arrives or can be written, and pass it on.

        Args:
            others: further files to wait for.
            timeout: seconds to wait at most.

        Returns:
            those of the `others` that can be read.
        """
        for channel in self.channels:
            channel.copy_window_size()
        # A channel with a backlog is not read: the child waits, as it would for the terminal itself.
        sources = {one.source: one for one in self.channels if not one.ended and not one.backlog}
        sinks = {one.sink: one for one in self.channels if one.sink is not None and one.backlog}
        readable, writable, _ = select.select([*sources, *others], list(sinks), [], timeout)
        for fd in readable:
            if fd in sources:
                sources[fd].read()
        for fd in writable:
            sinks[fd].write()
        return set(readable) & set(others)

    def flush(self, timeout: float) -> None:
        """Pass on what is left, as long as the reader takes something within `timeout` seconds."""
        for channel in self.channels:
            while not channel.ended and select.select([channel.source], [], [], 0)[0]:
                channel.read()
            if not channel.ended:
                channel.note(b"")
            while channel.sink is not None and channel.backlog:
                if not select.select([], [channel.sink], [], timeout)[1]:
                    break
                channel.write()

    def close(self) -> None:
        for channel in self.channels:
            os.close(channel.source)


def _open(sink: int, note: Callable[[bytes], None]) -> Channel:
    if not os.isatty(sink):
        source, child_end = os.pipe()
        return Channel(source, child_end, sink, False, note)
    source, child_end = os.openpty()
    modes = termios.tcgetattr(child_end)
    modes[1] &= ~termios.OPOST  # \n stays \n on the way: the real terminal adds the \r
    termios.tcsetattr(child_end, termios.TCSANOW, modes)
    channel = Channel(source, child_end, sink, True, note)
    channel.copy_window_size()
    return channel


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


_TURN_S: Final = 0.25  # the longest delay until a new window size or an order is noticed
_FLUSH_S: Final = 1.0
_SCARCE_FRACTION: Final = 0.03  # of the machine's memory; with less than that available it is short
_SHORT_FOR_S: Final = 30.0  # how long that, or a kill by the kernel, explains the end: it may have hit a part first


class StopOrder(NamedTuple):
    """How to end an attempt, and why: ("SIGTERM", "nonfinite"). SIGKILL means at once, without a grace."""

    signal_name: str
    reason: str


@dataclass
class AttemptResult:
    """How an attempt ended, as seen from outside.

    Attributes:
        returncode: the command's exit code, or minus the number of the signal that killed it; None if its shim died.
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
        self._relay = Relay(lambda: LineSplitter(evidence.note).feed)
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
        except BaseException:
            os.close(self._control)
            os.close(self._report)
            self._relay.close()
            raise
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # a second Ctrl-C, for instance
            self.stop(StopOrder("SIGKILL", "abort"))
        os.close(self._control)
        self._shim.wait()
        process_tree.end(0.0)
        os.close(self._report)
        self._relay.close()


def _environment(given: Mapping[str, str], *, unbuffered: bool) -> dict[str, str]:
    # Python buffers what it writes into a pipe: a NaN would be seen minutes late.
    own = {name: value for name, value in given.items() if name != STARTED}  # by which the supervisor was started
    return {**({"PYTHONUNBUFFERED": "1"} if unbuffered else {}), **own}


class _MemoryWatch:
    """Whether memory ran short a moment ago. A process that the kernel kills for it cannot report that.

    The kernel counts its kills for the whole machine, since it booted. Only a kill of the last moments says something
    about the attempt: an earlier one may belong to another job.
    """

    def __init__(self) -> None:
        self._kills = _out_of_memory_kills()
        self._next_look, self._short_at = 0.0, -math.inf

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        memory, kills = psutil.virtual_memory(), _out_of_memory_kills()
        if kills > self._kills or memory.available < _SCARCE_FRACTION * memory.total:
            self._kills, self._short_at = kills, now

    def was_short(self) -> bool:
        self._next_look = 0.0
        self.look()
        return time.monotonic() - self._short_at < _SHORT_FOR_S


def _out_of_memory_kills() -> int:
    """How often this kernel has killed for memory since it booted, control groups included; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
