"""`ci_llm.train` in a script and a notebook: again and again in one process, on several, interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import EarlyStoppingCallback

import ci_llm
from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import Pace, watch_walltime
from ci_llm.config import read_call
from ci_llm.core.run_status import read_status
from ci_llm.evaluation.evaluator import Evaluator
from ci_llm.logs.run_log import RunLog
from ci_llm.mirror.objects import open_objects
from ci_llm.mirror.reader import MirrorReader
from ci_llm.run import attempt, call, job
from ci_llm.run.mirroring import RunMirror
from ci_llm.run.step.callbacks import TrainerControl, TrainerState

KEYS: dict[str, Any] = {
    "num_agents": 2,
    "lora_rank": 2,
    "lora_dropout": 0.1,
    "max_train_samples": 9,
    "max_train_steps": 4,
    "batch_size": 2,
    "eval_steps": 2,
    "eval_samples": 4,
    "generation_eval_samples": 2,
    "max_new_tokens_eval": 4,
    "logging_steps": 1,
    "save_steps": 2,
    "num_workers": 0,
    "report_to": "none",
}


class Witness:
    """A callback that records every event, and disturbs generators and arguments as a careless one would."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.logs: list[Mapping[str, Any]] = []

    def on_train_begin(self, args: ci_llm.Config, state: TrainerState, control: TrainerControl) -> None:
        assert (args.lora_rank, state.max_steps) == (2, 4)
        self.told.append(("begin", state.global_step))

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        random.random(), np.random.rand(), torch.rand(3)
        self.told.append(("step", state.global_step))

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: dict[str, Any]) -> None:
        self.told.append(("log", state.global_step))
        self.logs.append(dict(logs))
        logs.clear()

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]) -> None:
        self.told.append(("evaluate", state.global_step))
        assert metrics["eval/crowd/nll"] > 0

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.told.append(("save", state.global_step))

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.told.append(("end", state.global_step))
        control.should_training_stop = True  # too late to mean anything


class StopAt:
    """A callback that stops the run after a step, by a signal or by the control."""

    def __init__(self, step: int, *, by_signal: bool = False) -> None:
        self.step, self.by_signal = step, by_signal

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == self.step and self.by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        control.should_training_stop = state.global_step == self.step and not self.by_signal


class Misspelt:
    """A callback for an event that does not exist."""

    def on_step_ends(self, *_: object) -> None:
        raise AssertionError


def same(one: Path, other: Path) -> bool:
    """True if two checkpoints have the same bits."""
    return compare(load_checkpoint(one), load_checkpoint(other)).identical


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without callbacks."""
    return ci_llm.train(KEYS, output_dir=tmp_path_factory.mktemp("plain") / "run").folder


@pytest.mark.slow
def test_callbacks_receive_every_event_and_change_no_bit(plain: Path, tmp_path: Path) -> None:
    witness = Witness()
    result = ci_llm.train(KEYS, output_dir=tmp_path / "run", callbacks=[witness])
    assert (result.status, result.step, result.reason) == ("completed", 4, None)
    assert witness.told == [
        ("begin", 0),
        *[("step", 1), ("log", 1), ("step", 2), ("log", 2), ("save", 2), ("evaluate", 2)],
        *[("step", 3), ("log", 3), ("step", 4), ("log", 4), ("save", 4), ("evaluate", 4), ("end", 4)],
    ]
    assert [logs["train/task_loss"] > 0 for logs in witness.logs] == [True] * 4
    for name in ("checkpoint_step_2", "checkpoint_step_4", "final_checkpoint"):
        assert same(plain / name, tmp_path / "run" / name)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/task_loss"] for line in logged if "train/task_loss" in line] == [
        logs["train/task_loss"] for logs in witness.logs
    ]


@pytest.mark.slow
def test_a_run_whose_end_failed_after_its_scores_is_ended_by_the_next_call(tmp_path: Path) -> None:
    """Such a run was called complete, though its mirror lacked the last step and its status stayed "failed"."""

    class Fails:
        def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            raise RuntimeError("after the scores")

    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    keys = KEYS | {"output_dir": str(folder), "mirror": f"file://{mirror}"}
    with pytest.raises(RuntimeError, match="after the scores"):
        ci_llm.train(keys, callbacks=[Fails()])
    assert (folder / "evaluation.json").is_file()
    scores = (folder / "evaluation.json").read_bytes()
    assert read_status(folder).status == "failed"
    result = ci_llm.train(keys)
    assert (result.status, read_status(folder).status) == ("completed", "completed")
    assert (folder / "evaluation.json").read_bytes() == scores
    head = MirrorReader(open_objects(keys["mirror"])).head()
    assert head is not None
    assert "final_checkpoint" in [entry.name for entry in head.line]


@pytest.mark.slow
def test_a_result_has_a_crowd_that_answers_and_tables_of_scores_and_history(plain: Path) -> None:
    again = ci_llm.train(KEYS, output_dir=plain)  # is complete: nothing is left to do
    assert again.metrics == json.loads((plain / "evaluation.json").read_text())
    assert len(again.metrics["nll"]["agents"]) == again.crowd.num_agents == 2
    assert again.crowd is again.crowd
    assert isinstance(again.crowd.generate(["Ann has 7 pens."], max_new_tokens=2)[0], str)
    assert "nll" not in repr(again), "the scores would fill the screen of a notebook"
    nll, lines = again.metrics["nll"], (plain / "metrics.jsonl").read_text().splitlines()
    assert [*again.scores.index] == ["base", "agent0", "agent1", "agents, mean", "majority vote", "crowd"]
    assert again.scores.nll[["agent0", "agent1", "crowd"]].tolist() == [*nll["agents"], nll["crowd"]]
    assert math.isnan(again.scores.nll["majority vote"])
    assert [*again.history.index] == [1, 2, 3, 4]
    losses = [json.loads(line)["train/task_loss"] for line in lines if "train/task_loss" in line]
    assert again.history["train/task_loss"].tolist() == losses
    assert again.history["eval/crowd/nll"].isna().tolist() == [True, False, True, False]
    assert again.history["eval/crowd/nll"][4] == nll["crowd"]
    assert again.best["value"] == again.history["eval/crowd/nll"].min()
    assert again.best == {
        "step": again.history["eval/crowd/nll"].idxmin(),
        "value": again.best["value"],
        "metric": "nll",
    }
    table = again._repr_html_()  # there is no report
    assert f"{nll['crowd']:.4g}" in table


@pytest.mark.slow
def test_a_call_restores_signal_handlers_threads_and_generators(tmp_path: Path) -> None:
    def settings() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        generators = random.getstate(), torch.get_rng_state().tolist()
        return [handlers, wakeup, torch.get_num_threads(), torch.get_deterministic_debug_mode(), generators]

    torch.use_deterministic_algorithms(False)
    before = settings()
    ci_llm.train(KEYS, output_dir=tmp_path, max_train_steps=1, generation_eval_samples=0)
    assert settings() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "reason"),
    [(StopAt(1), "callback"), (StopAt(1, by_signal=True), "signal:SIGINT")],
    ids=["by a callback", "by Ctrl-C"],
)
def test_a_stopped_run_is_saved_and_the_same_call_resumes_it(
    stop: StopAt, reason: str, plain: Path, tmp_path: Path
) -> None:
    result = ci_llm.train(KEYS, output_dir=tmp_path / "run", callbacks=[stop])
    assert (result.status, result.reason, result.step) == ("interrupted", reason, 1)
    assert read_status(tmp_path / "run").reason == reason
    assert result.metrics == {}
    assert (len(result.scores), result.best, len(result.history)) == (0, {}, 1)
    assert "interrupted" in result._repr_html_()
    assert result.crowd.num_agents == 2
    assert ci_llm.train(KEYS, output_dir=tmp_path / "run").status == "completed"
    assert same(plain / "final_checkpoint", tmp_path / "run" / "final_checkpoint")


@pytest.mark.slow
def test_an_interrupted_job_is_requeued_after_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM kills the job when it is requeued. The lease is released even later, because training.log needs it."""
    acts: list[str] = []

    def noted(name: str, act: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **keys: (acts.append(name), act(*args, **keys))[1]

    monkeypatch.setattr(job, "write_page", noted("page", job.write_page))
    monkeypatch.setattr(RunLog, "finish_trackers", noted("trackers", RunLog.finish_trackers))
    monkeypatch.setattr(RunMirror, "__exit__", noted("mirror", RunMirror.__exit__))
    monkeypatch.setattr(attempt, "requeue", noted("put back", lambda *_, **__: "SLURM job 7 is put back"))
    monkeypatch.setattr(CheckpointManager, "close", noted("lease", CheckpointManager.close))
    result = ci_llm.train(KEYS, output_dir=tmp_path / "run", callbacks=[StopAt(1)])
    assert result.status == "interrupted"
    assert acts[: acts.index("lease") + 1] == ["page", "trackers", "mirror", "put back", "lease"]
    assert "SLURM job 7 is put back" in (tmp_path / "run/training.log").read_text()


@pytest.mark.slow
def test_the_evaluation_that_ends_a_run_is_made_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[str, int]] = []

    def noted(name: str) -> None:
        real = getattr(Evaluator, name)

        def scores(evaluator: Evaluator, step: int, *how: Any) -> Any:
            scored.append((name, step))
            return real(evaluator, step, *how)

        monkeypatch.setattr(Evaluator, name, scores)

    witness = Witness()
    noted("scores")
    noted("scores_of_base")
    patience = {"early_stopping_patience": 1, "metric_for_best_model": "exact_match", "eval_steps": 1}
    result = ci_llm.train(KEYS, output_dir=tmp_path / "run", callbacks=[witness], **patience)
    assert (result.status, result.step) == ("completed", 2)
    assert scored == [("scores", 1), ("scores", 2), ("scores_of_base", 2)]
    assert [step for event, step in witness.told if event == "evaluate"] == [1, 2]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.metrics["nll"]["crowd"] == logged[-1]["eval/crowd/nll"]


# Without a run


def test_a_configuration_is_a_file_a_mapping_or_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1e-3\nnum_agents: 3\n")
    wanted = ci_llm.Config(learning_rate=5e-4, num_agents=3)
    for given in (file, str(file), {"lr": 1e-3, "num_agents": 3}, ci_llm.Config(lr=1e-3, num_agents=3)):
        assert read_call(given, {"lr": 5e-4}).config == wanted
    read = read_call(file, {"output_dir": tmp_path})
    assert read.lines == (f"{file}; train(...): output_dir={tmp_path}; defaults for all other keys",)
    assert read_call(None, {}).config == ci_llm.Config()
    assert read_call(None, {}, {"mixed_precision": "bf16"}).config.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"config": {"learning_rat": 1, "num_agents": "many"}}, "learning_rat(.|\n)*num_agents"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml"),
        ({"batch_size": 0, "lr": "fast"}, "batch_size(.|\n)*learning_rate"),
        ({"model_name": "embedded", "dataset_name": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"callbacks": [object()]}, "no method for an event"),
        ({"callbacks": [Misspelt()]}, r"has on_step_ends, which nothing calls\n.*\n.*on_step_end,"),
        ({"callbacks": StopAt(1)}, r"callbacks is a StopAt, but takes a list(.|\n)*brackets"),
        (
            {"callbacks": [EarlyStoppingCallback(2)]},
            "EarlyStoppingCallback is a callback of Transformers(.|\n)*a plain class",
        ),
        ({"config": [1]}, "a list is not a configuration"),
    ],
)
def test_bad_input_is_an_exception_that_says_what_and_where(
    keywords: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ci_llm.CiLlmError, match=message):
        ci_llm.train(**keywords)


def test_max_runtime_counts_from_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in a notebook older than `max_runtime` trained nothing and ended the interpreter."""
    calls: list[Any] = []
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    monkeypatch.setattr(job, "run_job", lambda *args, **_: calls.append(args))
    before = time.time()
    ci_llm.train(KEYS, output_dir=tmp_path, max_runtime=1000)
    ((config, interrupts, launch),) = calls
    deadline = watch_walltime(config.max_runtime, launch, Pace(), interrupts).deadline
    assert deadline is not None
    assert before + 1000 <= deadline.at <= time.time() + 1000


def test_a_second_run_at_the_same_time_is_refused() -> None:
    bad: Any = {"config": [1]}  # what a call that may train says
    with call._only_run(), pytest.raises(ci_llm.CiLlmError, match="a run is already training in this process"):
        ci_llm.train(**bad)
    with pytest.raises(ci_llm.CiLlmError, match="not a configuration"):
        ci_llm.train(**bad)
