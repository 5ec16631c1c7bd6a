"""A whole run on a real terminal: what a person sees while it trains, and what is left on the screen at its end."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.screen import PseudoTerminal
from tools.testbed.events import wait_until
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import arguments

pytestmark = pytest.mark.slow


def train(words: list[str], seen: str) -> int:
    """In a process of the fork server whose standard output is a terminal. Waits in step 6 for the file `seen`."""
    os.environ["TERM"] = "xterm-256color"
    for name in ("COLUMNS", "NO_COLOR", "JPY_PARENT_PID"):
        os.environ.pop(name, None)
    from ci_llm.cli.main import main
    from ci_llm.run import loop

    agree = loop.agree_on_gradients

    def agree_when_seen(trainer: Any, attempt: Any, step: int, *rest: Any) -> Any:
        if step == 6:
            wait_until("the area is seen", Path(seen).exists)
        return agree(trainer, attempt, step, *rest)

    loop.agree_on_gradients = agree_when_seen
    return main(["train", *words])


def test_a_terminal_shows_the_live_area_while_training_and_the_result_at_the_end(
    server: ForkServer, tmp_path: Path
) -> None:
    words = arguments(num_agents=16, eval_steps=2, max_train_steps=12, output_dir=tmp_path / "run")
    codes, seen = list[int](), tmp_path / "seen"
    with PseudoTerminal(80, 24) as terminal:
        place = Path(os.ttyname(terminal.file.fileno()))
        thread = threading.Thread(target=lambda: codes.extend(server.run(train, place, words=words, seen=seen)))
        thread.start()
        screen = terminal.wait_for(
            "the area of a run", lambda screen: any(re.match(r"step +\d+/12 +\d+% +━", line) for line in screen)
        )
        seen.touch()
        assert not any(line.startswith("completed") for line in screen)
        thread.join()
        assert codes == [0]
        screen = terminal.wait_for("the end", lambda screen: any("own data" in line for line in screen))
    text = "\n".join(screen)
    assert re.search(r"\nsaved     step 4, [\d.]+ MB in [\d.]+ s\n", text)
    unbroken = "".join(screen).replace(" ", "")  # the line is longer than the terminal is wide
    assert re.search(
        r"evaluatestep2(,on\d+rows)?:crowdnll[\d.]+,exact[\d.]+;agentsnll[\d.]+,exact[\d.]+;bestyet", unbroken
    )
    assert re.search(r"\nquestion  .", text)
    assert re.search(
        r"\nanswer    .*\n          (right|wrong: .+ is right); of 16 agents alone, \d+ answer right\n", text
    )
    assert "\ncompleted at step 12\n" in text
    assert "━" not in text, "something of the live area is left"
    assert not [line for line in screen if re.match(r"(step|loss|epoch|score|generate|tokenise|load) ", line)]
    log = (tmp_path / "run" / "training.log").read_text()
    assert "\x1b" not in log
    assert "━" not in log
    assert re.search(r"\[1\] step 12/12  100%  loss [\d.]+ \([\d.]+ to [\d.]+, 16 agents\)", log)
