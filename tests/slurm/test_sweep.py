"""A sweep on a real SLURM: after a preemption it has the trials and bits of an undisturbed sweep."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from ci_llm.core.run_status import read_status
from tests.slurm.cluster import Cluster
from tests.slurm.scenarios import ENVIRONMENT, STAND_STILL
from tests.sweep.trials import called, facts, record, words
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import differences

pytestmark = pytest.mark.slow

#: A batch script as docs/recipes/clusters.md has one; the words of the command are its arguments.
SCRIPT = """\
#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
trap : TERM
srun --input=none "$@" & wait; wait
"""
WORDS = words(logging_steps=1, interrupted_exit_code=0)
CAUGHT_AT = 5  # lines of metrics: in the second of three segments


def test_a_preempted_sweep_comes_back_and_ends_with_the_same_trials(
    cluster: Cluster, server: ForkServer, tmp_path: Path
) -> None:
    alone, queued = tmp_path / "alone", tmp_path / "queued"
    for folder in (alone, queued):
        folder.mkdir()
    script, run = tmp_path / "sweep.sbatch", queued / "run"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ci_llm", "sweep", "--config", os.devnull, *WORDS]
    environment = {**ENVIRONMENT, **STAND_STILL, "STAND_STILL_AFTER": str(CAUGHT_AT)}
    job = cluster.submit(script, *command, environment=environment, cwd=queued)
    ended = server.run(called, alone / "log", folder=str(alone), command="sweep", arguments=WORDS)
    assert ended == [0], (alone / "log").read_text()

    def stands_still() -> bool:
        pid = read_status(run).pid if (run / "status.json").exists() else None
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    job.until("it stands still", stands_still)
    assert [segment["is_over"] for segment in record(queued)["segments"]] == [True, False]
    cluster.preempt(job.node)
    shown = job.until_ended()
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), job.said()
    assert "is put back into the queue (requeue 1)" in job.said()
    assert read_status(run).status == "completed"
    assert not differences(facts(alone), facts(queued))
