"""One adapter in TRL's SFTTrainer, K times, beside K agents of ours: the CPU time that the same rows take.

The base, adapters and rows are those of `benchmarks/step.py`, on one CPU thread in fp32. SFTTrainer trains one adapter
with each of the settings below; what counts is the best one. Its time is that between the beginning and the end of
its steps, so without its data loader and its start; four runs are taken to cost four times as much. Ours takes the
same rows, eight in a step. TRL is no dependency of this project: `pip install trl` first.

packing      rows one after the other up to a length, kept apart by their positions ("bfd")
no packing   eight rows, padded to the longest
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.gsm8k import LONGEST, batches
from benchmarks.step import ALPHA, LEARNING_RATE, MAX_NORM, PROJECTIONS, RANK, SIZES, K, Ours, random_base
from ci_llm import embedded
from ci_llm.data.batches import Batch

ROWS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "packing up to 512 tokens": {"packing": True, "max_length": LONGEST, "per_device_train_batch_size": 3},
    "packing up to 1,024 tokens": {"packing": True, "max_length": 1024, "per_device_train_batch_size": 1},
    "no packing": {"packing": False, "max_length": LONGEST, "per_device_train_batch_size": ROWS},
}


class _Clock(TrainerCallback):
    """The CPU seconds of all steps together."""

    def __init__(self) -> None:
        self.began, self.cpu_s = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.cpu_s += time.process_time() - self.began


def dataset_of(rows: list[Batch]) -> Dataset:
    """The rows as SFTTrainer takes what is tokenised already."""
    found = []
    for batch in rows:
        targets = torch.zeros(len(batch.input_ids), dtype=torch.long)
        targets[batch.predict_from + 1] = 1
        for begin, end in zip(batch.bounds[:-1], batch.bounds[1:], strict=True):
            found.append(
                {"input_ids": batch.input_ids[begin:end].tolist(), "completion_mask": targets[begin:end].tolist()}
            )
    return Dataset.from_list(found)


def sft_cpu_s(base: PreTrainedModel, rows: Dataset, settings: dict[str, Any], folder: str) -> float:
    """CPU seconds of one pass of SFTTrainer over the rows, with one adapter."""
    clock = _Clock()
    arguments = SFTConfig(
        folder,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        completion_only_loss=True,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **{"bf16": False, **settings},
    )
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)  # for its padding; the rows are tokens
    SFTTrainer(
        copy.deepcopy(base), arguments, train_dataset=rows, processing_class=tokenizer, peft_config=lora,
        callbacks=[clock],
    ).train()  # fmt: skip
    return clock.cpu_s


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a copy of GSM8K; by default rows of the same lengths are made up")
    parser.add_argument("--size", choices=SIZES, default="15M", help="parameters of the base (default: 15M)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 32 rows (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = random_base(options.size)
    ours = Ours(copy.deepcopy(base))
    every = batches(options.dataset, ROWS, 4 * options.rounds + 1)
    ours.step(every[0])
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for at in range(1, len(every), 4):
        rows = every[at : at + 4]
        began = time.process_time()
        for batch in rows:
            ours.step(batch)
        own_s = time.process_time() - began
        for name, settings in SETTINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(K * sft_cpu_s(base, dataset_of(rows), settings, folder) / own_s)
            print(f"{name}: {found[name][-1]:.2f} times ours ({own_s:.1f} s)", flush=True)
    ours.processes.shutdown()
    print("\n| TRL's SFTTrainer, four times | times ours |\n|---|---|")
    for name, ratios in found.items():
        print(f"| {name} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
