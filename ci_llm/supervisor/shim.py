"""The shim, a small process between the supervisor and the command: it ends everything that the command started.

It ignores signals that reach whole process groups (Ctrl-C, scancel). It reads one pipe, the control pipe: each byte is
the number of a signal by which to end the command (SIGKILL means now, without a grace), and the end of the pipe means
that the supervisor is gone. Into a second pipe it reports how the command ended and what had to be killed.

Within the supervisor only this file starts programs.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ci_llm.core.typed_json import dump_json
from ci_llm.interrupts import Interrupts, signal_number
from ci_llm.supervisor import process_tree

_TERM: Final = signal_number("SIGTERM")
_KILL: Final = signal_number("SIGKILL")
_IGNORED: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SETTLE_S: Final = 1.0  # the helper processes of multiprocessing end by themselves once their parent is gone
_ROOT: Final = str(Path(__file__).parents[2])
#: Runs `main` of a module of this package. It finds the modules that this process found, and no others that may lie in
#: the folder in which it starts.
_BOOT: Final = "import sys; sys.path[:] = {path!r}; from ci_llm.supervisor.{module} import main; sys.exit(main())"


def start_shim(
    command: Sequence[str],
    environment: Mapping[str, str],
    grace_s: float,
    pipes: tuple[int, int],
    outputs: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Start the shim of `command`, in a session of its own, so that signals of the terminal do not reach it.

    Args:
        pipes: its ends of the control pipe and of the report pipe.
        outputs: the files that become its stdout and stderr.
    """
    return subprocess.Popen(
        [*_program("shim"), *map(str, pipes), str(grace_s), *command],
        env=dict(environment),
        stdout=outputs[0],
        stderr=outputs[1],
        pass_fds=pipes,
        start_new_session=True,
    )


def run_task(module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Run `main` of a module of this package in a process of its own, without input, and end all that it started.

    Only while no attempt runs: its processes would be ended too.

    Returns:
        its output.
    """
    try:
        return subprocess.run(
            [*_program(module), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
            errors="replace",
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = (error.output or b"").decode(errors="replace")  # bytes, whatever was asked for
        return f"{output}\nno end within {timeout_s:g} s"
    finally:
        process_tree.end(0.0)


def _program(module: str) -> list[str]:
    path = [_ROOT, *(entry for entry in sys.path if entry and os.path.isabs(entry))]
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(path=path, module=module)]


def main() -> int:
    """The shim's own process: `shim CONTROL_FD REPORT_FD GRACE_S COMMAND...`."""
    control_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    # The command must not hold the ends of these pipes: the supervisor would wait for what it leaves behind.
    for fd in (control_fd, report_fd):
        os.set_inheritable(fd, False)
    process_tree.adopt_orphans()
    with Interrupts(stop=(), save=_IGNORED, announce=lambda _line: None):
        _run_command(sys.argv[4:], _ControlPipe(control_fd), report_fd, float(sys.argv[3]))
    return 0


class _ControlPipe:
    """The orders of the supervisor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._kill_ordered = False

    def read_signal(self) -> int:
        """Wait for an order; return its signal. That is TERM if the supervisor is gone."""
        order = os.read(self.fd, 1)
        self._kill_ordered = _KILL in order
        return order[0] if order else _TERM

    def kill_ordered(self) -> bool:
        """True if the supervisor has ordered a kill. The end of the pipe is no such order: the grace still holds."""
        if not self._kill_ordered and select.select([self.fd], [], [], 0)[0]:
            self._kill_ordered = _KILL in os.read(self.fd, 16)
        return self._kill_ordered


def _run_command(command: list[str], control: _ControlPipe, report_fd: int, grace_s: float) -> None:
    try:
        # A session of its own: a command that signals its whole process group does not reach the shim.
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        _report(report_fd, {"error": error.strerror or str(error)})
        return
    # select can wait for files only, so the end of the command becomes one.
    over_fd = _when_over(process)
    ready, _, _ = select.select([control.fd, over_fd], [], [])
    if over_fd in ready:  # reported at once: what the command has left may take its time
        _report(report_fd, {"returncode": process.returncode})
        killed = process_tree.end(grace_s, settle_s=_SETTLE_S, kill_ordered=control.kill_ordered)
    else:
        number = control.read_signal()
        if number not in (_TERM, _KILL):
            process_tree.ask(number, grace_s, kill_ordered=control.kill_ordered)
        # TERM is for what ignores the first signal: a job in the background of a shell ignores INT.
        killed = process_tree.end(grace_s, kill_ordered=control.kill_ordered)
        if select.select([over_fd], [], [], _SETTLE_S)[0]:
            _report(report_fd, {"returncode": process.returncode})
    process_tree.reap()
    _report(report_fd, {"killed": killed})


def _when_over(process: subprocess.Popen[bytes]) -> int:
    """Return a file that becomes readable when the process has ended and its exit code is known."""
    over_fd, write_fd = os.pipe()

    def wait() -> None:
        _reap_orphans_until_over(process.pid)
        process.wait()
        os.write(write_fd, b"\n")

    threading.Thread(target=wait, name="ci_llm command", daemon=True).start()
    return over_fd


def _reap_orphans_until_over(pid: int) -> None:
    """Reap the orphans that end while the command runs: one per step, for days, would fill the process table."""
    with contextlib.suppress(ChildProcessError):  # `process_tree.reap` has reaped the last one
        # WNOWAIT leaves the command itself to `process.wait`, which needs its exit code.
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is None or ended.si_pid == pid:
                return
            os.waitpid(ended.si_pid, 0)


def _report(fd: int, fact: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and the shim still ends the command
        os.write(fd, dump_json(fact))
