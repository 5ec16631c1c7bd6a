"""What SLURM does to a job, done by a real SLURM to `slurm/*.sbatch`: nothing is lost and the run comes back by itself.

The scenarios run side by side on one cluster: they are started by the first test that asks for one of them, and every
test waits for its own. A run that is to be caught in the middle is made to stand still there: SLURM wakes it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.status import Status, is_alive, read_status
from tests.slurm.cluster import Cluster, Job, hold, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

ROOT = Path(__file__).parents[2]
STEPS = 60
CAUGHT_AT = 12
AT_ONCE = 8  # that many scenarios; more would only wait for the two cores of a small machine
KEYS = {
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_samples": 40,
    "batch_size": 2,
    "eval_samples": 8,
    "eval_steps": "null",
    "logging_steps": 1,
    "save_steps": 5,
    "save_interval_seconds": "null",
    "max_train_steps": STEPS,
    "num_workers": 0,
    "report_to": "none",
}
ENVIRONMENT = {"CI_LLM_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Scenario:
    """A run of its own on the common cluster."""

    cluster: Cluster
    folder: Path

    @property
    def run(self) -> Path:
        """Where the run leaves what it leaves."""
        return self.folder / "ci_llm_output" / self.folder.name

    def submit(self, script: str = "train.sbatch", *, options: tuple[str, ...] = (), **keys: object) -> Job:
        """`sbatch` in this scenario's own folder, which is not the project's."""
        self.folder.mkdir(exist_ok=True)
        words = [f"{key}={value}" for key, value in (KEYS | keys).items() if value is not None]
        return self.cluster.submit(
            ROOT / "slurm" / script,
            f"--exp_name={self.folder.name}",
            *words,
            options=options,
            environment=ENVIRONMENT,
            cwd=self.folder,
        )

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> str:
        return (self.run / "training.log").read_text()

    def catch(self, job: Job, step: int = CAUGHT_AT) -> int:
        """Make the run stand still in the middle, at `step` or a little later; returns the pid of its main process."""
        job.until(f"step {step}", lambda: any(line["step"] >= step for line in self.metrics()))
        pid = read_status(self.run).pid
        hold(pid)
        assert len(self.metrics()) < STEPS, "the run was over before it could be caught"
        return pid

    def interruption(self) -> Status | None:
        """The status of a run that is interrupted."""
        status = read_status(self.run) if (self.run / "status.json").exists() else None
        return status if status and status.status == "interrupted" else None

    def newest_step(self) -> int:
        return max(CheckpointStore(self.run).numbered_steps(), default=0)

    def weights(self) -> dict[str, str]:
        """Digests of what the run has learned, and of what it would go on with."""
        digests = CheckpointStore(self.run).verify(STEPS).files
        assert {"agent0/adapter_model.safetensors", "agent1/adapter_model.safetensors"} <= digests.keys()
        return {name: record.digest for name, record in digests.items() if name.endswith(".safetensors")}

    def signal(self, job: Job) -> Status:
        """`scancel --signal=TERM`, which ends nothing by itself; the status in which the run has left."""
        self.cluster.call("scancel", "--signal=TERM", job.number)
        shown = job.until_ended()
        assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "0"), job.said()
        assert "Traceback" not in job.said()
        return read_status(self.run)


def undisturbed(scene: Scenario) -> dict[str, str]:
    job = scene.submit()
    assert job.until_ended()["JobState"] == "COMPLETED", job.said()
    assert read_status(scene.run).status == "completed"
    return scene.weights()


def preempted(scene: Scenario) -> dict[str, Any]:
    """(a) a job of higher priority takes the node; SLURM gives a grace to leave in."""
    job = scene.submit()
    scene.catch(job)
    scene.cluster.preempt(job.node)
    shown = job.until_ended()
    return {"shown": shown, "log": scene.log(), "output": job.said(), "weights": scene.weights()}


def out_of_time(scene: Scenario) -> dict[str, Any]:
    """(b) a job of one minute has more to do than that; when the first minute is over, the rest is made short."""
    scene.folder.mkdir()
    config = scene.folder / "length.yaml"
    config.write_text("max_train_steps: 1000000\n")
    job = scene.submit(options=("--time=1",), config=config, save_steps=1000, max_train_steps=None)
    limit = job.until("it runs", lambda: job.show()["JobState"] == "RUNNING" and job.show()["EndTime"])
    first = job.until("it is interrupted", scene.interruption)
    config.write_text(f"max_train_steps: {first.step + 5}\n")
    shown = job.until_ended()
    return {"shown": shown, "limit": limit, "first": first, "log": scene.log(), "status": read_status(scene.run)}


def put_back(scene: Scenario) -> dict[str, Any]:
    """(c) somebody says `scontrol requeue`."""
    job = scene.submit()
    scene.catch(job)
    scene.cluster.call("scontrol", "requeue", job.number)
    shown = job.until_ended()
    return {"shown": shown, "log": scene.log(), "weights": scene.weights()}


def cancelled(scene: Scenario) -> dict[str, Any]:
    """(c) somebody says `scancel`, and later submits the same again with --continue."""
    job = scene.submit()
    scene.catch(job)
    scene.cluster.call("scancel", job.number)
    shown = job.until_ended()
    until("nothing is left of the job", lambda: not scene.cluster.processes(job), deadline_s=60)
    return {"shown": shown, "log": scene.log(), "status": read_status(scene.run)}


def two_nodes(scene: Scenario) -> dict[str, Any]:
    """(d) two nodes, one torchrun each; a job of higher priority takes one of them."""
    job = scene.submit("train_multinode.sbatch")
    scene.catch(job)
    scene.cluster.preempt(job.node)
    shown = job.until_ended()
    return {"shown": shown, "log": scene.log(), "output": job.said()}


def node_died(scene: Scenario) -> dict[str, Any]:
    """(e) a node is gone without a word, in the middle of a step."""
    job = scene.submit()
    scene.catch(job)
    newest = scene.newest_step()
    scene.cluster.kill_node(job.node, job)
    shown = job.until_ended()
    return {"shown": shown, "newest": newest, "log": scene.log(), "weights": scene.weights()}


def split_brain(scene: Scenario) -> dict[str, Any]:
    """(f) SLURM takes a node for dead that only slept: the old attempt wakes up when the new one is done."""
    job = scene.submit()
    sleeper = scene.catch(job)
    scene.cluster.lose_node(job.node)
    shown = job.until_ended()
    before = digests(scene.run)
    os.kill(sleeper, signal.SIGCONT)
    until("the old attempt has ended", lambda: not is_alive(sleeper))
    return {"shown": shown, "before": before, "after": digests(scene.run), "weights": scene.weights()}


def signalled_at_start(scene: Scenario) -> Status:
    """A SIGTERM to the srun step while it loads what it needs."""
    job = scene.submit(requeue="false")
    job.until("it is loading", lambda: "loading..." in job.said())
    return scene.signal(job)


def signalled_in_training(scene: Scenario) -> Status:
    """A SIGTERM to the srun step in a step of the optimizer."""
    job = scene.submit(requeue="false", max_train_steps=1_000_000, save_steps="null")
    job.until("it trains", lambda: bool(scene.metrics()))
    return scene.signal(job)


def signalled_in_evaluation(scene: Scenario) -> Status:
    """A SIGTERM to the srun step while it judges what it has trained."""
    job = scene.submit(requeue="false", max_train_steps=2, eval_samples=1000)
    job.until("the last step is saved", lambda: scene.newest_step() == 2)
    return scene.signal(job)


def digests(folder: Path) -> dict[str, str]:
    """Of every file, but for what an attempt says about itself: its failure, and its token of a common folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    shared = [path for path in files if "attempts" not in path.parts and not path.name.startswith(".launch-")]
    return {str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in shared}


# out_of_time comes first: its minute runs.
SCENARIOS = (
    out_of_time,
    split_brain,
    node_died,
    two_nodes,
    preempted,
    put_back,
    undisturbed,
    cancelled,
    signalled_at_start,
    signalled_in_training,
    signalled_in_evaluation,
)

Stories = Callable[[Callable[[Scenario], Any]], Any]


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Starts every scenario; called with one, waits for its story."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Any]] = {
            scenario.__name__: pool.submit(scenario, Scenario(cluster, folder / scenario.__name__))
            for scenario in SCENARIOS
        }
        yield lambda scenario: futures[scenario.__name__].result()


@pytest.fixture(scope="module")
def reference(story: Stories) -> dict[str, str]:
    """The weights of the run that nobody disturbed."""
    weights: dict[str, str] = story(undisturbed)
    return weights


def resumed_at(log: str) -> list[int]:
    """Where each attempt but the first went on."""
    lines = [line.split("resume    step ")[1] for line in log.splitlines() if "resume    step " in line]
    return [int(line.split()[0]) for line in lines]


def test_a_preempted_job_saves_comes_back_and_ends_with_the_same_bits(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(preempted)
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert f"interrupted (signal:SIGTERM): step {step} is saved" in told["log"]
    assert "is put back into the queue, for the 1st time" in told["log"]
    assert "SLURM restart 1" in told["log"]
    assert "exactness: bitwise" in told["log"]
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1")
    assert "Traceback" not in told["output"]
    assert told["weights"] == reference


def test_a_job_that_runs_out_of_time_saves_before_the_limit_and_goes_on(story: Stories) -> None:
    told = story(out_of_time)
    first = told["first"]
    assert first.reason == "walltime"
    assert first.heartbeat < datetime.fromisoformat(told["limit"]).timestamp()
    assert resumed_at(told["log"])[0] == first.step > 0
    assert (told["shown"]["JobState"], told["status"].status) == ("COMPLETED", "completed")
    assert told["status"].step == first.step + 5


def test_a_job_that_is_put_back_by_hand_goes_on_with_the_same_bits(story: Stories, reference: dict[str, str]) -> None:
    told = story(put_back)
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1")
    assert "somebody has cancelled it or put it back already" in told["log"]
    assert told["weights"] == reference


def test_a_cancelled_job_saves_and_leaves_nothing_behind(story: Stories) -> None:
    told = story(cancelled)
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("CANCELLED", "0")
    assert (told["status"].status, told["status"].reason) == ("interrupted", "signal:SIGTERM")
    assert f"step {told['status'].step} is saved" in told["log"]
    assert "is not put back into the queue" in told["log"]


def test_two_nodes_under_torchrun_stop_together_and_come_back(story: Stories) -> None:
    told = story(two_nodes)
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert "4 rows per step: 2 process(es)" in told["log"]
    assert "exactness: bitwise" in told["log"]
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1")


def test_after_a_node_has_died_the_run_goes_on_from_the_last_checkpoint(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(node_died)
    assert resumed_at(told["log"]) == [told["newest"]]
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1")
    assert told["weights"] == reference


def test_an_attempt_that_slept_through_its_own_replacement_damages_nothing(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(split_brain)
    assert (told["shown"]["JobState"], told["shown"]["Restarts"]) == ("COMPLETED", "1")
    assert told["after"] == told["before"]
    assert told["weights"] == reference


@pytest.mark.parametrize("scenario", [signalled_at_start, signalled_in_training, signalled_in_evaluation])
def test_a_signal_to_the_step_is_heard_at_any_time(scenario: Callable[[Scenario], Status], story: Stories) -> None:
    status = story(scenario)
    assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM")
    assert status.step == {signalled_at_start: 0, signalled_in_evaluation: 2}.get(scenario, status.step)
