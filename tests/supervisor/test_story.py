"""safe_train.log as a person reads it, to the letter."""

from __future__ import annotations

import os
import re
import sys
import termios
import threading
from pathlib import Path

import pytest

from ci_llm.supervisor.log import SupervisorLog
from tests.supervisor.terminal import DEADLINE_S, SCRIPTS, Terminal

GOLDEN = """\
<time> configuration: configs/config.yaml, which stays as it is
<time> attempt 1 of 11: python moody.py --config-path ./configs --config-name config model=gnn
<time> attempt 1 ended after <s> s: nonfinite: step 1 Loss=nan
<time>   its last lines:
<time>     lr 0.0002 batch 32
<time>     step 1 Loss=nan
<time>   relaunching: non-finite values
<time>   training.learning_rate: 2e-4 -> 0.00013333333
<time> attempt 2 of 11: python moody.py --config-path ./configs --config-name config_retry_1_<token> model=gnn
<time> attempt 2 ended after <s> s: out_of_memory: torch.OutOfMemoryError: CUDA out of memory.
<time>   its last lines:
<time>     lr 0.00013333333 batch 32
<time>     torch.OutOfMemoryError: CUDA out of memory.
<time>   relaunching: out of memory
<time>   training.meta_batch_size: 32 -> 21
<time> attempt 3 of 11: python moody.py --config-path ./configs --config-name config_retry_2_<token> model=gnn
<time> attempt 3 ended after <s> s: crashed: exit code 1: no weights found
<time>   its last lines:
<time>     lr 0.00013333333 batch 21
<time>     no weights found
<time>   waiting 0 s, then relaunching: it crashed
<time> attempt 4 of 11: python moody.py --config-path ./configs --config-name config_retry_2_<token> model=gnn
<time> attempt 4 ended after <s> s: completed
<time> failure analysis of 4 attempts: completed
<time>   attempt 1 ended after <s> s: nonfinite: step 1 Loss=nan
<time>     then training.learning_rate: 2e-4 -> 0.00013333333
<time>   attempt 2 ended after <s> s: out_of_memory: torch.OutOfMemoryError: CUDA out of memory.
<time>     then training.meta_batch_size: 32 -> 21
<time>   attempt 3 ended after <s> s: crashed: exit code 1: no weights found
<time>   attempt 4 ended after <s> s: completed
<time> original unchanged: configs/config.yaml
"""


def normalised(log: str, folder: Path) -> str:
    for pattern, name in (
        (r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>"),
        (r"after \d+\.\d s", "after <s> s"),
        (r"(config_retry_\d)_[0-9a-f]{8}", r"\1_<token>"),
        (re.escape(sys.executable), "python"),
        (re.escape(str(folder.resolve())), "."),
    ):
        log = re.sub(pattern, name, log, flags=re.MULTILINE)
    return log


@pytest.mark.slow
def test_the_log_tells_the_story(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text("training:\n  learning_rate: 2e-4\n  meta_batch_size: 32\n")
    for name in ("moody.py", "settings.py"):
        (tmp_path / name).write_text((SCRIPTS / name).read_text())
    with Terminal("--train-script", "moody.py", "model=gnn", cwd=tmp_path, hasty=True) as terminal:
        assert terminal.wait() == 0, terminal.text
    assert normalised((tmp_path / "safe_train.log").read_text(), tmp_path) == GOLDEN


def test_the_log_is_appended_to(tmp_path: Path) -> None:
    SupervisorLog(tmp_path / "a.log").say("one")
    SupervisorLog(tmp_path / "a.log").say("two\nthree")
    assert [line[20:] for line in (tmp_path / "a.log").read_text().splitlines()] == ["one", "two", "three"]


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    story = SupervisorLog(tmp_path / "no folder" / "a.log")
    story.say("one")
    story.say("two", at_line_start=False)
    told = capfd.readouterr().err
    assert told.count("cannot be written") == 1
    assert told.endswith("\nsafe_train: two\n")


def test_a_terminal_that_stands_still_holds_nothing_up(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # Ctrl-S
    teller = threading.Thread(target=SupervisorLog(tmp_path / "a.log", fd=theirs).say, args=("one",), daemon=True)
    teller.start()
    teller.join(DEADLINE_S)
    held_up = teller.is_alive()
    termios.tcflow(theirs, termios.TCOON)
    os.close(theirs)
    os.close(ours)
    assert not held_up
    assert (tmp_path / "a.log").read_text().endswith(" one\n")


def test_a_terminal_that_has_gone_away_is_no_reason_to_stop(tmp_path: Path) -> None:
    SupervisorLog(tmp_path / "a.log", fd=999).say("one")
    assert (tmp_path / "a.log").read_text().endswith(" one\n")
