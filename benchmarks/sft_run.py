"""One LoRA adapter by TRL's SFTTrainer on rows of questions and answers, as its documentation does it: for `proof`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import peft
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

from benchmarks.record import surroundings


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
    """Trains, and keeps nothing."""
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
