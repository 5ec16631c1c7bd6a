"""Your own loops, made crash-proof: a plain torch one and a plain Accelerate one, five places each, marked # <-.

    python examples/own_loop.py                                        the torch loop
    python examples/own_loop.py accelerate                             the Accelerate loop; also by
    accelerate launch --multi_gpu --num_processes=2 examples/own_loop.py accelerate

Kill it, by Ctrl-C or in any other way, and start it again: it resumes, and ends with the same bits.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ci_llm import CheckpointManager, StatefulSampler, seed_everything

STEPS, BATCH = 60, 8


def ingredients() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A network with dropout, its optimizer, and 100 rows: what you have already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(100, 8)
    return model, optimizer, TensorDataset(x, x.sum(1, keepdim=True))


def torch_loop(folder: Path, steps: int = STEPS) -> None:
    model, optimizer, rows = ingredients()
    sampler = StatefulSampler(rows, seed=1)
    loader = DataLoader(rows, BATCH, sampler=sampler)
    objects = {"model": model, "optimizer": optimizer, "sampler": sampler}
    manager = CheckpointManager(folder, save_interval_steps=10)  # <- 1
    start = 0
    if (latest := manager.latest_step()) is not None:  # <- 2
        manager.restore(latest, into=objects)
        start = latest + 1
        print(f"resumes after step {latest} of {steps}", flush=True)
    batches = sampler.batches(loader)  # <- 3  epoch after epoch, from behind the last one that was used
    for step in range(start, steps):
        x, y = next(batches)
        seed_everything(1, step)  # <- 4  dropout as a function of the step: there is no generator to save
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        manager.save(step, objects, force=step == steps - 1)  # <- 5  every tenth, the last, and at a signal
        if manager.reached_preemption(step):
            break
    manager.close()


def accelerate_loop(folder: Path, steps: int = STEPS) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, rows = ingredients()
    loader = DataLoader(rows, BATCH, sampler=StatefulSampler(rows, seed=1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    objects = {"model": accelerator.unwrap_model(model), "optimizer": optimizer}
    manager = CheckpointManager(folder, save_interval_steps=10, accelerator=accelerator)  # <- 1
    start = 0
    if (latest := manager.latest_step()) is not None:  # <- 2
        manager.restore(latest, into=objects)
        start = latest + 1
        print(f"resumes after step {latest} of {steps}", flush=True)
    for step in range(start, steps):
        epoch, batches_done = divmod(step, len(loader))
        if step == start or batches_done == 0:
            loader.set_epoch(epoch)
            batches = iter(accelerator.skip_first_batches(loader, batches_done))  # <- 3
        x, y = next(batches)
        seed_everything(1, step, accelerator.process_index)  # <- 4
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
        manager.save(step, objects, force=step == steps - 1)  # <- 5
        if manager.reached_preemption(step):
            break
    manager.close()


if __name__ == "__main__":
    loop = accelerate_loop if "accelerate" in sys.argv[1:] else torch_loop
    loop(Path("ci_llm_output", loop.__name__))
