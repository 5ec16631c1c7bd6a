"""What `ci-llm watch` reads from a real squeue."""

from __future__ import annotations

import pytest

from ci_llm.cluster.slurm import QueuedJob, query_queue
from tests.slurm.cluster import Cluster
from tests.slurm.test_scenarios import pytestmark as of_all_scenarios

pytestmark = of_all_scenarios


def test_jobs_and_tasks_of_arrays_that_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    held_job = ("sbatch", "--parsable", "--hold", "--time=1-00:00:00", "--wrap", "true")
    number = cluster.call(*held_job, cwd=cluster.folder)
    array = cluster.call(*held_job, "--array=3,5", cwd=cluster.folder)
    held = QueuedJob("PENDING", "JobHeldUser", "1-00:00:00")
    try:
        assert query_queue([number, f"{array}_5"]) == {number: held, f"{array}_5": held}
    finally:
        cluster.call("scancel", number, array)
    assert query_queue([number, f"{array}_5"]) == {}
    assert query_queue(["999999"]) == {}, "a job that nobody knows is no failure"
    monkeypatch.setenv("SLURM_CONF", str(cluster.config.with_name("absent.conf")))
    assert query_queue([number]) is None
