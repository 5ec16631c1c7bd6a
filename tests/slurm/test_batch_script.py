"""A batch script without `srun`, on a cluster that kills what outlives the steps of a job: nothing is lost.

train.py and safe_train.py start themselves again as a step, which SLURM signals and leaves the time to save.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, Job, missing
from tests.slurm.scenarios import CAUGHT_AT, ROOT, STAND_STILL, STEPS, Scenario
from tests.slurm.test_scenarios import resumed_at

pytestmark = pytest.mark.slow

#: How long a step may take to save; long enough for a machine under any load, and costs nothing.
KILL_WAIT_S = 120
PROGRAMS = Path(sys.executable).parent
TRAIN, SAFE_TRAIN = ROOT / "train.py", (ROOT / "safe_train.py", "--train-script", ROOT / "train.py")
#: Two processes each: Accelerate starts one on a machine without a GPU, and that one starts both in its step.
ACCELERATE = ("accelerate", "launch", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", TRAIN)
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", TRAIN)
#: By name: the words before those of the run, and what happens to it in the middle.
CASES: dict[str, tuple[tuple[Any, ...], str]] = {
    "limit": ((sys.executable, TRAIN), "limit"),
    "scancel": ((sys.executable, TRAIN), "scancel"),
    "supervised": ((sys.executable, *SAFE_TRAIN), "scancel --full"),
    "accelerate": ((PROGRAMS / ACCELERATE[0], *ACCELERATE[1:]), "scancel"),
    "torchrun": ((PROGRAMS / TORCHRUN[0], *TORCHRUN[1:]), "preemption"),
}

Tell = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tell]:
    """Starts every case, some side by side; called with the name of one, waits for what came of it."""
    if reason := missing():
        pytest.skip(reason)
    at_once = 3
    runs = tmp_path_factory.mktemp("wrapped")
    scratch = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
    with (
        scratch as folder,
        Cluster(Path(folder), at_once, kills_leftovers=True, kill_wait_s=KILL_WAIT_S) as cluster,
        ThreadPoolExecutor(at_once) as pool,
    ):
        told: dict[str, Future[dict[str, Any]]] = {
            name: pool.submit(play, Scenario(cluster, runs / name), *case) for name, case in CASES.items()
        }
        yield lambda name: told[name].result()


def play(scene: Scenario, launcher: tuple[Any, ...], event: str) -> dict[str, Any]:
    """`sbatch --wrap` of a run, which stands still in the middle until the event wakes it."""
    wrapped = shlex.join(map(str, [*launcher, *scene.words()]))
    job = scene.sbatch("--requeue", "--time=60", f"--wrap={wrapped}", environment=STAND_STILL)
    scene.caught(job)
    happen(scene, job, event)
    shown = job.until_ended()
    scene.until_nothing_is_left(job)
    status = scene.status()
    assert status is not None
    return {"shown": shown, "said": job.said(), "status": status, "newest": scene.newest_step(), "log": scene.log()}


def happen(scene: Scenario, job: Job, event: str) -> None:
    if event == "preemption":
        scene.cluster.preempt(job.node)
    elif event == "limit":  # it is near once the run stands still, on a machine of any speed, and far the next time
        hours, minutes, _ = (int(part) for part in job.show()["RunTime"].split(":"))
        limit(job, 60 * hours + minutes + 1)
        job.until("it comes back", lambda: job.show()["Restarts"] == "1")
        limit(job, 60)
    else:
        scene.cluster.call(*event.split(), job.number)


def limit(job: Job, minutes: int) -> None:
    job.cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")


@pytest.mark.parametrize("name", [name for name, (_, event) in CASES.items() if event.startswith("scancel")])
def test_a_cancelled_run_saves(name: str, tell: Tell) -> None:
    told = tell(name)
    assert told["shown"]["JobState"] == "CANCELLED"
    assert (told["status"].status, told["status"].reason) == ("interrupted", "signal:SIGTERM"), told["said"]
    assert told["newest"] == told["status"].step >= CAUGHT_AT
    assert "is not put back into the queue: it is" in told["said"] + told["log"]
    assert_started_once(told["said"])


def test_a_run_at_its_limit_saves_and_comes_back(tell: Tell) -> None:
    told = tell("limit")
    assert int(told["shown"]["Restarts"]) == 1, told["said"]
    assert (told["shown"]["JobState"], told["status"].status) == ("COMPLETED", "completed"), told["said"]
    assert CAUGHT_AT <= resumed_at(told["log"])[0] < STEPS


@pytest.mark.parametrize("name", [name for name, (_, event) in CASES.items() if event == "preemption"])
def test_a_preempted_run_saves_and_comes_back(name: str, tell: Tell) -> None:
    told = tell(name)
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1"), told["said"]
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert (told["status"].status, told["newest"]) == ("completed", STEPS)


@pytest.mark.parametrize("name", ["accelerate", "torchrun"])
def test_a_launcher_of_two_processes_has_two_in_a_step(name: str, tell: Tell) -> None:
    assert "4 rows per step: 2 process(es)" in tell(name)["log"]


def assert_started_once(said: str) -> None:
    """One process of each launch started itself again, and what it started did not."""
    assert said.count("starting again as a step of SLURM job") == 1
    assert "does not come up" not in said
    assert "but no step of it" not in said
