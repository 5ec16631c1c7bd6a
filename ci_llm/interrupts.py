"""Signals become notes: a handler writes down that the run shall stop or save; the loop reads it in peace.

A handler does nothing else, because work in a handler tears or hangs. It also comes late: Python runs
handlers between two bytecodes of the main thread, 18 s after the signal during one long backward. So a thread
reads `signal.set_wakeup_fd`, to which the interpreter writes in the very moment of the signal; it takes the
note at once, tells people, and ends the process when they insist.

This is the only file that imports `signal`. It loads nothing heavy, to be installed before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Final

from ci_llm.errors import ConfigError

STOP_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGUSR2")
SAVE_SIGNALS: Final = ("SIGUSR1",)
#: Asks a process for the stacks of its threads (stacks.py). It means nothing to a process that knows no answer.
STACKS_SIGNAL: Final = signal.SIGURG

ABORTED_EXIT_CODE: Final = 128 + signal.SIGINT
_QUIT: Final = b"\0"  # no signal has the number 0
_PR_SET_PDEATHSIG: Final = 1
_POKE_S: Final = 0.05
_HANG_UP: Final = getattr(signal, "SIGHUP", None)  # Windows knows none


class Interrupts:
    """Notes of the signals that ask the run to stop or to save; a context manager around the whole run.

    Args:
        stop: names of the signals that end the run after a checkpoint.
        save: names of the signals after which the run saves and goes on.
        announce: called with one line for people, from the listening thread; stderr by default.
        abort_grace_s: how long a second Ctrl-C waits for the main thread to raise KeyboardInterrupt, before
            the process ends with exit code 130 out of whatever long C call the main thread is in.

    The loop keeps `plan` current ("saving step 37"): it is what the announcement says. Only the main thread
    may install handlers; elsewhere `install` says so and changes nothing. A process forked from this one gets
    the handlers of before, because it is not the run. A SIGHUP that `nohup` has made ignored stays ignored.
    At the end the handlers of before come back, except in a program that `ends_with_process`.

    Raises:
        ConfigError: a name is no signal, or a signal that nobody can catch.
    """

    def __init__(
        self,
        stop: Iterable[str] = STOP_SIGNALS,
        save: Iterable[str] = SAVE_SIGNALS,
        *,
        announce: Callable[[str], None] | None = None,
        abort_grace_s: float = 2.0,
    ) -> None:
        self._stop_signals, self._save_signals = _meanings(stop, save)
        self.announce = announce or _to_stderr
        self.plan = "saving"
        self._abort_grace_s = abort_grace_s
        self._note: tuple[str, float] | None = None
        self._save_requested = False
        self._stopping = threading.Event()
        self._ctrl_c_heard = self._abort = False
        self._own_pokes = 0
        self._raised = threading.Event()
        self._old_handlers: dict[int, _Handler] = {}
        self._old_wakeup_fd = -1
        self._read_fd = self._write_fd = -1
        self._listener: threading.Thread | None = None

    # What the run reads

    @property
    def stop_reason(self) -> str | None:
        """Why the run shall stop, "signal:SIGTERM" for instance; None as long as it shall not."""
        return self._note[0] if self._note else None

    @property
    def stop_requested_at(self) -> float | None:
        """`time.monotonic()` of the first request to stop."""
        return self._note[1] if self._note else None

    @property
    def save_requested(self) -> bool:
        """Whether a checkpoint was asked for since `take_save_request`."""
        return self._save_requested

    def take_save_request(self) -> bool:
        """Return whether a checkpoint was asked for, and cross the request off."""
        if not self._save_requested:
            return False  # not written here: a signal may arrive between the look and the write
        self._save_requested = False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a stop is requested, or for `timeout` seconds; return whether it is."""
        return self._stopping.wait(timeout)

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop for a reason that is no signal ("walltime"). The first request counts."""
        self._write_down(reason)
        self._stopping.set()

    # Installing

    @property
    def installed(self) -> bool:
        """Whether signals are heard."""
        return self in _installed

    def install(self) -> Interrupts:
        """Start to hear signals. From any thread but the main one: say so and change nothing."""
        if self.installed:
            return self
        if threading.current_thread() is not threading.main_thread():
            self.announce("signals are not watched here: only the main thread can do that")
            return self
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._listener = threading.Thread(target=self._listen, name="ci_llm signals", daemon=True)
        self._listener.start()
        _installed.append(self)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._take(self._stop_signals | self._save_signals)
        return self

    def listen_to(self, stop: Iterable[str], save: Iterable[str]) -> None:
        """Change what is listened to, once it is known. Notes stay; a signal that is in neither gets its old handler.

        Raises:
            ConfigError: as above; nothing is changed then.
        """
        self._stop_signals, self._save_signals = _meanings(stop, save)
        if self.installed:
            wanted, heard = self._stop_signals | self._save_signals, self._old_handlers.keys()
            unwanted = heard - wanted
            self._take(wanted - heard)
            self._give(unwanted)

    def restore(self) -> None:
        """Give the handlers of before back and end the thread. The notes stay readable."""
        if not self.installed:
            return
        if _process_ends and _installed == [self]:
            self._ignore()
        self._give_back()
        os.write(self._write_fd, _QUIT)
        if self._listener is not None:
            self._listener.join()
        self._close()

    def __enter__(self) -> Interrupts:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _take(self, numbers: Iterable[int]) -> None:
        for number in sorted(numbers):
            if number != _HANG_UP or signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._take_note)

    def _give(self, numbers: Iterable[int]) -> None:
        for number in sorted(numbers):
            old = self._old_handlers.pop(number)
            if signal.getsignal(number) == self._take_note:
                signal.signal(number, signal.SIG_DFL if old is None else old)

    def _ignore(self) -> None:
        # No handler of Python's: the interpreter gives those back on its way out, which takes a second with torch.
        for number in self._old_handlers:
            if signal.getsignal(number) == self._take_note:
                signal.signal(number, signal.SIG_IGN)

    def _give_back(self) -> None:
        """Undo `install`, except where somebody else has installed something over it."""
        self._give(self._old_handlers)
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._old_wakeup_fd if current == self._write_fd else current)
        _installed.remove(self)

    def _close(self) -> None:
        os.close(self._write_fd)
        os.close(self._read_fd)
        self._read_fd = self._write_fd = -1
        self._listener = None

    # In the main thread, between two bytecodes

    def _take_note(self, number: int, _frame: FrameType | None) -> None:
        # No lock may be taken here, the interrupted code may hold it: the event is for the listener to set.
        if number in self._save_signals:
            self._save_requested = True
        else:
            self._write_down(f"signal:{_name(number)}")
        if self._abort and not self._raised.is_set():
            self._raised.set()
            raise KeyboardInterrupt

    def _write_down(self, reason: str) -> None:
        if self._note is None:
            self._note = (reason, time.monotonic())

    # In the listening thread, at once

    def _listen(self) -> None:
        while _QUIT not in (heard := os.read(self._read_fd, 64)):
            for number in heard:
                self._hear(number)

    def _hear(self, number: int) -> None:
        if number in self._save_signals:
            self.announce(f"{_name(number)}: saving after this step, then going on")
        elif number == signal.SIGINT and number in self._stop_signals:
            self._hear_ctrl_c()
        elif number in self._stop_signals and not self._stopping.is_set():
            self.request_stop(f"signal:{_name(number)}")
            self.announce(f"{_name(number)}: {self.plan}")

    def _hear_ctrl_c(self) -> None:
        if self._own_pokes:
            self._own_pokes -= 1
        elif not self._ctrl_c_heard:
            self._ctrl_c_heard = True
            self.request_stop("signal:SIGINT")
            self.announce(f"SIGINT: {self.plan} (again to abort now)")
        elif self._abort:
            os._exit(ABORTED_EXIT_CODE)
        else:
            self._abort_now()

    def _abort_now(self) -> None:
        """Raise KeyboardInterrupt in the main thread; end the process if that thread does not come back."""
        self.announce("SIGINT again: aborting now; committed checkpoints stay")
        self._abort = True
        deadline = time.monotonic() + self._abort_grace_s
        while time.monotonic() < deadline:
            # Again and again: a signal that comes just before a system call blocks does not wake it.
            self._own_pokes += 1
            signal.pthread_kill(_main_thread_id(), signal.SIGINT)
            if self._raised.wait(_POKE_S):
                return
        os._exit(ABORTED_EXIT_CODE)


_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_installed: list[Interrupts] = []
_process_ends = False


def ends_with_process() -> None:
    """For a program: what its `Interrupts` listened to is ignored once they are through, until the process has ended.

    Its exit code is settled then, and a signal on the way out of the interpreter must not change it.
    """
    global _process_ends
    _process_ends = True


_before_fork = threading.local()


def _block_before_fork() -> None:
    # A signal to the child before it is on its own would be written into the pipe of the parent.
    numbers = {number for one in _installed for number in one._old_handlers}
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _forget_in_child() -> None:
    for one in reversed(_installed.copy()):
        one._give_back()
        one._close()
    _unblock_after_fork()


os.register_at_fork(before=_block_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_forget_in_child)


def ignore_signals(_worker_id: int = 0) -> None:
    """Make a worker process of a DataLoader deaf to what is meant for the run; fits `worker_init_fn`.

    SLURM, a supervisor and a terminal signal whole process groups. A worker that dies of it takes the run
    down, which still needs it for its last step. So it ignores these signals and ends when its parent process
    says so with a SIGTERM of its own, or is gone. (A worker that ignored SIGTERM altogether would hang the
    exit of the parent: multiprocessing terminates its children and joins them.)
    """
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    notify_of_parent_death("SIGHUP")
    owner = multiprocessing.parent_process()  # not `parent` where a fork server stands between
    masters = {parent, owner.pid} if owner else {parent}
    threading.Thread(target=_obey, args=(parent, masters), name="ci_llm parent", daemon=True).start()
    if os.getppid() != parent:
        os._exit(0)


def _obey(parent: int, masters: set[int | None]) -> None:
    """End this process when one of its masters terminates it or its parent dies; wait for both for ever.

    The death notice of Linux comes when the *thread* that forked us ends, hence the look at the parent.
    """
    while True:
        heard = signal.sigwaitinfo({signal.SIGTERM, signal.SIGHUP})
        ordered = heard.si_signo == signal.SIGTERM and heard.si_pid in masters
        if ordered or os.getppid() != parent:
            os._exit(0)


def die_with_parent(signal_name: str = "SIGTERM") -> bool:
    """Receive `signal_name` when the process that started this one ends; for a trainer under a lone launcher.

    `accelerate launch` with one process dies of a SIGTERM without handing it on, and the trainer would run on
    as an orphan that nobody tells. (It starts the trainer from its main thread, so that thread's end is its
    own.) Returns False where the system knows no such notice.
    """
    parent = os.getppid()
    if not notify_of_parent_death(signal_name):
        return False
    if os.getppid() != parent:
        os.kill(os.getpid(), getattr(signal, signal_name))
    return True


def send(pid: int, signal_name: str) -> bool:
    """Send a process of this machine a signal; False if there is no such process."""
    try:
        os.kill(pid, _number(signal_name))
    except ProcessLookupError:
        return False
    return True


def signal_number(name: str) -> int:
    """The number of "SIGTERM", say; of any signal that a process can be sent, SIGKILL included.

    Raises:
        ConfigError: this system has no such signal.
    """
    number = signal.Signals.__members__.get(name)
    if number is None:
        raise ConfigError(f"there is no signal {name!r}", hint=f"for instance {STOP_SIGNALS[0]}")
    return int(number)


def notify_of_parent_death(signal_name: str) -> bool:
    """Ask Linux for a signal when the thread that forked this process ends; False on other systems."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(getattr(signal, signal_name)), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return True


def _meanings(stop: Iterable[str], save: Iterable[str]) -> tuple[frozenset[int], frozenset[int]]:
    stops, saves = (frozenset(_number(name) for name in names) for names in (stop, save))
    if both := stops & saves:
        raise ConfigError(f"{_name(min(both))} cannot mean both stop and save")
    return stops, saves


def _number(name: str) -> int:
    number = signal.Signals.__members__.get(name)
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{name!r} is not a signal that a program can hear", hint=f"for instance {STOP_SIGNALS[0]}")
    return number


def _name(number: int) -> str:
    return signal.Signals(number).name


def _main_thread_id() -> int:
    identity = threading.main_thread().ident
    assert identity is not None
    return identity


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, and then nobody is left to read it
        os.write(2, f"{line}\n".encode())
