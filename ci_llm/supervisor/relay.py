"""The output of a child on its way to ours, byte for byte, through a pseudo-terminal where ours is a terminal.

Nothing here ever waits for a reader: a terminal that was stopped by Ctrl-S holds the child back, not the supervisor.
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

_CHUNK_BYTES: Final = 1 << 16
_SLICE_BYTES: Final = select.PIPE_BUF  # a pipe that is ready takes this much without waiting
_GONE: Final = frozenset({errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO})


@dataclass
class Channel:
    """One stream of the child.

    Attributes:
        source: where its output arrives.
        child_end: what the child writes to; closed here once it runs.
        target: our own file; None once nobody reads it any more.
        backlog: what arrived and is not written yet.
    """

    source: int
    child_end: int
    target: int | None
    is_terminal: bool
    note: Callable[[bytes], None]
    backlog: bytearray = field(default_factory=bytearray)
    at_line_start: bool = True
    ended: bool = False

    def read(self) -> None:
        """Take what has arrived; the end of a pseudo-terminal is an error on Linux and nothing elsewhere."""
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self.source, _CHUNK_BYTES)
        self.ended = not data
        self.note(data)
        if data and self.target is not None:
            self.backlog += data
            self.at_line_start = data[-1:] == b"\n"

    def write(self) -> None:
        """Write some of the backlog; a terminal that has gone away, or a full disk, is no reason to stop."""
        assert self.target is not None
        try:
            del self.backlog[: os.write(self.target, self.backlog[:_SLICE_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _GONE:
                self.target = None
            self.backlog.clear()  # a full disk may take what comes later

    def copy_window_size(self) -> None:
        """Give the child's terminal the size of ours."""
        if self.is_terminal and self.target is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)


class Relay:
    """The channels of one child.

    Args:
        note_for: makes, for each channel, what is called with every piece that arrives, and with b"" at its end.
        targets: our own standard output and standard error. If both are the same terminal or file, there is one
            channel, so that the order of what is written stays.
    """

    def __init__(self, note_for: Callable[[], Callable[[bytes], None]], targets: tuple[int, int] = (1, 2)) -> None:
        first = _open(targets[0], note_for())
        self.stdout = first
        self.stderr = first if _same_file(*targets) else _open(targets[1], note_for())
        self.channels = [self.stdout] if self.stderr is self.stdout else [self.stdout, self.stderr]

    @property
    def backlog(self) -> bool:
        """Whether anything waits for a reader."""
        return any(channel.backlog for channel in self.channels)

    @property
    def at_line_start(self) -> bool:
        """Whether a line of our own would begin at the left edge of the terminal."""
        return all(channel.at_line_start for channel in self.channels)

    def close_child_ends(self) -> None:
        """To be called once the child has them: otherwise a channel would never end."""
        for channel in self.channels:
            os.close(channel.child_end)

    def turn(self, others: Sequence[int], timeout: float) -> set[int]:
        """Wait for anything to arrive and pass it on; returns which of the `others` can be read."""
        for channel in self.channels:
            channel.copy_window_size()
        sources = {one.source: one for one in self.channels if not one.ended and not one.backlog}
        targets = {one.target: one for one in self.channels if one.target is not None and one.backlog}
        readable, writable, _ = select.select([*sources, *others], list(targets), [], timeout)
        for fd in readable:
            if fd in sources:
                sources[fd].read()
        for fd in writable:
            targets[fd].write()
        return set(readable) & set(others)

    def flush(self, timeout: float) -> None:
        """Pass on what is left, for as long as something moves within `timeout` seconds."""
        for channel in self.channels:
            while not channel.ended and select.select([channel.source], [], [], 0)[0]:
                channel.read()
            if not channel.ended:
                channel.note(b"")
            while channel.target is not None and channel.backlog:
                if not select.select([], [channel.target], [], timeout)[1]:
                    break
                channel.write()

    def close(self) -> None:
        for channel in self.channels:
            os.close(channel.source)


def _open(target: int, note: Callable[[bytes], None]) -> Channel:
    if not os.isatty(target):
        source, child_end = os.pipe()
        return Channel(source, child_end, target, False, note)
    source, child_end = os.openpty()
    modes = termios.tcgetattr(child_end)
    modes[1] &= ~termios.OPOST  # the terminal of ours does that: \n stays \n on the way
    termios.tcsetattr(child_end, termios.TCSANOW, modes)
    channel = Channel(source, child_end, target, True, note)
    channel.copy_window_size()
    return channel


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
