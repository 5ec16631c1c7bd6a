"""Everything that descends from this process: found, ended, and proven gone.

On Linux the orphans of a subreaper come back to it, so nothing that was ever started below it can get away, whatever
sessions it made. Elsewhere an orphan is found as long as it stays in the session of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import psutil

from ci_llm.core.run_status import is_alive
from ci_llm.interrupts import signal_number

_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_LOOK_S: Final = 0.01
_LONGEST_LOOK_S: Final = 0.5
_KILL_S: Final = 10.0  # nobody survives a KILL for longer, but for a process stuck in the kernel


def adopt_orphans() -> None:
    """Let Linux hand processes of this tree whose parent died to this one; other systems know no such thing."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def living(session: int | None = None) -> list[psutil.Process]:
    """The descendants of this process, and the members of `session`, that are not merely waiting to be reaped.

    psutil's own walk loses the children of a process that ends while it looks. They were taken for leftovers once in
    fifty launchers that died of their TERM, and killed before they had saved; here the parent stays on the list.
    """
    found = {process.pid: process for process in psutil.process_iter(["ppid"])}
    tree = {os.getpid()}
    while more := {pid for pid, process in found.items() if process.info["ppid"] in tree} - tree:
        tree |= more
    if session is not None and sys.platform != "linux":
        tree |= {pid for pid in found if _session_of(pid) == session}
    return [found[pid] for pid in sorted(tree - {os.getpid()}) if is_alive(pid)]


def end(
    grace_s: float,
    *,
    settle_s: float = 0.0,
    session: int | None = None,
    insisted: Callable[[], bool] = lambda: False,
) -> list[str]:
    """End every descendant: TERM, and KILL for what is left after `grace_s` seconds, or once `insisted` says so.

    Args:
        settle_s: seconds in which they may go by themselves before anything is sent.

    Returns:
        what had to be killed, as "python (pid 17)".
    """
    ask(signal_number("SIGTERM"), grace_s, settle_s=settle_s, session=session, insisted=insisted)
    killed: dict[int, str] = {}
    for alive in _looks(session, until=time.monotonic() + _KILL_S):
        killed |= {process.pid: _describe(process) for process in alive}
        _tell_all(process.kill for process in alive)
    return list(killed.values())


def ask(
    number: int,
    grace_s: float,
    *,
    settle_s: float = 0.0,
    session: int | None = None,
    insisted: Callable[[], bool] = lambda: False,
) -> None:
    """Send every descendant a signal and wait until all are gone, for `grace_s` seconds, or until `insisted` says so.

    What a process starts after its signal is not asked: it may need just that to save. Its orphans are.
    """
    start = time.monotonic()
    asked: set[int] = set()
    for alive in _looks(session, until=start + settle_s + grace_s):
        if insisted():
            break
        if time.monotonic() - start >= settle_s:
            pids = {process.pid for process in alive}
            new = [one for one in alive if one.pid not in asked and not (asked and one.info["ppid"] in pids)]
            _tell_all(partial(process.send_signal, number) for process in new)
            asked |= {process.pid for process in new}


def reap() -> None:
    """Collect what has ended. Only for a process none of whose children is waited for by anybody else."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _looks(session: int | None, *, until: float) -> Iterable[list[psutil.Process]]:
    """What is alive, again and again, more and more rarely, until nothing is or the time is over.

    That nothing is takes two looks: an orphan which was listed before its parent (numbers start again at some time)
    is below nobody when that parent has ended before its own turn.
    """
    pause = _FIRST_LOOK_S
    while (alive := living(session) or living(session)) and time.monotonic() < until:
        yield alive
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_LOOK_S)


def _tell_all(orders: Iterable[Callable[[], None]]) -> None:
    for order in orders:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone by itself, or another user's
            order()


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.name()} (pid {process.pid})"
    return f"pid {process.pid}"


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
