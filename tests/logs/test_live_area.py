"""What the live area shows fits every width."""

from __future__ import annotations

import pytest
from rich.console import Console

from ci_llm.core.work import Work
from ci_llm.logs.progress import Position, Speed
from ci_llm.logs.terminal import View
from tests.support.clock import Clock


def drawn(width: int, num_agents: int, *works: Work) -> list[str]:
    """The lines of a run at step 1204 of 4000."""
    clock = Clock()
    speed = Speed(clock)
    view = View(speed)
    names = [f"agent{k}" for k in range(num_agents)]
    for step in range(1200, 1205):
        losses = [1.0 + k / 100 for k in range(num_agents)]
        position = Position(step, 4000, losses, 3000 * step, 1.2, 9.4e-4, names)
        speed.mark(position)
        view.take_position(position)
        clock.now += 0.5
    for work in works:
        view.take_work(work)
    console = Console(width=width, force_terminal=True, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(view.draw(width), no_wrap=True)
    return captured.get().splitlines()


def test_four_agents_on_80_columns() -> None:
    bar, figures, losses = drawn(79, 4)
    assert bar.startswith("step  1204/4000  30%  ━")
    assert bar.endswith("0:23:18 left")
    assert figures == "epoch 1.20  2 steps/s  6k tokens/s  lr 9.40e-04  0:00:02 so far"
    assert losses == "loss 1.015  agent0 1.000  agent1 1.010  agent2 1.020  agent3 1.030"


def test_agents_that_do_not_fit_are_shown_as_mean_and_range() -> None:
    assert drawn(79, 64)[2:] == ["loss 1.315  lowest 1.000 agent0  highest 1.630 agent63"]


@pytest.mark.fast_cases(18)
@pytest.mark.parametrize("width", [10, 20, 30, 47, 48, 60, 79, 100, 159, 240])
@pytest.mark.parametrize("num_agents", [1, 2, 4, 7, 16, 33, 128])
def test_no_line_is_wider_than_the_terminal(width: int, num_agents: int) -> None:
    lines = drawn(width, num_agents, Work("tokenise", 10**6, "rows", done=12345), Work("load", 0, "weights"))
    assert max(map(len, lines)) <= width
    assert len(lines) <= 5
