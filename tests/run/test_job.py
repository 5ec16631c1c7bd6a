"""The main job as a user sees it: what it leaves, the second call, interruption, what is refused and stays whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cli.main import main
from ci_llm.core import determinism, run_folder
from ci_llm.core.run_folder import read_failures
from ci_llm.core.run_status import read_status
from ci_llm.crowd import publishing
from ci_llm.distributed.ballot import Verdict
from ci_llm.embedded import BASE_FOLDER
from ci_llm.logs.run_log import RunLog
from ci_llm.run import evaluation, loop
from ci_llm.run.mirroring import RunMirror
from tests.support.bit_flips import flip

pytestmark = pytest.mark.usefixtures("threads_as_they_were")
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs.yaml"
SMALL = [
    "num_agents=3",
    "lora_rank=2",
    "max_train_steps=6",
    "batch_size=4",
    "eval_samples=8",
    "generation_eval_samples=2",
    "max_new_tokens_eval=4",
    "eval_steps=4",
    "save_steps=2",
]
SMALL += ["logging_steps=2", "max_train_samples=20", "num_workers=0", "learning_rate=5e-3", "save_total_limit=2"]


def train(folder: Path, *words: str) -> int:
    return main(["train", "--config", str(CONFIG), *SMALL, f"output_dir={folder}", *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, which a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.slow
def test_a_completed_run_leaves_the_documented_files(finished: Path) -> None:
    assert (read_status(finished).status, read_status(finished).total_steps) == ("completed", 6)
    assert f"config    {CONFIG}; command line: num_agents=3 " in (finished / "training.log").read_text()
    assert sorted(p.name for p in finished.glob("checkpoint_step_*")) == ["checkpoint_step_4", "checkpoint_step_6"]
    for name in ("training.log", "tensorboard", "evaluation.json", "final_checkpoint/README.md"):
        assert (finished / name).exists()
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/task_loss" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "eval/crowd/nll" in line] == [4]
    assert lines[-1]["train/task_loss"] < lines[0]["train/task_loss"]
    wanted = {"train/agent0/loss", "train/agent2/grad_norm", "train/diversity", "train/learning_rate", "epoch"}
    assert wanted | {"tokens_per_s", "step_time_s"} <= set(lines[0])
    record = json.loads((finished / "evaluation.json").read_text())
    assert record["n"] == 2
    assert record["teacher_forced"]["n"] == 8
    assert len(record["exact_match"]["agents"]) == len(record["nll"]["agents"]) == 3


@pytest.mark.slow
def test_the_evaluation_at_the_end_is_the_last_point_in_tensorboard(finished: Path) -> None:
    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    record = json.loads((finished / "evaluation.json").read_text())
    crowd = [(event.step, event.value) for event in events.Scalars("eval/crowd/nll")]
    assert [step for step, _ in crowd] == [4, 6]
    assert crowd[-1][1] == pytest.approx(record["nll"]["crowd"])
    for name in ("crowd", "vote"):
        [final] = events.Scalars(f"final/{name}/exact_match")
        assert (final.step, final.value) == (6, pytest.approx(record["exact_match"][name]))
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_and_no_base(finished: Path) -> None:
    folder = finished / "checkpoint_step_6"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for name in ("ci_llm_meta_config.json", "config.yaml", "manifest.json", "optimizer.safetensors", "scheduler.json"):
        assert name in files
    assert "tokenizer/tokenizer.json" in files
    adapters = [load_file(folder / f"agent{k}/adapter_model.safetensors") for k in range(3)]
    assert all("lora_" in name for name in adapters[0])
    trainable = sum(t.numel() * 4 for adapter in adapters for t in adapter.values())
    tokenizer = sum(p.stat().st_size for p in (folder / "tokenizer").iterdir())
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) - tokenizer < 5 * trainable


@pytest.mark.slow
def test_every_agent_of_the_final_checkpoint_can_be_used_alone(finished: Path) -> None:
    final = finished / "final_checkpoint"
    verify_folder(final)
    assert not (finished / "checkpoint_step_6" / "agent0" / "tokenizer.json").exists(), "one copy is enough to resume"
    run_wide = AutoTokenizer.from_pretrained(final / "tokenizer")
    for k in range(3):
        own = AutoTokenizer.from_pretrained(final / f"agent{k}")
        assert own.chat_template == run_wide.chat_template
        assert own("3 + 4 = ").input_ids == run_wide("3 + 4 = ").input_ids
        targets = json.loads((final / f"agent{k}" / "adapter_config.json").read_text())["target_modules"]
        tensors = load_file(final / f"agent{k}" / "adapter_model.safetensors")
        assert targets == sorted({name.split(".")[-3] for name in tensors})
    assert '--lora-modules agent0="$PWD/agent0" agent1=' in (final / "README.md").read_text()
    assert "--max-lora-rank 8" in (final / "README.md").read_text(), "vLLM knows no rank of 2"


@pytest.mark.slow
def test_a_push_that_was_interrupted_does_not_evaluate_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise every attempt of a job that ends before its upload would evaluate again."""

    def broken_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "publish", broken_off)
    words = ["max_train_steps=2", "push_to_hub=true"]
    assert train(tmp_path, *words) == 130
    assert read_status(tmp_path).status == "completed"
    monkeypatch.setattr(publishing, "publish", lambda *_: SimpleNamespace(url="https://there", private=True))
    capsys.readouterr()
    assert train(tmp_path, *words) == 0
    said = capsys.readouterr().out
    assert "complete at step 2" in said
    assert "hub       https://there" in said


@pytest.mark.slow
@pytest.mark.parametrize("last", [(RunLog, "finish_trackers"), (RunMirror, "__exit__")])
def test_a_call_interrupted_in_its_last_cleanup_releases_folder_and_log(
    last: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a notebook survives a second Ctrl-C, and its next call must be able to take the folder."""

    def broken_off(*_: object) -> None:
        monkeypatch.undo()  # once
        raise KeyboardInterrupt

    handlers = logging.getLogger("ci_llm").handlers[:]
    monkeypatch.setattr(*last, broken_off)
    assert train(tmp_path, "max_train_steps=1") == 130
    with CheckpointManager(tmp_path) as manager:
        manager.store.acquire_lease()
    assert logging.getLogger("ci_llm").handlers == handlers


def test_the_folder_of_a_sweep_is_refused_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    for words in ([], ["overwrite_output_dir=true"]):
        assert train(tmp_path, *words) == 2
        assert "this folder holds a sweep and not a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


@pytest.mark.slow
def test_a_run_with_more_steps_resumes_and_says_that_it_is_longer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(run, "max_train_steps=8") == 0
    said = capsys.readouterr().out
    assert "step 6 of 8" in said
    assert "a run of this length from step 0 ends with other weights" in said
    assert "exactness: bitwise; another run from here on (max_train_steps)\n" in said
    assert read_status(run).step == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_agents=2"], "num_agents was 3, is 2"),
        (["learning_rate=1e-3"], "learning_rate was 0.005, is 0.001"),
        (["restart_from=5"], "this run has no step 5: it holds 4, 6"),
    ],
)
def test_a_run_that_would_not_be_the_same_is_refused(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    assert train(run, "max_train_steps=8", *words) == 2
    told = capsys.readouterr().err
    assert message in told
    if words[0].startswith("learning_rate"):
        assert "experiment_name=NAME begins a new run beside it; overwrite_output_dir=true begins" in told
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
def test_another_version_of_a_library_is_named_and_not_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = determinism.version
    monkeypatch.setattr(determinism, "version", lambda name: "0.1" if name == "numpy" else real(name))
    assert train(run, "restart_from=4") == 0
    assert f"exactness: sample-exact (numpy {real('numpy')} -> 0.1)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "grade"),
    [
        (
            ["learning_rate=1e-3", "use_gradient_checkpointing=true"],
            "sample-exact (use_gradient_checkpointing False -> True); another run from here on (learning_rate)\n",
        ),
        (["max_train_samples=10"], "bitwise; another run from here on (max_train_samples, training rows)\n"),
        (["logging_steps=1"], "bitwise\n"),
    ],
)
def test_the_log_says_how_exact_a_run_with_other_settings_is(
    run: Path, words: list[str], grade: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(run, "restart_from=4", *words, "allow_inexact_resume=true") == 0
    assert f"exactness: {grade}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("final_checkpoint", [], "nothing is left to train: the checkpoint is of step 6, and this run ends at step 6"),
        ("checkpoint_step_6", ["max_train_steps=3"], "the checkpoint is of step 6, and this run ends at step 3"),
    ],
)
def test_a_run_that_begins_at_its_last_step_is_refused_before_any_evaluation(
    name: str, words: list[str], message: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", f"resume_from_checkpoint={finished / name}", *words) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "max_train_steps=12 trains on" in told.err
    assert "evaluate  " not in told.out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_completed_run_whose_results_are_damaged_is_evaluated_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "evaluation.json").read_bytes()
    (run / "evaluation.json").write_text('{"task": "x')
    assert train(run) == 0
    assert "cannot be read, the run is evaluated again" in capsys.readouterr().out
    assert (run / "evaluation.json").read_bytes() == before
    assert verify_folder(run / "final_checkpoint").step == 6


@pytest.mark.slow
def test_a_completed_run_writes_a_damaged_final_checkpoint_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = run / "final_checkpoint"
    before = (final / "manifest.json").read_bytes()
    flip(final / "agent0/adapter_model.safetensors", -1)
    assert train(run) == 0
    said = capsys.readouterr().out
    assert "final_checkpoint is damaged: " in said
    assert "agent0/adapter_model" in said
    assert "it is made again from step 6" in said
    assert verify_folder(final).files.keys() == json.loads(before)["files"].keys()
    assert train(run) == 0
    assert "This run is complete at step 6" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_whose_checkpoints_go_bad_while_it_is_evaluated_is_no_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "evaluation.json").unlink()
    card = evaluation.final_card

    def damaged(*given: Any) -> str:
        for name in ("final_checkpoint", "checkpoint_step_6"):
            flip(run / name / "optimizer.safetensors", -1)
        return card(*given)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "final_card", damaged)
        assert train(run) == 1
    assert "there is no step 6; committed: 4" in capsys.readouterr().err
    assert read_status(run).status == "failed"
    assert not (run / "final_checkpoint").exists(), "it would hold step 4 beside the results of step 6"
    assert train(run) == 0
    assert verify_folder(run / "final_checkpoint").step == 6


@pytest.mark.slow
def test_an_overwritten_run_is_moved_aside_and_the_new_one_uses_nothing_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "recovery.json").write_text(json.dumps({"learning_rate_factor": 0.5}))
    evaluated = ("predictions.jsonl", "predictions.source.json", "calibration.json")
    for name in evaluated:
        (run / name).write_text("{}")
    words = ("overwrite_output_dir=true", "max_train_steps=5")
    assert train(run, *words) == 0
    told = capsys.readouterr().out
    assert "a fresh start" in told
    assert "recovery:" not in told
    assert read_status(run / "overwritten/1").step == 6
    assert all((run / "overwritten/1" / name).exists() and not (run / name).exists() for name in evaluated)
    assert verify_folder(run / "overwritten/1/final_checkpoint").step == 6
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[0] == 2
    assert train(run, *words) == 0
    assert "complete at step 5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_until_the_call_says_where_to_begin(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"final_checkpoint", "checkpoint_step_4", "checkpoint_step_6"}
    shutil.copytree(run / "checkpoint_step_4", tmp_path / "kept" / "checkpoint_step_4")
    for name in names:
        flip(run / name / "optimizer.safetensors", -1)
    for _ in range(2):  # the second call finds them in quarantine
        assert train(run) == 1
        told = capsys.readouterr().err
        assert "every checkpoint from which this run could resume is damaged" in told
        assert "restart_from=PATH" in told
        assert "overwrite_output_dir=true" in told
        status = read_status(run)
        assert (status.status, status.reason) == ("failed", "error:ProgressLost")
    assert {path.name for path in (run / "quarantine").iterdir()} == names
    assert train(run, f"restart_from={tmp_path / 'kept/checkpoint_step_4'}") == 0
    assert "step 4 of 6" in capsys.readouterr().out
    assert {path.name for path in (run / "overwritten/1/quarantine").iterdir()} == names
    assert verify_folder(run / "final_checkpoint").step == 6


def test_a_folder_in_the_place_of_a_file_of_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/status.json").mkdir(parents=True)
    assert train(tmp_path / "run") == 2
    told = capsys.readouterr().err
    assert "a folder has the name of a file that a run writes: status.json" in told
    assert "Traceback" not in told
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status.json"]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_agent=3"], "did you mean num_agents"),
        (["num_agents=0"], "whole number of at least 1"),
        (["dataset_name=/nowhere.jsonl"], "does not exist"),
        (["lora_target_modules=[nothing]"], "matches nothing"),
        (["model_name=/nowhere/model"], "there is no such folder"),
        (["mixed_precision=fp16"], "fp16 needs a GPU"),
        (["max_seq_length=2"], "No row is left"),
        (["max_seq_length=600"], "rows of up to 600 tokens, but the base has 512 positions"),
        (["output_dir=/proc/nothing"], "nothing can be written here"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert train(tmp_path / "run", *words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_tokens_that_the_base_does_not_know_are_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token was added to the tokenizer without resizing the embeddings of the base."""
    base = Path(shutil.copytree(BASE_FOLDER, tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(base)
    questions = ("2+2?", "1+1?", "<new>?", "3+3?")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{each}", "answer": "4"}}\n' for each in questions))
    words = (f"model_name={base}", f"dataset_name={tmp_path / 'rows.jsonl'}", "eval_split=train")
    assert train(tmp_path / "run", *words) == 2
    said = capsys.readouterr().err
    assert "and the base has embeddings for tokens 0 to" in said
    assert "rows.jsonl, split train, row 2 (counted from 0)" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_rows_under_the_name_of_the_old_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "mine.jsonl"
    keys = [f"dataset_name={data}", "generation_eval_samples=0", "eval_samples=1", "eval_steps=null"]

    def write(answer: str) -> None:
        data.write_text("".join(f'{{"question": "What is {n}?", "answer": "{answer} {n}"}}\n' for n in range(8)))

    write("It is")
    assert train(tmp_path / "run", *keys, "max_train_steps=1") == 0
    write("That is")
    assert train(tmp_path / "run", *keys, "max_train_steps=2") == 2
    assert "the training rows are not those of the checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_resumes_to_the_same_bits(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged records of where it stood and where it began are named, and hinder no resume."""
    folder, original = tmp_path / "run", loop.agree_on_gradients

    def interrupted(trainer: Any, attempt: Any, step: int, *rest: Any) -> Verdict:
        if step == 2:
            attempt.interrupts.request_stop("signal:SIGTERM")
        return original(trainer, attempt, step, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "agree_on_gradients", interrupted)
        assert train(folder) == 0
    status = read_status(folder)
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", 3)
    assert "step 3 is saved" in capsys.readouterr().out
    damaged = ("status.json", "beginning.json")
    for file in map(folder.joinpath, damaged):
        file.write_bytes(b"\x00" + file.read_bytes()[1:])
    assert train(folder) == 0
    said = capsys.readouterr().out
    assert "exactness: bitwise" in said
    assert all(name in said for name in damaged)
    assert read_status(folder).status == "completed"
    for name in ("optimizer.safetensors", "rng.safetensors", "agent1/adapter_model.safetensors"):
        assert (folder / "final_checkpoint" / name).read_bytes() == (finished / "final_checkpoint" / name).read_bytes()


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_start_is_recorded_as_a_failure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr("ci_llm.logs.run_log.write_bytes", full)  # which cuts metrics.jsonl back
        with pytest.raises(OSError, match="No space left"):
            train(run, "max_train_steps=8")
    status = read_status(run)
    assert (status.status, status.reason, status.attempt, status.step) == ("failed", "disk_full", 2, 6)
    assert status.first_loss is not None, "the next attempt compares with it"
    assert [failure.reason for failure in read_failures(run, 2)] == ["disk_full"]
    with monkeypatch.context() as disk:
        disk.setattr(run_folder, "record_attempt", full)
        assert train(run, "max_train_steps=8") == 1
    assert read_status(run).attempt == 2, "the third one has not begun"
    assert train(run, "max_train_steps=8") == 0
