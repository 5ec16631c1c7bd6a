"""What can happen to a job, done by a real SLURM to `slurm/*.sbatch`; every scenario reports the outcome.

No deadline of theirs is shorter than a machine under load needs: what has to be caught in the middle stands still there
by itself until SLURM wakes it, and everything else waits for an event.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash

from ci_llm.checkpoints.layout import numbered_steps
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cluster import slurm
from ci_llm.core.run_folder import read_failures, record_attempt
from ci_llm.core.run_status import Status, is_alive, read_status
from tests.slurm.cluster import END_S, ENDED, Cluster, Job, until
from tests.support.children import PYTHONPATH, hold_at

ROOT = Path(__file__).parents[2]
STEPS = 30
CAUGHT_AT = 12
KEYS = {
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_samples": 40,
    "batch_size": 2,
    "eval_samples": 8,
    "eval_steps": "null",
    "generation_eval_samples": 2,
    "max_new_tokens_eval": 8,
    "logging_steps": 1,
    "save_steps": 5,
    "save_interval_seconds": "null",
    "max_train_steps": STEPS,
    "num_workers": 0,
    "report_to": "none",
}
ENVIRONMENT = {
    "CI_LLM_PYTHON": sys.executable,
    "CI_LLM_PUBLISH": "echo published >>published",
    "PYTHONPATH": PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
#: The first attempt stops itself in the middle.
STAND_STILL = {"AT_START": str(Path(__file__).with_name("stand_still.py")), "STAND_STILL_AFTER": str(CAUGHT_AT)}
#: The minutes that a job gets, until they suffice for its start and a step.
TIMES = (1, 2, 4, 8)
FOREIGN = """\
import sys
print("Loss=nan" if sys.argv[1:] == ["lr=0.15"] else "Loss=0.5")
"""


@dataclass
class Scenario:
    """A run of its own on the common cluster."""

    cluster: Cluster
    folder: Path

    @property
    def run(self) -> Path:
        """Where the run leaves what it leaves."""
        return self.folder / "ci_llm_output" / self.folder.name

    def submit(
        self,
        script: str = "train.sbatch",
        *words: str,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        **keys: object,
    ) -> Job:
        """`sbatch` in this scenario's own folder, which is not the project's."""
        return self.sbatch(
            *options, ROOT / "slurm" / script, *words, *self.words(**keys), environment=environment or {}
        )

    def sbatch(self, *words: object, environment: Mapping[str, str]) -> Job:
        self.folder.mkdir(exist_ok=True, parents=True)
        return self.cluster.submit(*words, environment={**ENVIRONMENT, **environment}, cwd=self.folder)

    def words(self, **keys: object) -> list[str]:
        """What train.py is called with."""
        given = (KEYS | keys).items()
        return [f"--exp_name={self.folder.name}", *(f"{key}={value}" for key, value in given if value is not None)]

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> str:
        return (self.run / "training.log").read_text()

    def caught(self, job: Job) -> int:
        """Wait until a run that was submitted with STAND_STILL does; the pid of its main process."""

        def standing() -> int | None:
            status = self.status()
            stopped = status and psutil.Process(status.pid).status() == psutil.STATUS_STOPPED
            return status.pid if status and stopped else None

        pid = job.until("it stands still", standing)
        assert len(self.metrics()) == CAUGHT_AT
        return pid

    def status(self) -> Status | None:
        """None as long as the run has not begun."""
        return read_status(self.run) if (self.run / "status.json").exists() else None

    def interruption(self) -> Status | None:
        """The status of a run that is interrupted."""
        status = self.status()
        return status if status and status.status == "interrupted" else None

    def newest_step(self) -> int:
        return max(numbered_steps(self.run), default=0)

    def weights(self) -> dict[str, str]:
        """Digests of what the run has learned, and of what it would resume with."""
        digests = verify_folder(self.run / f"checkpoint_step_{STEPS}").files
        assert {"agent0/adapter_model.safetensors", "agent1/adapter_model.safetensors"} <= digests.keys()
        return {name: record.digest for name, record in digests.items() if name.endswith(".safetensors")}

    def published(self) -> int:
        """How often CI_LLM_PUBLISH was run."""
        path = self.folder / "published"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until_nothing_is_left(self, job: Job) -> None:
        until("nothing is left of the job", lambda: not self.cluster.processes(job))

    def signal(self, job: Job) -> dict[str, Any]:
        """`scancel --signal=TERM`, which ends nothing by itself, to the srun step."""
        self.cluster.call("scancel", "--signal=TERM", job.number)
        return self.told(job)

    def told(self, job: Job, **more: object) -> dict[str, Any]:
        """How the job ended, and what it left."""
        shown = job.until_ended()
        log, status = self.log(), read_status(self.run)
        return {"shown": shown, "output": job.said(), "log": log, "status": status, "metrics": self.metrics()} | more


def undisturbed(scene: Scenario) -> dict[str, Any]:
    """Nobody does anything to it."""
    told = scene.told(scene.submit())
    return told | {"weights": scene.weights(), "published": scene.published()}


def preempted(scene: Scenario) -> dict[str, Any]:
    """(a) a job of higher priority takes the node; SLURM gives a grace to leave in."""
    job = scene.submit(environment=STAND_STILL)
    scene.caught(job)
    published = scene.published()
    scene.cluster.preempt(job.node)
    return scene.told(job) | {"weights": scene.weights(), "published": [published, scene.published()]}


def out_of_time(scene: Scenario) -> dict[str, Any]:
    """(b) a job has more to do than fits into its time; when the first time is over, the rest is made short.

    How much time a start and a step take depends on the machine: where nothing was done, the next job gets twice of it.
    """
    for minutes in TIMES:
        told = _out_of_time(Scenario(scene.cluster, scene.folder / f"{minutes}min"), minutes)
        if told["first"].step > 0:
            return told
    raise AssertionError(f"not a step within {TIMES[-1]} minutes")


def _out_of_time(scene: Scenario, minutes: int) -> dict[str, Any]:
    config = scene.folder / "length.yaml"
    shorten(config, 1_000_000)
    job = scene.submit(options=(f"--time={minutes}",), config=config, save_steps=1000, max_train_steps=None)
    limit = job.until("it runs", lambda: job.show()["JobState"] == "RUNNING" and job.show()["EndTime"])
    first = job.until("it is interrupted", scene.interruption)
    if not first.step:
        scene.cluster.call("scancel", job.number)

    def ended() -> bool:
        if (status := scene.interruption()) is not None:
            shorten(config, status.step + 5)
        return job.show()["JobState"] in ENDED

    until("it is completed, however often that takes its time", ended, every_s=END_S)
    return scene.told(job, limit=limit, first=first)


def shorten(config: Path, steps: int) -> None:
    """Set the length of a run in a file that an attempt may read in this very moment."""
    config.parent.mkdir(parents=True, exist_ok=True)
    draft = config.with_suffix(".draft")
    draft.write_text(f"max_train_steps: {steps}\n")
    draft.replace(config)


def put_back(scene: Scenario) -> dict[str, Any]:
    """(c) somebody says `scontrol requeue`."""
    job = scene.submit(environment=STAND_STILL)
    scene.caught(job)
    scene.cluster.call("scontrol", "requeue", job.number)
    return scene.told(job) | {"weights": scene.weights()}


def cancelled(scene: Scenario) -> dict[str, Any]:
    """(c) somebody says `scancel`, and later submits the same again with --continue."""
    job = scene.submit(environment=STAND_STILL)
    scene.caught(job)
    scene.cluster.call("scancel", job.number)
    told = scene.told(job)
    scene.until_nothing_is_left(job)
    again = scene.submit("train.sbatch", "--continue")
    return told | {"status": read_status(scene.run), "again": scene.told(again), "weights": scene.weights()}


def two_nodes(scene: Scenario) -> dict[str, Any]:
    """(d) two nodes, one torchrun each; a job of higher priority takes one of them."""
    job = scene.submit("train_multinode.sbatch", environment=STAND_STILL)
    scene.caught(job)
    scene.cluster.preempt(job.node)
    return scene.told(job) | {"weights": scene.weights()}


def two_processes(scene: Scenario) -> dict[str, Any]:
    """Nobody does anything to two processes of one node: what two nodes must come to as well."""
    job = scene.submit("train.sbatch", "--distributed", options=("--ntasks-per-node=2", "--cpus-per-task=1"))
    return scene.told(job) | {"weights": scene.weights()}


def node_died(scene: Scenario) -> dict[str, Any]:
    """(e) a node dies in the middle of a step, without any message."""
    job = scene.submit(environment=STAND_STILL)
    scene.caught(job)
    newest = scene.newest_step()
    scene.cluster.kill_node(job.node, job)
    return scene.told(job) | {"newest": newest, "weights": scene.weights()}


def split_brain(scene: Scenario) -> dict[str, Any]:
    """(f) SLURM takes a node for dead that only slept: the old attempt wakes up when the new one is done."""
    job = scene.submit(environment=STAND_STILL)
    sleeper = scene.caught(job)
    old = read_status(scene.run).attempt
    scene.cluster.lose_node(job.node)
    told = scene.told(job)
    before, slept = digests(scene.run), is_alive(sleeper)
    os.kill(sleeper, signal.SIGCONT)
    until("the old attempt has ended", lambda: not is_alive(sleeper))
    failures = read_failures(scene.run, old)
    return told | {
        "slept": slept,
        "before": before,
        "after": digests(scene.run),
        "failures": failures,
        "weights": scene.weights(),
    }


def signalled_at_start(scene: Scenario) -> dict[str, Any]:
    """A SIGTERM to the srun step while it loads what it needs, for the third time."""
    for earlier in (8, 9):
        record_attempt(scene.run, earlier, 0)
    job = scene.submit(environment=hold_at("ci_llm.run.start.loading:load_base"))
    job.until("it is loading", lambda: "loading..." in job.said())
    return scene.signal(job)


def signalled_in_training(scene: Scenario) -> dict[str, Any]:
    """A SIGTERM to the srun step in an optimizer step, of a job that may not be requeued."""
    job = scene.submit(requeue="false", max_train_steps=1_000_000, save_steps="null")
    job.until("it trains", lambda: bool(scene.metrics()))
    return scene.signal(job)


def signalled_in_evaluation(scene: Scenario) -> dict[str, Any]:
    """A SIGTERM to the srun step in an evaluation, of a run that is not to be requeued."""
    held = hold_at("ci_llm.crowd.scoring:_score_batch")
    job = scene.submit(environment=held, requeue="false", max_train_steps=2)
    job.until("the last step is saved", lambda: scene.newest_step() == 2)
    return scene.signal(job)


def supervised(scene: Scenario) -> dict[str, Any]:
    """A job of higher priority takes the node of safe_train.sbatch."""
    job = scene.submit("safe_train.sbatch", environment=STAND_STILL)
    scene.caught(job)
    scene.cluster.preempt(job.node)
    return scene.told(job) | {"weights": scene.weights(), "published": scene.published(), "story": story_of(scene)}


def foreign(scene: Scenario) -> dict[str, Any]:
    """A user's script under safe_train.sbatch, whose first loss is NaN."""
    scene.folder.mkdir()
    (scene.folder / "fit.py").write_text(FOREIGN)
    words = ("--lr-key=lr", "--", sys.executable, "fit.py", "lr=0.15")
    job = scene.sbatch(ROOT / "slurm" / "safe_train.sbatch", *words, environment={})
    shown = job.until_ended()
    return {"shown": shown, "output": job.said(), "published": scene.published(), "story": story_of(scene)}


def deaf(scene: Scenario) -> dict[str, Any]:
    """A job that ends for no SIGTERM: how long SLURM gives it in seconds, as `ci_llm.cluster.slurm` reads it."""
    job = scene.sbatch("--time=60", "--wrap=trap '' TERM; echo deaf; exec sleep 10000", environment={})
    job.until("it runs", lambda: "deaf" in job.said())

    def left() -> tuple[float, dict[str, str]]:
        end = slurm.kill_time(slurm.Job(job.number, 0), query=lambda command: scene.cluster.call(*command))
        return (end or math.inf) - time.time(), job.show()

    told = {"unasked": left()}
    scene.cluster.preempt(job.node)
    job.until("its grace begins", lambda: job.show()["PreemptTime"] != "None")
    told["preempted"] = left()
    scene.cluster.call("scancel", job.number)
    job.until("it is to end", lambda: job.show()["JobState"] != "RUNNING")
    told["cancelled"] = left()
    for process in scene.cluster.processes(job):
        process.kill()
    return told


def story_of(scene: Scenario) -> str:
    """The log of the supervisor."""
    return (scene.folder / "safe_train.log").read_text()


def digests(folder: Path) -> dict[str, str]:
    """Of every file, but for what an attempt says about itself: its failure, and its token of a common folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    shared = [path for path in files if "attempts" not in path.parts and not path.name.startswith(".launch-")]
    return {str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in shared}
