"""report.html: one self-contained file with true statements about completed, running and damaged runs."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.report.page import write_report
from tests.report.folders import NOW, leave_run, leave_status, prediction


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that is over."""
    return write_report(leave_run(tmp_path_factory.mktemp("drawn") / "run"))


def text_of(page: Path) -> str:
    """What a reader of the page sees, in one line."""
    body = page.read_text().partition("<body>")[2]
    body = re.sub(r"<svg.*?</svg>", " ", body, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_a_completed_run_shows_scores_curves_time_settings_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave_run(tmp_path / "run", learning_rate=5e-3)
    assert main(["report", str(run)]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}: {page.stat().st_size:,} bytes\n"
    told = text_of(page)
    assert "Completed at step 20, in 1 attempt and 1 min." in told
    assert "crowd 0.500 0.352 to 0.648 0.5000" in told
    assert "minus that of the agents' mean: +0.100 ± 0.200; the best agent: +0.100 ± 0.200." in told
    assert "learning_rate 0.005" in told
    assert f"ci-llm compare {run} OTHER_RUN" in told
    assert "Solved and failed" not in told, "it has left no predictions"
    assert page.read_text().count("<svg") == 4, "two losses, exact match, speed"


def test_the_page_asks_for_nothing_and_runs_nothing(drawn: Path) -> None:
    page = drawn.read_text()
    assert not re.findall(r"<(?:script|iframe|link(?! rel=\"icon\" href=\"data:,\")|img|object)", page)
    assert not re.findall(r"url\((?!#)|@import|(?:src|href)=\"(?!#|data:)", page)
    assert "default-src 'none'" in page


def test_text_from_data_and_messages_is_escaped(tmp_path: Path) -> None:
    """Prompts, answers, paths and messages may hold any characters."""
    evil = "<script>alert('prompt')</script>"
    rows = [prediction(1, correct=False, prompt=evil, confidence=0.9), prediction(2, correct=True)]
    run = leave_run(tmp_path / "run <b>&", predictions=rows, status="interrupted")
    leave_status(run, "interrupted", 20, reason="<i>", next_command="python train.py '<img src=x>'")
    page = write_report(run)
    source = page.read_text()
    assert "<script" not in source
    assert "<img" not in source
    told = text_of(page)
    assert evil in told
    assert "python train.py '<img src=x>'" in told


def test_failed_rows_come_first_the_surest_before_the_others(tmp_path: Path) -> None:
    rows = [prediction(n, correct=n % 2 == 0, confidence=n / 20) for n in range(20)]
    told = text_of(write_report(leave_run(tmp_path / "run", predictions=rows)))
    assert "10 of 20 rows are answered right." in told
    failed, _, solved = told.partition("Failed ")[2].partition("Solved ")
    assert re.findall(r"question (\d+)", failed) == ["19", "17", "15", "13", "11"]
    assert re.findall(r"question (\d+)", solved)[:2] == ["0", "2"]
    assert "reference 19" in failed


def test_a_run_trained_past_its_evaluation_says_from_which_step_scores_and_answers_are(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", predictions=[prediction(1, correct=True)])
    leave_status(run, "interrupted", 30)
    told = text_of(write_report(run))
    assert f"Answers of step 20 of {run}, to rows of my.jsonl." in told
    assert "data set embedded, after step 20: the run has gone on since." in told
    assert "crowd, exact match" not in told, "no key figure of what the run is now"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("running", "Still running, in attempt 1: step 20 at "),
        ("interrupted", "Interrupted: step 20 is saved, after 1 attempt. The same command resumes it."),
        ("failed", "Failed after step 20, in 1 attempt."),
    ],
)
def test_the_page_of_an_unfinished_run_says_its_state(status: str, told: str, tmp_path: Path) -> None:
    page = text_of(write_report(leave_run(tmp_path / "run", status=status)))
    assert told in page
    assert "Agents and crowd are evaluated after the last step, which this run has not taken yet." in page


def test_a_run_whose_process_is_gone_is_not_called_running(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", status="running")
    leave_status(run, "running", 20, heartbeat=NOW)
    told = text_of(write_report(run))
    assert "No sign of life since " in told
    assert "The process ended without writing a reason" in told


def test_torn_lines_are_counted_and_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "epoch": 1, "train/agent0/loss": "nan", "train/task_loss": "inf"}\n{"step": 22, "tra')
    assert "1 line of metrics.jsonl cannot be read" in text_of(write_report(run))


DAMAGE = [
    ("status.json", "{", "not the status of a run"),
    ("evaluation.json", "[1, 2]", "not an evaluation: Input should be a valid dictionary"),
    ("evaluation.json", '{"n": 3, "exact_match": {"agents": [0.1]}}', "not an evaluation: it lacks 'task'"),
    ("metrics.jsonl", "\x00\x00\n\x00", "no line of this file is a record of a run"),
    ("predictions.jsonl", '{"prompt": "?"}\n', "not a prediction: prompt, answer or correct is missing"),
    ("predictions.jsonl", '["prompt", "answer", "correct"]\n', "not a prediction"),
    ("predictions.source.json", "{", "predictions.source.json cannot be read"),
    ("recovery.json", "{", "the recovery state cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGE)
def test_a_damaged_file_is_named(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave_run(tmp_path / "run")
    (run / name).write_text(content)
    assert main(["report", str(run)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert f"where: {run / name}" in told
    assert not (run / "report.html").exists()


def test_commands_can_be_typed_whatever_the_folder_is_called(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "it's a run")
    (run / "final_checkpoint").mkdir()
    commands = [unescape(each) for each in re.findall(r"<code>(ci-llm .*)</code>", write_report(run).read_text())]
    words = [shlex.split(command) for command in commands]
    assert ["ci-llm", "report", str(run)] in words
    assert ["ci-llm", "chat", str(run)] in words


@pytest.mark.parametrize(("path", "message"), [(".", "it has no status.json"), ("s3://b/run", "a disk")])
def test_a_folder_that_is_not_a_run_is_refused(path: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", path]) == 2
    assert message in capsys.readouterr().err


def test_the_page_is_replaced_in_one_piece_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = leave_run(tmp_path / "run")
    before = write_report(run).read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ci_llm.report.page.write_bytes", refuse)
    assert main(["report", str(run)]) == 1
    assert "the report cannot be written: No space left on device" in capsys.readouterr().err
    assert (run / "report.html").read_bytes() == before
    assert json.loads((run / "status.json").read_text())["status"] == "completed"
