"""A launcher that is asked to end: the run below it saves, says so, leaves no process behind, and can be resumed.

Whoever stops a job signals the launcher: one that ignores it, dies of it, or hands it on and kills after a while.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.run_status import read_status
from tests.support.campaign import sampled
from tests.support.children import ROOT, SCRIPTS, Child, hold_at, processes_of
from tools.testbed.events import wait_until
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import arguments, train_signalled

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "accelerate, 1 process": ["accelerate", "launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"],
    "accelerate, 2 processes": ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"],
    "accelerate, 2 processes for its one": ["accelerate", "launch", "--num_processes=2", "--num_machines=1"],
    "torchrun, 2 processes": ["torchrun", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
}
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # a machine under load starts slowly, and is told to end before that
}
LONG = {"max_train_steps": 100_000, "eval_steps": "null", "save_steps": "null"}
SHORT = {"max_train_steps": 3, "eval_steps": "null"}
#: What is read before the launcher is told to end, where the run waits for that, its keys, and the step to be saved.
MOMENTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "at the start": ("loading...", "ci_llm.run.start.loading:load_base", LONG, 0),
    "in the evaluation at the end": ("step 3/3", "ci_llm.crowd.scoring:_score_batch", SHORT, 3),
}
BEFORE_AND_AFTER = [
    ("accelerate, 1 process", "at the start"),
    ("accelerate, 1 process", "in the evaluation at the end"),
    ("torchrun, 2 processes", "in the evaluation at the end"),
    ("torchrun, 2 processes", "at the start"),
    ("accelerate, 2 processes for its one", "at the start"),
    ("accelerate, 2 processes for its one", "in the evaluation at the end"),
    ("accelerate, 2 processes", "at the start"),
    ("accelerate, 2 processes", "in the evaluation at the end"),
]


def launch(launcher: str, folder: Path, environment: Mapping[str, str], **keys: object) -> Child:
    name, *options = LAUNCHERS[launcher]
    words = arguments(**keys | {"output_dir": folder / "run"})
    port = ["--main_process_port=0"] if "--multi_gpu" in options else []
    return Child(SCRIPTS / name, *options, *port, ROOT / "train.py", *words, env={**ENVIRONMENT, **environment})


def stop(child: Child, folder: Path) -> list[str]:
    """End the launcher, wait until every process of the run has ended, and return its output without a traceback."""
    child.signal(signal.SIGTERM)
    wait_until("every process of the run has ended", lambda: not processes_of(folder))
    child.wait()
    assert not [line for line in child.seen if 'File "' in line and "ci_llm" in line], child.seen
    return child.seen


@pytest.mark.parametrize("case", sampled(BEFORE_AND_AFTER, BEFORE_AND_AFTER[2:3]), ids=", ".join)
def test_a_launcher_asked_to_end_before_or_after_training_leaves_no_process(
    case: tuple[str, str], tmp_path: Path
) -> None:
    launcher, when = case
    seen, place, keys, step = MOMENTS[when]
    held = tmp_path / "held"
    held.mkdir()
    with launch(launcher, tmp_path, {**hold_at(place), "HOLD_TOLD": str(held)}, **keys) as child:
        child.read_until(seen)
        ranks = 1 if step or "1 process" in launcher else 2  # before they load the base, all have begun
        wait_until("the run waits", lambda: len([*held.iterdir()]) >= ranks)
        said = stop(child, tmp_path)
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", step), said
    assert (tmp_path / "run" / f"checkpoint_step_{step}").is_dir() == (step > 0)


@pytest.mark.parametrize("launcher", sampled([*LAUNCHERS], ("accelerate, 1 process",)))
def test_a_launcher_asked_to_end_in_training_saves_and_leaves_no_process(
    launcher: str, server: ForkServer, tmp_path: Path
) -> None:
    """A launcher whose run resumes is tested under the supervisor and on SLURM: here only the run does."""
    with launch(launcher, tmp_path, {}, **LONG) as child:
        child.read_until("step 1/")
        said = stop(child, tmp_path)
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM"), said
    assert f"{' '.join(LAUNCHERS[launcher])} " in str(status.next_command), "the launcher's, which has gone by then"
    assert (tmp_path / "run" / f"checkpoint_step_{status.step}").is_dir()
    ranks = 1 if "1 process" in launcher else 2
    words = [f"--config={ROOT / 'configs.yaml'}", *arguments(max_train_steps=status.step + 1)]
    codes = server.run(train_signalled, tmp_path / "log", ranks=ranks, folder=str(tmp_path), words=words)
    assert codes == [0] * ranks, (tmp_path / "log").read_text()
    assert read_status(tmp_path / "run").status == "completed"
