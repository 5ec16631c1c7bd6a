"""The picture of runs: it fits the terminal, whatever its size, and says what matters in every form."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ci_llm.cluster.slurm import QueuedJob
from ci_llm.core.run_folder import record_attempt
from ci_llm.report.watch import Board, JobQueue, Scene
from tests.report.folders import FRESH, leave_run, leave_status

JOBS = {"7": QueuedJob("PENDING", "Priority", "4:00:00"), "8": QueuedJob("RUNNING", "None", "3:12:00")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs: each has something to show that the others have not."""
    tmp_path = tmp_path_factory.mktemp("runs")
    leave_run(tmp_path / "done")
    leave_run(tmp_path / "one_agent", agents=1, status="running")
    leave_status(tmp_path / "one_agent", "running", 20, heartbeat=FRESH)
    leave_run(tmp_path / "sixteen", agents=16, status="running")
    leave_status(tmp_path / "sixteen", "running", 20, total_steps=5000, heartbeat=FRESH)
    record_attempt(tmp_path / "sixteen", 1, 0, {"slurm_job": "8"})
    leave_run(tmp_path / "stopped", status="interrupted")
    command = "python train.py --config configs/qwen2.5_0.5b_gsm8k.yaml experiment_name=stopped"
    leave_status(tmp_path / "stopped", "interrupted", 20, reason="walltime", next_command=command, total_steps=40)
    record_attempt(tmp_path / "stopped", 1, 0, {"slurm_job": "7"})
    leave_run(tmp_path / "wild", status="running")
    leave_status(tmp_path / "wild", "running", 20, warning="the loss of every agent has risen to 7", heartbeat=FRESH)
    leave_status(tmp_path / "begins", "running", 0, total_steps=10, heartbeat=FRESH)
    return tmp_path


def drawn(*words: Path, width: int, height: int | None = None, encoding: str = "utf-8") -> list[str]:
    """The lines of a picture; in a file, if there is no height."""
    scene = Scene([str(word) for word in words], JobQueue(is_there=False))
    scene.look()
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    terminal = {"force_terminal": True, "height": height, "color_system": None} if height else {}
    console = Console(file=file, width=width, legacy_windows=False, **terminal)  # type: ignore[arg-type]
    console.print(Board(scene.looks, JOBS, footer="Ctrl-C leaves" if height else ""))
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize("width", [40, 80, 97, 160])
@pytest.mark.parametrize("height", [None, 10, 24])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_picture_fits_its_terminal(width: int, height: int | None, count: int, runs: Path) -> None:
    folders = sorted(path for path in runs.iterdir() if path.is_dir())[:count]
    lines = drawn(*folders, width=width, height=height)
    assert max(map(len, lines)) <= width
    if height is not None and count > 1:
        assert len(lines) <= height
    text = "\n".join(lines)
    if height != 10:
        for folder in folders:
            assert folder.name in text


def test_runs_are_shown_by_what_their_objective_measures(tmp_path: Path) -> None:
    for name, objective in (("heads", "classification"), ("pairs", "dpo")):
        folder = leave_run(tmp_path / name, status="running")
        leave_status(folder, "running", 20, heartbeat=FRESH, objective=objective)
        line = {
            "step": 20,
            "eval/crowd/nll": 0.5,
            "eval/crowd/exact_match": 0.25,
            "eval/crowd/rewards/accuracies": 0.75,
        }
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    heads, pairs = tmp_path / "heads", tmp_path / "pairs"
    text = "\n".join(drawn(heads, width=120))
    assert "crowd accuracy" in text
    assert "training loss, nats per row by optimizer step" in text
    text = "\n".join(drawn(pairs, width=120))
    assert "crowd pairs ranked right" in text
    assert "training loss, loss per pair by optimizer step" in text
    text = "\n".join(drawn(heads, pairs, width=120))
    assert "training loss, nats per row and loss per pair by optimizer step" in text
    assert "accuracy 0.25" in text
    assert "pairs ranked right 0.75" in text


def test_a_single_run_is_shown_in_full(runs: Path) -> None:
    text = "\n".join(drawn(runs / "sixteen", width=100, height=40))
    for words in ("20/5000", "20 of 5000 steps, 0 %", "1 steps/s, 100 tokens/s", "1:23:00 left", "16 agents"):
        assert words in text
    assert "attempt 1 on here, heartbeat 0 s ago" in text
    assert "SLURM job 8 RUNNING, 3:12:00 left" in text
    assert "training loss, nats per token by optimizer step" in text
    assert "┤o" in text
    stopped = " ".join("\n".join(drawn(runs / "stopped", width=120)).split())
    for words in ("interrupted (walltime)", "SLURM job 7 PENDING (Priority)", "resume with: python train.py"):
        assert words in stopped
    assert "warning: the loss of every agent has risen" in "\n".join(drawn(runs / "wild", width=100))


def test_several_runs_share_a_table_and_a_drawing(runs: Path) -> None:
    lines = drawn(runs, width=100)
    assert lines[0].split() == ["run", "state", "step", "done", "loss", "crowd", "nll", "speed", "left"]
    [row] = [line for line in lines if line.split()[:2] == ["E", "stopped"]]
    assert row.split() == ["E", "stopped", "interrupted", "20/40", "50%", "0.1", "0.05"]
    [row] = [line for line in lines if line.split()[:2] == ["D", "sixteen"]]
    assert row.split() == ["D", "sixteen", "running", "20/5000", "0%", "0.1", "0.05", "1", "steps/s", "1:23:00"]
    notes = "\n".join(lines)
    assert "sixteen: SLURM job 8 RUNNING, 3:12:00 left\n" in notes
    assert "stopped: interrupted (walltime); resume with: python train.py --config" in notes
    assert "wild: warning: the loss of every agent has risen to 7" in lines
    assert sum("training loss" in line for line in lines) == 1


def test_each_run_draws_its_curve_by_its_letter(tmp_path: Path) -> None:
    for name, loss in (("low", 1.0), ("high", 2.0)):
        leave_status(tmp_path / name, "completed", 2)
        points = [{"step": step, "epoch": 0.1, "train/task_loss": loss} for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    lines = drawn(tmp_path / "low", tmp_path / "high", width=80)
    [above], [below] = ([line for line in lines if line.endswith(mark)] for mark in ("BB", "AA"))
    assert above.split() == ["2", "┤BB"]
    assert below.split() == ["1", "┤AA"]


def test_a_small_terminal_drops_first_the_curves_and_then_the_notes(runs: Path) -> None:
    def parts(height: int) -> tuple[bool, bool]:
        text = "\n".join(drawn(runs, width=160, height=height))
        assert "stopped" in text
        return "wild: warning" in text, "training loss" in text

    assert [parts(height) for height in (40, 24, 15, 9)] == [(True, True), (True, True), (True, False), (False, False)]


def test_runs_that_do_not_fit_are_counted(runs: Path) -> None:
    assert drawn(runs, width=80, height=6)[-2].strip() == "and 4 more: 3 running, 1 interrupted"


def test_runs_beyond_the_alphabet_keep_their_columns(tmp_path: Path) -> None:
    for number in range(30):
        leave_status(tmp_path / f"run{number:02}", "completed", number)
    lines = drawn(tmp_path, width=80)
    assert lines[26].split() == ["Z", "run25", "completed", "25"]
    assert lines[30].split() == ["run29", "completed", "29"]
    assert lines[30].index("run29") == lines[26].index("run25")


def test_a_loss_that_is_not_finite_is_seen(tmp_path: Path) -> None:
    leave_status(tmp_path / "run", "running", 2, heartbeat=FRESH)
    line = {"step": 2, "epoch": 0.1, "train/task_loss": "nan", "train/agent0/loss": "nan"}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert drawn(tmp_path / "run", width=80)[1].split() == ["run", "running", "2", "nan"]


def test_runs_of_the_same_name_are_shown_with_different_labels(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        leave_status(tmp_path / parent / "run", "completed", 1)
    text = "\n".join(drawn(tmp_path / "a/run", tmp_path / "b/run", width=250))
    assert str(tmp_path / "a/run") in text
    assert str(tmp_path / "b/run") in text


def test_a_terminal_that_has_only_ascii_gets_only_ascii(runs: Path) -> None:
    text = "\n".join(drawn(runs, width=80, height=120, encoding="ascii"))
    assert text.isascii()
    assert "training loss" in text
    assert "+--------" in text


def test_a_run_that_is_not_there_yet_has_a_row(runs: Path) -> None:
    lines = drawn(runs / "done", runs / "later", width=80)
    assert ["B", "later", "waiting"] in [line.split() for line in lines]
    assert "later: no run has begun here yet" in lines


def test_markup_in_a_name_is_shown_as_it_is(tmp_path: Path) -> None:
    leave_status(tmp_path / "[bold]a", "completed", 1)
    assert "[bold]a" in drawn(tmp_path / "[bold]a", width=80)[1]
