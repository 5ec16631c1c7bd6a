"""The log of a run: no line is lost or cut, a resumed run continues its files, and no log ends a run."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from ci_llm.core import work
from ci_llm.core.run_folder import METRICS_NAME
from ci_llm.logs import trackers
from ci_llm.logs.progress import Position
from ci_llm.logs.run_log import LOG_NAME, PACKAGE, RunHandler, RunLog
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]

logger = logging.getLogger("ci_llm.tests")  # as the modules of the package have it


@pytest.fixture(autouse=True)
def package_logger() -> Iterator[None]:
    """Every test ends without handlers of logs that it left open."""
    yield
    while handlers := [one for one in PACKAGE.handlers if isinstance(one, RunHandler)]:
        handlers[-1].detach()  # which brings back the one before
    work.listeners.clear()
    assert (PACKAGE.level, PACKAGE.propagate) == (logging.NOTSET, True)


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(tmp_path: Path, screen: io.StringIO) -> RunLog:
    return make_log(tmp_path, screen)


def make_log(folder: Path, screen: TextIO, **options: Any) -> RunLog:
    log = RunLog(folder, terminal=screen, **options)
    log.open(1)
    return log


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / METRICS_NAME).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def log_text(folder: Path) -> str:
    return (folder / LOG_NAME).read_text(encoding="utf-8")


# People


def test_says_to_terminal_and_file_with_date_and_attempt(tmp_path: Path, screen: io.StringIO) -> None:
    make_log(tmp_path, screen)
    logger.info("one\n  two")
    RunLog(tmp_path, terminal=screen).open(2)
    head, one, two, second = log_text(tmp_path).splitlines()
    assert screen.getvalue() == "one\n  two\n"
    assert "attempt 1 on" in head
    assert one.endswith("[1] one")
    assert two.endswith("[1]   two")
    assert "[2] attempt 2 on" in second
    assert one[:4].isdigit()


def test_before_open_no_file_is_created_and_no_message_is_lost(tmp_path: Path, screen: io.StringIO) -> None:
    log = RunLog(tmp_path, terminal=screen)
    logger.info("hello")
    log.metrics(1, {"loss": 1.0})
    assert screen.getvalue() == "hello\n"
    assert list(tmp_path.iterdir()) == []
    log.open(1)
    assert log_text(tmp_path).splitlines()[1].endswith("[1] hello")


def test_records_of_the_package_are_shown_and_marked_by_their_level(tmp_path: Path, screen: io.StringIO) -> None:
    make_log(tmp_path, screen)
    logger.debug("for developers")
    logger.info("step 46 % done")
    logger.warning("the disk is slow\n  it took 3 s")
    assert screen.getvalue() == "step 46 % done\nwarning: the disk is slow\n  it took 3 s\n"
    written = [line.partition("] ")[2] for line in log_text(tmp_path).splitlines()[1:]]
    assert written == ["step 46 % done", "WARNING the disk is slow", "  it took 3 s"]


def test_a_closed_log_takes_no_records_and_restores_the_logger(
    tmp_path: Path, screen: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    log = make_log(tmp_path, screen)
    logger.warning("while it is open")
    assert caplog.messages == [], "the root logger would show every line twice"
    log.close()
    log.close()
    logger.warning("afterwards")
    assert caplog.messages == ["afterwards"]
    assert "afterwards" not in screen.getvalue() + log_text(tmp_path)


def test_threads_that_log_and_threads_that_write_metrics_do_not_wait_for_each_other(
    tmp_path: Path, log: RunLog
) -> None:
    log._trackers = SimpleNamespace(log=lambda *_: logger.warning("while metrics are written"))  # type: ignore[assignment]
    count = 300

    def write_metrics() -> None:
        for step in range(count):
            log.metrics(step, {})

    def write_messages() -> None:
        for _ in range(count):
            logger.info("a message")

    threads = [threading.Thread(target=work, daemon=True) for work in (write_metrics, write_messages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert log_text(tmp_path).count("a message\n") == log_text(tmp_path).count("while metrics are written\n") == count


def test_a_forked_process_writes_nothing_and_does_not_wait_for_a_lock_of_its_parent(
    tmp_path: Path, log: RunLog
) -> None:
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with log._lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(DEADLINE_S))
        logger.warning("from a worker")
        os._exit(0)
    forked.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert "from a worker" not in log_text(tmp_path)


def test_other_processes_are_silent(
    tmp_path: Path, screen: io.StringIO, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    log = make_log(tmp_path, screen, is_main_process=False)
    logger.info("hello")
    logger.warning("hello")
    assert (caplog.messages, *capfd.readouterr()) == ([], "", "")
    log.metrics(1, {"loss": 1.0})
    log.progress(Position(1, 2, [1.0]))
    log.metrics_file.truncate(0)
    log.start_trackers(None, ("tensorboard",))
    assert log.tracker_state() == {}
    log.close()
    assert screen.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_lost_its_folder_writes_nothing(tmp_path: Path, screen: io.StringIO) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step": 5}\n', encoding="utf-8")
    log = RunLog(tmp_path, terminal=screen)
    log.open(1, still_held=lambda: False)
    logger.info("hello")
    logger.warning("hello")
    log.metrics(1, {"loss": 1.0})
    log.metrics_file.truncate(0)
    assert lines(tmp_path) == [{"step": 5}]
    assert not (tmp_path / LOG_NAME).exists()
    log.open(1)
    with pytest.raises(FileNotFoundError):  # taken over between the question and the write
        log.metrics_file.truncate(0, tmp_path / "renamed away")
    assert lines(tmp_path) == [{"step": 5}]


def test_a_full_disk_is_reported_once_and_lines_stay_whole(
    tmp_path: Path, screen: io.StringIO, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.metrics(1, {"loss": 1.0})
    whole = (tmp_path / METRICS_NAME).read_bytes()
    real_open = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == METRICS_NAME:
            path.write_bytes(whole + b'{"step": 2, "lo')  # what a full disk leaves of a line
            raise OSError(28, "No space left on device")
        return real_open(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        patch.setattr(Path, "write_bytes", lambda path, data: os.truncate(path, 0) or _write(path, data))
        log.metrics(2, {"loss": 2.0})
        log.metrics(3, {"loss": 3.0})
    log.metrics(4, {"loss": 4.0})
    assert screen.getvalue().count("cannot be written") == 1
    text = (tmp_path / METRICS_NAME).read_text(encoding="utf-8").splitlines()
    assert len(text) == 3
    assert json.loads(text[-1])["step"] == 4
    log.metrics_file.truncate(4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 4]


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY)
    os.write(handle, data)
    os.close(handle)


# Metrics


def test_metrics_are_strict_json(tmp_path: Path, log: RunLog) -> None:
    log.metrics(3, {"loss": float("nan"), "up": float("inf"), "down": float("-inf"), "n": 2, "name": "é", "x": None})
    (record,) = lines(tmp_path)
    time = record.pop("time")
    assert time > 1e9
    assert record == {
        "step": 3, "loss": "nan", "up": "inf", "down": "-inf", "n": 2, "name": "é", "x": None, "attempt": 1
    }  # fmt: skip


def test_truncation_keeps_lines_before_the_resumed_step(tmp_path: Path, log: RunLog) -> None:
    log.metrics_file.truncate(5)
    for step in (1, 2, 2, 3, 10):
        log.metrics(step, {"loss": 1.0})
    with (tmp_path / METRICS_NAME).open("a", encoding="utf-8") as file:
        file.write('\n[]\n{"no": 1}\n{"step": "2"}\n{"step": 2, "los')
    log.metrics_file.truncate(2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    log.metrics(3, {})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 3]
    log.metrics_file.truncate(-1)
    assert lines(tmp_path) == []


def test_a_line_torn_by_a_kill_does_not_swallow_the_next(tmp_path: Path, screen: io.StringIO) -> None:
    (tmp_path / METRICS_NAME).write_text('{"step": 1}\n{"st', encoding="utf-8")
    (tmp_path / LOG_NAME).write_text("half a li", encoding="utf-8")
    log = make_log(tmp_path, screen)
    log.metrics(2, {})
    assert (tmp_path / METRICS_NAME).read_text(encoding="utf-8").splitlines()[1] == '{"st'
    assert log_text(tmp_path).splitlines()[0] == "half a li"
    log.metrics_file.truncate(2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


# Trackers


def make_accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def attempt(folder: Path, steps: range, value: float, *, resumed_from: int = 0) -> None:
    log = make_log(folder, io.StringIO())
    log.start_trackers(
        make_accelerator(),
        ("tensorboard",),
        resumed_from=resumed_from,
        hyperparameters={"learning_rate": 1e-4, "modules": ("a", "b")},
    )
    for step in steps:
        log.metrics(step, {"train/loss": value, "name": "not a number"})
    log.close()


def drawn(folder: Path) -> tuple[Any, list[tuple[int, float]]]:
    """What TensorBoard has of a run, and (step, value) of its losses."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events, [(event.step, event.value) for event in events.Scalars("train/loss")]


@pytest.fixture
def seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard orders its files by the second in their names, and attempts in one test share a second."""
    clock = SimpleNamespace(time=map(float, itertools.count(1_700_000_000)).__next__)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


@pytest.mark.usefixtures("seconds_apart")
def test_tensorboard_draws_one_curve_over_attempts(tmp_path: Path) -> None:
    attempt(tmp_path, range(10, 60, 10), 1.0)
    attempt(tmp_path, range(40, 80, 10), 2.0, resumed_from=30)
    events, points = drawn(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss"]
    assert points == [(10, 1.0), (20, 1.0), (30, 1.0), (40, 2.0), (50, 2.0), (60, 2.0), (70, 2.0)]
    assert len(events.Tensors("config/text_summary")) == 1
    assert all(path.is_file() for path in (tmp_path / "tensorboard").iterdir()), "a second run beside the first"


@pytest.mark.usefixtures("seconds_apart")
def test_a_fresh_start_drops_the_curve_of_an_attempt_that_saved_nothing(tmp_path: Path) -> None:
    attempt(tmp_path, range(10, 60, 10), 1.0)
    attempt(tmp_path, range(10, 30, 10), 2.0)
    assert drawn(tmp_path)[1] == [(10, 2.0), (20, 2.0)]


def test_a_tracker_that_fails_is_named_and_left_out(tmp_path: Path, screen: io.StringIO, log: RunLog) -> None:
    log.start_trackers(make_accelerator(), ("tensorboard",))
    assert log._trackers is not None
    [one] = log._trackers._trackers
    one.tracker.writer.close()
    one.tracker.writer = None  # what a writer on a full disk comes to
    log.metrics(1, {"loss": 1.0})
    log.metrics(2, {"loss": 1.0})
    log.close()
    assert screen.getvalue().count("tensorboard failed and is left out") == 1
    assert len(lines(tmp_path)) == 2


def test_a_checkpoint_after_the_failure_of_a_tracker_still_has_the_id_of_its_run(
    tmp_path: Path, screen: io.StringIO, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the next attempt would begin another run there."""

    class Named(trackers.TrackerKind):
        def run_id(self, tracker: Any) -> str:
            return "run 7"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    tracker = SimpleNamespace(log=refuse, finish=refuse, store_init_configuration=lambda _values: None)
    monkeypatch.setattr(trackers, "find_kind", lambda _name: Named())
    monkeypatch.setattr(trackers, "_start", lambda *_: tracker)
    log.start_trackers(make_accelerator(), ("tensorboard",))
    log.metrics(1, {"loss": 1.0})
    assert "tensorboard failed and is left out" in screen.getvalue()
    assert log.tracker_state() == {"tensorboard": "run 7"}


@pytest.mark.slow
def test_wandb_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="there is no wandb; make install-dev")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for attempt_number in (1, 2):
        log = make_log(tmp_path, io.StringIO())
        log.known_tracker_state = {"wandb": ids[0]} if ids else {}
        log.start_trackers(make_accelerator(), ("wandb",), attempt_number - 1, {"a": (1,)})
        log.metrics(attempt_number, {"loss": 1.0})
        ids.append(log.tracker_state()["wandb"])
        log.close()
    assert ids[0] == ids[1]
