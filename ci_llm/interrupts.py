"""Signals become requests: a handler records that the run shall stop or save, and the loop reads it between two steps.

A handler does nothing else: it interrupts arbitrary code, which may hold a lock or be in the middle of a write.
It also runs late, between two bytecodes of the main thread: 18 s after the signal during one long backward. So a thread
reads the pipe of `signal.set_wakeup_fd`, to which the interpreter writes at the moment of the signal. It records the
request, announces what the run will do, and ends the process at the second Ctrl-C. No other file imports `signal`. This
one imports nothing heavy, because it is installed before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from types import FrameType
from typing import Any, Final

from ci_llm.errors import ConfigError

STOP_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGUSR2")
SAVE_SIGNALS: Final = ("SIGUSR1",)

ABORTED_EXIT_CODE: Final = 130  # 128 + SIGINT
BROKEN_PIPE_EXIT_CODE: Final = 141  # 128 + SIGPIPE: what a shell reports of a program whose reader has gone
_QUIT: Final = b"\0"  # no signal has the number 0
_PR_SET_PDEATHSIG: Final = 1
_RETRY_S: Final = 0.05


class Interrupts:
    """The requests to stop or to save that arrive as signals; a context manager around the whole run.

    Args:
        stop: names of the signals that end the run after a checkpoint.
        save: names of the signals after which the run saves and continues.
        announce: called with one line for people, from the listening thread; stderr by default.
        describe_stop: called at a request to stop, from the listening thread: what the run will do now, in a few
            words for the announcement. It can be replaced later.
        abort_grace_s: seconds that a second Ctrl-C waits for the main thread to raise KeyboardInterrupt. After
            them the process ends with exit code 130, even if the main thread is in a long C call.

    Only the main thread may install and restore handlers; in any other thread `install` and `restore` announce this and
    change nothing. The previous handlers come back in a process forked from this one, which is not the run, and at the
    end, except in a program that `ends_with_process`. A SIGHUP that `nohup` has set to be ignored stays ignored.

    Raises:
        ConfigError: a name is not a signal, or a signal that cannot be caught.

    Examples:
        >>> with ci_llm.Interrupts(["SIGTERM"], announce=print) as interrupts:
        ...     interrupts.stop_reason is None, interrupts.installed
        (True, True)
    """

    def __init__(
        self,
        stop: Iterable[str] = STOP_SIGNALS,
        save: Iterable[str] = SAVE_SIGNALS,
        *,
        announce: Callable[[str], None] | None = None,
        describe_stop: Callable[[], str] = lambda: "saving",
        abort_grace_s: float = 2.0,
    ) -> None:
        self._stop_signals, self._save_signals = _signal_numbers(stop, save)
        self.announce = announce or _to_stderr
        self.describe_stop = describe_stop
        #: If set, it gets the name of every signal, from the listening thread, instead of all that this one would do.
        self.pass_on: Callable[[str], None] | None = None
        self._abort_grace_s = abort_grace_s
        self._stop_request: tuple[str, float] | None = None  # the reason, and time.monotonic()
        self._save_requested = False
        self._stopping = threading.Event()  # set by the listener only: an Event takes a lock
        self._ctrl_c_seen = self._aborting = False
        self._own_sigints = 0  # sent by `_abort`, and not yet read from the pipe
        self._raised = threading.Event()
        self._old_handlers: dict[int, _Handler] = {}
        self._old_wakeup_fd = -1
        self._read_fd = self._write_fd = -1
        self._listener: threading.Thread  # while installed

    # What the run reads

    @property
    def stop_reason(self) -> str | None:
        """The reason why the run shall stop, for example "signal:SIGTERM"; None if it shall not."""
        return self._stop_request[0] if self._stop_request else None

    @property
    def stop_requested_at(self) -> float | None:
        """`time.monotonic()` of the first request to stop."""
        return self._stop_request[1] if self._stop_request else None

    @property
    def save_requested(self) -> bool:
        """True if a checkpoint has been requested since the last `take_save_request`."""
        return self._save_requested

    def take_save_request(self) -> bool:
        """Return whether a checkpoint has been requested, and clear the request."""
        if not self._save_requested:
            return False  # without a write: it would erase a request that arrives after the test
        self._save_requested = False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a stop is requested, or for `timeout` seconds; return whether it is."""
        return self._stopping.wait(timeout)

    def request_stop(self, reason: str) -> None:
        """Ask the run to stop for a reason other than a signal ("walltime"). The first request counts."""
        self._record_stop(reason)
        self._stopping.set()

    def announce_stop(self, cause: str, remark: str = "") -> None:
        """Announce why the run stops and what it does now."""
        self.announce(f"{cause}: {self.describe_stop()}{remark}")

    # Installing

    @property
    def signals(self) -> frozenset[str]:
        """The names of the signals that stop and that save."""
        return frozenset(map(_name, self._stop_signals | self._save_signals))

    @property
    def installed(self) -> bool:
        """True while the handlers are in place."""
        return self in _installed

    def install(self) -> Interrupts:
        """Install the handlers. In any thread but the main one: announce that it is not possible, change nothing."""
        if self.installed:
            return self
        if threading.current_thread() is not threading.main_thread():
            self.announce("signals are not watched here: only the main thread can do that")
            return self
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # as set_wakeup_fd requires: the interpreter must never wait in a signal
        self._listener = threading.Thread(target=self._listen, name="ci_llm signals", daemon=True)
        self._listener.start()
        _installed.append(self)  # before the first handler, so that a fork from here on removes all of them
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in sorted(self._stop_signals | self._save_signals):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def restore(self) -> None:
        """Restore the previous handlers and end the thread; the requests stay readable. For the main thread."""
        if not self.installed:
            return
        if threading.current_thread() is not threading.main_thread():
            self.announce("signals are still watched here: only the main thread can end that")
            return
        if _process_ends and _installed == [self]:
            self._ignore()
        self._uninstall()
        os.write(self._write_fd, _QUIT)
        self._listener.join()
        self._close()

    def __enter__(self) -> Interrupts:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _ignore(self) -> None:
        # Not by handlers of Python: the interpreter restores those at its exit, which takes a second with torch.
        for number in self._old_handlers:
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, signal.SIG_IGN)

    def _uninstall(self) -> None:
        """Undo `install`, except for a handler or a descriptor that other code has installed since."""
        for number, old in sorted(self._old_handlers.items()):
            if signal.getsignal(number) == self._handle_signal:
                signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old_handlers.clear()
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._old_wakeup_fd if current == self._write_fd else current)
        _installed.remove(self)

    def _close(self) -> None:
        os.close(self._write_fd)
        os.close(self._read_fd)
        self._read_fd = self._write_fd = -1

    # In the main thread, between two bytecodes

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        # The interrupted code may hold any lock, so this takes none: the listener sets the event.
        if number in self._save_signals:
            self._save_requested = True
        else:
            self._record_stop(f"signal:{_name(number)}")
        if self._aborting and not self._raised.is_set():
            self._raised.set()
            raise KeyboardInterrupt

    def _record_stop(self, reason: str) -> None:
        # Both threads may come here at the same moment, for the same signal: either order leaves the same reason.
        if self._stop_request is None:
            self._stop_request = (reason, time.monotonic())

    # In the listening thread, at the moment of the signal

    def _listen(self) -> None:
        while _QUIT not in (numbers := os.read(self._read_fd, 64)):
            for number in numbers:
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if self.pass_on is not None:
            self.pass_on(_name(number))
        elif number in self._save_signals:
            self.announce(f"{_name(number)}: saving after this step, then continuing")
        elif number == signal.SIGINT and number in self._stop_signals:
            self._on_ctrl_c()
        elif number in self._stop_signals and not self._stopping.is_set():
            self.request_stop(f"signal:{_name(number)}")
            self.announce_stop(_name(number))

    def _on_ctrl_c(self) -> None:
        if self._own_sigints:
            self._own_sigints -= 1
        elif not self._ctrl_c_seen:
            self._ctrl_c_seen = True
            self.request_stop("signal:SIGINT")
            self.announce_stop("SIGINT", " (again to abort now)")
        elif self._aborting:
            os._exit(ABORTED_EXIT_CODE)
        else:
            self._abort()

    def _abort(self) -> None:
        """Raise KeyboardInterrupt in the main thread; end the process if that thread runs no bytecode in time."""
        self.announce("SIGINT again: aborting now; committed checkpoints stay")
        self._aborting = True
        deadline, main = time.monotonic() + self._abort_grace_s, threading.main_thread().ident
        assert main is not None
        while time.monotonic() < deadline:
            # One signal may be too few: if it comes just before a system call blocks, the call still blocks.
            self._own_sigints += 1
            signal.pthread_kill(main, signal.SIGINT)
            if self._raised.wait(_RETRY_S):
                return
        os._exit(ABORTED_EXIT_CODE)


_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_installed: list[Interrupts] = []
_process_ends = False


def ends_with_process() -> None:
    """Ignore the signals of the last `Interrupts` of this process after it, until the process has ended.

    The exit code is decided by then, and a signal during the exit of the interpreter must not change it.
    """
    global _process_ends
    _process_ends = True


_before_fork = threading.local()


def _block_before_fork() -> None:
    # Until `_forget_in_child` has run, the child would write its signals into the pipe of its parent.
    numbers = {number for one in _installed for number in one._old_handlers}
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _forget_in_child() -> None:
    for one in reversed(_installed.copy()):
        one._uninstall()
        one._close()
    _unblock_after_fork()


os.register_at_fork(before=_block_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_forget_in_child)


@contextlib.contextmanager
def termination_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGHUP in this thread; threads and processes that start meanwhile block them for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore(names: Iterable[str]) -> None:
    """Ignore these signals in this process, and in the program that it becomes."""
    for name in names:
        signal.signal(_number(name), signal.SIG_IGN)


def ignore_signals(_worker_id: int = 0) -> None:
    """Let a worker process of a DataLoader ignore the signals that are meant for the run; fits `worker_init_fn`.

    SLURM, a supervisor and a terminal signal whole process groups, and a run needs its workers for its last step. So a
    worker ends when its parent sends it a SIGTERM, as multiprocessing does at its exit, or is gone.
    """
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    notify_of_parent_death("SIGHUP")  # blocked above, so it wakes `sigwaitinfo` only
    creator = multiprocessing.parent_process()  # with a fork server, another process than the parent
    senders = {parent, creator and creator.pid}
    threading.Thread(target=_end_with_parent, args=(parent, senders), name="ci_llm parent", daemon=True).start()
    if os.getppid() != parent:  # it died before it was asked for, and no notification comes
        os._exit(0)


def shield_workers(*loaders: Any) -> None:
    """Let the workers of loaders ignore the signals of the run, from their next pass on.

    A terminal, `timeout` and SLURM signal them too; a worker that ends at once takes the run with it, unsaved.

    Args:
        loaders: torch's own, or as Accelerate has prepared them; their own `worker_init_fn` still runs. Anything else
            that yields batches has no workers that are known, and stays as it is.
    """
    for loader in loaders:
        inner = getattr(loader, "base_dataloader", loader)
        init = getattr(inner, "worker_init_fn", None)
        is_shielded = isinstance(init, partial) and init.func is _begin_shielded
        if hasattr(inner, "worker_init_fn") and not is_shielded:
            inner.worker_init_fn = partial(_begin_shielded, init)
            if getattr(inner, "num_workers", 0) > 0 and hasattr(inner, "multiprocessing_context"):
                inner.multiprocessing_context = worker_context(inner.multiprocessing_context)


def worker_context(given: BaseContext | None = None) -> BaseContext | None:
    """The context in which workers start that call `ignore_signals`; another one only where they are forked.

    A forked worker has threads before it calls anything of its own: torch starts its pool again.
    """
    if given is None:  # asked without fixing it: a program may still set another one
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        return _WorkerContext() if method == "fork" else None
    return _WorkerContext() if type(given) is ForkContext else given


class _Worker(ForkProcess):
    def start(self) -> None:
        """Fork while termination is blocked, which the worker inherits."""
        with termination_blocked():
            super().start()


class _WorkerContext(ForkContext):
    Process = _Worker


def _begin_shielded(init: Callable[[int], object] | None, worker: int) -> None:
    ignore_signals(worker)
    if init is not None:
        init(worker)


def _end_with_parent(parent: int, senders: set[int | None]) -> None:
    """End this process when one of `senders` sends a SIGTERM, or when the parent is gone. Never returns."""
    while True:
        received = signal.sigwaitinfo({signal.SIGTERM, signal.SIGHUP})
        terminated = received.si_signo == signal.SIGTERM and received.si_pid in senders
        # A SIGHUP proves nothing: Linux sends it at the end of the *thread* that forked this process.
        if terminated or os.getppid() != parent:
            os._exit(0)


def die_with_parent(signal_name: str = "SIGTERM") -> None:
    """Receive `signal_name` when the process that started this one ends; for a trainer under `accelerate launch`.

    With one process, `accelerate launch` ends at a SIGTERM and does not forward it. The trainer would run on without
    a parent, and would not know that it shall stop. (The launcher starts the trainer from its main thread, so the end
    of that thread is the end of the launcher.)
    """
    parent = os.getppid()
    notify_of_parent_death(signal_name)
    if os.getppid() != parent:  # it died before the call, and sends no notification
        os.kill(os.getpid(), getattr(signal, signal_name))


def send(pid: int, signal_name: str) -> bool:
    """Send a process of this machine a signal; False if there is no such process."""
    try:
        os.kill(pid, _number(signal_name))
    except ProcessLookupError:
        return False
    return True


def signal_number(name: str) -> int:
    """The number of a signal by its name, for example "SIGTERM"; SIGKILL included.

    Raises:
        ConfigError: this system has no such signal.
    """
    number = signal.Signals.__members__.get(name)
    if number is None:
        raise ConfigError(f"there is no signal {name!r}", hint=f"for instance {STOP_SIGNALS[0]}")
    return int(number)


def notify_of_parent_death(signal_name: str) -> None:
    """Ask Linux for a signal when the thread that forked this process ends."""
    set_process_attribute(_PR_SET_PDEATHSIG, int(getattr(signal, signal_name)))


def set_process_attribute(attribute: int, value: int) -> None:
    """Call prctl(2). Raises OSError: the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(attribute, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({attribute}, {value}) failed")


def _signal_numbers(stop: Iterable[str], save: Iterable[str]) -> tuple[frozenset[int], frozenset[int]]:
    stops, saves = (frozenset(_number(name) for name in names) for names in (stop, save))
    if both := stops & saves:
        raise ConfigError(f"{_name(min(both))} cannot mean both stop and save")
    return stops, saves


def _number(name: str) -> int:
    number = signal_number(name)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{name!r} is not a signal that a program can catch", hint=f"for instance {STOP_SIGNALS[0]}")
    return number


def _name(number: int) -> str:
    return signal.Signals(number).name


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, and with it every reader
        os.write(2, f"{line}\n".encode())
