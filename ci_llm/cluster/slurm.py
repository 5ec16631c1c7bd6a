"""SLURM, from the inside of a job: when the job ends, and asking for it to be run again.

Whoever leaves within the grace of a preemption, or before the limit, has completed in SLURM's eyes: nothing puts such
a job back but its own request. The outermost program of ours makes it, as its last act, because SLURM answers with a
SIGTERM to all that is left of the job.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from ci_llm.cluster.launch import SUPERVISED
from ci_llm.core.durable import make_folders, read_json, write_json

PATIENCE: Final = 3
_ANSWER_S: Final = 20.0

Ask = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Job:
    """The job that this process belongs to.

    Attributes:
        id: as squeue and scontrol take it; one task of an array is `<array>_<task>`.
        restarts: how often it was put back into the queue before this attempt.
    """

    id: str
    restarts: int


@dataclass(frozen=True)
class Standing:
    """What SLURM says of a job now.

    Attributes:
        state, reason: in SLURM's words, RUNNING or COMPLETING for instance.
        end: unix seconds at which SLURM ends it, as far as known; a preemption moves it to the end of the grace.
    """

    state: str
    reason: str
    is_batch: bool
    may_requeue: bool
    end: float | None


def read_job(environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job of this process; None outside of SLURM."""
    if "SLURM_JOB_ID" not in environ:
        return None
    task = environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]
    return Job(name, int(environ.get("SLURM_RESTART_COUNT") or 0))


# ------------------------------------------------------------------------------------------------- asking SLURM


def ask(command: Sequence[str], timeout_s: float = _ANSWER_S) -> str | None:
    """What a command of SLURM answers; None if it is not installed, fails, or stays silent."""
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def end_of(job: Job, environ: Mapping[str, str] = os.environ, ask: Ask = ask) -> float | None:
    """Unix seconds at which SLURM ends the job, from its environment (23.02 and newer) or asked for."""
    told = environ.get("SLURM_JOB_END_TIME", "")
    return float(told) if told.isdecimal() else end_now(job, ask)


def end_now(job: Job, ask: Ask = ask) -> float | None:
    """The same, as it is now: somebody may have moved it."""
    answer = ask(["squeue", "-h", "-j", job.id, "-o", "%e"])
    if (end := _unix_seconds(answer or "")) is not None:
        return end
    standing = look_up(job, ask)
    return standing.end if standing else None


def look_up(job: Job, ask: Ask = ask) -> Standing | None:
    """What scontrol says of the job; None if it says nothing."""
    answer = ask(["scontrol", "show", "job", "-o", job.id])
    if not answer:
        return None
    said = dict(re.findall(r"(\w+)=(\S*)", answer))
    return Standing(
        state=said.get("JobState", ""),
        reason=said.get("Reason", ""),
        is_batch=said.get("BatchFlag", "0") != "0",
        may_requeue=said.get("Requeue", "0") != "0",
        end=_unix_seconds(said.get("EndTime", "")),
    )


def killed_at(job: Job, ask: Ask = ask, now: float | None = None) -> float | None:
    """Unix seconds at which SLURM kills a job that it has told to end; None if that is not known.

    The end of a job that still runs is its limit, or that of a preemption's grace, to which SLURM then moves it; it
    says so only of a job with a limit. Told to end at its limit, by scancel or by scontrol requeue, a job is killed
    KillWait seconds later.
    """
    standing = look_up(job, ask)
    if standing is None or standing.end is None:
        return None
    if standing.state == "RUNNING" and standing.end > (time.time() if now is None else now):
        return standing.end
    found = re.search(r"^KillWait\s*=\s*(\d+)", ask(["scontrol", "show", "config"]) or "", re.MULTILINE)
    return standing.end + int(found[1]) if found else None


def _unix_seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # Unknown, N/A, NONE: a job without an end
        return None


# ------------------------------------------------------------------------------------- attempts, and their progress


def record_attempt(run_folder: Path, attempt: int, step: int, job: Job | None) -> None:
    """Write down at which step an attempt begins, and when its process did (unix seconds).

    Whether it has brought anything shows in the next ones.
    """
    path = run_folder / "attempts" / str(attempt) / "began.json"
    make_folders(path.parent)
    place = {"slurm_job": job.id, "slurm_restarts": job.restarts} if job else {}
    write_json(path, {"step": step, "launched": psutil.Process().create_time(), **place})


def attempts_in_vain(run_folder: Path, step: int) -> int:
    """How many attempts in a row, the last one included, have not come further than `step`."""
    records = sorted(run_folder.glob("attempts/*/began.json"), key=lambda path: int(path.parent.name))
    return len(list(takewhile(lambda path: _step_in(path) == step, reversed(records))))


def _step_in(record: Path) -> int | None:
    """None if it cannot be read: what a run says last must not hang on that."""
    try:
        value: Any = read_json(record)
        return int(value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------- running it again


def put_back(
    wanted: bool | Literal["auto"],
    reason: str,
    *,
    max_requeues: int,
    in_vain: int,
    environ: Mapping[str, str] = os.environ,
    ask: Ask = ask,
) -> str | None:
    """Ask SLURM to run this job again. SLURM then ends what is left of it: to be the last act.

    Args:
        wanted: of the configuration; "auto" is silent where there is no job.
        reason: why the run was stopped.
        in_vain: attempts in a row without progress.

    Returns:
        what became of it, in a line for people; None if there is nothing to say.
    """
    if wanted is False or SUPERVISED in environ:  # the supervisor is the outermost then, and puts it back
        return None
    job = read_job(environ)
    if job is None:
        return "not put back into a queue: this is no SLURM job" if wanted is True else None
    against = objection(job, look_up(job, ask), reason, max_requeues, in_vain)
    if against is None and ask(["scontrol", "requeue", job.id]) is None:
        against = "scontrol requeue failed"
    if against:
        return f"SLURM job {job.id} is not put back into the queue: {against}"
    return f"SLURM job {job.id} is put back into the queue, for the {_ordinal(job.restarts + 1)} time"


def objection(job: Job, standing: Standing | None, reason: str, max_requeues: int, in_vain: int) -> str | None:
    """What speaks against running a job again; None if nothing does."""
    if reason == "signal:SIGINT":
        return "a person stopped it (SIGINT)"
    if standing is None:
        return "scontrol says nothing about it"
    if not standing.is_batch:
        return "only batch jobs can be"
    if not standing.may_requeue:
        return "it was submitted with --no-requeue, or this cluster forbids it (JobRequeue=0)"
    if standing.state != "RUNNING" and standing.reason != "TimeLimit":
        return f"it is {standing.state}, so somebody has cancelled it or put it back already"
    if job.restarts >= max_requeues:
        return f"it was {job.restarts} times, and max_requeues is {max_requeues}"
    if in_vain >= PATIENCE:
        return f"no progress in {in_vain} attempts; more time per job, or smaller steps, and submit it again"
    return None


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
