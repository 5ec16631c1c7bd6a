"""`accelerate launch --num_processes=N train.py` without a GPU, and `train.py --distributed=N`, as typed.

The one process that Accelerate starts there starts all of them: what they see and leave is what torchrun's do, and each
signal, each death and each exit code comes through.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.core.run_status import read_status
from tests.support.children import ROOT, Child, processes_of
from tests.support.launched import launch, micro_steps
from tools.testbed.events import wait_until
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import train_watched
from tools.testbed.worlds import arguments, toy_base

pytestmark = pytest.mark.slow

STEPS = 6
TYPED = ["accelerate", "launch", "--num_processes=2"]
ON_CPU = ["accelerate", "launch", "--cpu", "--num_processes=2"]
PLAIN = ["python"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final checkpoint of an undisturbed run on two processes, with the variables that torchrun gives."""
    folder = tmp_path_factory.mktemp("undisturbed")
    keys = words(base, "run")
    codes = server.run(train_watched, folder / "log", ranks=2, folder=str(folder), arguments=keys, fate=None)
    assert codes == [0, 0], (folder / "log").read_text()
    return folder / "run/final_checkpoint"


def words(base: Path, output_dir: Path | str, **keys: Any) -> list[str]:
    own: dict[str, Any] = {
        "model_name": base,
        "max_train_samples": 64,
        "max_train_steps": STEPS,
        "global_batch_size": "null",
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.1,
        "save_steps": 2,
        "output_dir": output_dir,
    }
    return [f"--config={ROOT / 'configs.yaml'}", *arguments(**own | keys)]


def end(child: Child, folder: Path) -> int:
    """The exit code, when every process of the run has ended, also those whose launcher ended first."""
    code = child.wait()
    wait_until("every process of the run has ended", lambda: not processes_of(folder))
    child.read_to_the_end()
    return code


def assert_same_bits(run: Path, final: Path) -> None:
    found = compare(load_checkpoint(run / "final_checkpoint"), load_checkpoint(final))
    assert [one for one in found.differences if one.counts] == []  # config.yaml names another output_dir


def test_one_process_under_torchrun_ends_with_the_bits_of_one_alone(base: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    for name, launcher in (("alone", []), ("launched", torchrun)):
        call = [sys.executable, *launcher, str(ROOT / "train.py"), *words(base, tmp_path / name)]
        done = subprocess.run(call, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(tmp_path / "launched", tmp_path / "alone/final_checkpoint")


CTRL_C = """
def act(number):
    if number == 5 and rank == "0":
        os.killpg(launcher(), signal.SIGINT)
    if number == 5:
        heard("stop_reason")
"""


def test_a_run_stopped_by_ctrl_c_resumes_by_the_same_command_to_the_bits_of_torchrun(
    base: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Ctrl-C reaches the whole process group: Accelerate, which ends, and the process that it has started."""
    run = tmp_path / "run"
    with launch(tmp_path, TYPED, words(base, run), CTRL_C) as child:
        end(child, tmp_path)
    status = read_status(run)
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGINT", 3), child.seen
    assert " ".join(TYPED) in str(status.next_command)
    assert not [line for line in child.seen if "aborting" in line], "one Ctrl-C came once"
    with launch(tmp_path, TYPED, words(base, run)) as child:
        assert end(child, tmp_path) == 0, child.seen
    assert any("exactness: bitwise" in line for line in child.seen)
    assert len([line for line in child.seen if line.startswith("launch ")]) == 1
    steps = micro_steps(tmp_path)
    assert len(steps) == 2 * STEPS
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        rows = [row for part in (*first, *second) for row in part]
        assert len(first) == 2
        assert len(rows) == len({*rows}) == 8, "of a step"
    assert_same_bits(run, undisturbed)


KILL = """
def act(number):
    if number == 7 and rank == "1":
        while not os.path.isdir({saved!r}):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_death_of_one_process_ends_all_and_the_next_attempt_resumes(
    server: ForkServer, base: Path, undisturbed: Path, tmp_path: Path
) -> None:
    keys = words(base, run := tmp_path / "run")
    with launch(tmp_path, ON_CPU, keys, KILL.format(saved=str(run / "checkpoint_step_2"))) as child:
        assert end(child, tmp_path) == 1, child.seen
    assert read_status(run).reason == "peer_lost", child.seen
    codes = server.run(train_watched, tmp_path / "log", ranks=2, folder=str(tmp_path), arguments=keys, fate=None)
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert_same_bits(run, undisturbed)


SAVE_THEN_STOP = """
def act(number):
    if number in (5, 9):
        parts = ("SIGUSR1", "save_requested") if number == 5 else ("SIGTERM", "stop_reason")
        if rank == "0":
            os.kill(launcher(), getattr(signal, parts[0]))
        heard(parts[1])
"""


def test_without_a_launcher_signals_and_exit_codes_are_those_of_one_process(base: Path, tmp_path: Path) -> None:
    """A save on demand, which torchrun does not know, and the exit code of a clean stop, which it makes a failure."""
    keys = words(base, run := tmp_path / "run", save_steps="null", interrupted_exit_code=75)
    with launch(tmp_path, PLAIN, ["--distributed=2", *keys], SAVE_THEN_STOP) as child:
        assert end(child, tmp_path) == 75, child.seen
    assert "ChildFailedError" not in child.seen, "an orderly end is no error of torchrun"
    status = read_status(run)
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", 5), child.seen
    assert [path.name for path in sorted(run.glob("checkpoint_step_*"))] == ["checkpoint_step_3", "checkpoint_step_5"]
    assert "train.py --distributed=2 " in str(status.next_command)


ABORT = """
def act(number):
    if number == 3:
        for _ in range(2):
            if rank == "0":
                os.kill(launcher(), signal.SIGINT)
            heard("stop_reason")
        heard("_aborting")
        time.sleep(600)
"""


def test_a_second_ctrl_c_aborts(base: Path, tmp_path: Path) -> None:
    with launch(tmp_path, PLAIN, ["--distributed=2", *words(base, tmp_path / "run")], ABORT) as child:
        assert end(child, tmp_path) == 130, child.seen
    assert "ChildFailedError" not in child.seen


AGENT_DIES = """
def act(number):
    if number == 1 and rank == "1":  # its library waits for a peer at the end
        from ci_llm.distributed import processes
        processes.SHUTDOWN_BOUND_S, processes.leave = 0.1, lambda: time.sleep(600)
    if number == 5:
        if rank == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        heard("stop_reason")
"""


def test_processes_save_and_end_when_torchruns_agent_is_killed(base: Path, tmp_path: Path) -> None:
    """This holds before the first save too, although the agent's rendezvous store died with it."""
    keys = words(base, run := tmp_path / "run", save_steps="null")
    with launch(tmp_path, PLAIN, ["--distributed=2", *keys], AGENT_DIES) as child:
        assert end(child, tmp_path) == 0, "\n".join(child.seen)
    status = read_status(run)
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", 3), child.seen
