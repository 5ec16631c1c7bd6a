"""TRL's SFTTrainer with one LoRA adapter: the CPU time of its steps for `real_step`, and a run of its own for `proof`.

TRL is no dependency of this project: `pip install trl` first.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.record import surroundings
from benchmarks.step import ALPHA, LEARNING_RATE, MAX_NORM, PROJECTIONS, RANK
from ci_llm import embedded
from ci_llm.data.batches import Batch


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


def conversations(file: Path) -> Dataset:
    """The rows as SFTTrainer takes chats of which it learns the answers alone."""
    rows = load_dataset("json", data_files=str(file), split="train")
    return rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        },
        remove_columns=rows.column_names,
    )


def main() -> None:
    """Trains as its documentation does it, and keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder of Transformers")
    parser.add_argument("--rows", type=Path, required=True, help="a file of questions and answers")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per step")
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--lora_rank", type=int, required=True)
    options = parser.parse_args()
    bf16 = bool(surroundings()["bf16_units"])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if bf16 else torch.float32)
    rank = options.lora_rank
    with tempfile.TemporaryDirectory() as scratch:
        arguments = SFTConfig(
            scratch, max_steps=options.steps, per_device_train_batch_size=options.batch, bf16=bf16, use_cpu=True,
            learning_rate=options.learning_rate, gradient_checkpointing=False, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        SFTTrainer(
            model,
            arguments,
            train_dataset=conversations(options.rows),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=peft.LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        ).train()


if __name__ == "__main__":
    main()
