"""SLURM from the inside of a job: when it ends the job, and how the job is requeued.

SLURM counts a job as completed if it leaves within the grace of a preemption, or before its limit. Only a request of
its own puts such a job back into the queue. The outermost program of this package makes the request as its last act,
because SLURM answers it with a SIGTERM to everything that is left of the job.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from ci_llm.cluster.launch import SUPERVISED

#: The requeues of one job at most: many preemptions are usual, and a job that is put back for ever is a fault.
MAX_REQUEUES: Final = 100
MAX_WITHOUT_PROGRESS: Final = 3
_QUERY_TIMEOUT_S: Final = 20.0

Query = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Job:
    """The job that this process belongs to.

    Attributes:
        id: for squeue and scontrol; one task of an array is `<array>_<task>`.
        restarts: how often it was requeued before this attempt.
    """

    id: str
    restarts: int


@dataclass(frozen=True)
class JobInfo:
    """The present state of a job, as SLURM reports it.

    Attributes:
        state, reason: in SLURM's words, for example RUNNING or COMPLETING.
        is_batch: whether it was submitted by sbatch.
        may_requeue: whether its options and the cluster allow a requeue.
        end: unix seconds at which SLURM ends it; None if unknown. A preemption moves it to the end of the grace.
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


def query(command: Sequence[str], timeout_s: float = _QUERY_TIMEOUT_S) -> str | None:
    """The output of a SLURM command; None if the command is not installed, fails, or takes too long."""
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


def job_end(job: Job, environ: Mapping[str, str] = os.environ, query: Query = query) -> float | None:
    """Unix seconds at which SLURM ends the job: from the environment (SLURM 23.02 and newer), else by a query."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdecimal() else current_job_end(job, query)


def current_job_end(job: Job, query: Query = query) -> float | None:
    """Unix seconds at which SLURM ends the job, always by a query: the end may have been moved since the start."""
    answer = query(["squeue", "-h", "-j", job.id, "-o", "%e"])
    end = _unix_seconds(answer or "")
    if end is not None:
        return end
    info = query_job(job, query)
    return info.end if info else None


def query_job(job: Job, query: Query = query) -> JobInfo | None:
    """The state of the job, as scontrol reports it; None without an answer."""
    answer = query(["scontrol", "show", "job", "-o", job.id])
    if not answer:
        return None
    # A value may hold spaces (Command=/home/me/my scripts/...): its first word is enough for these fields.
    fields = dict(re.findall(r"(\w+)=(\S*)", answer))
    return JobInfo(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        is_batch=fields.get("BatchFlag", "0") != "0",
        may_requeue=fields.get("Requeue", "0") != "0",
        end=_unix_seconds(fields.get("EndTime", "")),
    )


def kill_time(job: Job, query: Query = query, now: float | None = None) -> float | None:
    """Unix seconds at which SLURM kills a job that it has signalled to end; None if that is not known.

    The end of a job that still runs is its time limit, or the end of a preemption's grace: SLURM moves the end there,
    but only for a job with a limit. At the limit, after scancel and after scontrol requeue, SLURM kills the job
    KillWait seconds after its end.
    """
    info = query_job(job, query)
    if info is None or info.end is None:
        return None
    if info.state == "RUNNING" and info.end > (time.time() if now is None else now):
        return info.end
    kill_wait = re.search(r"^KillWait\s*=\s*(\d+)", query(["scontrol", "show", "config"]) or "", re.MULTILINE)
    return info.end + int(kill_wait[1]) if kill_wait else None


def _unix_seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # Unknown, N/A, NONE: a job without an end
        return None


def requeue(
    wanted: bool | Literal["auto"],
    reason: str,
    *,
    without_progress: int,
    environ: Mapping[str, str] = os.environ,
    query: Query = query,
) -> str | None:
    """Ask SLURM to run this job again. It must be the last act: SLURM then ends what is left of the job.

    Args:
        wanted: the key `requeue`; "auto" says nothing outside of SLURM.
        reason: why the run was stopped.
        without_progress: attempts in a row without progress.

    Returns:
        the result, as one line for people; None if there is nothing to say.
    """
    if wanted is False or SUPERVISED in environ:  # under a supervisor, the supervisor requeues the job
        return None
    job = read_job(environ)
    if job is None:
        return "not put back into a queue: this is not a SLURM job" if wanted is True else None
    # SLURM would requeue a job that makes no progress, or that a person has stopped: that is decided here.
    obstacle = reason_not_to_requeue(job, query_job(job, query), reason, without_progress)
    if obstacle is None and query(["scontrol", "requeue", job.id]) is None:
        obstacle = "scontrol requeue failed"
    if obstacle:
        return f"SLURM job {job.id} is not put back into the queue: {obstacle}"
    return f"SLURM job {job.id} is put back into the queue (requeue {job.restarts + 1})"


def reason_not_to_requeue(
    job: Job, info: JobInfo | None, reason: str, without_progress: int, max_requeues: int = MAX_REQUEUES
) -> str | None:
    """Why a job must not run again; None if it may. For the arguments see `requeue`."""
    if reason == "signal:SIGINT":
        return "a person stopped it (SIGINT)"
    if reason == "callback":
        return "a callback of the program stopped it"
    if info is None:
        return "scontrol says nothing about it"
    if not info.is_batch:
        return "only batch jobs can be"
    if not info.may_requeue:
        return "it was submitted with --no-requeue, or this cluster forbids it (JobRequeue=0)"
    # A job at its limit is COMPLETING with this reason, and may still be requeued.
    if info.state != "RUNNING" and info.reason != "TimeLimit":
        return f"it is {info.state}, so somebody has cancelled it or put it back already"
    if job.restarts >= max_requeues:
        return f"it was {job.restarts} times, the most of one job"
    if without_progress >= MAX_WITHOUT_PROGRESS:
        return f"no progress in {without_progress} attempts; more time per job, or smaller steps, and submit it again"
    return None
