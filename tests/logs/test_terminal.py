"""The live area on a real pseudo-terminal: what a person sees stays whole, whatever else happens there."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.logs import terminal as areas
from ci_llm.logs.progress import Position
from ci_llm.logs.run_log import LOG_NAME, RunLog
from tests.support.clock import Clock
from tests.support.screen import PseudoTerminal
from tools.testbed.events import wait_until

logger = logging.getLogger("ci_llm.tests")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    with PseudoTerminal() as terminal:
        yield terminal


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[..., RunLog]]:
    logs: list[RunLog] = []

    def open_one(terminal: PseudoTerminal, **options: Any) -> RunLog:
        logs.append(RunLog(tmp_path, terminal=terminal.file, **options))
        logs[-1].open(1)
        return logs[-1]

    yield open_one
    for log in logs:
        log.close()


def at(step: int, num_agents: int = 4) -> Position:
    losses, names = [1.0 + k / 100 for k in range(num_agents)], [f"agent{k}" for k in range(num_agents)]
    return Position(step, 4000, losses, 1000 * step, step / 1000, 1e-3, names)


def shows(*texts: str) -> Callable[[list[str]], bool]:
    return lambda screen: all(any(text in line for line in screen) for text in texts)


def test_an_area_at_the_bottom_and_lines_that_stay_above_it(
    tmp_path: Path, terminal: PseudoTerminal, open_log: Callable[..., RunLog]
) -> None:
    log = open_log(terminal)
    logger.info("model     [bold]tiny[/bold]")
    log.progress(at(1))
    terminal.wait_for("the area", shows("step  1/4000"))
    logger.info("saved     step 1")
    logger.warning("the disk is slow")
    log.progress(at(2))
    screen = terminal.wait_for("the next step", shows("step  2/4000"))
    assert screen[:3] == ["model     [bold]tiny[/bold]", "saved     step 1", "warning: the disk is slow"]
    assert screen[3] == ""
    assert screen[4].startswith("step  2/4000  0%  ━")
    assert screen[6] == "loss 1.015  agent0 1.000  agent1 1.010  agent2 1.020  agent3 1.030"
    assert len(screen) == 7
    log.close()
    logger.info("goodbye")
    assert terminal.wait_for("the end", lambda screen: len(screen) == 3) == screen[:3]
    assert "\x1b" not in (tmp_path / LOG_NAME).read_text()


def test_sentences_are_broken_between_words_and_commands_are_left_whole(
    tmp_path: Path, terminal: PseudoTerminal, open_log: Callable[..., RunLog]
) -> None:
    open_log(terminal)
    sentence = "data      6638 tokens in 100 rows, 1990 of them learned; the longest row of all of them has 90 tokens"
    command = f"longer     python train.py {' '.join(f'key_{n}=value' for n in range(6))}"
    logger.info(sentence)
    logger.info(command)
    screen = terminal.wait_for("both", shows("key_5=value"))
    assert screen[:2] == [sentence[:79], f"{' ' * 10}of them has 90 tokens"]
    assert "".join(screen[2:]) == command
    assert command in terminal.text.replace("\x1b[1mlonger\x1b[0m", "longer"), "no line feed within it"
    assert sentence in (tmp_path / LOG_NAME).read_text()


def test_the_cursor_is_never_hidden_as_a_kill_would_leave_it_so(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog]
) -> None:
    open_log(terminal).progress(at(1))
    terminal.wait_for("the area", shows("step  1/4000"))
    assert "\x1b[?25l" not in terminal.text


def test_an_area_that_cannot_be_drawn_costs_no_line(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(terminal)

    def broken(*_: object) -> Any:
        raise KeyError("no such colour")

    monkeypatch.setattr(areas.ScreenArea, "draw", broken)
    log.progress(at(1))
    terminal.wait_for("the warning", shows("the live area cannot be drawn (KeyError: 'no such colour')"))
    logger.info("saved     step 1")
    terminal.wait_for("the line", shows("saved     step 1"))


def test_output_of_other_processes_is_kept_above_the_area(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog]
) -> None:
    log = open_log(terminal)
    log.progress(at(1))
    terminal.wait_for("the area", shows("step  1/4000", "loss"))
    os.write(terminal.file.fileno(), b"^Cprocess 1: error: out of luck\n")
    log.progress(at(2))
    screen = terminal.wait_for("the next step", shows("step  2/4000"))
    assert screen[:3] == ["^Cprocess 1: error: out of luck", "", screen[2]]
    assert screen[2].startswith("step  2/4000")


def test_output_of_other_code_is_kept_whole_above_the_area(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.file)
    monkeypatch.setattr(sys, "stderr", terminal.file)
    log = open_log(terminal)
    log.progress(at(1))
    terminal.wait_for("the area", shows("loss"))
    print("one\ntwo\nthree", flush=True)
    print("x.py:1: UserWarning: take\n  care", file=sys.stderr, flush=True)
    log.progress(at(2))
    screen = terminal.wait_for("the next step", shows("step  2/4000"))
    assert screen[:6] == ["one", "two", "three", "x.py:1: UserWarning: take", "  care", ""]
    log.close()
    assert sys.stdout is sys.stderr is terminal.file


def test_a_bar_of_another_library_has_the_terminal_until_its_line_ends(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci_llm.logs.terminal.PATIENCE_S", 600.0)
    monkeypatch.setattr(sys, "stderr", terminal.file)
    log = open_log(terminal)
    log.progress(at(1))
    terminal.wait_for("the area", shows("loss"))
    for done in range(5):
        sys.stderr.write(f"\rGenerating {done}/4")
        sys.stderr.flush()
    terminal.wait_for("the other bar alone", lambda screen: screen == ["Generating 4/4"])
    sys.stderr.write("\n")
    screen = terminal.wait_for("both", shows("loss"))
    assert screen[:2] == ["Generating 4/4", ""]
    sys.stderr.write("half a li")
    sys.stderr.flush()
    logger.info("saved     step 1")
    assert terminal.wait_for("a line", shows("saved"))[1:3] == ["half a li", "saved     step 1"]


def test_a_resize_leaves_nothing_of_the_old_area(terminal: PseudoTerminal, open_log: Callable[..., RunLog]) -> None:
    log = open_log(terminal)
    log.progress(at(1, 8))
    terminal.wait_for("the range", shows("highest 1.070 agent7"))
    terminal.resize(160)
    screen = terminal.wait_for("all losses", shows("agent6 1.060  agent7 1.070"))
    assert len([line for line in screen if line.startswith("step")]) == 1
    terminal.resize(40, 5)
    screen = terminal.wait_for("a narrow screen", lambda screen: max(map(len, screen)) < 40)
    assert len(screen) <= 4


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", ""), ("JPY_PARENT_PID", "1")])
def test_a_terminal_that_cannot_redraw_gets_lines(
    terminal: PseudoTerminal,
    open_log: Callable[..., RunLog],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    open_log(terminal).progress(Position(1, 4, [1.0], agents=["agent0"]))
    terminal.wait_for("the line", lambda screen: screen == ["step 1/4  25%  loss 1"])
    assert "\x1b" not in terminal.text


def test_a_terminal_that_is_lost_does_not_end_the_run(tmp_path: Path, open_log: Callable[..., RunLog]) -> None:
    with PseudoTerminal(reads=False) as terminal:
        log = open_log(terminal)
        terminal.hang_up()
        log.progress(at(1))
        wait_until("the loss is noticed", lambda: "is gone" in (tmp_path / LOG_NAME).read_text())
        logger.info("still here")
        log.progress(at(2))
        log.close()
    written = (tmp_path / LOG_NAME).read_text()
    assert written.count("the terminal is gone") == 1
    assert "still here" in written


def test_a_terminal_that_takes_nothing_does_not_hold_the_run(tmp_path: Path, open_log: Callable[..., RunLog]) -> None:
    """After Ctrl-S, for example, the drawing thread waits and the steps continue."""
    with PseudoTerminal(reads=False) as terminal:
        log = open_log(terminal, interval_s=0.0)
        log.progress(at(1))
        filler = os.open(os.ttyname(terminal.file.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while os.write(filler, b"." * 100):
                pass
        os.close(filler)
        for step in range(2, 1000):
            log.progress(at(step))
        logger.info("saved     step 999")
        assert "step 999/4000" in (tmp_path / LOG_NAME).read_text()
        terminal.start_reading()
        log.close()
        terminal.wait_for("the line", shows("saved     step 999"))


def test_steps_are_drawn_by_a_clock_and_not_one_by_one(
    terminal: PseudoTerminal, open_log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line wakes the drawing thread, which draws the area again only once the interval is over."""
    clock, drawn, draw = Clock(), list[str](), areas.ScreenArea.draw
    monkeypatch.setattr(areas, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(areas.ScreenArea, "draw", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    log = open_log(terminal)
    log.progress(at(1))
    terminal.wait_for("the area", shows("step  1/4000"))
    for step in range(2, 1001):
        log.progress(at(step))
    for line in ("saved     step 999", "the disk is slow"):  # after the second, the turn of the first is over
        logger.info(line)
        terminal.wait_for("the line", shows(line, "step  1/4000"))
    assert len(drawn) == 1
    clock.now = areas.REFRESH_S
    logger.info("goodbye")
    terminal.wait_for("the newest step", shows("goodbye", "step  1000/4000"))
    assert len(drawn) == 2
