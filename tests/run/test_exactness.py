"""Killed at any moment and called again, a run ends with the bits of the run that was never killed.

Every trial ends a process for real and compares all that can be told about the two runs: rows and weights of every
step, the files of the last checkpoint, metrics, evaluation. In a campaign all cells are tried.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.run_status import read_status
from tests.support.campaign import sampled
from tests.support.children import PYTHONPATH, ROOT, Child
from tools.testbed.forkserver import ENVIRONMENT, free_port
from tools.testbed.trials import MOMENTS, STEPS, Cell, Fate, Trials, account, differences, matrix, unwitnessed

pytestmark = pytest.mark.slow

ONE_PROCESS = matrix(moment=MOMENTS, accumulation=(1, 4), dropout=(0.0, 0.1), workers=(0, 2))
OTHER_MATHS = [
    *matrix(moment=MOMENTS, accumulation=(4,), dropout=(0.1,), precision=("bf16",)),
    Cell("mid epoch 1", dropout=0.1, workers=2, precision="bf16"),
    Cell("mid epoch 0", accumulation=4, dropout=0.1, diversity="swd"),
    Cell("mid epoch 0", dropout=0.1, precision="bf16", quantization="int8"),
    Cell("mid epoch 1", accumulation=4, dropout=0.1, quantization="nf4"),
    Cell("mid epoch 1", accumulation=4, dropout=0.1, diversity="swd"),
]
TWO_PROCESSES = [
    Cell("mid epoch 0", accumulation=1, dropout=0.0, workers=0, ranks=2),
    Cell("mid epoch 0", accumulation=4, dropout=0.1, workers=2, ranks=2),
    Cell("boundary", accumulation=1, dropout=0.1, workers=2, ranks=2),
    Cell("boundary", accumulation=4, dropout=0.1, workers=0, ranks=2),
    Cell("mid epoch 1", accumulation=1, dropout=0.1, workers=0, ranks=2),
    Cell("mid epoch 1", accumulation=1, dropout=0.1, workers=2, ranks=2, precision="bf16"),
]
INTERRUPTED = [
    Cell("mid epoch 0", accumulation=4, dropout=0.1),
    Cell("boundary", accumulation=4, dropout=0.1, workers=2),
    Cell("mid epoch 1", accumulation=1, dropout=0.1),  # an evaluation is due at this step, and has to wait
    Cell("mid epoch 1", accumulation=4, dropout=0.1, ranks=2),
]
THROUGH_TRAIN_PY = [
    Cell("mid epoch 0", accumulation=4, dropout=0.1),
    Cell("boundary", accumulation=1, dropout=0.1, workers=2),
    Cell("mid epoch 1", accumulation=4, dropout=0.1, precision="bf16"),
    Cell("mid epoch 1", accumulation=1, dropout=0.1, ranks=2),
]
#: What `make test` runs of them: each value of each axis; a campaign runs each of all.
SAMPLE = [ONE_PROCESS[0], ONE_PROCESS[13], ONE_PROCESS[19], *OTHER_MATHS[3:7], TWO_PROCESSES[1]]


# Killed


@pytest.mark.parametrize("cell", sampled([*ONE_PROCESS, *OTHER_MATHS, *TWO_PROCESSES], SAMPLE), ids=str)
def test_killed_and_resumed(trials: Trials, cell: Cell) -> None:
    assert not differences(trials.reference(cell), trials.killed(cell))


def test_a_run_that_dies_five_times_ends_with_the_same_bits(trials: Trials) -> None:
    """Five attempts, each of which saves after two steps and dies after three; the sixth gets to the end."""
    cell = Cell(accumulation=4, dropout=0.1)
    folder = trials.new_folder()
    for start in range(0, STEPS - 2, 2):
        fate = Fate("SIGKILL", steps=3, committed=start + 2)
        assert trials.train(cell, folder, fate, save_steps=2) == [-signal.SIGKILL], (folder / "log").read_text()
    assert trials.train(cell, folder) == [0]
    assert not differences(trials.reference(cell), account(folder))


@pytest.mark.parametrize("cell", sampled(THROUGH_TRAIN_PY, THROUGH_TRAIN_PY[:1]), ids=str)
def test_through_train_py(trials: Trials, cell: Cell) -> None:
    """The program as people call it, killed when it is about to give the next checkpoint its name.

    In the sample one process; two of them, under torchrun and the supervisor: tests/run/test_beginnings.py.
    """
    folder = trials.new_folder()
    write_call(trials.arguments(cell), folder)
    doomed = min(2 * cell.saved_step, STEPS)
    killed = train_py(cell, folder, die_before=f"checkpoint_step_{doomed}", save_steps=cell.saved_step)
    assert killed[0] == -signal.SIGKILL
    assert sorted(path.name for path in folder.glob("run/checkpoint_*")) == [f"checkpoint_step_{cell.saved_step}"]
    assert "train.py" in (read_status(folder / "run").next_command or "")
    assert train_py(cell, folder) == [0] * cell.ranks, (folder / "log").read_text()
    assert not differences(unwitnessed(trials.reference(cell)), account(folder))


def write_call(arguments: list[str], folder: Path) -> None:
    """A configuration file, and what makes a process end itself on a file event."""
    (folder / "trial.yaml").write_text("\n".join(arguments).replace("=", ": "))
    (folder / "die.py").write_text(
        "import os, sys\n"
        "def die(event, arguments):\n"
        "    name = os.environ.get('DIE_BEFORE')\n"
        "    if name and event == 'os.rename' and os.path.basename(arguments[1]) == name:\n"
        "        os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(die)\n"
    )


def train_py(cell: Cell, folder: Path, die_before: str = "", **keys: Any) -> list[int]:
    """Exit codes of the processes of one call; when the first has died the others are ended, as by a launcher."""
    keys["output_dir"] = folder / "run"
    command = [f"{ROOT}/train.py", f"--config={folder}/trial.yaml", *(f"{k}={v}" for k, v in keys.items())]
    worlds = surroundings(cell, folder, die_before)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(sys.executable, "-u", *command, env=env)) for env in worlds]
        codes = [children[0].wait()]
        for child in children[1:]:
            if codes[0]:
                child.signal(signal.SIGKILL)
            codes.append(child.wait())
        (folder / "log").write_text("\n".join(line for child in children for line in child.seen))
    return codes


def surroundings(cell: Cell, folder: Path, die_before: str) -> list[dict[str, str]]:
    """The variables of each process; only the first is told when to die."""
    all_of_them = {
        **ENVIRONMENT,
        "PYTHONPATH": PYTHONPATH,
        "AT_START": str(folder / "die.py"),
        "DIE_BEFORE": die_before,
    }
    if cell.ranks == 1:
        return [all_of_them]
    world = {"WORLD_SIZE": str(cell.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(cell.ranks)]
    return [all_of_them | world | places[0], *(all_of_them | world | p | {"DIE_BEFORE": ""} for p in places[1:])]


# Interrupted


@pytest.mark.parametrize("cell", sampled(INTERRUPTED, INTERRUPTED[1::2]), ids=str)
def test_interrupted_and_resumed(trials: Trials, cell: Cell) -> None:
    assert not differences(trials.reference(cell), trials.interrupted(cell))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_ended_in_an_evaluation(trials: Trials, name: str) -> None:
    """Killed there the run resumes from the step before it, which was saved; asked to stop, it saves that step."""
    cell = Cell("mid epoch 1", dropout=0.1)
    folder = trials.new_folder()
    killed = name == "SIGKILL"
    fate = Fate(name, cell.saved_step, micro_step=None, committed=cell.saved_step if killed else None)
    codes = trials.train(cell, folder, fate, save_steps=cell.saved_step if killed else "null")
    assert codes == [-signal.SIGKILL if killed else 0]
    assert not differences(trials.reference(cell), trials.resumed(cell, folder))


def test_a_process_without_rows_has_its_generators_restored(trials: Trials) -> None:
    """The only step after the resume has one row, so the second process draws nothing that would reset them."""
    cell = Cell(dropout=0.1, ranks=2)
    undisturbed, folder = trials.new_folder(), trials.new_folder()
    assert trials.train(cell, undisturbed, max_train_steps=10) == [0, 0]
    assert trials.train(cell, folder, Fate("SIGTERM", steps=8, rank=1), max_train_steps=10) == [0, 0]
    assert (folder / "run/checkpoint_step_9").is_dir()
    assert trials.train(cell, folder, max_train_steps=10) == [0, 0]
    assert not differences(account(undisturbed), account(folder))


# The comparison


def test_another_seed_is_noticed(trials: Trials) -> None:
    cell = Cell(accumulation=4)
    folder = trials.new_folder()
    assert trials.train(cell, folder, seed=43) == [0]
    noticed = differences(trials.reference(cell), account(folder))
    for fact in ("witnessed: step 1 of process0", "metrics of step 2", "evaluation.json"):
        assert fact in noticed
    for part in ("agent0/", "agent1/", "optimizer/agent1/", "rng/process0/torch"):
        assert any(name.startswith(f"final checkpoint: {part}") for name in noticed), part


def test_one_bit_and_one_missing_fact_are_noticed(trials: Trials) -> None:
    facts = trials.reference(Cell(accumulation=4))
    name = next(name for name, fact in facts.items() if isinstance(fact, tuple))
    kind, shape, raw = facts[name]
    flipped = (kind, shape, bytes([raw[0] ^ 1]) + raw[1:])
    assert differences(facts, facts | {name: flipped}) == [name]
    assert differences(facts, {key: fact for key, fact in facts.items() if key != name}) == [name]
    assert differences({}, {name: None}) == [name]
