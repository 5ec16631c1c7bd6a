"""A run of Transformers' Trainer, made crash-proof in two marked places.

Kill it, by Ctrl-C or in any other way, and start it again: it resumes, and ends with the same bits.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ci_llm import TrainerCheckpoints


def row(number: int) -> dict[str, torch.Tensor]:
    """12 tokens, each the sum of the two before it."""
    tokens = [number % 31, number // 31]
    while len(tokens) < 12:
        tokens.append((tokens[-1] + tokens[-2]) % 31)
    return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)}


def train(folder: Path, **changes: object) -> str | None:
    """Why it was interrupted, if it was; `changes` are arguments of the training."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    how = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
    }
    arguments = TrainingArguments(str(folder / "trainer"), **{**how, **changes})
    checkpoints = TrainerCheckpoints(folder / "run", save_interval_steps=5)  # <- 1
    rows = [row(number) for number in range(116)]
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows[:100], eval_dataset=rows[100:], callbacks=[checkpoints]
    )
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))  # <- 2
    return checkpoints.interrupted


if __name__ == "__main__":
    if reason := train(Path("ci_llm_output", "hf_trainer")):
        print(f"interrupted ({reason}): start it again to resume")
