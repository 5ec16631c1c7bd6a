"""Wherever a run begins and however it is interrupted: it resumes from its own newest step, to the same bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.supervisor.terminal import ROOT, Terminal
from tests.support.beginnings import BEGINS, ENDS, STEPS, Beginnings, begins_at
from tests.support.campaign import sampled_cases
from tests.support.children import PYTHONPATH, SCRIPTS
from tools.testbed.forkserver import ENVIRONMENT, ForkServer
from tools.testbed.trials import account, differences, unwitnessed

pytestmark = pytest.mark.slow


#: A begin, an end, and a number of processes; in the sample every begin meets one end, and every end a begin.
CASES = [(begin, end, ranks) for begin in BEGINS for end in ENDS[:-1] for ranks in (1, 2)]
SAMPLE = [(begin, ENDS[number % 5], 1 + number % 2) for number, begin in enumerate(BEGINS)]
CALLED_AGAIN = [(begin, ranks) for begin in BEGINS for ranks in (1, 2)]


@pytest.fixture(scope="module")
def beginnings(
    server: ForkServer, narrow_base: str, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[int, Beginnings]:
    """By the number of their processes."""
    return {ranks: Beginnings(server, tmp_path_factory.mktemp("beginnings"), ranks, narrow_base) for ranks in (1, 2)}


@pytest.mark.parametrize(("begin", "end", "ranks"), sampled_cases(CASES, SAMPLE))
def test_an_interrupted_run_resumes_from_its_own_newest_step(
    begin: str, end: str, ranks: int, beginnings: Mapping[int, Beginnings], tmp_path: Path
) -> None:
    undisturbed = beginnings[ranks].undisturbed(begin)
    beginnings[ranks].end(end, tmp_path, begin)
    assert not differences(account(undisturbed), account(tmp_path))
    log = (tmp_path / "run/training.log").read_text()
    assert ("(max_runtime)" in log) == (end == "walltime"), log
    newest = begins_at(begin) + 2
    told = f"resume    step {newest} of {STEPS}, verified, from run/checkpoint_step_{newest}\n"
    assert told in log.replace(f"{tmp_path}/", ""), log
    assert log.rpartition("resume    step")[2].count("exactness: bitwise\n") == 1, log
    assert not (tmp_path / "run/superseded").exists()


@pytest.mark.parametrize(("begin", "ranks"), sampled_cases(CALLED_AGAIN, [("null", 2), ("PATH", 1)]))
def test_a_second_call_of_a_completed_run_changes_nothing(
    begin: str, ranks: int, beginnings: Mapping[int, Beginnings]
) -> None:
    own = beginnings[ranks]
    folder = own.undisturbed(begin)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
    (folder / "log").unlink()
    assert own.train(folder, **BEGINS[begin](own.source)) == [0] * ranks
    assert f"This run is complete at step {STEPS}" in (folder / "log").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}


#: Makes the first Python process die that is about to give a checkpoint its name, and no later one.
DIE_ONCE = """
import os, sys
def die(event, arguments):
    if event == "os.rename" and os.path.basename(arguments[1]) == os.environ["DIE_BEFORE"]:
        try:
            os.mkdir(os.environ["DIED"])
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)
sys.addaudithook(die)
"""
#: What starts the trainer, by the number of its processes.
LAUNCHERS = {
    1: [sys.executable],
    2: [SCRIPTS / "torchrun", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
}


@pytest.mark.parametrize(
    ("begin", "ranks"),
    sampled_cases([("PATH", 1), ("null", 2), ("PATH", 2), ("null", 1)], [("null", 2)]),
)
def test_safe_train_over_a_killed_train_py_ends_with_the_same_bits(
    begin: str, ranks: int, beginnings: Mapping[int, Beginnings], tmp_path: Path
) -> None:
    """safe_train.py relaunches train.py, which is killed just before it commits its second own step."""
    runs = beginnings[ranks]
    undisturbed, newest = runs.undisturbed(begin), begins_at(begin) + 2
    (tmp_path / "die.py").write_text(DIE_ONCE)
    own = {"AT_START": str(tmp_path / "die.py"), "DIE_BEFORE": f"checkpoint_step_{newest + 2}"}
    words = runs.words(**BEGINS[begin](runs.source) | {"output_dir": tmp_path / "run"})
    command = [*LAUNCHERS[ranks], ROOT / "train.py", "--config", os.devnull, *words]
    surroundings = {**ENVIRONMENT, **own, "PYTHONPATH": PYTHONPATH, "DIED": str(tmp_path / "died")}
    with Terminal("--", *command, cwd=tmp_path, hasty=True, env=surroundings) as terminal:
        assert terminal.wait() == 0, terminal.text
    assert (tmp_path / "died").is_dir()
    log = (tmp_path / "run/training.log").read_text()
    assert f"resume    step {newest} of {STEPS}, verified, from run/checkpoint_step_{newest}\n" in log, log
    assert not differences(unwitnessed(account(undisturbed)), unwitnessed(account(tmp_path)))
