"""Does a run in bf16 learn what the same run learns in fp32? Loss curves of both, beside the spread between seeds.

    python -m benchmarks.precision --dataset FOLDER --folder runs

FOLDER is a `save_to_disk` copy of GSM8K; without it, only the embedded base is trained on its own task. Each run is a
training by `ci_llm.train`: four agents of rank 16, two rows a step. Its curve is the mean loss of the agents over
windows of 20 steps, and it ends with the NLL of held-out rows in the run's own precision. All runs take the rows in one
order, so that seeds differ in the agents' random starts alone.

Runs stay in `--folder`: a later call resumes one that was interrupted, and takes the results of the others.

Legend: S seeds, W windows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.gsm8k import texts, trained_tokenizer
from benchmarks.step import random_base
from ci_llm import train
from ci_llm.core.durable import read_json

PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "fp32": {"mixed_precision": "no"},
    "bf16": {"mixed_precision": "bf16", "model_dtype": "bf16"},
    "bf16, base in fp32": {"mixed_precision": "bf16"},
}
TASKS = {
    "gsm8k": "the embedded base on GSM8K",
    "random": "a random Llama of 15M parameters on GSM8K",
    "embedded": "the embedded base on its own task",
}
WINDOW = 20
KEYS = {
    "num_agents": 4,
    "lora_rank": 16,
    "lora_alpha": 32,
    "batch_size": 2,
    "learning_rate": 2e-3,
    "num_warmup_steps_ratio": 0.08,
    "data_seed": 0,
    "num_workers": 0,
    "logging_steps": WINDOW,
    "eval_steps": None,
    "eval_samples": 200,
    "generation_eval_samples": 1,
    "save_steps": 50,
    "report_to": "none",
    "write_report": False,
}


@dataclass(frozen=True, eq=False)
class Curves:
    """What one precision came to with every seed.

    Attributes:
        losses: [S, W], nats per target token, the mean of the agents.
        agents_nll, crowd_nll: [S], of the held-out rows; of the agents the mean.
    """

    losses: Tensor
    agents_nll: Tensor
    crowd_nll: Tensor

    @classmethod
    def of(cls, runs: Sequence[Path]) -> Curves:
        """From the folders of the runs, one for each seed."""
        lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()] for run in runs]
        losses = [[one["train/task_loss"] for one in listed if "train/task_loss" in one] for listed in lines]
        final = [read_json(run / "evaluation.json")["nll"] for run in runs]
        agents = torch.tensor([one["agents"] for one in final], dtype=torch.float64).mean(1)
        crowd = torch.tensor([one["crowd"] for one in final], dtype=torch.float64)
        return cls(torch.tensor(losses, dtype=torch.float64), agents, crowd)

    @property
    def columns(self) -> Tensor:
        """[S, W + 2]: the curve, then the NLL of agents and crowd."""
        return torch.cat([self.losses, self.agents_nll[:, None], self.crowd_nll[:, None]], dim=1)


def task_keys(task: str, dataset: Path | None, folder: Path) -> dict[str, Any]:
    """The keys that name the base and the rows."""
    if dataset is None:
        return {"eval_split": "validation"}
    rows = {"dataset_name": str(dataset.absolute())}
    return rows if task == "gsm8k" else {**rows, "model_name": str(saved_base(dataset, folder))}


def saved_base(dataset: Path, folder: Path) -> Path:
    """The random Llama with a tokenizer trained on the rows, written once."""
    path = folder / "random_base"
    if not path.exists():
        questions, answers = texts(dataset)
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained_tokenizer([*questions, *answers]), **names)
        partial = folder / "random_base.partial"
        tokenizer.save_pretrained(partial)
        random_base("15M").save_pretrained(partial)
        os.replace(partial, path)
    return path


def curves(
    task: str, keys: Mapping[str, Any], precisions: Sequence[str], seeds: Sequence[int], folder: Path
) -> dict[str, Curves]:
    """Every precision with every seed: trained now, or taken from `folder`."""
    runs: dict[str, list[Path]] = {name: [] for name in precisions}
    for seed in seeds:
        for name in precisions:
            run = folder / f"{task}-{keys['max_train_steps']}" / name.replace(", ", "_").replace(" ", "_") / f"{seed}"
            result = train({**keys, **PRECISIONS[name]}, seed=seed, output_dir=str(run))
            if result.status != "completed":
                raise SystemExit(f"interrupted ({result.reason}): the same command resumes")
            runs[name].append(run)
            print(f"trained   {task}, {name}, seed {seed}", file=sys.stderr, flush=True)
    return {name: Curves.of(paths) for name, paths in runs.items()}


def table(found: Mapping[str, Curves]) -> str:
    """In markdown, a line for each window: the mean of every precision over the seeds; beside the first, the spread
    between the seeds; beside each other, the largest difference from the first with the same seed."""
    fp32, *others = found.values()
    named = [f"to step {WINDOW * (w + 1)}" for w in range(fp32.losses.shape[1])]
    columns = [fp32.columns.mean(0), fp32.columns.amax(0) - fp32.columns.amin(0)]
    for each in others:
        columns += [each.columns.mean(0), (each.columns - fp32.columns).abs().amax(0)]
    first, *names = found
    heads = [first, "highest minus lowest seed", *(head for name in names for head in (name, "largest difference"))]
    out = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, values in zip(
        [*named, "agents, held out", "crowd, held out"], torch.stack(columns, 1).tolist(), strict=True
    ):
        out.append(f"| {name} | {' | '.join(f'{value:.4f}' for value in values)} |")
    return "\n".join(out)


def main() -> None:
    """Print a markdown table for each base and its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a `save_to_disk` copy of GSM8K")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all; without --dataset: embedded")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS], help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--folder", type=Path, help="keep runs here, and take those that are there")
    options = parser.parse_args()
    tasks = options.tasks or (["embedded"] if options.dataset is None else [*TASKS])
    if options.dataset is None and tasks != ["embedded"]:
        parser.error("gsm8k and random need --dataset")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            dataset = None if task == "embedded" else options.dataset
            keys = {**KEYS, **task_keys(task, dataset, folder), "max_train_steps": options.steps}
            print(
                f"{TASKS[task]}\n\n{table(curves(task, keys, options.precisions, options.seeds, folder))}\n", flush=True
            )


if __name__ == "__main__":
    main()
