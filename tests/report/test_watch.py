"""The runs that `ci-llm watch` shows: which ones, when they have ended, with which exit code, and the table of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from ci_llm.core.run_folder import record_attempt
from ci_llm.report.watch import Absent, exit_code, find_runs, have_ended, look_at_all, picture
from tests.report.folders import FRESH, leave_run, leave_status


@pytest.mark.parametrize(
    ("states", "ended", "code"),
    [
        (["completed"], True, 0),
        (["running"], False, 3),
        (["interrupted"], True, 75),
        (["completed", "interrupted", "running"], False, 75),
        (["interrupted", "failed", "completed"], True, 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(states: list[str], ended: bool, code: int, tmp_path: Path) -> None:
    for number, state in enumerate(states):
        leave_status(tmp_path / str(number), state, 1)
    looks = look_at_all([str(tmp_path)])
    assert [have_ended(looks), exit_code(looks)] == [ended, code]


def test_words_name_runs_and_folders_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("out/a", "out/b", "other", "other/inner"):
        leave_status(tmp_path / name, "completed", 1)
    (tmp_path / "out/folder").mkdir()
    assert find_runs(["out", "out/b", "other"]) == [Path("out/a"), Path("out/b"), Path("other")]
    assert find_runs(["later", "out/folder"]) == [Path("later"), Path("out/folder")]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Within the block root, who may read everything, becomes another user."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_status_that_cannot_be_read_says_why_and_ends_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be entered by its user alone
        Path(folder).chmod(0o755)
        leave_status(Path(folder), "running", 1)
        Path(folder, "status.json").chmod(0)
        with as_nobody():
            [refused] = look_at_all([folder])
        Path(folder, "status.json").unlink()
        Path(folder, "status.json").write_text("[]")
        [look] = look_at_all([folder])
    assert isinstance(refused, Absent)
    assert "Permission denied" in refused.why
    assert isinstance(look, Absent)
    assert "not the status of a run" in look.why
    assert not have_ended([look])


@pytest.mark.parametrize("place", [{"supervised": True}, {"slurm_job": "7"}])
def test_a_run_that_may_be_launched_again_is_waited_for(place: dict[str, object], tmp_path: Path) -> None:
    record_attempt(tmp_path, 1, 0, place)
    leave_status(tmp_path, "completed", 3, heartbeat=time.time())
    assert have_ended(look_at_all([str(tmp_path)]))
    leave_status(tmp_path, "interrupted", 3, heartbeat=time.time())
    assert not have_ended(look_at_all([str(tmp_path)]))
    leave_status(tmp_path, "interrupted", 3, heartbeat=time.time() - 500)
    assert have_ended(look_at_all([str(tmp_path)]))


# The table


def drawn(*words: Path, width: int = 160) -> list[str]:
    """The lines of a picture, with single spaces."""
    file = io.StringIO()
    Console(file=file, width=width).print(picture(look_at_all([*map(str, words)])))
    assert max(map(len, file.getvalue().splitlines())) <= width
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_a_single_run_is_shown_in_full(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", agents=16, status="running")
    leave_status(run, "running", 20, total_steps=5000, heartbeat=FRESH, warning="the loss has risen to 7")
    record_attempt(run, 1, 0, {"slurm_job": "8"})
    assert drawn(run) == [
        "run state step loss held out speed left",
        "run running 20/5000 0.1 0.05 1 steps/s 1:23:00",
        "20 of 5000 steps, 0 %, 1 steps/s, 100 tokens/s, 1:23:00 left",
        "loss 0.1 (0.1 to 1.6, 16 agents)",
        "evaluation after step 20: crowd nll 0.05 (agents 0.05)",
        "attempt 1 on here, heartbeat 0 s ago",
        "SLURM job 8",
        "warning: the loss has risen to 7",
    ]


def test_several_runs_share_a_table_and_say_what_asks_for_attention(tmp_path: Path) -> None:
    leave_run(tmp_path / "done")
    stopped = leave_run(tmp_path / "[bold]stopped", status="interrupted")
    leave_status(stopped, "interrupted", 20, reason="walltime", next_command="python train.py", total_steps=40)
    wild = tmp_path / "wild"
    leave_status(wild, "running", 2, heartbeat=FRESH, warning="the loss has risen to 7")
    line = {"step": 2, "epoch": 0.1, "train/task_loss": "nan", "train/agent0/loss": "nan"}
    (wild / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    later = tmp_path / "later"
    assert drawn(tmp_path / "done", stopped, wild, later) == [
        "run state step loss held out speed left",
        "done completed 20 0.1 0.5",
        "[bold]stopped interrupted 20/40 0.1 0.05",
        "wild running 2 nan",
        "later waiting",
        "[bold]stopped: interrupted (walltime); resume with: python train.py",
        "wild: warning: the loss has risen to 7",
        "later: no run has begun here yet",
    ]
    assert drawn(stopped, wild, width=60)
    assert drawn(tmp_path / "a/run", tmp_path / "b/run")[1:3] == [f"{tmp_path / each / 'run'} waiting" for each in "ab"]
