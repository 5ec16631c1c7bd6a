"""A run whose agents do not learn warns, during the training and at its end; one that learns does not."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ci_llm
from ci_llm.cli.main import main
from ci_llm.core.run_status import RunStatus, read_status
from ci_llm.run import job
from ci_llm.run.end.result import score_table
from ci_llm.run.step.callbacks import TrainerControl, TrainerState
from ci_llm.run.step.members import ask
from ci_llm.run.step.step_metrics import FIRST, LOOKS, RECENT, Learning

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


def test_one_agent_is_named_and_the_others_are_not() -> None:
    learning = Learning(("agent0", "agent2", "agent3"), 100)
    for step in range(40):
        learning.count([1.0, 1.0 if step < 10 else 3.0, 1.0])
    assert learning.warning() == "the loss of agent2 has risen from 1 at the beginning to 3, the mean of 20 steps"


def test_rows_that_are_learned_give_no_gradient_and_no_warning() -> None:
    learning = Learning(NAMES, 100)
    for _ in range(LOOKS + 1):
        learning.count([1e-4])
        learning.look([0.0])
    assert learning.warning() is None


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


def test_status_keeps_what_a_later_attempt_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunStatus(tmp_path, 1)
    run.update(warning="nothing is learned", first_loss=1.5)
    run.finish("completed")
    found = read_status(tmp_path)
    assert (found.warning, found.first_loss) == ("nothing is learned", 1.5)
    assert main(["status", str(tmp_path)]) == 0
    assert "warning: nothing is learned\n" in capsys.readouterr().out
    assert replace(found, warning=None, first_loss=None).exit_code == 0


def test_the_table_of_scores_ends_with_the_warning() -> None:
    gain = {"value": 0.0, "interval95": 0.0}
    exact = {"agents": [0.0], "crowd": 0.0, "crowd_minus_mean": gain, "crowd_minus_best": gain}
    record = {"exact_match": exact, "nll": {"agents": [6.0], "crowd": 6.0}, "measured_by": "generation", "n": 4}
    record["task"] = "mine"
    record["rows_trained_on"] = "none"
    assert "warning" not in score_table(record, "run")
    assert score_table({**record, "warning": "its loss has risen"}, "run").endswith(
        "warning: while they trained, its loss has risen"
    )


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
    words += ["write_report=false"]
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


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
def test_a_resumed_run_names_the_agents_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the agent that was stopped, the warning named the one before the guilty one."""

    class StopsAgent0:
        def on_step_end(self, args: object, state: TrainerState, control: TrainerControl) -> None:
            if state.global_step == 1:
                ask(tmp_path, 0)
            control.should_training_stop = state.global_step == 3

    begun: list[Learning] = []
    monkeypatch.setattr(job, "Learning", lambda *args: begun.append(Learning(*args)) or begun[-1])
    keys = {"num_agents": 3, "lora_rank": 2, "max_train_samples": 20, "max_train_steps": 6, "max_seq_length": 256}
    keys |= {"num_workers": 0, "eval_samples": 4, "generation_eval_samples": 0, "report_to": "none"}
    keys |= {"write_report": False, "output_dir": str(tmp_path)}
    ci_llm.train(keys, callbacks=[StopsAgent0()])
    ci_llm.train(keys)
    assert [[*learning.names] for learning in begun] == [["agent1", "agent2"]] * 2  # the first has gone on with them
