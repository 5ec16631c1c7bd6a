"""A run on a simulated GPU: it resumes bit for bit, its losses are those of the CPU, and it waits once per step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ci_llm.checkpoints.checkpoint import load_checkpoint
from tests.accelerator.conftest import Ran, Simulated

pytestmark = pytest.mark.slow

BALLOT = "distributed/ballot.py:encode"
DRAWS = ["lora_dropout=0.1", "dropconnect_p=0.1", "lr_scheduler_type=constant"]


def agents_in(folder: Path) -> dict[str, torch.Tensor]:
    state = load_checkpoint(folder / "final_checkpoint").state
    return {f"{k}.{name}": each for k in range(2) for name, each in state[f"agent{k}/adapter_model"].items()}


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/task_loss"] for line in lines if "train/task_loss" in line]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_the_losses_of_the_cpu(simulated: Simulated) -> None:
    words = [*simulated.training(*DRAWS, "deterministic=true"), "output_dir=parts"]
    whole = [*words, "output_dir=whole", "max_train_steps=4"]
    ran = simulated(*whole, "then", *words, "max_train_steps=2", "then", *words, "max_train_steps=4")
    ran.require_order()
    found, wanted = agents_in(simulated.folder / "parts"), agents_in(simulated.folder / "whole")
    assert all(torch.equal(each, found[name]) for name, each in wanted.items())

    simulated.on_cpu(*words, "output_dir=cpu", "max_train_steps=4")
    on_cpu = _losses(simulated.folder / "cpu")
    assert len(on_cpu) == 4
    assert _losses(simulated.folder / "whole") == pytest.approx(on_cpu, rel=1e-4)


MODES = {
    "fp32": [],
    "bf16": ["mixed_precision=bf16"],
    "fp16": ["mixed_precision=fp16"],
    "one pass": ["pass_per_agent=false"],
    "recomputed": ["use_gradient_checkpointing=true"],
    "dropout": ["lora_dropout=0.1"],
    "dropconnect": ["dropconnect_p=0.1"],
    "ivon": ["optimizer=ivon"],
    "swd": ["diversity=swd"],
    "own rows": ["row_weights=bootstrap"],
}


def test_a_step_waits_for_the_device_once_whatever_the_mode(simulated: Simulated) -> None:
    words: list[str] = []
    for name, keys in MODES.items():
        own = [*keys, "max_train_steps=3", f"output_dir={name.replace(' ', '_')}"]
        words += ["then"] * bool(words) + simulated.training("save_steps=null", *own)
    ran = simulated(*words)
    ran.require_order()
    found = {name: _waits_of_steps(ran, number) for number, name in enumerate(MODES, 1)}
    assert found == {name: [BALLOT] * 3 for name in MODES}


def _waits_of_steps(ran: Ran, command: int) -> list[str]:
    prefix = f"{command}: " if command > 1 else ""
    return [place for step in (1, 2, 3) for place in ran.waits(f"{prefix}step {step}")]
