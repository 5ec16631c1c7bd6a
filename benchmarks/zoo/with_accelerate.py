"""A loop of Accelerate that resumes as its documentation says; `--fault` plants one mistake."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, SAVE_EVERY, STEPS = 64, 4, 5, 40
FAULTS = {"no-position": "repeated rows", "skip-more": "skipped rows", "scheduler-not-prepared": "scheduler"}


def main() -> None:
    """Train, or resume from the newest checkpoint in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    fault = parser.parse_args().fault
    out = Path("out")
    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 8)), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if fault != "scheduler-not-prepared":
        scheduler = accelerator.prepare(scheduler)
    step = 0
    if newest := max(out.glob("step_*"), key=lambda path: int(path.name[5:]), default=None):
        accelerator.load_state(str(newest))
        step = int(newest.name[5:])
    epoch, done = divmod(step, len(loader))
    while step < STEPS:
        loader.set_epoch(epoch)
        skip = 0 if fault == "no-position" else done + 2 * (done > 0) if fault == "skip-more" else done
        for (rows,) in accelerator.skip_first_batches(loader, skip) if skip else loader:
            loss = ((model(rows) - rows.sum(1, keepdim=True)) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(out / f"step_{step}"))
        epoch, done = epoch + 1, 0


if __name__ == "__main__":
    main()
