"""A plain Accelerate loop over a crowd that uses only our hooks and sampler, killed at a given moment."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader

from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch, pack
from ci_llm.data.stateful_sampler import StatefulSampler
from ci_llm.integrations.accelerate import latest_state, register_hooks
from ci_llm.lora.settings import LoraSettings
from tools.testbed import tiny

EPOCHS = 2
SETTINGS = LoraSettings(2, rank=2, alpha=4, dropout=0.2, dropconnect=0.1, target_modules=("q_proj", "v_proj"))


class Rows:
    """Rows that know their number, for the trace."""

    def __init__(self, count: int = 19) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, tiny.example(6 + number % 5, seed=number)


def collate(part: list[tuple[int, Any]]) -> Batch:
    return pack([row for _, row in part], [number for number, _ in part])


def hooked_loop(
    folder: str, save_every: int, kill_at: int | None = None, workers: int = 0, told_epochs: bool = True
) -> int:
    """A trial for the fork server: two epochs, from the newest state on; the last state is `final`.

    Args:
        save_every, kill_at: in micro-steps of one process; windows are of two.
        told_epochs: the loop calls `set_epoch`, as the documentation of Accelerate has it.
    """
    torch.set_num_threads(1)
    place = Path(folder)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pids = gather_object([os.getpid()])
    set_seed(1)
    crowd: Any = Crowd(tiny.base(dtype=torch.float32), SETTINGS, "toy").train()
    rows: Any = Rows()
    loader: Any = DataLoader(rows, 2, sampler=StatefulSampler(rows, seed=3), collate_fn=collate, num_workers=workers)
    optimizer: Any = torch.optim.AdamW([p for p in crowd.parameters() if p.requires_grad], lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    crowd, optimizer, loader, scheduler = accelerator.prepare(crowd, optimizer, loader, scheduler)
    register_hooks(accelerator)
    done = 0
    if (state := latest_state(place)) is not None:
        accelerator.load_state(str(state))
        done = int(state.name.partition("_")[2])
    trace = (place / f"rows{accelerator.process_index}.jsonl").open("a", buffering=1)
    first_epoch, skipped = divmod(done, len(loader))
    for epoch in range(first_epoch, EPOCHS):
        if told_epochs:
            loader.set_epoch(epoch)
        within = epoch == first_epoch and skipped
        for batch in accelerator.skip_first_batches(loader, skipped) if within else loader:
            with accelerator.accumulate(crowd):
                accelerator.backward(crowd(batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done += 1
            trace.write(json.dumps([done, list(batch.sample_ids)]) + "\n")
            if done % save_every == 0:
                accelerator.save_state(str(place / f"state_{done}"))
            if done == kill_at and accelerator.is_main_process:
                for pid in reversed(pids):
                    os.kill(pid, signal.SIGKILL)
    accelerator.save_state(str(place / "final"))
    return 0
