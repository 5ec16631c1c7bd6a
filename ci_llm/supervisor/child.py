"""The only file that starts programs: the command of an attempt below its keeper, and a short errand of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ci_llm.supervisor import tree

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
        [*_program("keeper"), str(control_fd), str(report_fd), str(grace_s), *command],
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


def run_errand(module: str, arguments: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
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
        tree.end(0.0)
    return done.returncode == 0, done.stdout


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _program(module: str) -> list[str]:
    path = [_ROOT, *(entry for entry in sys.path if entry and os.path.isabs(entry))]
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(path=path, module=module)]
