"""A run whose agents do not learn warns, during the training and at its end; one that learns does not."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.core.run_status import read_status
from ci_llm.run.step.step_metrics import FIRST, RECENT, Learning

#: Losses, then gradient norms, of the agents in every step of real runs on the embedded base.
CURVES: dict[str, list[list[float]]] = json.loads((Path(__file__).parents[1] / "fixtures/curves.json").read_text())
NAMES = ("agent0", "agent1")
GOOD = ("as shipped", "no warm-up", "one row per step", "one agent, two rows per step", "rate rather high, 0.02")


def told(curve: list[list[float]], every: int) -> Iterator[tuple[int, str | None]]:
    """The (step, warning) pairs that a run with this loss curve would log."""
    learning = Learning([f"agent{k}" for k in range(len(curve[0]) // 2)], len(curve))
    for step, values in enumerate(curve, 1):
        agents = len(values) // 2
        learning.count(values[:agents])
        if step % every == 0 or step == len(curve):
            learning.look(values[agents:])
            yield step, learning.warning()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", GOOD)
def test_a_run_that_learns_gets_no_warning(name: str, every: int) -> None:
    assert [warning for _, warning in told(CURVES[name], every) if warning] == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", sorted({*CURVES} - {*GOOD}))
def test_a_rate_that_is_too_large_gets_a_warning(name: str, every: int) -> None:
    warnings = [warning for _, warning in told(CURVES[name], every)]
    assert warnings[-1] is not None


def test_vanished_gradients_are_reported_before_any_loss_is_compared() -> None:
    step, warning = next((step, warning) for step, warning in told(CURVES["rate 1000"], 1) if warning)
    assert step == 5
    assert warning == "no gradient reaches every agent any more, at a loss of 6.36: nothing is learned"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.6, 1.0])
def test_batches_that_differ_do_not_count_as_a_rise(spread: float) -> None:
    """These runs learn nothing, so that their loss varies only with their batches."""
    drawn = random.Random(0)
    accused = 0
    for _ in range(100):
        batches = [drawn.lognormvariate(0, spread) for _ in range(100)]
        accused += any(warning for _, warning in told([[loss, loss, 1.0, 1.0] for loss in batches], 10))
    assert accused <= 1


def test_a_nonfinite_loss_is_not_counted() -> None:
    learning = Learning(NAMES, 100)
    for _ in range(RECENT + FIRST):
        learning.count([float("nan"), 1.0])
        learning.look([float("nan"), 1.0])
    assert learning.warning() is None
    assert learning.first_loss == 1.0


def test_a_later_attempt_compares_with_the_beginning_of_the_run() -> None:
    learning = Learning(NAMES, 100, first_loss=1.0, earlier="it was bad")
    for _ in range(RECENT - 1):
        learning.count([3.0])
        assert learning.warning() == "it was bad"
    learning.count([3.0])
    assert "has risen from 1 at the beginning to 3" in str(learning.warning())
    for _ in range(RECENT):
        learning.count([0.5])
    assert learning.warning() is None


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
def test_a_run_whose_loss_rises_says_so_in_all_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are set by the test: those of a rate that is far too large depend on the processor's rounding."""
    losses, count, look = itertools.chain([1.0] * FIRST, itertools.repeat(9.0)), Learning.count, Learning.look
    monkeypatch.setattr(Learning, "count", lambda self, found: count(self, [next(losses)] * len(found)))
    monkeypatch.setattr(Learning, "look", lambda self, found: look(self, [1.0] * len(found)))
    words = ["num_agents=2", "lora_rank=2", "batch_size=4", "max_train_samples=20", "num_workers=0", "report_to=none"]
    words += ["eval_samples=4", "generation_eval_samples=0", "eval_steps=null", "logging_steps=2", "max_seq_length=256"]
    run = tmp_path / "run"
    words += ["learning_rate=1e-3", f"output_dir={run}"]
    assert main(["train", *words, "max_train_steps=30"]) == 0
    said = capsys.readouterr().out
    assert said.count("learning_rate 0.001 is too large") == 1
    assert "completed at step 30, but the loss of every agent has risen from 1 at the beginning to 9" in said
    warning = read_status(run).warning
    assert warning is not None
    assert json.loads((run / "evaluation.json").read_text())["warning"] == warning
    assert warning in (run / "final_checkpoint/README.md").read_text()
    assert warning in (run / "training.log").read_text()
    first_loss = read_status(run).first_loss
    assert main(["train", *words, "max_train_steps=32"]) == 0  # too few steps to see for itself
    assert f"completed at step 32, but {warning}" in capsys.readouterr().out
    assert (read_status(run).warning, read_status(run).first_loss) == (warning, first_loss)
