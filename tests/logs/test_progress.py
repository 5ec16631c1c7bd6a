"""Progress in plain lines: one per interval with means, for whoever has no terminal; and the speed of training."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci_llm.core import work
from ci_llm.logs.progress import Position, Speed
from ci_llm.logs.run_log import LOG_NAME, RunLog
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(tmp_path: Path, screen: io.StringIO, clock: Clock) -> Iterator[RunLog]:
    log = RunLog(tmp_path, terminal=screen, clock=clock, interval_s=10.0)
    log.open(1)
    yield log
    log.close()


def test_a_plain_line_per_interval_and_always_at_the_end(
    tmp_path: Path, log: RunLog, screen: io.StringIO, clock: Clock
) -> None:
    log.begin_progress(Position(0, 100))
    for step in range(1, 101):
        clock.now += 0.5
        log.progress(Position(step, 100, [1.0, 2.0]))
    shown = screen.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == [*(f"{n}/100" for n in (1, 21, 41, 61, 81, 100))]
    assert shown[1] == "step 21/100  21%  loss 1.5 (1 2)  2 steps/s  0:00:40 left"
    assert [line.partition("] ")[2] for line in (tmp_path / LOG_NAME).read_text().splitlines()[1:]] == shown


def test_a_line_gives_the_means_over_its_interval(log: RunLog, screen: io.StringIO, clock: Clock) -> None:
    for step, losses in enumerate([[9.0, 9.0], [1.0, 4.0], [], [3.0, 6.0]], start=1):
        log.progress(Position(step, 4, losses))
    assert screen.getvalue().splitlines() == ["step 1/4  25%  loss 9 (9 9)", "step 4/4  100%  loss 3.5 (2 5)"]


def test_speed_is_that_of_the_last_minute_and_leaves_evaluations_out(clock: Clock) -> None:
    speed = Speed(clock)
    for step in range(100):
        speed.mark(Position(step, 1000, tokens=10 * step))
        clock.now += 1.0
    assert speed.rates() == pytest.approx((1.0, 10.0))
    speed.pause()
    clock.now += 500.0
    speed.resume()
    assert speed.rates() == pytest.approx((1.0, 10.0))
    for step in range(100, 400):
        speed.mark(Position(step, 1000, tokens=10 * step))
        clock.now += 0.5
    assert speed.rates() == pytest.approx((2.0, 20.0), rel=0.02)
    assert str(speed.left(1000)) == "0:18:49", "the time left counts evaluations as well"


def test_long_work_gets_a_line_per_interval_and_short_work_none(
    log: RunLog, screen: io.StringIO, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci_llm.logs.progress.time", SimpleNamespace(monotonic=clock))
    for _ in work.counted(range(5), "score", 5, "rows"):
        clock.now += 1.0
    assert screen.getvalue() == ""
    with work.working("tokenise", 100, "rows") as tokens:
        tokens.began_at = clock.now
        for done in range(1, 51):
            clock.now += 0.5
            tokens.advance_to(done)
    assert screen.getvalue().splitlines() == [
        "tokenise  20/100 rows  20%  0:00:40 left",
        "tokenise  40/100 rows  40%  0:00:30 left",
    ]


def test_work_ends_for_its_listeners_also_by_an_error() -> None:
    heard: list[tuple[int, bool]] = []

    def listen(one: work.Work) -> None:
        heard.append((one.done, one.ended))

    work.listeners.append(listen)
    try:
        with pytest.raises(ZeroDivisionError):
            [1 / (item - 1) for item in work.counted([0, 1], "read", 2, "rows")]
    finally:
        work.listeners.remove(listen)
    assert heard == [(0, False), (1, False), (1, True)]
