"""A small process between the supervisor and the command; it makes sure that nothing of the command is left.

It ignores signals that reach whole process groups (Ctrl-C, scancel) and reads one pipe: "end" (TERM, then KILL after
the grace period), "kill" (now), and the end of the pipe, which means that the supervisor is gone. It reports how the
command ended, ends every process that the command left, and exits. Only this file starts programs.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Final

from ci_llm.core.typed_json import dump_json
from ci_llm.interrupts import Interrupts, signal_number
from ci_llm.supervisor import process_tree

if TYPE_CHECKING:
    import subprocess
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_TERM: Final = signal_number("SIGTERM")
_KILL: Final = signal_number("SIGKILL")
_DEAF_TO: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SETTLE_S: Final = 1.0  # helpers of multiprocessing go by themselves once their parent has gone


def main() -> int:
    """`keeper CONTROL_FD REPORT_FD GRACE COMMAND...`"""
    control_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (control_fd, report_fd):
        os.set_inheritable(fd, False)
    process_tree.adopt_orphans()
    with Interrupts(stop=(), save=_DEAF_TO, announce=lambda _line: None):
        _keep(sys.argv[4:], _Orders(control_fd), report_fd, float(sys.argv[3]))
    return 0


class _Orders:
    """What the supervisor orders through its pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._insisted = False

    def read(self) -> int:
        """The signal by which to end; TERM if the supervisor is gone."""
        ordered = os.read(self.fd, 1)
        self._insisted = _KILL in ordered
        return ordered[0] if ordered else _TERM

    def insisted(self) -> bool:
        """Whether what is left shall be killed now. The end of the pipe is no such order."""
        if not self._insisted and select.select([self.fd], [], [], 0)[0]:
            self._insisted = _KILL in os.read(self.fd, 16)
        return self._insisted


def _keep(command: list[str], orders: _Orders, report_fd: int, grace_s: float) -> None:
    try:
        process = start_command(command)
    except OSError as error:
        _report(report_fd, {"error": error.strerror or str(error)})
        return
    over_fd = _when_over(process)
    ready, _, _ = select.select([orders.fd, over_fd], [], [])
    if over_fd in ready:  # its verdict is told at once, whatever it has left behind
        _report(report_fd, {"returncode": process.returncode})
        killed = process_tree.end(grace_s, settle_s=_SETTLE_S, session=process.pid, insisted=orders.insisted)
    else:
        killed = _end(orders.read(), grace_s, process.pid, orders)
    if over_fd not in ready and select.select([over_fd], [], [], _SETTLE_S)[0]:
        _report(report_fd, {"returncode": process.returncode})
    process_tree.reap()
    _report(report_fd, {"killed": killed})


def _end(number: int, grace_s: float, session: int, orders: _Orders) -> list[str]:
    """End the command by a signal. What is deaf to it, as a job in the background of a shell is to INT, is then asked
    by TERM, and has the grace once more."""
    if number not in (_TERM, _KILL):
        process_tree.ask(number, grace_s, session=session, insisted=orders.insisted)
    return process_tree.end(grace_s, session=session, insisted=orders.insisted)


def _when_over(process: subprocess.Popen[bytes]) -> int:
    """A file that becomes readable when the process has ended and its exit code is known."""
    over_fd, told_fd = os.pipe()

    def wait() -> None:
        _reap_orphans_until_over(process.pid)
        process.wait()
        os.write(told_fd, b"\n")

    threading.Thread(target=wait, name="ci_llm command", daemon=True).start()
    return over_fd


def _reap_orphans_until_over(pid: int) -> None:
    """A training of many days may leave an orphan at each of its steps; what has ended must not fill the table."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ChildProcessError):  # `tree.reap` was faster
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != pid:
            os.waitpid(ended.si_pid, 0)


def _report(fd: int, fact: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and the work goes on without it
        os.write(fd, dump_json(fact))


# ---------------------------------------------------------------------------------------------------- child


_ROOT: Final = str(Path(__file__).parents[2])
#: A program of ours finds the modules that this one found, whatever folder it starts in and whatever lies there.
_BOOT: Final = "import sys; sys.path[:] = {path!r}; from ci_llm.supervisor.{module} import main; sys.exit(main())"


def start_keeper(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    grace_s: float,
    control_fd: int,
    report_fd: int,
    stdout_fd: int,
    stderr_fd: int,
) -> subprocess.Popen[bytes]:
    """Start the process that keeps `command`, in a session of its own, so that no terminal and no group reaches it."""
    return subprocess.Popen(
        [*_program("shim"), str(control_fd), str(report_fd), str(grace_s), *command],
        env=dict(environment),
        stdout=stdout_fd,
        stderr=stderr_fd,
        pass_fds=(control_fd, report_fd),
        start_new_session=True,
    )


def start_command(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command of an attempt, for its keeper: in its own session, with the keeper's files and environment.

    Raises:
        OSError: there is no such program, or it may not be run.
    """
    return subprocess.Popen(list(command), start_new_session=True)


def run_task(module: str, arguments: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
    """Run `main` of a module of this package in a process of its own, without input; nothing of it is left.

    Only while no attempt runs.

    Returns:
        whether it ended well in time, and what it said.
    """
    try:
        done = subprocess.run(
            [*_program(module), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        return False, f"{_text(error.output)}\nno end within {timeout_s:g} s"
    finally:
        process_tree.end(0.0)
    return done.returncode == 0, done.stdout


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _program(module: str) -> list[str]:
    path = [_ROOT, *(entry for entry in sys.path if entry and os.path.isabs(entry))]
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(path=path, module=module)]
