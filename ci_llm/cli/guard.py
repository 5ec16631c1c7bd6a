"""Run a command: its errors become one message and an exit code; closed or failing standard files are handled."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ci_llm.core.imports import set_library_defaults
from ci_llm.errors import BadInput, CiLlmError, first_line
from ci_llm.interrupts import ABORTED_EXIT_CODE

_LOGGER = logging.getLogger(__name__)

BROKEN_PIPE_EXIT_CODE: Final = 141  # 128 + SIGPIPE: what a shell reports of a program whose reader has gone


def run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; an error with a hint becomes a short explanation on stderr and its exit code.

    Args:
        debug: show the traceback of such an error, and log what is meant for developers.
    """
    _prepare_standard_files()
    set_library_defaults()  # before a command imports what reads them
    if debug:
        _enable_debug_log()
    try:
        code = _exit_code_of(command)
        sys.stdout.flush()  # here, where a closed pipe can still be told from another failure
        return code
    except KeyboardInterrupt:  # the second Ctrl-C: no explanation is needed
        return ABORTED_EXIT_CODE
    except BrokenPipeError:
        if not _stdout_reader_is_gone():
            raise
        _discard_output()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if not _stdout_fails():
            raise
        _discard_output()
        refusal = BadInput(
            f"the output could not be written: {error.strerror}",
            where="standard output",
            hint="redirect it to a terminal, a pipe, or a file on a disk that has space",
        )
        print_error(refusal)
        return refusal.exit_code
    except CiLlmError as error:
        if debug:
            traceback.print_exc()
        print_error(error)
        return error.exit_code


def _exit_code_of(command: Callable[[], int]) -> int:
    """The exit code of a command, also if it raises SystemExit, as argparse does after `--help`."""
    try:
        return command()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0


def _enable_debug_log() -> None:
    """Send the package's records to stderr, with the milliseconds since the start, until a run's log takes them."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("debug %(relativeCreated)7.0f ms  %(name)s: %(message)s"))
    package = logging.getLogger("ci_llm")
    package.setLevel(logging.DEBUG)
    package.handlers[:] = [shown]
    package.propagate = False
    _LOGGER.debug("Python %s, %s, in %s", sys.version.split()[0], sys.argv, Path.cwd())


def _prepare_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr, and write characters that the locale lacks as escapes.

    Otherwise the next file that is opened takes the number of a closed one, and prints go into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stdout_reader_is_gone() -> bool:
    """Whether the reader of standard output has closed it, as `| head` does; another pipe may have broken instead."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # poll reports an error even if no event is asked for
    return bool(poll.poll(0))


def _stdout_fails() -> bool:
    """Whether standard output refuses to be written, as on a full disk; another file may have failed instead."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # an unbuffered stream has nothing to flush
    except OSError:
        return True
    return False


def print_line(line: str) -> None:
    """Print a line at once; a terminal that is gone must not end a run."""
    try:
        print(line, flush=True)
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at the exit of the interpreter cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_error(error: CiLlmError) -> None:
    """Print an error to stderr: in full on the main process, as one line on the others, whose error may differ."""
    from ci_llm.cluster.launch import own_process_index

    number = own_process_index()
    told = f"error: {error}" if number == 0 else f"process {number}: error: {first_line(error)}"
    with contextlib.suppress(OSError):  # the exit code remains
        print(told, file=sys.stderr, flush=True)
