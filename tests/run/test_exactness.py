"""Killed at any moment and called again, a run ends with the bits of the run that was never killed.

Every trial ends a process for real and compares all that can be told about the two runs: rows and weights of every
step, the files of the last checkpoint, metrics, evaluation. In a campaign all cells are tried.
"""

from __future__ import annotations

import pytest

from tests.support.campaign import sampled
from tools.testbed.trials import MOMENTS, STEPS, Cell, Fate, Trials, account, differences, matrix

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
#: What `make test` runs of them: each value of each axis, but of 4 and 8 bits one; a campaign runs each of all.
SAMPLE = [ONE_PROCESS[13], ONE_PROCESS[19], *OTHER_MATHS[4:6], TWO_PROCESSES[1]]


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
        trials.ended(cell, fate, folder, save_steps=2)
    assert not differences(trials.reference(cell), account(trials.complete(cell, folder)))


# Interrupted


@pytest.mark.parametrize("cell", sampled(INTERRUPTED, INTERRUPTED[1:2]), ids=str)
def test_interrupted_and_resumed(trials: Trials, cell: Cell) -> None:
    assert not differences(trials.reference(cell), trials.interrupted(cell))


def test_a_process_without_rows_has_its_generators_restored(trials: Trials) -> None:
    """The only step after the resume has one row, so the second process draws nothing that would reset them."""
    cell = Cell(dropout=0.1, ranks=2)
    keys = {"max_train_steps": 10, "eval_steps": "null"}
    undisturbed = trials.complete(cell, **keys)
    folder = trials.ended(cell, Fate("SIGTERM", steps=8, rank=1), **keys)
    assert (folder / "run/checkpoint_step_9").is_dir()
    assert not differences(account(undisturbed), account(trials.complete(cell, folder, **keys)))


# The comparison


def test_dropout_is_noticed(trials: Trials) -> None:
    noticed = differences(*(trials.reference(Cell(accumulation=4, dropout=dropout)) for dropout in (0.0, 0.1)))
    for fact in ("witnessed: step 2 of process0", "metrics of step 2", "evaluation.json"):
        assert fact in noticed
    for part in ("agent0/", "agent1/", "optimizer/agent1/"):
        assert any(name.startswith(f"final checkpoint: {part}") for name in noticed), part


def test_one_bit_and_one_missing_fact_are_noticed(trials: Trials) -> None:
    facts = trials.reference(Cell(accumulation=4))
    name = next(name for name, fact in facts.items() if isinstance(fact, tuple))
    kind, shape, raw = facts[name]
    flipped = (kind, shape, bytes([raw[0] ^ 1]) + raw[1:])
    assert differences(facts, facts | {name: flipped}) == [name]
    assert differences(facts, {key: fact for key, fact in facts.items() if key != name}) == [name]
    assert differences({}, {name: None}) == [name]
