"""The audit on real scripts: exact ones pass, a planted mistake is named, others are refused."""

from __future__ import annotations

import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.audit import ZOO, Case, cases, examine, examine_warm, executor
from ci_llm.errors import BadInput, ConfigError
from tools.audit.__main__ import main, show
from tools.audit.audit import audit as run_audit
from tools.audit.runs import LARGEST_COPY, Place, Plan
from tools.testbed.forkserver import ForkServer

PLAIN = str(ZOO / "plain.py")


def audit(folder: Path, *words: str, options: tuple[str, ...] = ()) -> int:
    """Run the command in a folder of its own."""
    folder.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return main([*options, "--", *words])
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
    assert (stopped["resumed_from"], stopped["lost_steps"]) == (8, 0)  # it saved when it was asked to stop
    assert told["saves"] == [5, 10]
    assert [*(tmp_path / "work").iterdir()] == []
    assert (tmp_path / "kept" / "sigkill" / "resumed" / "process_0.jsonl").is_file()


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """With torch; torch imports the compiler when the first optimizer is made."""
    with ForkServer("torch", "numpy", "torch._dynamo", "torch.utils.data") as server:
        yield server


SAMPLE = ("torch", "no dropout", "no-position", "no-torch-generator", "no-scaler", "no-head", "half-precision")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_zoo(name: str, tmp_path: Path, server: ForkServer) -> None:
    case = next(case for case in cases() if case.name.split(", ")[-1].startswith(name))
    verdict = examine_warm(case, tmp_path, server)
    assert verdict.exact == (case.expected == "")
    assert case.expected in ("", *(each.kind for check in verdict.checks[1:] for each in check.divergences[:1]))


@pytest.mark.campaign
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_zoo(case: Case, tmp_path: Path) -> None:
    assert examine(case, tmp_path / "work")[0] == case.expected


@pytest.mark.slow
def test_a_mistake_is_reported_with_its_line_and_its_cause(tmp_path: Path, server: ForkServer) -> None:
    [case] = [case for case in cases() if case.name == "torch, no-moments"]
    said = io.StringIO()
    show(examine_warm(case, tmp_path, server), Console(file=said, width=120))
    line = next(number for number, text in enumerate(Path(PLAIN).read_text().splitlines(), 1) if "AdamW(" in text)
    for part in (
        "killed and resumed, step 16: moments",
        "exp_avg, exp_avg_sq, step are missing: the optimizer starts without them",
        "optimizer.state_dict() is not saved or not loaded",
        f"plain.py:{line}",
    ):
        assert part in said.getvalue()
    assert said.getvalue().rstrip().endswith("not exact")


@pytest.mark.slow
def test_a_script_that_refuses_to_resume_is_not_said_to_count_its_steps_wrong(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["python", PLAIN, "--out", "{out}"]
    verdict = run_audit(Plan(command, ["--from-there"], steps=8, execute=executor(server)), tmp_path / "scratch")
    for check in verdict.checks[1:]:
        assert [each.kind for each in check.divergences] == ["no resume"]
        assert "unrecognized arguments: --from-there" in check.divergences[0].detail
    said = io.StringIO()
    show(verdict, Console(file=said, width=200))
    assert "likely: another --resume-arg is needed, or no checkpoint was there yet" in said.getvalue()


@pytest.mark.slow
def test_a_script_that_cannot_be_audited_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, seconds, message in (
        ("raise SystemExit('no data')", 900, "the script failed by itself, with exit code 1"),
        ("print('nothing to do')", 900, "no optimizer step of torch was seen"),
        ("import threading; threading.Event().wait()", 1, "the script took longer than its limit"),
    ):
        assert audit(tmp_path / "work", sys.executable, "-c", code, options=("--seconds", str(seconds))) == 2
        assert message in capsys.readouterr().err
    assert audit(tmp_path / "work", "/no/such/program") == 2
    assert "the command cannot be started: No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_before_the_signal_is_not_a_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This ended in a traceback with the exit code of a divergence."""
    work = tmp_path / "work"  # each run works in a copy of the current folder
    work.mkdir()
    monkeypatch.chdir(work)
    train = "import torch; o = torch.optim.SGD(torch.nn.Linear(2, 1).parameters())\nfor _ in range(4): o.step()"
    third = f"import pathlib, sys; n = pathlib.Path({str(tmp_path / 'n')!r}); n.open('a').write('.')\n"
    third += "if len(n.read_text()) == 3: sys.exit('the port is in use')\n"
    with pytest.raises(BadInput, match=r"failed by itself, with exit code 1(.|\n)*the port is in use"):
        run_audit(Plan([sys.executable, "-c", third + train], steps=4), tmp_path / "scratch")


def test_a_wrong_call_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "2", "--kill-at", "9"]) == 2
    said = capsys.readouterr().err
    assert "there is no command" in said
    assert "--steps takes at least 3" in said
    assert "--kill-at takes a step" in said
    assert main(["--resume-arg={newest}", "--", "true"]) == 2
    assert "{newest} needs --newest" in capsys.readouterr().err


def test_a_folder_too_large_to_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "base.bin").open("wb") as file:
        file.truncate(LARGEST_COPY + 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="larger than 256 MiB"):
        Place(tmp_path / "scratch", "straight", Plan(["true"]))
    Place(tmp_path / "scratch", "other", Plan(["true", "--out={out}"]))


@pytest.mark.slow
def test_a_library_that_only_asks_whether_there_is_a_torch_hides_nothing(tmp_path: Path) -> None:
    """datasets looks for torch in this way when it is imported first."""
    script = "import importlib.util, sys; importlib.util.find_spec('torch'); import torch; print(*sys.modules)"
    inside = Path(inspect.getfile(Plan)).parent / "inside"
    environment = {**os.environ, "PYTHONPATH": str(inside), "CI_LLM_AUDIT_RECORD": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "ci_llm_probe" in done.stdout.split()
