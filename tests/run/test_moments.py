"""A signal at any moment: the run saves, says so, and the same command resumes to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cli.main import main
from ci_llm.core.run_status import read_status
from ci_llm.distributed.processes import Processes
from ci_llm.run.emergency_save import MARGIN_S, seconds_left
from tests.support.campaign import sampled
from tests.support.children import DEADLINE_S, ROOT
from tools.testbed import moments
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import EVAL_STEPS, MOMENTS, STEPS, Moment, arguments

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]


def train(server: ForkServer, folder: Path, moment: Moment | None = None, **options: object) -> list[int]:
    """One attempt; the exit codes of its processes."""
    folder.mkdir(exist_ok=True)
    keys: Any = options.pop("keys", {})
    if moment is not None:
        options |= {"place": moment.place, "call": moment.call, "behind": moment.behind}
    how: dict[str, Any] = {"folder": str(folder), "words": arguments(**keys)} | options
    return server.run(moments.train_signalled, folder / "log", **how)


def learned(folder: Path) -> dict[str, bytes]:
    """What a run has learned, and what it would resume with."""
    final = folder / "run" / "final_checkpoint"
    return {str(path.relative_to(final)): path.read_bytes() for path in sorted(final.rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(server, folder) == [0], (folder / "log").read_text()
    return folder


#: Before the run, in its steps, in a save, in an evaluation, and at the end.
SAMPLE = (
    "a checkpoint is looked for",
    "waiting for the first batch",
    "second micro-step, backward",
    "a checkpoint is committed behind",
    "evaluation on the way",
    "generation",
    "results are written",
)


@pytest.mark.parametrize("name", sampled([*MOMENTS], SAMPLE))
def test_a_run_that_is_asked_to_stop_is_saved_and_resumes(
    name: str, server: ForkServer, undisturbed: Path, tmp_path: Path
) -> None:
    moment = MOMENTS[name]
    codes = train(server, tmp_path, moment)
    said, status = (tmp_path / "log").read_text(), read_status(tmp_path / "run")
    assert codes == [0], said
    assert "Traceback" not in said
    if moment.completed:
        assert status.status == "completed"
    else:
        assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM"), said
        assert status.step == moment.step
        assert f"step {status.step} is saved" in said or (status.step == 0 and "no step is saved" in said)
        assert "step 0 is done" not in said
        assert status.next_command
    if name == "evaluation on the way":
        assert f"SIGTERM: step {EVAL_STEPS} is done; saving and leaving\n" in said, "the step that will be saved"
    assert train(server, tmp_path) == [0], (tmp_path / "log").read_text()
    assert read_status(tmp_path / "run").status == "completed"
    assert learned(tmp_path) == learned(undisturbed)


@pytest.mark.parametrize(
    ("place", "call"), [("ci_llm.crowd.scoring._score_batch", 2), ("ci_llm.crowd.questions.generate_each", 1)]
)
def test_all_processes_leave_an_evaluation_in_the_round_in_which_one_was_asked_to_stop(
    place: str, call: int, server: ForkServer, tmp_path: Path
) -> None:
    keys = {"eval_samples": 64, "generation_eval_samples": 12, "eval_steps": "null"}  # one on the way shows an example
    moment = Moment(place, call)
    codes = train(server, tmp_path, moment, ranks=2, rank=1, tripwire=call + 1, keys=keys)
    assert codes == [0, 0], (tmp_path / "log").read_text()
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM")


def test_a_request_to_save_is_met_and_the_run_continues(server: ForkServer, undisturbed: Path, tmp_path: Path) -> None:
    moment = Moment("ci_llm.crowd.crowd.Crowd.forward", 6)  # in step 3, of which nobody keeps a checkpoint
    keys = {"save_total_limit": "null", "save_steps": "null"}
    assert train(server, tmp_path, moment, sent="SIGUSR1", keys=keys) == [0]
    assert (tmp_path / "run" / "checkpoint_step_3").is_dir()
    assert not (tmp_path / "run" / "checkpoint_step_2").exists()
    assert learned(tmp_path) == learned(undisturbed)


def test_ctrl_c_twice_ends_a_run_at_once_and_what_is_committed_stays(server: ForkServer, tmp_path: Path) -> None:
    moment = Moment("ci_llm.crowd.crowd.Crowd.forward", 6)
    assert train(server, tmp_path, moment, sent="SIGINT", times=2, stall_s=1000.0, committed=2) == [130]
    said, status = (tmp_path / "log").read_text(), read_status(tmp_path / "run")
    assert "SIGINT: finishing step 3, then saving and leaving (again to abort now)" in said
    assert "interrupted (signal:SIGINT): step 2 is saved" in said
    assert "Traceback" not in said
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGINT", 2)


def test_a_process_whose_peer_is_gone_leaves_with_what_is_committed(server: ForkServer, tmp_path: Path) -> None:
    moment = Moment("ci_llm.crowd.crowd.Crowd.forward", 6)  # in step 5: every second one has no row for it
    codes = train(server, tmp_path, moment, ranks=2, rank=1, sent="SIGKILL")
    assert codes == [1, -signal.SIGKILL], (tmp_path / "log").read_text()
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("failed", "peer_lost")
    assert (tmp_path / "run" / f"checkpoint_step_{status.step}").is_dir()
    assert "is saved without it" not in (tmp_path / "log").read_text()
    assert train(server, tmp_path, ranks=2) == [0, 0]
    assert "exactness: bitwise" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("lost", sampled([1, 0], [0]))
def test_in_an_elastic_job_a_process_whose_peer_is_gone_saves_the_last_boundary_alone(
    lost: int, server: ForkServer, tmp_path: Path
) -> None:
    """The peer dies in the fourth step, where no save is due; process 1 takes the folder over from process 0."""
    moment = Moment("ci_llm.run.loop.apply_gradients", 4)
    keys = {"save_steps": "null", "eval_steps": "null"}
    codes = train(server, tmp_path, moment, ranks=2, rank=lost, sent="SIGKILL", elastic=True, keys=keys)
    assert sorted(codes) == [-signal.SIGKILL, 1], (tmp_path / "log").read_text()
    assert codes[lost] == -signal.SIGKILL
    assert CheckpointStore(tmp_path / "run").all_steps() == [3]
    if lost:
        status = read_status(tmp_path / "run")
        assert (status.status, status.reason, status.step) == ("failed", "peer_lost", 3)
    assert train(server, tmp_path, ranks=2, keys=keys) == [0, 0]
    assert f"step 3 of {STEPS}, verified" in (tmp_path / "run/training.log").read_text()


def train_stuck(folder: str, words: list[str]) -> int:
    """A trial for the fork server: `train.py` in a world that its library does not let go of."""
    torch.set_num_threads(1)
    os.chdir(folder)
    Processes.shutdown = lambda _self: False  # type: ignore[method-assign]
    main(["train", "--config", os.devnull, *words])
    return 99


def train_apart(folder: str, words: list[str]) -> int:
    """A trial for the fork server: `train.py`, each process with a disk of its own."""
    torch.set_num_threads(1)
    own = Path(folder, os.environ.get("RANK", "0"))
    own.mkdir(exist_ok=True)
    os.chdir(own)
    return main(["train", "--config", os.devnull, *words])


def test_a_process_whose_library_waits_for_a_lost_peer_ends_all_the_same(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    how = {"folder": str(tmp_path), "words": arguments()}
    assert server.run(train_stuck, tmp_path / "log", **how) == [0]
    assert read_status(tmp_path / "run").status == "completed"
    how["words"] = arguments(lora_rank=3)
    assert server.run(train_stuck, tmp_path / "again", **how) == [2]
    assert "error: the run in this folder has another crowd" in (tmp_path / "again").read_text()


def test_a_run_folder_that_processes_do_not_share_is_refused(server: ForkServer, tmp_path: Path) -> None:
    how = {"folder": str(tmp_path), "words": arguments()}
    assert server.run(train_apart, tmp_path / "log", **how) == [0]
    assert server.run(train_apart, tmp_path / "again", ranks=2, **how) == [2, 2]
    said = (tmp_path / "again").read_text()
    assert f"the processes find different checkpoints to resume from: step {STEPS}, none" in said
    assert "complete" not in said


def test_an_error_that_only_process_0_sees_ends_all_processes(server: ForkServer, tmp_path: Path) -> None:
    store, log = CheckpointStore(tmp_path / "run"), tmp_path / "log"
    store.acquire_lease()
    assert train(server, tmp_path, ranks=2) == [2, 2], log.read_text()
    assert "process 1: error: process" in (busy := log.read_text())
    assert busy.count("writes to this folder") == 2
    store.close()
    log.unlink()
    (tmp_path / "run" / "recovery.json").write_text("{")
    assert train(server, tmp_path, ranks=2) == [1, 1], log.read_text()
    assert "process 1: error: the recovery state cannot be read" in log.read_text()


@pytest.mark.parametrize("ranks", sampled([1, 2], [2]))
def test_a_step_that_outlasts_the_grace_is_given_up_and_the_last_boundary_saved(
    ranks: int, server: ForkServer, tmp_path: Path
) -> None:
    moment = Moment("ci_llm.crowd.crowd.Crowd.forward", 6)  # the first micro-step of step 3
    keys = {"max_train_samples": 16 * ranks, "grace_s": 4, "save_steps": "null"}
    codes = train(server, tmp_path / "cut", moment, ranks=ranks, stall_s=1000.0, keys=keys)
    said, status = (tmp_path / "cut" / "log").read_text(), read_status(tmp_path / "cut" / "run")
    assert codes == [0] * ranks, said
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", 2), said
    assert "step 3 would not end within the grace" in said
    assert "step 2 is saved" in said
    for folder in ("cut", "whole"):
        assert train(server, tmp_path / folder, ranks=ranks, keys=keys) == [0] * ranks
    assert "exactness: bitwise" in (tmp_path / "cut" / "log").read_text()
    assert learned(tmp_path / "cut") == learned(tmp_path / "whole")


def test_a_long_step_that_ends_within_the_grace_is_finished(server: ForkServer, tmp_path: Path) -> None:
    train(server, tmp_path, Moment("ci_llm.crowd.crowd.Crowd.forward", 6), stall_s=1.0, keys={"grace_s": 60})
    status = read_status(tmp_path / "run")
    assert (status.status, status.step) == ("interrupted", 3)


def test_a_step_is_given_up_when_it_cannot_end_within_the_grace() -> None:
    until = MARGIN_S + 100.0
    assert seconds_left(10.0, 0.0, until, [30.0], [5.0]) == 85.0  # fits, and may take longer than expected
    assert seconds_left(10.0, 0.0, until, [96.0], [5.0]) == 0.0  # would end too late to be saved: at once
    assert seconds_left(95.0, 0.0, until, [30.0], [5.0]) == 0.0  # should have ended long ago
    assert seconds_left(10.0, 0.0, until, [], []) == 90.0  # nothing is known: as late as possible


AT_THE_DOOR = """
import os, signal, sys
def listen(event, arguments):
    if event == "import" and arguments[0] == "ci_llm.cli.main":
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(listen)
"""


def test_before_the_configuration_is_read_nothing_is_created(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_THE_DOOR)
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments()],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
    assert not list(here.iterdir())
