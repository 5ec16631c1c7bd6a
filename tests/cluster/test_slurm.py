"""The answers of SLURM; which jobs are requeued, and when to give up. The real one is in tests/slurm/."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.cluster.slurm import (
    MAX_WITHOUT_PROGRESS,
    Job,
    JobInfo,
    current_job_end,
    job_end,
    kill_time,
    query,
    read_job,
    reason_not_to_requeue,
    requeue,
)
from ci_llm.core.run_status import RunStatus
from tests.support.children import Child

ROOT = Path(__file__).parents[2]

# As Slurm 22.05 prints it, in one line; shortened.
SHOWN = (
    "JobId=7 JobName=ci_llm UserId=root(0) Priority=1 JobState={state} Reason={reason} Dependency=(null) Requeue=1"
    " Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:09 TimeLimit=00:01:00 StartTime=2026-11-20T23:02:21"
    " EndTime={end} Deadline=N/A PreemptEligibleTime=2026-11-20T23:02:21 PreemptTime=None"
    " SuspendTime=None Command=/home/me/CI LLM/slurm/train.sbatch --exp_name=a WorkDir=/home/me"
)
END = "2026-11-20T23:03:21"
# Some of what `scontrol show config` prints.
CONFIGURATION = """\
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 45 sec
LaunchParameters        = (null)"""
END_S = datetime.fromisoformat(END).timestamp()
JOB = Job("7", 0)
RUNNING = JobInfo("RUNNING", "None", is_batch=True, may_requeue=True, end=END_S)


class Cluster:
    """Answers in the place of squeue and scontrol, and remembers what it was asked."""

    def __init__(self, state: str = "RUNNING", reason: str = "None", end: str = END, **answers: str | None) -> None:
        shown = SHOWN.format(state=state, reason=reason, end=end)
        self._answers = {"squeue": end, "job": shown, "config": CONFIGURATION, "requeue": ""} | answers
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> str | None:
        word = next(name for name in self._answers if name in command)
        self.asked.append(word)
        assert word == "config" or any(JOB.id in part for part in command)
        return self._answers[word]


# The job


def test_the_job_is_read_from_the_environment() -> None:
    assert read_job({}) is None
    assert read_job({"SLURM_JOB_ID": "7"}) == Job("7", 0)
    assert read_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == Job("7", 2)
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert read_job(array) == Job("7_3", 0)


def test_the_end_is_taken_from_the_environment_else_from_squeue_else_from_scontrol() -> None:
    cluster = Cluster()
    assert job_end(JOB, {"SLURM_JOB_END_TIME": "1795216345"}, cluster) == 1795216345.0
    assert cluster.asked == []
    assert job_end(JOB, {}, cluster) == END_S
    assert cluster.asked == ["squeue"]
    cluster = Cluster(squeue=None)
    assert current_job_end(JOB, cluster) == END_S
    assert cluster.asked == ["squeue", "job"]


def test_when_a_job_that_was_told_to_end_is_killed() -> None:
    cluster = Cluster()
    assert kill_time(JOB, cluster, now=END_S - 60) == END_S  # the limit, or the end of a preemption's grace
    assert cluster.asked == ["job"]
    assert kill_time(JOB, cluster, now=END_S + 1) == END_S + 45  # the limit is over
    assert kill_time(JOB, Cluster("COMPLETING"), now=END_S - 60) == END_S + 45  # scancel, scontrol requeue
    assert kill_time(JOB, Cluster(config=None), now=END_S + 1) is None
    assert kill_time(JOB, Cluster(job=None), now=END_S - 60) is None
    assert kill_time(JOB, Cluster(end="Unknown"), now=END_S - 60) is None


def test_a_command_that_is_missing_or_fails_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, body in {"squeue": "echo $SLURM_TIME_FORMAT; echo $1", "scontrol": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    assert query(["squeue", "-h"]) == "standard\n-h"
    assert query(["scontrol", "show"]) is None
    assert query([str(tmp_path / "sinfo")]) is None


# Requeue


@pytest.mark.parametrize(
    ("change", "reason", "without_progress", "against"),
    [
        ({}, "signal:SIGTERM", 0, None),
        ({}, "walltime", MAX_WITHOUT_PROGRESS - 1, None),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, "signal:SIGTERM", 0, None),
        ({}, "signal:SIGINT", 0, "a person"),
        ({"is_batch": False}, "walltime", 0, "only batch jobs"),
        ({"may_requeue": False}, "walltime", 0, "--no-requeue"),
        ({"state": "COMPLETING"}, "signal:SIGTERM", 0, "cancelled it or put it back already"),
        ({"state": "CANCELLED"}, "signal:SIGTERM", 0, "cancelled"),
        ({}, "walltime", MAX_WITHOUT_PROGRESS, "no progress in 3 attempts"),
    ],
)
def test_which_jobs_are_requeued(
    change: dict[str, object], reason: str, without_progress: int, against: str | None
) -> None:
    found = reason_not_to_requeue(JOB, replace(RUNNING, **change), reason, without_progress)  # type: ignore[arg-type]
    assert found == against if against is None else found is not None and against in found


def test_a_job_is_requeued_a_number_of_times_at_most() -> None:
    assert reason_not_to_requeue(Job("7", 1), RUNNING, "walltime", 0, 2) is None
    assert "it was 100 times" in (reason_not_to_requeue(Job("7", 100), RUNNING, "walltime", 0) or "")
    assert "scontrol says nothing" in (reason_not_to_requeue(JOB, None, "walltime", 0) or "")


ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


def back(cluster: Cluster, wanted: object = "auto", environ: dict[str, str] = ENVIRONMENT, **keys: int) -> str | None:
    settings = {"without_progress": 0} | keys
    return requeue(wanted, "walltime", environ=environ, query=cluster, **settings)  # type: ignore[arg-type]


def test_the_outermost_program_asks_for_the_requeue_once() -> None:
    cluster = Cluster()
    assert back(cluster) == "SLURM job 7 is put back into the queue (requeue 2)"
    assert cluster.asked == ["job", "requeue"]
    for silent in (
        back(cluster, wanted=False),
        back(cluster, environ={}),
        back(cluster, environ=ENVIRONMENT | {"CI_LLM_SUPERVISED": "120"}),
    ):
        assert silent is None
    assert cluster.asked == ["job", "requeue"]


def test_a_job_that_is_not_requeued_has_a_reason() -> None:
    assert "not a SLURM job" in (back(Cluster(), wanted=True, environ={}) or "")
    assert "scontrol requeue failed" in (back(Cluster(requeue=None)) or "")
    cluster = Cluster("COMPLETING")
    assert "is not put back into the queue: it is COMPLETING" in (back(cluster) or "")
    assert cluster.asked == ["job"]
    assert "no progress" in (back(Cluster(), without_progress=MAX_WITHOUT_PROGRESS) or "")


# What the scripts ask of the program


def test_continue_needs_a_checkpoint_and_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--continue", f"output_dir={tmp_path}", "--exp_name=none"]) == 2
    assert "there is no checkpoint to continue from" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_status_takes_the_arguments_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    RunStatus(run, 1).finish("interrupted", "walltime", "python train.py")
    words = ["--continue", f"output_dir={tmp_path}", "--exp_name=mine", "num_agents=2"]
    assert [main(["status", *words]), main(["status", str(run)])] == [75, 75]
    assert capsys.readouterr().out.count("interrupted (walltime)") == 2
    assert main(["status", f"output_dir={tmp_path}"]) == 2
    assert main(["status", "--help"]) == 0


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_the_scripts_ask_for_nothing_that_a_small_cluster_lacks(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert options.keys() == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "requeue", "open-mode"}
    assert (options["ntasks-per-node"], options["cpus-per-task"], options["open-mode"]) == ("1", "2", "append")
    assert len(re.findall(r"^##SBATCH ", text, re.MULTILINE)) == 2


SRUN = """#!/bin/bash
trap 'echo heard $0; exit 0' USR1 USR2
echo running
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_batch_shell_is_forwarded_to_the_step(number: int, tmp_path: Path) -> None:
    """`--signal=B:USR1@600` signals the shell, which would die of it; srun forwards the signal to its step."""
    for name, text in (("srun", SRUN), ("scontrol", f"#!/bin/sh\necho Command={ROOT}/slurm/train.sbatch\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_SUBMIT_DIR": str(tmp_path), "CI_LLM_PYTHON": "true"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with Child("bash", ROOT / "slurm" / "train.sbatch", env={**job, "PATH": path}) as batch:
        batch.read_until("running")
        batch.signal(number)
        batch.read_until("heard")
        assert batch.wait() == 0
