"""A run without progress ends, and the log shows where each of its processes stood; runs on a full disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.launch import Launch
from ci_llm.core.run_folder import read_failures
from ci_llm.core.run_status import read_status
from ci_llm.crowd import generation, scoring
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import Decoder, Request
from ci_llm.run.attempt import Attempt
from ci_llm.run.watchdog import FIRST_S, LEAST_S, TIMES, Heartbeat, Watchdog
from tests.support.campaign import sampled
from tests.support.faults import KEYS, Fault, fired, said, train, train_with_faults, wrap
from tools.testbed.forkserver import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]


def stacks(folder: Path) -> list[str]:
    """The stacks that the log shows of each process without progress, in the order of their numbers."""
    log = (folder / "run" / "training.log").read_text()
    parts = log.split("stacks of process ")[1:]
    return sorted(parts)


# A hang


def test_a_process_that_never_reaches_the_vote_is_reported_with_its_stack(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("hang", steps=(3,), process=1)
    assert train(server, tmp_path, fault, ranks=2, global_batch_size=8) == [1, 1], said(tmp_path)
    assert fired(tmp_path) == [("hang", 3, 1)]
    waiting, stuck = stacks(tmp_path)
    assert "in _add_in_order" in waiting
    assert "in agree_on_gradients" in waiting
    assert "in wait_for_nothing" in stuck
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason, status.step) == ("failed", "hang", 3)
    for failure in read_failures(tmp_path / "run", 1):
        assert failure.reason == "hang"
        assert failure.step == 3
    assert train(server, tmp_path, ranks=2, global_batch_size=8) == [0, 0], said(tmp_path)


def test_a_loader_worker_that_never_answers_is_reported_as_well(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("hang in a worker", steps=(5,))
    assert train(server, tmp_path, fault, num_workers=1) == [1], said(tmp_path)
    assert [kind for kind, _, _ in fired(tmp_path)] == ["hang in a worker"]
    (own,) = stacks(tmp_path)
    assert "in train" in own
    assert read_status(tmp_path / "run").reason == "hang"


def test_a_hang_is_reported_although_the_disk_refuses_every_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attempts").write_text("no folder can be made here")
    ends: list[str] = []
    config: Any = SimpleNamespace(run_folder=tmp_path, mirror=None)
    attempt: Any = Attempt(config, Launch("python"), CheckpointManager(tmp_path), SimpleNamespace())
    attempt.number, attempt.processes = 1, SimpleNamespace(process_index=0)
    attempt.status = SimpleNamespace(finish=lambda status, *_: ends.append(status))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ci_llm.run.attempt.command_line", lambda _: "again")
        watchdog = Watchdog(attempt, Heartbeat(), lambda: 4)
        watchdog._report("no progress for 3 s")
    assert "no progress for 3 s" in capfd.readouterr().err
    assert "in test_a_hang_is_reported_although_the_disk_refuses_every_write" in (tmp_path / "training.log").read_text()
    assert ends == ["failed"]


def train_and_count(folder: str, words: list[str]) -> int:
    """A trial for the fork server: notes of each kind of work how often it was done, and between two signs of life."""
    done, since, most = Counter[str](), Counter[str](), Counter[str]()
    tick = Heartbeat.tick

    def begin_again(heartbeat: Heartbeat) -> None:
        since.clear()
        tick(heartbeat)

    def count(work: str) -> None:
        done[work] += 1
        since[work] += 1
        most[work] = max(most[work], since.total())

    class Counted(Decoder):
        """Counts the steps of the decoder that writes texts, and not of the trial before the first text."""

        def step(self) -> list[Request]:
            count("generation")
            return super().step()

    Heartbeat.tick = begin_again  # type: ignore[method-assign]
    wrap(Crowd, "forward", lambda *_: count("training") if torch.is_grad_enabled() else None)
    wrap(scoring, "_score_batch", lambda *_: count("evaluation"))
    generation.Decoder = Counted  # type: ignore[misc]
    code = train_with_faults(folder, words, [], {})
    Path(folder, "counts.json").write_text(json.dumps([done, most]))
    return code


def test_every_micro_step_batch_and_token_is_a_sign_of_life(server: ForkServer, tmp_path: Path) -> None:
    """Otherwise a run whose evaluation takes longer than its steps would be ended although it makes progress."""
    keys = {"eval_steps": 4, "eval_samples": 60, "generation_eval_samples": 6, "max_new_tokens_eval": 8}
    words = [f"{key}={value}" for key, value in (KEYS | keys | {"max_train_steps": 6}).items()]
    codes = server.run(train_and_count, tmp_path / "log", folder=str(tmp_path), words=words)
    assert codes == [0], said(tmp_path)
    done, most = json.loads((tmp_path / "counts.json").read_text())
    assert most == {"training": 1, "evaluation": 1, "generation": 1}
    assert min(done.values()) >= 6, done


def test_the_limit_on_silence() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.limit_s(step_measured=False) == FIRST_S
    assert heartbeat.limit_s(step_measured=True) == LEAST_S
    for _ in range(40):
        heartbeat.look(1.0)
    assert heartbeat.silent_s == 40
    heartbeat.tick()
    heartbeat.look(1.0)
    assert heartbeat.silent_s == 0
    assert heartbeat.limit_s(step_measured=True) == max(LEAST_S, TIMES * 40)


def test_a_suspended_limit_counts_no_silence_and_learns_nothing() -> None:
    heartbeat = Heartbeat()
    with heartbeat.resting():
        for _ in range(1000):
            heartbeat.look(1.0)
        assert heartbeat.silent_s == 0
    heartbeat.look(1.0)
    heartbeat.look(1.0)
    assert heartbeat.silent_s == 1
    assert heartbeat.limit_s(step_measured=True) == LEAST_S


# A full disk


@pytest.mark.parametrize("ranks", sampled([1, 2], [2]))
def test_a_run_whose_results_find_no_space_is_not_completed(ranks: int, server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("disk full", steps=(11,))
    assert train(server, tmp_path, fault, ranks=ranks, save_steps=6) == [1] * ranks, said(tmp_path)
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("failed", "disk_full")
    assert "checkpoint_step_12 is dropped" in said(tmp_path)
    assert "make space on this disk" in said(tmp_path)
    assert said(tmp_path).count("No space left on device") == 1, "what is known is not told again"
    assert said(tmp_path).count("make space on this disk") == 1
    assert "make space on this disk" in (tmp_path / "run/training.log").read_text()
    assert train(server, tmp_path, ranks=ranks, save_steps=6) == [0] * ranks, said(tmp_path)
    assert read_status(tmp_path / "run").status == "completed"


def test_a_last_checkpoint_that_is_spoilt_after_the_save_completes_no_run(server: ForkServer, tmp_path: Path) -> None:
    """The final checkpoint is made from the last step and never from the one before it, which is whole."""
    fault = Fault("bit flipped", steps=(11,))
    assert train(server, tmp_path, fault, save_steps=6) == [1], said(tmp_path)
    assert read_status(tmp_path / "run").status == "failed"
    assert "there is no step 12; committed: 6" in said(tmp_path)
    assert train(server, tmp_path, save_steps=6) == [0], said(tmp_path)
    assert load_checkpoint(tmp_path / "run/final_checkpoint").manifest.step == 12


def test_a_failure_is_raised_although_its_record_cannot_be_written(server: ForkServer, tmp_path: Path) -> None:
    faults = (Fault("bug", steps=(2,)), Fault("failure unwritten", steps=(2,)))
    assert train(server, tmp_path, *faults) == [1]
    assert {kind for kind, _, _ in fired(tmp_path)} == {"bug", "failure unwritten"}
    assert "the failure could not be written down" in said(tmp_path)
    assert "RuntimeError: a bug: memory is fine" in said(tmp_path)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", "error:RuntimeError")
