"""Passes the output of a child on to that of this process, byte for byte, through a pseudo-terminal if that is one.

The relay never waits for a reader. A terminal that was stopped by Ctrl-S holds the child back, but not the supervisor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

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
        sinks: standard output and standard error of this process. If both are the same terminal or file, the child
            gets one channel for both, so that its lines stay in their order.
    """

    def __init__(self, note_for: Callable[[], Callable[[bytes], None]], sinks: tuple[int, int] = (1, 2)) -> None:
        first = _open(sinks[0], note_for())
        self.stdout = first
        self.stderr = first if _same_file(*sinks) else _open(sinks[1], note_for())
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
