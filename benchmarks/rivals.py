"""Runs of other systems, resumed as their documentation says, in the shape in which exactness.py tries them.

Each trains a LoRA adapter of PEFT on a tiny random Llama, over rows that carry their number as the first token, for
as many steps of as many rows as a trial of ours. Each is at its best: checkpoints lie between two optimizer steps.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tools.testbed.trials import ROWS_PER_MICRO_BATCH, STEPS, Cell, Fate, Witness

VOCABULARY = 128
ROW_TOKENS = 16
LEARNING_RATE = 4e-3
SEED = 42


class NumberedRows(Dataset[dict[str, Tensor]]):
    """Random tokens; the first one is the row's number."""

    def __init__(self, num_rows: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (num_rows, ROW_TOKENS), generator=torch.Generator().manual_seed(5))
        self.tokens[:, 0] = torch.arange(num_rows)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def build_model(dropout: float, witness: Witness) -> PeftModel:
    """A base of 30,000 parameters with one adapter, whose training the witness sees."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=ROW_TOKENS,
    )
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)

    def look(module: nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if module.training:
            witness.sees(inputs["input_ids"][:, 0].tolist())

    model.register_forward_pre_hook(look, with_kwargs=True)
    return model


def begin(folder: str, cell: dict[str, Any], fate: dict[str, Any] | None) -> tuple[Path, Cell, Witness]:
    torch.set_num_threads(1)
    return Path(folder), Cell(**cell), Witness(Path(folder), Fate(**fate) if fate else None)


# --------------------------------------------------------------------------------------------- Accelerate


def accelerate_plain(**trial: Any) -> int:
    """`save_state`, `load_state`, `skip_first_batches`, as in its complete examples."""
    return train_with_accelerate(**trial, seedable=False)


def accelerate_seedable(**trial: Any) -> int:
    """The same with what its documentation offers for reproducible order: the seedable sampler and `set_epoch`."""
    return train_with_accelerate(**trial, seedable=True)


def train_with_accelerate(
    folder: str, cell: dict[str, Any], fate: dict[str, Any] | None, save_step: int | None, seedable: bool
) -> int:
    path, options, witness = begin(folder, cell, fate)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    set_seed(SEED)
    bare = build_model(options.dropout, witness)
    rows = NumberedRows(options.num_rows)
    plain = DataLoader(rows, batch_size=ROWS_PER_MICRO_BATCH, shuffle=True, num_workers=options.workers)
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE), plain)
    batches = resume_with_accelerate(accelerator, path)
    first_epoch, to_skip = divmod(batches, len(loader))
    taken = 0 if batches == 0 else steps_of(optimizer)
    for epoch in range(first_epoch, STEPS):
        if seedable:
            loader.set_epoch(epoch)
        skipping = epoch == first_epoch and to_skip
        for batch in accelerator.skip_first_batches(loader, to_skip) if skipping else loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
            taken += accelerator.sync_gradients
            if accelerator.sync_gradients and taken == save_step:
                accelerator.save_state(str(path / f"step_{batches}"))
            if taken == STEPS:
                return 0
    return 1


def resume_with_accelerate(accelerator: Accelerator, path: Path) -> int:
    """Load the checkpoint if there is one; returns the micro-steps that were taken."""
    for checkpoint in path.glob("step_*"):
        accelerator.load_state(str(checkpoint))
        return int(checkpoint.name.removeprefix("step_"))
    return 0


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    return max(int(state["step"]) for state in optimizer.state.values())


# ------------------------------------------------------------------------------------------------ Trainer


def trainer_plain(**trial: Any) -> int:
    """Saved every so many steps, resumed with `resume_from_checkpoint=True`."""
    return train_with_trainer(**trial, saves_on_sigterm=False)


def trainer_sigterm(**trial: Any) -> int:
    """`enable_jit_checkpoint`: a SIGTERM makes it save and stop."""
    return train_with_trainer(**trial, saves_on_sigterm=True)


def train_with_trainer(
    folder: str, cell: dict[str, Any], fate: dict[str, Any] | None, save_step: int | None, saves_on_sigterm: bool
) -> int:
    path, options, witness = begin(folder, cell, fate)
    arguments = TrainingArguments(
        str(path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS_PER_MICRO_BATCH,
        gradient_accumulation_steps=options.accumulation,
        dataloader_num_workers=options.workers,
        learning_rate=LEARNING_RATE,
        bf16=options.precision == "bf16",
        seed=SEED,
        save_strategy="no" if save_step is None else "steps",
        save_steps=save_step or STEPS,
        enable_jit_checkpoint=saves_on_sigterm,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(SEED)
    model = build_model(options.dropout, witness)
    if saves_on_sigterm:
        model.register_forward_pre_hook(let_timers_end)
    trainer = Trainer(model, arguments, train_dataset=NumberedRows(options.num_rows))
    trainer.train(resume_from_checkpoint=any(path.glob("out/checkpoint-*")) or None)
    return 0


def let_timers_end(*_: object) -> None:
    """It acts on a SIGTERM three seconds later, and most of the time of a run passes in forward and backward."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
