"""`ci-llm status` and `ci-llm watch` as typed: what is printed, how soon, with which exit code, and how they leave."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.cli.runs import look_again
from ci_llm.core.run_folder import record_attempt
from ci_llm.interrupts import ABORTED_EXIT_CODE
from ci_llm.report.status import Reading
from tests.report.folders import FRESH, leave_run, leave_status, metrics
from tests.supervisor.terminal import Terminal

ROOT = Path(__file__).parents[2]


def watch(*words: str | Path) -> Terminal:
    return Terminal("watch", *words, cwd=ROOT, env={"TERM": "xterm"}, program=["-m", "ci_llm"])


# Status


def test_status_of_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "run", status="running")
    leave_status(tmp_path / "run", "running", 20, total_steps=60, heartbeat=FRESH, warning="the loss has risen to 7")
    record_attempt(tmp_path / "run", 1, 0, {"slurm_job": "8"})
    assert main(["status", str(tmp_path / "run")]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "running: step 20, attempt 1, process 1 on here",
        "20 of 60 steps, 33 %, 1 steps/s, 100 tokens/s, 0:00:40 left",
        "loss 0.1 (0.1 0.2)",
        "evaluation after step 20: crowd nll 0.05 (agents 0.05)",
        "attempt 1 on here, heartbeat 0 s ago",
        "SLURM job 8",
        "warning: the loss has risen to 7",
    ]


def test_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "run")
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["exit_code"], told["step"], told["total_steps"]) == ("completed", 0, 20, None)
    assert told["losses"] == {"step": 20, "mean": 0.1, "agents": [0.1, 0.2]}
    assert (told["evaluation"]["measure"], told["evaluation"]["crowd"]) == ("exact_match", 0.5)
    assert told["evaluation"]["is_final"] is True


# Watch


def test_watch_without_a_terminal_is_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "run")
    assert main(["watch", str(tmp_path / "run")]) == main(["status", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[: len(told) // 2] == told[len(told) // 2 :]


@pytest.mark.parametrize("place", [{"supervised": True}, {"slurm_job": "7"}])
def test_a_run_that_may_be_launched_again_is_waited_for(place: dict[str, object], tmp_path: Path) -> None:
    leave_status(tmp_path, "running", 3)
    assert not Reading(tmp_path).is_over
    leave_status(tmp_path, "interrupted", 3, heartbeat=time.time())
    assert Reading(tmp_path).is_over
    record_attempt(tmp_path, 1, 0, place)
    assert not Reading(tmp_path).is_over
    leave_status(tmp_path, "interrupted", 3, heartbeat=time.time() - 500)
    assert Reading(tmp_path).is_over
    leave_status(tmp_path, "completed", 3, heartbeat=time.time())
    assert Reading(tmp_path).is_over


def test_a_status_that_cannot_be_read_says_why_and_ends_nothing(tmp_path: Path) -> None:
    assert look_again(tmp_path) == (None, ["no run has begun here yet"])
    (tmp_path / "status.json").write_text("[]")
    found, [told] = look_again(tmp_path)
    assert found is None
    assert "not the status of a run" in told


def test_watch_of_a_missing_run_is_a_bad_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nothing")]) == 2
    assert f"where: {tmp_path / 'nothing'}" in capsys.readouterr().err
    assert main(["watch", "--twice"]) == 2


@pytest.mark.slow
def test_watch_redraws_until_the_run_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with watch(run) as terminal:
        terminal.read_until("no run has begun here yet")
        leave_status(run, "running", 0, total_steps=60)
        terminal.read_until("0 of 60 steps")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(12, 2)) + '{"step": 1')
        leave_status(run, "running", 12, total_steps=60)
        terminal.read_until("12 of 60 steps")
        terminal.read_until("loss 0.1667")
        leave_status(run, "failed", 12, total_steps=60, reason="nonfinite")
        terminal.read_until("nonfinite")
        assert terminal.wait() == 1
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l"), "the cursor stays hidden"


@pytest.mark.slow
def test_ctrl_c_leaves_quietly(tmp_path: Path) -> None:
    leave_status(tmp_path, "running", 0)
    with watch(tmp_path) as terminal:
        terminal.read_until("Ctrl-C leaves")
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == ABORTED_EXIT_CODE
    assert "Traceback" not in terminal.text
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l")
