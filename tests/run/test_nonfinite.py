"""Numbers that are not finite, in real runs: other agents keep their bits, a bad batch is skipped, attempts end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.config import Config
from ci_llm.core.run_folder import Recovery, read_failures, write_recovery
from ci_llm.core.run_status import read_status
from ci_llm.distributed.ballot import Verdict
from ci_llm.run.step.nonfinite import findings_of
from ci_llm.run.step.state import MAX_IN_A_ROW, AgentRecovery, AgentState, TrainState
from tests.support.faults import KEYS, Fault, fired, metrics, said, train, train_with_faults, weights
from tools.testbed.forkserver import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(server, folder) == [0], said(folder)
    return folder


# One agent


def test_a_nonfinite_agent_changes_no_bit_of_the_others(server: ForkServer, undisturbed: Path, tmp_path: Path) -> None:
    fault = Fault("nan gradient", steps=(2, 5, 6), agents=(1,))
    assert train(server, tmp_path, fault) == [0], said(tmp_path)
    assert [step for _, step, _ in fired(tmp_path)] == [2, 5, 6]
    assert weights(tmp_path, [0, 2]) == weights(undisturbed, [0, 2])
    assert weights(tmp_path, [1]) != weights(undisturbed, [1])
    last = metrics(tmp_path)[-1]
    assert last["train/agent1/skipped_steps"] == 3
    assert last["train/agent1/learning_rate_share"] == pytest.approx(1.5**-3)
    assert "train/agent0/skipped_steps" not in last
    assert "agent1    not finite in step 6, 1 in a row: left out, learning rate x 0.667 -> x 0.444" in said(tmp_path)


def test_a_bad_row_costs_its_agent_no_more_than_in_a_run_alone(server: ForkServer, tmp_path: Path) -> None:
    """Each agent reads the rows in its own order, so that they meet the bad row in different batches."""
    one, other = "{seed: 1}", "{seed: 2, max_train_samples: 30}"
    fault = Fault("nan gradient", steps=(4,), agents=(0,))
    for name, agents in (("alone", [one]), ("beside", [one, other])):
        keys = {"agents": f"[{', '.join(agents)}]", "num_agents": len(agents)}
        assert train(server, tmp_path / name, fault, **keys) == [0], said(tmp_path / name)
        assert fired(tmp_path / name) == [("nan gradient", 4, 0)]
    assert weights(tmp_path / "beside", [0]) == weights(tmp_path / "alone", [0])
    last = metrics(tmp_path / "beside")[-1]
    assert last["train/agent0/skipped_steps"] == 1
    assert last.get("train/agent0/learning_rate_share", 1) == 1
    assert "finite in step 5, 1 in a row: left out\n" in said(tmp_path / "beside")


def test_the_vote_of_one_process_counts_for_all(server: ForkServer, tmp_path: Path) -> None:
    for name, faults in (("whole", []), ("faulty", [Fault("nan gradient", steps=(3,), process=1, agents=(2,))])):
        assert train(server, tmp_path / name, *faults, ranks=2) == [0, 0], said(tmp_path / name)
    assert fired(tmp_path / "faulty") == [("nan gradient", 3, 1)]
    assert weights(tmp_path / "faulty", [0, 1]) == weights(tmp_path / "whole", [0, 1])
    assert weights(tmp_path / "faulty", [2]) != weights(tmp_path / "whole", [2])


def test_a_nonfinite_agent_leaves_the_diversity_term(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("nan output", steps=(2, 5), agents=(1,))
    for name, faults in (("whole", []), ("faulty", [fault])):
        assert train(server, tmp_path / name, *faults, diversity="swd") == [0], said(tmp_path / name)
    assert [step for _, step, _ in fired(tmp_path / "faulty")] == [2, 5]
    whole, faulty = (metrics(tmp_path / name) for name in ("whole", "faulty"))
    for before, after in zip(whole, faulty, strict=True):
        for name in ("train/agent0/loss", "train/agent2/loss", "train/diversity"):
            assert isinstance(after[name], float)
        for name in ("train/agent0/loss", "train/agent2/loss"):
            assert after[name] == pytest.approx(before[name], rel=2e-2)
    assert faulty[2]["train/agent1/loss"] == "nan"


def test_an_agent_that_is_nonfinite_too_often_is_rolled_back_also_over_a_resume(
    server: ForkServer, undisturbed: Path, tmp_path: Path
) -> None:
    """Two steps before the checkpoint and three after it are five in a row; the rollback is to the older snapshot."""
    keys = {"save_steps": 5}
    fault = Fault("nan gradient", steps=(3, 4, 5, 6, 7), agents=(1,))
    assert train(server, tmp_path / "whole", fault, **keys) == [0], said(tmp_path / "whole")
    assert metrics(tmp_path / "whole")[-1]["train/agent1/set_backs"] == 1
    assert weights(tmp_path / "whole", [0, 2]) == weights(undisturbed, [0, 2])
    state = load_checkpoint(tmp_path / "whole" / "run" / "final_checkpoint").state
    assert float(state["optimizer"]["agent1"]["step"]) == 12 - 8  # its moments are those of the four steps since
    assert float(state["optimizer"]["agent0"]["step"]) == 12
    cut = tmp_path / "cut"
    assert train(server, cut, fault, Fault("kill", steps=(9,), committed=5), **keys) == [-9]
    assert train(server, cut, fault, **keys) == [0], said(cut)
    assert "agent1    rolled back to its weights and moments of step 0" in said(cut).partition("resume    step 5 of")[2]
    assert weights(cut, [0, 1, 2]) == weights(tmp_path / "whole", [0, 1, 2])


def test_a_rollback_after_a_resume_is_to_the_step_to_which_the_run_would_have_gone(
    server: ForkServer, tmp_path: Path
) -> None:
    fault = Fault("nan gradient", steps=(4, 5, 6, 7, 8), agents=(1,))
    assert train(server, tmp_path / "whole", fault, save_steps=3) == [0], said(tmp_path / "whole")
    cut = tmp_path / "cut"
    assert train(server, cut, fault, Fault("kill", steps=(4,), committed=3), save_steps=3) == [-9]
    assert train(server, cut, fault, save_steps=3) == [0], said(cut)
    for folder in (tmp_path / "whole", cut):
        assert "agent1    rolled back to its weights and moments of step 3" in said(folder)
    assert weights(cut, [0, 1, 2]) == weights(tmp_path / "whole", [0, 1, 2])


def test_an_agent_with_no_rollback_left_ends_the_attempt(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("nan gradient", steps=tuple(range(4, 99)), agents=(1,))
    assert train(server, tmp_path, fault, save_steps=3, max_train_steps=20) == [1]
    assert [step for _, step, _ in fired(tmp_path)] == [*range(4, 14)]
    status, (failure,) = read_status(tmp_path / "run"), read_failures(tmp_path / "run", 1)
    assert (status.status, status.reason) == ("failed", "nonfinite")
    assert (failure.reason, failure.step) == ("nonfinite", 4)
    assert "agent1: from step 5 on not finite 5 times in a row, rolled back, and as often once more" in failure.message


def train_trials(**keys: Any) -> int:
    """As `train_with_faults`, with agents that are trials of a sweep."""
    Config.trial_steps = property(lambda _: KEYS["max_train_steps"])  # type: ignore[assignment,misc]
    return train_with_faults(**keys)


def test_a_trial_with_no_rollback_left_is_dropped(server: ForkServer, undisturbed: Path, tmp_path: Path) -> None:
    """The attempt after a kill drops it too, and evaluation.json names it."""
    fault, keys = Fault("nan gradient", steps=tuple(range(1, 99)), agents=(1,)), {"save_steps": 11}
    killed = Fault("kill", steps=(11,), committed=11)
    assert train(server, tmp_path, fault, killed, trial=train_trials, **keys) == [-9]
    assert train(server, tmp_path, trial=train_trials, **keys) == [0], said(tmp_path)
    assert "agent1    dropped; the others train on" in said(tmp_path)
    assert weights(tmp_path, [0, 2]) == weights(undisturbed, [0, 2])
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["dropped"] == [1]
    assert metrics(tmp_path)[-1]["train/agent1/skipped_steps"] == 11


def test_a_dropped_agent_has_no_effect_on_decisions_about_the_others() -> None:
    def verdict(*nonfinite: bool) -> Verdict:
        return Verdict(
            5, nonfinite, (1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 0.0, 7.0), out_of_memory=False, stop=None, save=False
        )

    exhausted = AgentRecovery(rolled_back=True, nonfinite_in_a_row=MAX_IN_A_ROW)
    state = TrainState((AgentState(0), AgentState(1, recovery=exhausted), AgentState(2)))
    fine = findings_of(verdict(False, False, False), state)
    assert (fine.left_out, fine.nonfinite, fine.bad_batch, fine.tokens) == ((1,), (), False, 7)
    worse = findings_of(verdict(True, True, False), state)
    assert (worse.left_out, worse.nonfinite, worse.bad_batch) == ((0, 1), (0,), False)
    bad = findings_of(verdict(True, False, True), state)
    assert (bad.left_out, bad.nonfinite, bad.bad_batch, bad.tokens) == ((0, 1, 2), (0, 2), True, 0)


# A batch


def test_a_bad_batch_is_skipped_without_a_cut_of_rates_and_a_replay_does_not_compute_it(
    server: ForkServer, tmp_path: Path
) -> None:
    """The run is killed between the batch and the next checkpoint; the fault is gone in the second attempt."""
    fault, keys = Fault("nan output", steps=(4,), agents=(0, 1, 2)), {"pass_per_agent": False}  # it strikes in passes
    assert train(server, tmp_path / "whole", fault, **keys) == [0], said(tmp_path / "whole")
    assert "step 5 is finite for no agent: skipped for good, rows " in said(tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    assert "train/task_loss" not in lines[4]
    assert (lines[4]["train/skipped_batches"], lines[5]["train/task_loss"] > 0) == (1, True)
    assert not [name for name in lines[-1] if "share" in name]
    [record] = json.loads((tmp_path / "whole/run/skipped_batches.json").read_text())
    assert (record["step"], len(record["rows"])) == (4, 4)
    cut = tmp_path / "cut"
    assert train(server, cut, fault, Fault("kill", steps=(5,), committed=3), save_steps=3, **keys) == [-9]
    assert train(server, cut, **keys) == [0], said(cut)
    assert fired(cut) == [("nan output", 4, 0), ("kill", 5, 0)]
    assert "recovery: steps skipped: 5" in said(cut)
    assert weights(cut, [0, 1, 2]) == weights(tmp_path / "whole", [0, 1, 2])
    states = [load_checkpoint(folder / "run" / "final_checkpoint").state for folder in (cut, tmp_path / "whole")]
    assert states[0]["train_state"] == states[1]["train_state"]


def test_nan_in_every_step_ends_the_attempt_with_the_good_weights(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("nan output", steps=tuple(range(6, 99)), agents=(0, 1, 2))
    keys = {"save_steps": 6, "pass_per_agent": False}
    assert train(server, tmp_path, fault, **keys) == [1]
    assert [step for _, step, _ in fired(tmp_path)] == [6, 7, 8, 9, 10]
    status, (failure,) = read_status(tmp_path / "run"), read_failures(tmp_path / "run", 1)
    assert (status.status, status.reason) == ("failed", "nonfinite")
    assert (failure.reason, failure.step) == ("nonfinite", 6)
    assert "no agent had a finite step 5 times in a row, from step 7 on" in failure.message
    assert "safe_train.py" in failure.message
    state = load_checkpoint(tmp_path / "run" / "checkpoint_step_6").state
    assert all(t.isfinite().all() for k in range(3) for t in state[f"agent{k}/adapter_model"].values())
    assert json.loads((tmp_path / "run" / "skipped_batches.json").read_text()) == []  # the batches were not to blame
    assert train(server, tmp_path, **keys) == [0], said(tmp_path)


# What the supervisor asks for


def test_requests_of_the_supervisor_are_applied_and_stay_in_force(server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(server, tmp_path, save_steps=2, save_total_limit="null", max_train_steps=6) == [0], said(tmp_path)
    write_recovery(run, Recovery(2, 4, 1, because=("attempt 1: non-finite values",), learning_rate_factor=0.5))
    constant = {"lr_scheduler_type": "constant", "allow_inexact_resume": "true"}
    assert train(server, tmp_path, max_train_steps=8, save_steps=2, **constant) == [0], said(tmp_path)
    second = said(tmp_path).split("loading...")[2]
    for line in (
        "step 4 of 8, verified",
        "recovery: learning rate x 0.5 for all agents",
        "recovery: micro-batch of at most 2 row(s), the effective batch holds",
        "recovery: attempt 1: non-finite values",
        "exactness: sample-exact (micro_batch 4 -> 2)",
        "4 rows per step: 1 process(es) x 2 micro-step(s) of at most 2",
    ):
        assert line in second, second
    assert (run / "superseded" / "checkpoint_step_6").is_dir()
    assert metrics(tmp_path)[-1]["train/learning_rate"] == KEYS["learning_rate"] / 2
    assert metrics(tmp_path)[-1]["train/micro_batch_size"] == 2
    assert read_status(run).micro_batch_size == 2
    (run / "recovery.json").unlink()  # what the checkpoint remembers is in force without it
    assert train(server, tmp_path, max_train_steps=10, **constant) == [0]
    third = said(tmp_path).split("loading...")[3]
    assert "step 8 of 10, verified" in third
    assert "exactness: bitwise" in third
    assert metrics(tmp_path)[-1]["train/learning_rate"] == KEYS["learning_rate"] / 2


def test_going_back_before_every_checkpoint_is_a_fresh_start(server: ForkServer, tmp_path: Path) -> None:
    assert train(server, tmp_path, save_steps=4, max_train_steps=4) == [0], said(tmp_path)
    write_recovery(tmp_path / "run", Recovery(resume_at_most_step=0, after_attempt=1))
    assert train(server, tmp_path, max_train_steps=2) == [0], said(tmp_path)
    assert "no checkpoint: a fresh start" in said(tmp_path)
    assert (tmp_path / "run" / "superseded" / "checkpoint_step_4").is_dir()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
