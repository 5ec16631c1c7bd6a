"""safe_train.log as a person reads it, to the letter."""

from __future__ import annotations

import logging
import os
import re
import sys
import termios
import threading
from pathlib import Path

import pytest

from ci_llm.supervisor.loop import FILE_ONLY, SupervisorLog
from tests.supervisor.terminal import DEADLINE_S, SCRIPTS, ran

GOLDEN = """\
<time> configuration: configs/config.yaml, which stays as it is
<time> attempt 1 of 11: python moody.py --config-path ./configs --config-name config model=gnn
<time> attempt 1 ended after <s> s: nonfinite: step 1 Loss=nan
<time>   its last lines:
<time>     lr 0.0002 batch 32
<time>     step 1 Loss=nan
<time>   relaunching: non-finite values
<time>   training.learning_rate: 0.0002 -> 0.00013333333
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
<time>     then training.learning_rate: 0.0002 -> 0.00013333333
<time>   attempt 2 ended after <s> s: out_of_memory: torch.OutOfMemoryError: CUDA out of memory.
<time>     then training.meta_batch_size: 32 -> 21
<time>   attempt 3 ended after <s> s: crashed: exit code 1: no weights found
<time>   attempt 4 ended after <s> s: completed
"""


def normalised(log: str, folder: Path) -> str:
    for pattern, name in (
        (r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<time>"),
        (r"after [\d.]+ s", "after <s> s"),
        (r"(config_retry_\d)_[0-9a-z_]{8}", r"\1_<token>"),
        (re.escape(sys.executable), "python"),
        (re.escape(str(folder.resolve())), "."),
    ):
        log = re.sub(pattern, name, log, flags=re.MULTILINE)
    return log


@pytest.mark.slow
def test_the_log_of_a_whole_supervision(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text("training:\n  learning_rate: 2e-4\n  meta_batch_size: 32\n")
    for name in ("moody.py", "settings.py"):
        (tmp_path / name).write_text((SCRIPTS / name).read_text())
    ran(tmp_path, "--train-script", "moody.py", "model=gnn", hasty=True)
    assert normalised((tmp_path / "safe_train.log").read_text(), tmp_path) == GOLDEN


logger = logging.getLogger("ci_llm.supervisor.test")


def lines_of(path: Path) -> list[str]:
    """The lines of a log without their times."""
    return [line[20:] for line in path.read_text().splitlines()]


def test_the_log_is_appended_to(tmp_path: Path) -> None:
    for text in ("one", "two\nthree"):
        with SupervisorLog(tmp_path / "a.log"):
            logger.info(text)
    assert lines_of(tmp_path / "a.log") == ["one", "two", "three"]


def test_warnings_of_the_whole_package_are_marked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with SupervisorLog(tmp_path / "a.log"):
        logger.debug("for developers")
        logger.info("shown already", extra=FILE_ONLY)
        logger.info("a line")
        logging.getLogger("ci_llm.checkpoints.store").warning("%d damaged\nas seen here", 1)
    assert lines_of(tmp_path / "a.log") == ["shown already", "a line", "WARNING 1 damaged", "WARNING as seen here"]
    assert capfd.readouterr().err.splitlines() == [
        "safe_train: a line",
        "safe_train: warning: 1 damaged",
        "safe_train: warning: as seen here",
    ]


@pytest.mark.slow
def test_a_terminal_that_stands_still_holds_nothing_up(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # Ctrl-S
    with SupervisorLog(tmp_path / "a.log", fd=theirs):
        teller = threading.Thread(target=logger.info, args=("one",), daemon=True)
        teller.start()
        teller.join(DEADLINE_S)
        held_up = teller.is_alive()
        termios.tcflow(theirs, termios.TCOON)
        os.close(theirs)
        os.close(ours)
    assert not held_up
    assert lines_of(tmp_path / "a.log") == ["one"]
