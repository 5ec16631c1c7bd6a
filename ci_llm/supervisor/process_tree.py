"""The descendants of this process: found, ended, and proven gone.

This process becomes a subreaper: an orphan below it becomes its child, so that no descendant is lost, whatever sessions
it opens.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import psutil

from ci_llm.core.run_status import is_alive
from ci_llm.interrupts import set_process_attribute, signal_number

_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.5
_KILL_S: Final = 10.0  # only a process that is stuck in the kernel survives a KILL for longer


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    set_process_attribute(_PR_SET_CHILD_SUBREAPER, 1)


def living() -> list[psutil.Process]:
    """The descendants of this process, without those that wait to be reaped.

    psutil's own `children(recursive=True)` loses the children of a process that ends while it looks. One launcher in
    fifty ended at that moment, and its trainer was taken for a leftover and killed before it had saved. Here all pairs
    of process and parent are read first, so that a parent that has just ended still leads to its children.
    """
    found = {process.pid: process for process in psutil.process_iter(["ppid"])}
    tree: set[int] = set()
    more = {os.getpid()}
    while more:
        tree |= more
        more = {pid for pid, process in found.items() if process.info["ppid"] in tree} - tree
    return [found[pid] for pid in sorted(tree - {os.getpid()}) if is_alive(pid)]


def end(grace_s: float, *, settle_s: float = 0.0, kill_ordered: Callable[[], bool] = lambda: False) -> list[str]:
    """End every descendant: by TERM, and by KILL after `grace_s` seconds or as soon as `kill_ordered` returns True.

    Args:
        settle_s: seconds in which they may end by themselves before anything is sent.

    Returns:
        what had to be killed, each as "python (pid 17)".
    """
    ask(signal_number("SIGTERM"), grace_s, settle_s=settle_s, kill_ordered=kill_ordered)
    # Again and again: a process that is forked at this moment is in no list yet.
    killed: dict[int, str] = {}
    for alive in _looks(until=time.monotonic() + _KILL_S):
        killed |= {process.pid: _describe(process) for process in alive}
        _send_all(process.kill for process in alive)
    return list(killed.values())


def ask(
    number: int, grace_s: float, *, settle_s: float = 0.0, kill_ordered: Callable[[], bool] = lambda: False
) -> None:
    """Send every descendant a signal, and wait until all are gone, for `grace_s` seconds or until `kill_ordered()`.

    A process that is started after its parent got the signal gets none: the parent may need it to save. It gets one
    when it is an orphan.
    """
    start = time.monotonic()
    asked: set[int] = set()
    for alive in _looks(until=start + settle_s + grace_s):
        if kill_ordered():
            break  # the caller kills
        if time.monotonic() - start >= settle_s:
            pids = {process.pid for process in alive}
            # In the first round everyone is asked. Later only orphans are new: their parent is not alive any more.
            new = [one for one in alive if one.pid not in asked and not (asked and one.info["ppid"] in pids)]
            _send_all(partial(process.send_signal, number) for process in new)
            asked |= {process.pid for process in new}


def reap() -> None:
    """Reap every child that has ended. Only for a process in which nothing else waits for a child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _looks(*, until: float) -> Iterable[list[psutil.Process]]:
    """Yield what is alive, with growing pauses, until nothing is alive or the time is over.

    It takes two looks to say that nothing is alive. In one look an orphan may be read before its parent (pids start
    again from small numbers at some time), and if the parent ends before its own turn, nothing leads to the orphan.
    """
    pause = _FIRST_PAUSE_S
    while (alive := living() or living()) and time.monotonic() < until:
        yield alive
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _send_all(senders: Iterable[Callable[[], None]]) -> None:
    for send in senders:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended, or is another user's
            send()


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.name()} (pid {process.pid})"
    return f"pid {process.pid}"
