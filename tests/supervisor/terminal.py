"""A supervisor as a person runs it: in a session and on a pseudo-terminal of its own, or with its output in a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
#: The same supervise, with pauses of no time, and on a machine that has memory: tests wait for events only.
HASTY = """
import functools, sys
from ci_llm.cli.main import run_guarded
from ci_llm.supervisor import child, policy
from ci_llm.cli import supervise
policy.Policy = functools.partial(policy.Policy, first_wait_s=0.0, disk_wait_s=0.0)
child._SCARCE_FRACTION, child._out_of_memory_kills = 0.0, lambda: 0
sys.exit(run_guarded(lambda: supervise.supervise(sys.argv[1:]), debug=False))
"""


class Terminal:
    """`python safe_train.py ...` and everything it writes; a context manager that leaves no process behind.

    Args:
        cwd: the folder it is started in.
        is_terminal: its output goes to a pseudo-terminal, 90 columns wide; else into a pipe.
        hasty: without pauses before a relaunch.
        program: what Python runs instead of safe_train.py.
        types: somebody types at the terminal, where Ctrl-C is a key; what is written there arrives as a screen gets it.
    """

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        is_terminal: bool = True,
        hasty: bool = False,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (str(ROOT / "safe_train.py"),),
        types: bool = False,
    ) -> None:
        self._read_fd, write_fd = os.openpty() if is_terminal else os.pipe()
        if is_terminal:
            self.resize(80 if types else 90)
        if is_terminal and not types:
            modes = termios.tcgetattr(write_fd)
            modes[1] &= ~termios.OPOST  # what arrives here is then what was written, byte for byte
            termios.tcsetattr(write_fd, termios.TCSANOW, modes)
        door = ["-c", HASTY] if hasty else program
        self.process = subprocess.Popen(
            [sys.executable, *door, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **({"PYTHONPATH": str(ROOT)} if hasty else {}), **(env or {})},
            stdin=write_fd if types else subprocess.DEVNULL,
            stdout=write_fd,
            stderr=write_fd,
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if types else None,
        )
        os.close(write_fd)
        self.output = b""
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._read_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> int:
        """Type, and return where the output stood before."""
        before = len(self.text)
        os.write(self._read_fd, text.encode())
        return before

    def comes(self, wanted: str | re.Pattern[str], start: int = 0, timeout_s: float = DEADLINE_S) -> str | None:
        """What was written from `start` on up to and with the first match of `wanted`; a string stands for itself."""
        pattern = re.compile(re.escape(wanted)) if isinstance(wanted, str) else wanted
        with self._news:
            self._news.wait_for(lambda: pattern.search(self.text, start) or self._ended, timeout_s)
            found = pattern.search(self.text, start)
            return self.text[start : found.end()] if found else None

    def read_until(self, wanted: str | re.Pattern[str], start: int = 0) -> str:
        """As `comes`, of what has to come."""
        found = self.comes(wanted, start)
        assert found is not None, f"no {wanted!r} in {self.text[start:]}"
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once everything that was written has been read."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {DEADLINE_S} s; so far: {self.text}") from None
        self._reader.join(DEADLINE_S)
        return code

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        data = b"?"
        while data:
            data = b""
            with contextlib.suppress(OSError):  # the end of a pseudo-terminal
                data = os.read(self._read_fd, 1 << 16)
            with self._news:
                self.output += data
                self._ended = not data
                self._news.notify_all()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.descendants(), psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        os.close(self._read_fd)


def assert_gone(processes: list[psutil.Process]) -> None:
    """Nothing of these is left, once they have had the time that a KILL takes."""
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def ran(folder: Path, *arguments: str | Path, code: int = 0, **options: Any) -> Terminal:
    """A supervisor that has ended with this exit code; for the options see `Terminal`."""
    with Terminal(*arguments, cwd=folder, **options) as terminal:
        assert terminal.wait() == code, terminal.text
    return terminal
