"""From a SIGTERM to a saved checkpoint to the end of the process; and what the ballot costs that makes it possible.

    python -m benchmarks.interrupt_latency                 ten turns each, a few minutes on two cores

Ours (train.py, K = 4 agents) and the HF Trainer with `enable_jit_checkpoint` (one adapter) take turns on the same
embedded base with rows of the same length; each is sent a SIGTERM at the beginning of its eighth forward pass. Ours is
saved when status.json says so: written, synced to the disk, and read back. The Trainer's checkpoint counts as saved
when the mark of its being incomplete is taken away; it is not synced. By design the Trainer waits 3 s before it begins.

The ballot is timed on two processes that do nothing else, beside the step of the embedded default on one of them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ci_llm.embedded
from ci_llm.cli.main import main as command
from ci_llm.config import Config
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.processes import Processes
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import STRUCK, interfere

FORWARD_PASS = 8
ROWS, ROW_TOKENS = 12, 80
BASE = Path(ci_llm.embedded.__file__).parent / "base"
OURS = {
    "max_train_steps": 10_000,
    "batch_size": ROWS,
    "num_workers": 0,
    "report_to": "none",
    "write_report": "false",
    "eval_steps": "null",
    "save_steps": "null",
    "output_dir": "run",
}
BALLOTS, STEPS = 300, 20


# ------------------------------------------------------------------------------------- in the trial's process


def strike(folder: str) -> None:
    """Send oneself the signal, and leave its time."""
    Path(folder, STRUCK).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGTERM)


def train_ours(folder: str) -> int:
    torch.set_num_threads(1)
    os.chdir(folder)
    interfere("ci_llm.crowd.crowd.Crowd.forward", FORWARD_PASS, lambda: strike(folder))
    return command(["train", "--config", os.devnull, *(f"{key}={value}" for key, value in OURS.items())])


def train_with_trainer(folder: str) -> int:
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(BASE)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    passes = iter(range(1, 1_000_000))

    def look(_module: nn.Module, _inputs: tuple[Any, ...]) -> None:
        if next(passes) == FORWARD_PASS:
            strike(folder)

    model.register_forward_pre_hook(look)
    tokens = torch.randint(base.config.vocab_size, (ROWS * 4, ROW_TOKENS))
    settings = TrainingArguments(
        output_dir=f"{folder}/run",
        enable_jit_checkpoint=True,
        per_device_train_batch_size=ROWS,
        max_steps=10_000,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]).train()
    return 0


def time_ballots(folder: str) -> int:
    """Nothing but ballots, on every process of a world."""
    processes = Processes(Config())
    ballot = Ballot(num_targets=1, nonfinite=torch.zeros(4, dtype=torch.bool), sums=torch.zeros(6))
    seconds = []
    for _ in range(BALLOTS):
        began = time.perf_counter()
        processes.agree(ballot)
        seconds.append(time.perf_counter() - began)
    if processes.is_main_process:
        Path(folder, "ballot.json").write_text(json.dumps(seconds))
    processes.shutdown()
    return 0


def time_steps(folder: str) -> int:
    """The embedded default as it is, for a few steps, each of which is logged with its time."""
    torch.set_num_threads(1)
    os.chdir(folder)
    keys = OURS | {"max_train_steps": STEPS, "logging_steps": 1, "eval_samples": 1, "generation_eval_samples": 0}
    return command(["train", "--config", os.devnull, *(f"{key}={value}" for key, value in keys.items())])


# ------------------------------------------------------------------------------------------ in this process


def latency(server: ForkServer, home: Path, system: str, turn: int) -> tuple[float, float]:
    """Seconds from the signal until the checkpoint is saved, and until the process is gone."""
    folder = home / f"{system}{turn}"
    folder.mkdir()
    trial = {"ours": here().train_ours, "trainer": here().train_with_trainer}[system]
    codes = server.run(trial, folder / "log", folder=str(folder))
    gone = time.time()
    assert codes == [0], (folder / "log").read_text()
    struck = float((folder / STRUCK).read_text())
    pattern = {"ours": "run/status.json", "trainer": "run/checkpoint-*"}[system]
    [saved] = folder.glob(pattern)
    return saved.stat().st_mtime - struck, gone - struck


def cost_of_the_ballot(server: ForkServer, home: Path) -> tuple[float, float]:
    """Seconds of one ballot on two processes, and of one step; medians."""
    assert server.run(here().time_ballots, home / "log", ranks=2, folder=str(home)) == [0, 0], (
        home / "log"
    ).read_text()
    assert server.run(here().time_steps, home / "log", folder=str(home)) == [0], (home / "log").read_text()
    ballots = json.loads((home / "ballot.json").read_text())
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_time_s"] for line in lines if "step_time_s" in line]
    return statistics.median(ballots), statistics.median(steps)


def here() -> Any:
    """This module by its name: the fork server cannot call functions of `__main__`."""
    return importlib.import_module("benchmarks.interrupt_latency")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    turns = parser.parse_args().turns
    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "trainer": []}
    with ForkServer("benchmarks.interrupt_latency") as server, tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns):
            for system, found in figures.items():
                found.append(latency(server, Path(scratch), system, turn))
        ballot, step = cost_of_the_ballot(server, Path(scratch))
    names = {"ours": "CI-LLM, K = 4 agents", "trainer": "HF Trainer, enable_jit_checkpoint, 1 adapter"}
    print("| | SIGTERM to saved, s (median / worst) | SIGTERM to exit, s (median / worst) |\n|---|---|---|")
    for system, found in figures.items():
        cells = [f"{statistics.median(column):.2f} / {max(column):.2f}" for column in zip(*found, strict=True)]
        print(f"| {names[system]} | {' | '.join(cells)} |")
    print(f"\nballot on 2 processes {ballot * 1e3:.3f} ms, step {step * 1e3:.0f} ms: {ballot / step:.3%}")


if __name__ == "__main__":
    main()
