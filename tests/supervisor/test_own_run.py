"""An own run under the supervisor: every kind of fault and every ordered pair of them, without real training."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest

from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cluster.launch import read_launch
from ci_llm.core import run_status
from ci_llm.core.durable import write_json
from ci_llm.core.run_folder import Failure, Recovery, read_recovery, write_failure, write_recovery
from ci_llm.core.run_status import Status, is_alive, pid_space
from ci_llm.errors import CheckpointError
from ci_llm.supervisor import own_run
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Outcome, Policy, decide
from tests.supervisor.terminal import ROOT, SCRIPTS, Terminal, ran
from tests.support.campaign import first_fast, sampled, size
from tests.support.children import PYTHONPATH

ACCELERATE = ["--", "accelerate", "launch", "--num_processes=1", "train.py"]
KINDS = ("nonfinite", "out_of_memory", "killed", "interrupted", "hang", "disk_full", "damaged")
WORDS = ["--train-script", SCRIPTS / "light_trainer.py", "batch_size=64", "learning_rate=4e-3"]


def every_pair(kinds: tuple[str, ...]) -> list[str]:
    """A sequence in which every kind follows every kind, itself included, exactly once (Hierholzer)."""
    left = {kind: list(kinds) for kind in kinds}
    walk, stack = list[str](), [kinds[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def supervise(folder: Path, faults: list[str]) -> tuple[list[int], list[dict[str, Any]]]:
    """Call the supervisor until the run is completed; returns exit codes and the requests to every attempt."""
    plan = {str(attempt): fault for attempt, fault in enumerate(faults, 1)}
    (folder / "plan.json").write_text(json.dumps(plan))
    codes = [75]
    while codes[-1] == 75:
        with Terminal(*WORDS, "--max-retries", 99, cwd=folder, hasty=True, env={"PYTHONPATH": str(ROOT)}) as terminal:
            codes.append(terminal.wait())
            assert codes[-1] in (0, 75), terminal.text
    return codes[1:], [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def assert_each_fault_was_answered(faults: list[str], attempts: list[dict[str, Any]]) -> None:
    """Assert that the attempt after each fault resumed from the right step with exactly the requested changes."""
    assert [one["attempt"] for one in attempts] == list(range(1, len(faults) + 2))
    for fault, (before, after) in zip(faults, pairwise(attempts), strict=True):
        reached = before["from"] + 4
        # A damaged newest checkpoint costs one more interval; going back ends before the first bad step.
        expected = {"damaged": reached - 2, "nonfinite": reached - 2}.get(fault, reached)
        assert after["from"] == expected, (fault, before, after)
        assert after["allowed"] == (reached - 1 if fault == "nonfinite" else None)
        factor = before["factor"] / 1.5 if fault == "nonfinite" else before["factor"]
        assert after["factor"] == pytest.approx(factor)
        micro = int((before["micro"] or 64) / 1.5) if fault == "out_of_memory" else before["micro"]
        assert after["micro"] == micro


@pytest.mark.slow
def test_every_ordered_pair_of_faults(tmp_path: Path) -> None:
    """In the sample each kind comes before and after a damaged checkpoint."""
    faults = every_pair(KINDS)
    assert len(set(pairwise(faults))) == len(KINDS) ** 2
    faults = faults[: size(14, len(faults))]
    assert {*faults} == {*KINDS}
    codes, attempts = supervise(tmp_path, faults)
    assert codes == [75] * faults.count("interrupted") + [0]
    assert_each_fault_was_answered(faults, attempts)
    told = (tmp_path / "safe_train.log").read_text()
    for kind in KINDS:
        assert (kind if kind != "damaged" else "killed") in told
    assert "the configuration is unchanged; adjustments, if any, are in recovery.json" in told


@pytest.mark.slow
def test_a_signal_lets_an_own_run_save(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(
        "from ci_llm.cli.main import run_guarded\nfrom ci_llm.interrupts import Interrupts\n"
        "from ci_llm.core.run_status import RunStatus\n"
        "with Interrupts() as heard:\n"
        "    status = RunStatus('ci_llm_output', 1)\n    import os\n    os.mkdir('ci_llm_output')\n"
        "    status.start()\n    print('ready', flush=True)\n"
        "    while not heard.wait(0.01):\n"
        "        if heard.take_save_request():\n            print('saved', flush=True)\n"
        "    status.update(step=7)\n    status.finish('interrupted', heard.stop_reason)\n"
    )
    with Terminal("--train-script", "saves.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) as terminal:
        terminal.read_until("ready")
        terminal.signal(signal.SIGUSR1)
        terminal.read_until("it saves and continues")
        terminal.read_until("saved")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 75, terminal.text
    assert "interrupted: signal:SIGTERM, step 7" in (tmp_path / "safe_train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", sampled([[], ACCELERATE], [ACCELERATE]))
def test_the_real_trainer_is_interrupted_and_resumes(tmp_path: Path, launcher: list[str]) -> None:
    """`accelerate launch` dies of the SIGTERM that its orphan, the trainer, survives to save."""
    (tmp_path / "train.py").write_text((ROOT / "train.py").read_text())
    words = ["num_agents=1", "max_train_samples=40", "batch_size=2", "num_workers=0", "lr_scheduler_type=constant"]
    words += ["eval_steps=null", "eval_samples=2", "generation_eval_samples=2", "max_new_tokens_eval=4"]
    words += ["save_steps=null", "save_interval_seconds=null"]  # however far it comes, only the stop saves
    path = {"PYTHONPATH": PYTHONPATH, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Terminal(*words, "max_train_steps=999", *launcher, cwd=tmp_path, env=path) as first:
        first.read_until(re.compile("[1-9][0-9]*/999 "))  # a step is done
        processes = first.descendants()
        first.signal(signal.SIGTERM)
        assert first.wait() == 75, first.text
        assert not [process for process in processes if is_alive(process.pid)]
    steps = CheckpointStore(tmp_path / "ci_llm_output").all_steps()
    assert len(steps) == 1, first.text
    [step] = steps
    assert f"interrupted: signal:SIGTERM, step {step}" in first.text
    with Terminal(*words, f"max_train_steps={step + 1}", *launcher, cwd=tmp_path, env=path) as second:
        assert second.wait() == 0, second.text
    assert f"step {step} of {step + 1}, verified, from" in second.text, second.text
    assert "attempt 1 ended" in second.text


# What is refused before anything is launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    first_fast(
        [
            (["batch_size=none"], ["batch_size is 'none'"]),
            (["--lr-key", "lr"], ["the trainer of this project takes no --lr-key", "write --config FILE"]),
            (["--config", "missing.yaml"], ["missing.yaml", "cannot be read"]),
            (["--", "torchrun", SCRIPTS / "light_trainer.py", "num_agent=3"], ["did you mean num_agents?"]),
        ],
        2,
    ),
)
def test_a_wrong_configuration_is_refused_at_once(tmp_path: Path, words: list[str], told: list[str]) -> None:
    script = [] if "--" in words else ["--train-script", SCRIPTS / "light_trainer.py"]
    terminal = ran(tmp_path, *script, *words, code=2)
    assert os.listdir(tmp_path) == []
    for part in told:
        assert part in terminal.text


# A run that gives no sign of life


Begin: TypeAlias = Callable[..., own_run.OwnRun]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Begins the first attempt of a run in the folder `run`, which writes such a status."""
    monkeypatch.chdir(tmp_path)

    def begin_run(**status: Any) -> own_run.OwnRun:
        run = own_run.OwnRun(["true"], ["output_dir=run"])
        run.begin_attempt()
        (tmp_path / "run").mkdir()
        tell(tmp_path, **status)
        return run

    return begin_run


def tell(folder: Path, **status: Any) -> None:
    now = time.time()
    told = Status("running", None, 5, 1, os.getpid(), "host", pid_space(), now, now)
    write_json(folder / "run" / "status.json", asdict(replace(told, **status)))


def test_the_trainer_knows_how_long_it_may_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CI_LLM_SUPERVISED", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    told = own_run.OwnRun(["true"], ["output_dir=run"], grace_s=20).begin_attempt()[1]
    assert read_launch(told, parent_command=[]).kill_delay_s == 20
    assert told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "15"


def checkpoint(folder: Path, *steps: int) -> None:
    store = CheckpointStore(folder / "run")
    store.acquire_lease()
    for step in steps:
        store.save(step, {"weights": FileImage((bytes(8),))})


@pytest.mark.parametrize(
    "status",
    [
        {"pid_space": "another machine"},
        {"status": "completed"},
        {"pid": os.getppid()},  # that of a trainer that has ended, and which a stranger has now
    ],
    ids=str,
)
def test_a_request_to_save_without_a_trainer_is_reported(
    status: dict[str, Any], begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_run, "send", lambda *_: pytest.fail("a stranger got the signal"))
    assert "no training on this machine" in begin(**status).request_save()


def test_a_run_that_resumes_from_elsewhere_loses_nothing_by_a_stop(begin: Begin) -> None:
    """Its status names the step from which the same command resumes, a step that its own folder does not hold."""
    run = begin(status="interrupted", reason="signal:SIGTERM", step=500)
    outcome = run.classify(AttemptResult(Evidence(), returncode=0))
    assert (outcome.kind, outcome.detail, outcome.progress) == ("interrupted", "signal:SIGTERM, step 500", False)


def test_a_failure_that_cannot_be_read_is_a_crash_and_ends_nothing(tmp_path: Path, begin: Begin) -> None:
    run = begin(status="failed", reason="error:OSError")
    write_failure(tmp_path / "run", 1, 0, Failure("nonfinite", "as planned", 0, 1.0)).write_text("{")
    outcome = run.classify(AttemptResult(Evidence(), returncode=1))
    assert (outcome.kind, outcome.detail.partition(":")[0]) == ("crashed", "unreadable")


def test_checkpoints_from_before_a_rollback_are_not_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt that should go back ended before it had moved the newer checkpoints aside."""
    (tmp_path / "run").mkdir()
    checkpoint(tmp_path, 2, 4, 6)
    tell(tmp_path, status="failed", reason="nonfinite", attempt=1)
    write_recovery(tmp_path / "run", Recovery(learning_rate_factor=0.5, resume_at_most_step=3, after_attempt=1))
    monkeypatch.chdir(tmp_path)
    run = own_run.OwnRun(["true"], ["output_dir=run"])
    run.begin_attempt()
    assert not run.classify(AttemptResult(Evidence(), returncode=1)).progress
    tell(tmp_path, status="failed", reason="nonfinite", attempt=2)
    assert run.classify(AttemptResult(Evidence(), returncode=1)).progress


def test_a_kill_in_an_evaluation_does_not_cut_the_batch_of_the_training(tmp_path: Path, begin: Begin) -> None:
    """The next attempt cuts the evaluation by itself, down to one row at a time."""
    run = begin(phase="evaluation", evaluation_batch_size=64, micro_batch_size=16)
    assert run._micro_batch_size() == 64
    told = run.adjust(decide([], Outcome("out_of_memory", batch_size=64), Policy()), 1)
    assert told == ["evaluation: fewer than 64 rows at a time; the training stays as it is"]
    assert read_recovery(tmp_path / "run").micro_batch_size is None
    assert decide([], Outcome("out_of_memory", batch_size=1), Policy()).action == "give up"


def clock_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch, **readings: float) -> None:
    """Give a module a clock that stands still. The clock of the process stays: servers of other tests run by it."""
    stopped = {name: lambda reading=reading: reading for name, reading in readings.items()}
    monkeypatch.setattr(module, "time", SimpleNamespace(**stopped))


def test_a_run_with_a_heartbeat_does_not_hang(tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    run, started = begin(), time.monotonic()
    for hour in range(3):  # in which it says nothing
        tell(tmp_path, heartbeat=time.time() + hour)
        clock_of(own_run, monkeypatch, monotonic=started + 3600 * hour)
        assert run.stop_order(Evidence()) is None
    clock_of(own_run, monkeypatch, monotonic=started + 3600 * 3)
    assert run.stop_order(Evidence()) == ("SIGKILL", "hang")


def test_a_clock_that_jumps_is_not_a_hang(tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    run, started, now = begin(), time.monotonic(), time.time()
    for look in range(3):
        tell(tmp_path, heartbeat=now + 100 * look)
        for module in (own_run, run_status):
            clock_of(module, monkeypatch, monotonic=started + 100 * look, time=now + 100 * look + 3600)
        assert run.stop_order(Evidence()) is None


def test_a_status_that_cannot_be_read_is_not_a_completion(tmp_path: Path, begin: Begin) -> None:
    run = begin()
    (tmp_path / "run" / "status.json").write_text("{")
    outcome = run.classify(AttemptResult(Evidence(), returncode=0))
    assert (outcome.kind, outcome.detail.partition(":")[0]) == ("crashed", "status.json")


# recovery.json


def test_going_back_is_asked_of_one_attempt_only() -> None:
    state = Recovery(resume_at_most_step=120, after_attempt=4)
    assert [state.latest_step_allowed(attempt) for attempt in (3, 4, 5, None)] == [None, 120, None, None]
    assert Recovery().latest_step_allowed(None) is None


@pytest.mark.parametrize("text", ["[]", "{", '{"learning_rate_factor": 0}', '{"learning_rate_factor": "x"}'])
def test_a_recovery_state_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "recovery.json").write_text(text)
    with pytest.raises(CheckpointError, match="recovery state cannot be read"):
        read_recovery(tmp_path)


HOLDER = """\
import sys
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cli.main import run_guarded
from ci_llm.core.run_status import RunStatus
from ci_llm.interrupts import Interrupts

def main():
    with Interrupts() as interrupts:
        store = CheckpointStore("ci_llm_output")
        RunStatus("ci_llm_output", store.acquire_lease(), still_held=store.holds_lease).start(0)
        print("it holds the folder", flush=True)
        interrupts.wait()
    return 0

sys.exit(run_guarded(main, debug=False))
"""


@pytest.mark.slow
def test_a_second_supervisor_on_one_folder_is_refused(tmp_path: Path) -> None:
    """This happens where a step of a SLURM job starts late and the batch script has continued without it."""
    (tmp_path / "train.py").write_text(HOLDER)
    arguments = ("--train-script", "train.py", "--max-retries", "2")
    with Terminal(*arguments, cwd=tmp_path, hasty=True) as first:
        first.read_until("it holds the folder")
        attempts = sorted((tmp_path / "ci_llm_output").rglob("attempt*"))
        with Terminal(*arguments, cwd=tmp_path, hasty=True) as second:
            code = second.wait()
            said = second.text
        assert code not in (0, 75), said
        assert "writes to this folder" in said
        assert "it holds the folder" not in said
        assert sorted((tmp_path / "ci_llm_output").rglob("attempt*")) == attempts
        first.signal(signal.SIGTERM)
        first.wait()
