"""Signals become requests at once; handlers do nothing else and are restored; workers ignore signals."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import psutil
import pytest

from ci_llm import interrupts as interrupts_module
from ci_llm.errors import ConfigError
from ci_llm.interrupts import Interrupts, ignore_signals
from tests.support.children import DEADLINE_S, Child
from tools.testbed.events import wait_until


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with Interrupts(announce=lambda _line: None) as one:
        yield one


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP as it is without `nohup`, with which the tests themselves may have been started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


# Notes


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2"])
def test_a_stop_signal_is_recorded_with_its_time(interrupts: Interrupts, name: str) -> None:
    assert (interrupts.stop_reason, interrupts.stop_requested_at) == (None, None)
    send(getattr(signal, name))
    assert interrupts.stop_reason == f"signal:{name}"
    assert interrupts.stop_requested_at is not None
    assert interrupts.wait(DEADLINE_S)
    assert not interrupts.save_requested


def test_the_first_request_to_stop_counts(interrupts: Interrupts) -> None:
    interrupts.request_stop("walltime")
    first = interrupts.stop_requested_at
    for _ in range(3):
        send(signal.SIGTERM)
    assert (interrupts.stop_reason, interrupts.stop_requested_at) == ("walltime", first)


def test_a_save_request_is_taken_once_and_stops_nothing(interrupts: Interrupts) -> None:
    assert not interrupts.take_save_request()
    send(signal.SIGUSR1)
    send(signal.SIGUSR1)
    assert interrupts.save_requested
    assert [interrupts.take_save_request() for _ in range(2)] == [True, False]
    assert interrupts.stop_reason is None
    assert not interrupts.wait(0)


@pytest.mark.usefixtures("hang_up")
def test_the_signals_to_stop_and_to_save_are_configurable() -> None:
    with Interrupts(stop=["SIGUSR1"], save=["SIGHUP"], announce=lambda _line: None) as one:
        send(signal.SIGHUP)
        assert (one.take_save_request(), one.stop_reason) == (True, None)
        send(signal.SIGUSR1)
        assert one.stop_reason == "signal:SIGUSR1"


@pytest.mark.parametrize(
    ("start", "expected"), [(["env", "--default-signal=HUP"], "signal:SIGHUP"), (["nohup"], "None")]
)
def test_sighup_stops_a_run_unless_nohup_ignores_it(start: list[str], expected: str) -> None:
    source = """
import os, signal
from ci_llm.interrupts import Interrupts
with Interrupts(stop=["SIGHUP"], announce=lambda line: None) as one:
    os.kill(os.getpid(), signal.SIGHUP)
    print("heard", one.stop_reason)
"""
    with Child(*start, sys.executable, "-u", "-c", source) as child:
        assert child.read_until("heard") == f"heard {expected}"
        assert child.wait() == 0


def test_a_forwarder_gets_the_name_of_each_signal_and_nothing_is_announced() -> None:
    passed: queue.Queue[str] = queue.Queue()
    lines: list[str] = []
    with Interrupts(announce=lines.append) as one:
        one.pass_on = passed.put
        for name in ("SIGUSR1", "SIGTERM", "SIGINT"):
            send(getattr(signal, name))
            assert passed.get(timeout=DEADLINE_S) == name
        assert not one.wait(0), "the listener leaves the request to whoever gets the name"
    assert lines == []


def test_termination_that_is_held_back_arrives_afterwards(interrupts: Interrupts) -> None:
    here, before = threading.get_ident(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with contextlib.suppress(ZeroDivisionError), interrupts_module.termination_blocked():
        signal.pthread_kill(here, signal.SIGTERM)
        assert interrupts.stop_reason is None
        1 / 0  # noqa: B018
    assert interrupts.stop_reason == "signal:SIGTERM"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNONE", "TERM"])
def test_a_signal_that_cannot_be_caught_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Interrupts(stop=[name])


def test_a_signal_with_two_meanings_is_refused() -> None:
    with pytest.raises(ConfigError, match="SIGUSR1"):
        Interrupts(stop=["SIGUSR1"])


# Handlers


def test_handlers_and_the_wakeup_fd_come_back() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    old_fd = signal.set_wakeup_fd(write_fd)
    try:
        one = Interrupts(announce=lambda _line: None)
        assert one.install() is one.install()
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        one.restore()
        one.restore()
        assert {number: signal.getsignal(number) for number in before} == before
        assert signal.set_wakeup_fd(write_fd) == write_fd
    finally:
        signal.set_wakeup_fd(old_fd)
        os.close(read_fd)
        os.close(write_fd)
    assert "ci_llm signals" not in {thread.name for thread in threading.enumerate()}


def test_at_the_end_of_a_program_its_signals_are_ignored_and_the_handler_of_other_code_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts_module, "_process_ends", True)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]

    def of_other_code(*_: object) -> None: ...

    try:
        with Interrupts(announce=lambda _line: None):
            signal.signal(signal.SIGUSR2, of_other_code)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 3 + [of_other_code]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_outside_of_the_main_thread_nothing_is_changed_and_this_is_announced() -> None:
    before, lines = signal.getsignal(signal.SIGTERM), list[str]()
    one = Interrupts(announce=lines.append)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(one.install).result()
        assert not one.installed
        assert signal.getsignal(signal.SIGTERM) is before
        one.restore()
        assert len(lines) == 1
        one.install()
        elsewhere.submit(one.restore).result()
        assert one.installed
        assert len(lines) == 2
    one.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_announcement_says_what_the_run_will_do() -> None:
    heard = threading.Event()
    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        heard.set()

    with Interrupts(announce=announce) as one:
        one.describe_stop = lambda: "saving step 37"
        send(signal.SIGTERM)
        assert heard.wait(DEADLINE_S)
        send(signal.SIGTERM)
        heard.clear()
        send(signal.SIGUSR1)
        assert heard.wait(DEADLINE_S)
    assert lines == ["SIGTERM: saving step 37", "SIGUSR1: saving after this step, then continuing"]


# At once: the main thread is in one C call that no signal ends, and comes out when the test says so

STUCK = """
import ctypes, sys, threading
from ci_llm.interrupts import Interrupts

sys.settrace(None)  # what measures coverage waits for the interpreter's lock, which nobody gives up below
threading.settrace(None)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
lock, unlock = libc.pthread_mutex_lock, libc.pthread_mutex_unlock
entered, inside = threading.Lock(), True

def announce(line):
    print("announced", inside, interrupts.stop_reason, line)

def tell():
    entered.acquire()
    sys.setswitchinterval(0.005)
    print("inside")
    for line in sys.stdin:
        unlock(mutex)

with Interrupts(announce=announce, abort_grace_s=float(sys.argv[1])) as interrupts:
    libc.pthread_mutex_init(mutex, None)
    lock(mutex)
    entered.acquire()
    threading.Thread(target=tell, daemon=True).start()
    sys.setswitchinterval(1000)  # nobody else runs before this thread is in the call below
    entered.release()
    lock(mutex)
    inside = False
    try:
        print("outside", interrupts.stop_reason)
        threading.Event().wait(float(sys.argv[2]))
    except KeyboardInterrupt:
        print("aborted")
"""


@pytest.mark.slow
def test_a_signal_is_announced_while_the_main_thread_is_in_one_long_call() -> None:
    with Child.python(STUCK, "60", "0") as child:
        child.read_until("inside")
        child.signal(signal.SIGTERM)
        assert child.read_until("announced") == "announced True signal:SIGTERM SIGTERM: saving"
        child.say("come out")
        assert child.read_until("outside") == "outside signal:SIGTERM"
        assert child.wait() == 0


def test_ctrl_c_twice_ends_a_process_that_does_not_come_back() -> None:
    with Child.python(STUCK, "0.1", "0") as child:
        child.read_until("inside")
        child.signal(signal.SIGINT)
        assert "again to abort" in child.read_until("announced True signal:SIGINT")
        child.signal(signal.SIGINT)
        child.read_until("aborting")
        assert child.wait() == 130


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[int]:
    """The codes with which the process would have been ended."""
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(interrupts_module.os, "_exit", codes.put)
    return codes


def test_ctrl_c_twice_raises_where_bytecode_runs_and_a_third_one_ends_the_process(exit_codes: queue.Queue[int]) -> None:
    lines: queue.Queue[str] = queue.Queue()

    def press_again() -> None:
        send(signal.SIGINT)
        one._raised.wait(DEADLINE_S)

    with Interrupts(announce=lines.put) as one:
        send(signal.SIGINT)
        assert "again to abort" in lines.get(timeout=DEADLINE_S)
        with pytest.raises(KeyboardInterrupt):
            press_again()
        assert "aborting now" in lines.get(timeout=DEADLINE_S)
        assert exit_codes.empty()  # its own signals are not taken for the user's
        # One more may be taken for one of its own, of which two that came at the same moment were one.
        wait_until("a further Ctrl-C ends the process", lambda: send(signal.SIGINT) or not exit_codes.empty())
        assert exit_codes.get() == 130


# Children


def test_a_forked_child_is_not_the_run() -> None:
    """It dies of a SIGTERM, as a pool that terminates its workers expects, and its parent hears nothing."""
    source = """
import os, signal
from ci_llm.interrupts import Interrupts
with Interrupts(announce=lambda line: None) as interrupts:
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("parent", interrupts.stop_reason, interrupts.installed)
    os.kill(os.getpid(), signal.SIGTERM)
    print("parent", interrupts.stop_reason)
"""
    with Child.python(source) as child:
        assert child.read_until("child") == f"child {-signal.SIGTERM}"
        assert child.read_until("parent") == "parent None True"
        assert child.read_until("parent") == "parent signal:SIGTERM"


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader
from ci_llm.interrupts import Interrupts, ignore_signals

with Interrupts(announce=lambda line: None) as interrupts:
    loader = iter(DataLoader(range(10**9), batch_size=None, num_workers=2, worker_init_fn=ignore_signals))
    next(loader), next(loader)
    print("workers", *(worker.pid for worker in loader._workers))
    for line in sys.stdin:
        print("next", next(loader), interrupts.stop_reason)
        if line == "leave\\n":
            sys.exit()
"""


@pytest.mark.slow
def test_workers_ignore_signals_and_end_with_their_parent() -> None:
    with Child.python(WORKERS) as leaving, Child.python(WORKERS) as killed:
        pids = {one: [int(pid) for pid in one.read_until("workers").split()[1:]] for one in (leaving, killed)}
        for one, workers in pids.items():
            for name in ("TERM", "INT", "USR1", "USR2"):
                subprocess.run(["kill", f"-{name}", *map(str, workers)], check=True, timeout=DEADLINE_S)
            one.say("more")
            assert one.read_until("next") == "next 2 None"
        leaving.say("leave")  # the iterator is alive: multiprocessing terminates and joins its processes
        assert leaving.wait() == 0
        killed.signal(signal.SIGKILL)
        killed.wait()
        workers = [pid for some in pids.values() for pid in some]
        left = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
        assert psutil.wait_procs(left, timeout=DEADLINE_S)[1] == []


def _work(ready: Connection) -> None:
    ignore_signals()
    ready.send(True)
    ready.recv()


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_worker_ends_when_the_process_that_created_it_terminates_it(method: str) -> None:
    """Even where it was forked by a server."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    worker = context.Process(target=_work, args=(there,), daemon=True)  # type: ignore[attr-defined]
    worker.start()
    try:
        assert here.poll(DEADLINE_S)
        worker.terminate()
        worker.join(DEADLINE_S)
        assert worker.exitcode == 0
    finally:
        worker.kill()


def _work_for_nobody() -> None:
    parents = itertools.count(4711)
    interrupts_module.os.getppid = lambda: next(parents)  # type: ignore[method-assign]
    ignore_signals()
    os._exit(1)


def test_a_worker_whose_parent_ends_before_it_asks_to_be_notified_ends() -> None:
    worker = multiprocessing.get_context("fork").Process(target=_work_for_nobody)
    worker.start()
    worker.join(DEADLINE_S)
    assert worker.exitcode == 0


def test_a_trainer_whose_launcher_ends_before_it_asks_to_be_notified_stops(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents, asked = iter([4711, 1]), list[str]()
    monkeypatch.setattr(interrupts_module.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(interrupts_module, "notify_of_parent_death", asked.append)
    interrupts_module.die_with_parent("SIGUSR2")
    assert (asked, interrupts.stop_reason) == (["SIGUSR2"], "signal:SIGUSR2")


def test_a_trainer_gets_a_signal_at_the_end_of_its_launcher() -> None:
    trainer = """
import sys
from ci_llm.interrupts import Interrupts, die_with_parent
with Interrupts(announce=lambda line: None) as interrupts:
    die_with_parent()
    print("armed")
    print("heard", interrupts.wait(), interrupts.stop_reason)
"""
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', sys.argv[1]])"
    with Child.python(launcher, trainer) as child:
        assert child.read_until("armed") == "armed"
        child.signal(signal.SIGKILL)
        assert child.read_until("heard") == "heard True signal:SIGTERM"
        child.read_to_the_end()


ON_THE_WAY_OUT = """
import atexit, sys
from ci_llm.cli.main import run_script

atexit.register(lambda: (print("on the way out"), input()))
sys.exit(run_script(["train", "num_agent=3"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_while_the_interpreter_ends_does_not_change_the_exit_code_of_a_program(name: str) -> None:
    with Child.python(ON_THE_WAY_OUT) as child:
        child.read_until("on the way out")
        child.signal(getattr(signal, name))
        child.say("continue")
        assert child.wait() == 2


INNER_AND_OUTER = """
import os, signal
from ci_llm.interrupts import Interrupts, ends_with_process

ends_with_process()
with Interrupts(announce=lambda line: None) as outer:
    with Interrupts(announce=lambda line: None) as inner:
        os.kill(os.getpid(), signal.SIGTERM)
    print("inner", inner.stop_reason, outer.stop_reason)
    os.kill(os.getpid(), signal.SIGTERM)
    print("outer", outer.stop_reason)
"""


def test_a_program_handles_signals_until_its_last_interrupts_ends() -> None:
    with Child.python(INNER_AND_OUTER) as child:
        assert child.read_until("inner") == "inner signal:SIGTERM None"
        assert child.read_until("outer") == "outer signal:SIGTERM"
        assert child.wait() == 0
