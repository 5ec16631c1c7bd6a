"""Transformers' Trainer with our callback: killed or told to stop at a step, it resumes and ends with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ci_llm import TrainerCheckpoints
from ci_llm.checkpoints.layout import numbered_steps
from ci_llm.errors import ConfigError, ForeignCheckpoint
from examples import hf_trainer
from tests.support.campaign import sampled
from tests.support.loader_workers import batches_despite_signals
from tests.support.loops import ends_twice
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import interfere

QUIET = {"disable_tqdm": True}
#: Of a Trainer's log, what no two runs have in common.
CLOCK = ("runtime", "per_second")


def on_lora(config: GPT2Config) -> Any:
    """A base that stays as it is, with an adapter."""
    adapter = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["c_attn"], init_lora_weights=False)
    return peft.get_peft_model(GPT2LMHeadModel(config), adapter)


def trained(folder: str, changes: Mapping[str, Any], lora: bool, sent: str | None = None, step: int = 0) -> int:
    """In a process of its own: the example, which sends itself a signal at the end of a step."""
    torch.set_num_threads(1)
    if lora:
        hf_trainer.GPT2LMHeadModel = on_lora
    if sent is not None:
        place = "ci_llm.checkpoints.manager.CheckpointManager.reached_preemption"
        interfere(place, step, lambda: os.kill(os.getpid(), signal.Signals[sent]))
    reason = hf_trainer.train(Path(folder), **QUIET, **changes)
    return 75 if reason else 0


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer has logged, less the clock and the summary of the last call."""
    lines = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in line.items() if not k.endswith(CLOCK)} for line in lines if "train_runtime" not in line]


CASES: dict[str, tuple[dict[str, Any], bool, int]] = {
    "accumulation": ({}, False, 1),
    "ends within an epoch": ({"max_steps": 33, "gradient_accumulation_steps": 1}, False, 1),
    "order by length": ({"train_sampling_strategy": "group_by_length"}, False, 1),
    "workers": ({"dataloader_num_workers": 2}, False, 1),
    "adapter": ({}, True, 1),
    "evaluated by epoch": ({"eval_strategy": "epoch", "logging_strategy": "epoch"}, False, 1),
    "two processes": ({"per_device_train_batch_size": 2}, False, 2),
}


@pytest.mark.parametrize("case", sampled([*CASES], ("workers", "adapter", "two processes")))
def test_a_run_ends_with_the_same_bits(case: str, server: ForkServer, tmp_path: Path) -> None:
    changes, lora, processes = CASES[case]
    straight, again = ends_twice(
        lambda folder, **told: server.run(
            trained, folder / "log", folder=str(folder), ranks=processes, changes=changes, lora=lora, **told
        ),
        tmp_path,
        kill_at=12,
        stop_after=11,
    )
    assert log_of(straight) == log_of(again)


class Rows(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((4,), number), "labels": torch.full((4,), number)}


class Drawing(Rows):
    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 31, (4,))
        return {"input_ids": tokens, "labels": tokens}


def trainer(
    folder: Path, callbacks: list[Any], rows: Dataset | None = None, model: Any = None, **changes: Any
) -> Trainer:
    how = {"max_steps": 6, "save_strategy": "no", "report_to": "none", "use_cpu": True, **QUIET, **changes}
    arguments = TrainingArguments(str(folder / "own"), per_device_train_batch_size=4, **how)
    torch.manual_seed(0)
    made = model or GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=12, n_embd=8, n_layer=1, n_head=1))
    given = rows or Rows()
    return Trainer(model=made, args=arguments, train_dataset=given, eval_dataset=Rows(), callbacks=callbacks)


def resumed(trainer: Trainer, checkpoints: TrainerCheckpoints) -> Trainer:
    """A trainer after its call of `train`, as the documentation has it."""
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))
    return trainer


@pytest.mark.slow
def test_a_training_that_would_begin_again_is_refused(tmp_path: Path) -> None:
    checkpoints = TrainerCheckpoints(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer\.train\(resume_from_checkpoint=checkpoints\.resume\(trainer\)\)"):
        trainer(tmp_path, [checkpoints]).train()
    resumed(trainer(tmp_path, [checkpoints]), checkpoints)
    second = trainer(tmp_path, [checkpoints])
    checkpoints.resume(second)
    with pytest.raises(ConfigError, match="would not resume from its newest checkpoint"):
        second.train()


@pytest.mark.slow
def test_loader_workers_keep_working_when_they_are_signalled_too(tmp_path: Path) -> None:
    checkpoints = TrainerCheckpoints(tmp_path / "run")
    made = trainer(tmp_path, [checkpoints], dataloader_num_workers=2, per_device_eval_batch_size=1)
    checkpoints.resume(made)
    made._train_batch_size = 1
    for loader in (made.get_train_dataloader(), made.get_eval_dataloader()):
        assert len(batches_despite_signals(loader, workers=2)) == len(Rows())
    checkpoints._end()
    assert not vars(made).keys() & {"get_train_dataloader", "get_eval_dataloader"}


@pytest.mark.slow
def test_handlers_are_given_back_whatever_ends_the_training(tmp_path: Path) -> None:
    class Torn(Rows):
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            raise OSError("torn")

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

    before = handlers()
    for rows in (Rows(), Torn()):
        checkpoints = TrainerCheckpoints(tmp_path / f"run{type(rows).__name__}")
        own = trainer(tmp_path, [checkpoints], rows)
        point = checkpoints.resume(own)
        assert handlers() != before
        with pytest.raises(OSError, match="torn") if isinstance(rows, Torn) else contextlib.nullcontext():
            own.train(resume_from_checkpoint=point)
        assert handlers() == before
        assert not {"_inner_training_loop", "_load_from_checkpoint"} & vars(own).keys()


@pytest.mark.slow
def test_another_loop_model_or_base_is_refused(tmp_path: Path) -> None:
    checkpoints = TrainerCheckpoints(tmp_path / "run")
    resumed(trainer(tmp_path, [checkpoints]), checkpoints)
    wider = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=12, n_embd=16, n_layer=1, n_head=1))
    frozen = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=12, n_embd=8, n_layer=1, n_head=1))
    frozen.transformer.wte.weight.requires_grad = False
    for odd, message in (
        (trainer(tmp_path, [checkpoints], gradient_accumulation_steps=2), "gradient_accumulation_steps was 1, is 2"),
        (trainer(tmp_path, [checkpoints], model=wider), "the model is another one"),
        (trainer(tmp_path, [checkpoints], model=frozen), "frozen weights was"),
    ):
        with pytest.raises(ForeignCheckpoint, match=message):
            resumed(odd, checkpoints)


@pytest.mark.parametrize("changes", [{"auto_find_batch_size": True}, {"ignore_data_skip": True}])
def test_settings_that_cannot_resume_exactly_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoints = TrainerCheckpoints(tmp_path / "run")
    with pytest.raises(ConfigError, match=next(iter(changes))):
        checkpoints.resume(trainer(tmp_path, [checkpoints], **changes))


@pytest.mark.slow
def test_rows_that_draw_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rows, told in ((Rows(), False), (Drawing(), True)):
        caplog.clear()
        checkpoints = TrainerCheckpoints(tmp_path / f"run{told}")
        resumed(trainer(tmp_path, [checkpoints], rows, eval_strategy="steps", eval_steps=2), checkpoints)
        assert ("make it a function of the row" in caplog.text) is told


@pytest.mark.slow
def test_a_save_that_is_asked_for_during_an_evaluation_is_of_its_step(tmp_path: Path) -> None:
    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    checkpoints = TrainerCheckpoints(tmp_path / "run", save_interval_steps=None)
    resumed(trainer(tmp_path, [checkpoints, Asks()], eval_strategy="steps", eval_steps=2, max_steps=4), checkpoints)
    assert numbered_steps(tmp_path / "run") == [2, 4]


@pytest.mark.slow
def test_the_patience_of_early_stopping_survives(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [TrainerCheckpoints(tmp_path / "run"), EarlyStoppingCallback(3, early_stopping_threshold=1e9)]

    how = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 20}
    how |= {"load_best_model_at_end": False}
    first = callbacks()
    own = trainer(tmp_path, first, **how)
    interrupts_after = 2

    class Stop(type(own.callback_handler.callbacks[0])):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == interrupts_after:
                os.kill(os.getpid(), signal.SIGTERM)

    own.callback_handler.callbacks.insert(0, Stop())
    resumed(own, first[0])
    assert (first[0].interrupted, own.state.global_step) == ("signal:SIGTERM", 2)
    second = callbacks()
    later = resumed(trainer(tmp_path, second, **how), second[0])
    assert (second[0].interrupted, later.state.global_step) == (None, 4)
    third = callbacks()
    over = resumed(trainer(tmp_path, third, **how), third[0])
    assert over.state.global_step == 4, "a run that has stopped early is over"
