"""`ci-llm audit` on real scripts: exact ones pass, a planted mistake is named, and what cannot be audited is said."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.audit import ZOO, cases
from benchmarks.zoo.plain import FAULTS
from ci_llm.audit.runs import LARGEST_COPY, Place, Plan
from ci_llm.cli.main import main
from ci_llm.errors import ConfigError

PLAIN = str(ZOO / "plain.py")


def audit(folder: Path, *words: str, options: tuple[str, ...] = ()) -> int:
    """Run the command in a folder of its own."""
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return main(["audit", *options, "--", *words])
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_a_script_that_resumes_exactly_passes_and_its_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, PLAIN, "--stops", "--out", "{out}"]
    code = audit(tmp_path / "work", *words, options=("--json", "--steps", "12", "--keep", str(tmp_path / "kept")))
    told = json.loads(capsys.readouterr().out)
    assert (code, told["exact"], told["first_divergence"]) == (0, True, None)
    straight, killed, stopped = told["checks"]
    assert (straight["steps"], straight["loss_difference"]) == (12, 0)
    assert (killed["resumed_from"], killed["lost_steps"], killed["steps"]) == (5, 3, 7)
    assert (stopped["resumed_from"], stopped["lost_steps"]) == (9, 0)  # the step under way was finished, and saved
    assert told["saves"] == [5, 10]
    assert [*(tmp_path / "work").iterdir()] == []
    assert (tmp_path / "kept" / "sigkill" / "resumed" / "process_0.jsonl").is_file()


@pytest.mark.slow
def test_a_mistake_is_named_with_its_line_and_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "no-moments"
    code = audit(tmp_path / "work", sys.executable, PLAIN, "--fault", fault, options=("--steps", "12"))
    said = capsys.readouterr().out
    assert code == 1
    assert f"killed and resumed, step 6: {FAULTS[fault]}" in said
    assert "optimizer.state_dict() is not saved or not loaded" in said
    line = next(number for number, text in enumerate(Path(PLAIN).read_text().splitlines(), 1) if "AdamW(" in text)
    assert f"plain.py:{line}" in said
    assert said.rstrip().endswith("not exact")


@pytest.mark.campaign
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_zoo(case: object, tmp_path: Path) -> None:
    from benchmarks.audit import Case, examine

    assert isinstance(case, Case)
    assert examine(case, tmp_path / "work")[0] == case.expected


def test_what_cannot_be_audited_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("-c", "raise SystemExit('no data')"), "the script failed by itself, with exit code 1"),
        (("-c", "print('nothing to do')"), "no optimizer step of torch was seen"),
        (("-c", "import threading; threading.Event().wait()"), "the script took longer than its limit"),
    ):
        assert audit(tmp_path / "work", sys.executable, *words, options=("--seconds", "2")) == 2
        assert message in capsys.readouterr().err
    assert audit(tmp_path / "work", "/no/such/program") == 2
    assert "the command cannot be started: No such file" in capsys.readouterr().err


def test_a_wrong_call_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--steps", "2", "--kill-at", "9"]) == 2
    said = capsys.readouterr().err
    assert "there is no command" in said
    assert "--steps takes at least 3" in said
    assert "--kill-at takes a step" in said
    assert main(["audit", "--resume-arg={newest}", "--", "true"]) == 2
    assert "{newest} needs --newest" in capsys.readouterr().err


def test_a_folder_too_large_to_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "base.bin").open("wb") as file:
        file.truncate(LARGEST_COPY + 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="larger than 256 MiB"):
        Place(tmp_path / "scratch", "straight", Plan(["true"]))
    Place(tmp_path / "scratch", "other", Plan(["true", "--out={out}"]))
