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


#: Mode -> its keys, and the kernels and copies of a step of two agents on a base of two layers, as they were counted.
MODES: dict[str, tuple[list[str], int]] = {
    "fp32": ([], 302),
    "bf16": (["mixed_precision=bf16"], 345),
    "fp16": (["mixed_precision=fp16"], 341),
    "recomputed": (["use_gradient_checkpointing=true"], 370),
    "dropout": (["lora_dropout=0.1"], 357),
    "dropconnect": (["dropconnect_p=0.1"], 339),
    "swd": (["diversity=swd"], 343),
    "own rows": (["row_weights=bootstrap"], 307),
}


def test_a_step_waits_for_the_device_once_and_starts_no_more_than_was_counted(simulated: Simulated) -> None:
    words: list[str] = []
    for name, (keys, _) in MODES.items():
        own = [*keys, "max_train_steps=3", f"output_dir={name.replace(' ', '_')}"]
        words += ["then"] * bool(words) + simulated.training("save_steps=null", "pass_per_agent=false", *own)
    ran = simulated(*words)
    ran.require_order()
    found = {name: _waits_of_steps(ran, number) for number, name in enumerate(MODES, 1)}
    assert found == {name: [BALLOT] * 3 for name in MODES}
    started = {name: ran.launches(f"{_command(number)}step 3").total() for number, name in enumerate(MODES, 1)}
    assert {name: count for name, count in started.items() if not 0 < count <= MODES[name][1]} == {}


def test_four_agents_on_24_layers_start_few_kernels_and_hardly_more_for_more_rows(simulated: Simulated) -> None:
    program = str(Path(__file__).parent / "programs/launches.py")
    ran = simulated(options=["--program", program, "2000", "short"])
    found = json.loads(ran.said.partition("\nlaunches ")[2].splitlines()[0])
    assert all(each["waits"] == [BALLOT] for each in found.values())
    started = {name: each["launches"] for name, each in found.items()}
    most = {"2000/4": 2350, "2000/8": 2350}  # counted: 2,342; with 151,936 words and long rows 2,413 and 2,486
    assert started.keys() == most.keys()
    assert {name: count for name, count in started.items() if count > most[name]} == {}


def _command(number: int) -> str:
    return f"{number}: " if number > 1 else ""


def _waits_of_steps(ran: Ran, command: int) -> list[str]:
    return [place for step in (1, 2, 3) for place in ran.waits(f"{_command(command)}step {step}")]
