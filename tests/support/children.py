"""Child processes for tests: they speak in lines, have a deadline, and never outlive their test."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from ci_llm.cli.main import main
from ci_llm.core.run_status import is_alive
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer, Started

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
#: How a trainer starts that a test starts: see the file in there.
START = Path(__file__).with_name("start")
PYTHONPATH = f"{ROOT}{os.pathsep}{START}"


def hold_at(place: str, call: int = 1, until: Path | None = None) -> dict[str, str]:
    """The environment in which a trainer waits at a place, as tests/support/hold.py says."""
    file = Path(__file__).with_name("hold.py")
    return {"AT_START": str(file), "HOLD_AT": place, "HOLD_CALL": str(call), "HOLD_UNTIL": str(until or "")}


def command(words: list[str]) -> int:
    """A trial for the fork server: a command of ours."""
    return main(words)


def python(
    *words: str | Path, cwd: Path | None = None, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python with these words, after its end."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
    )


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every living process that has this folder on its command line: launchers, trainers, loader workers."""
    return [one for one in psutil.process_iter() if is_alive(one.pid) and str(folder) in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


class Child:
    """A process in a session of its own whose standard output is read line by line, stderr included.

    Use it as a context manager: what is left of its session and of its descendants is killed at the end.
    """

    def __init__(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        assert process.stdout is not None
        self._listen(process, process.stdout)

    @classmethod
    def forked(
        cls, server: ForkServer, trial: Callable[..., int], env: Mapping[str, str] | None = None, **arguments: Any
    ) -> Child:
        """A trial of a fork server: as a process that Python starts, at a tenth of its cost; it has no input."""
        child = cls.__new__(cls)
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(pipe := Path(folder, "output"))
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            process = server.start(trial, pipe, environment=env, **arguments)
        os.set_blocking(reader, True)
        child._listen(process, os.fdopen(reader))
        return child

    def _listen(self, process: subprocess.Popen[str] | Started, output: IO[str]) -> None:
        self.process = process
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    @classmethod
    def python(cls, source: str, *arguments: str, env: Mapping[str, str] | None = None) -> Child:
        """Run a few lines of Python, unbuffered."""
        return cls(sys.executable, "-u", "-c", source, *arguments, env=env)

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_until(self, text: str) -> str:
        """The next line that holds `text`; fails with all that was said if the process ends without it."""
        while True:
            try:
                line = self._lines.get(timeout=DEADLINE_S)
            except queue.Empty:
                raise AssertionError(f"no {text!r} within {DEADLINE_S} s; so far: {self.seen}") from None
            if line is None:
                raise AssertionError(f"ended without {text!r}; it said: {self.seen}")
            if text in line:
                return line

    def read_to_the_end(self) -> None:
        """Wait until every process that writes to its standard output has ended."""
        self._reader.join(DEADLINE_S)
        assert not self._reader.is_alive(), f"still open after {DEADLINE_S} s; so far: {self.seen}"

    def say(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code; minus the signal's number for a process that a signal killed."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {DEADLINE_S} s; so far: {self.seen}") from None

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            # Those of torchrun have sessions of their own.
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.seen.append(line.rstrip("\n"))
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_all(children: Sequence[Child]) -> list[list[str]]:
    """Wait for every child to end well; what each of them said."""
    codes = [child.wait() for child in children]
    for child in children:
        child._reader.join(DEADLINE_S)
    assert codes == [0] * len(codes), [child.seen for child in children]
    return [child.seen for child in children]
