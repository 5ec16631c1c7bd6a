"""A crowd in a plain Accelerate loop, reduced by DDP: run it by python, accelerate launch or torchrun."""

from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ci_llm import Config, Crowd, LoraSettings, StatefulSampler, load_base, load_rows, pack, tokenize


def train(rows_per_process: int = 4, steps: int = 20, cache: Path = Path("ci_llm_output/cache")) -> list[float]:
    """Train for `steps` steps, which must fit into one epoch of the 160 rows.

    Returns:
        the loss of every step, in nats per target token, summed over the agents.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    base = load_base("embedded", device=accelerator.device)
    crowd = Crowd(base.model, LoraSettings(num_agents=4, rank=4), base.name)
    found = load_rows(Config(dataset_name="embedded", max_train_samples=160), "train")
    with accelerator.main_process_first():
        rows = tokenize(found, base.tokenizer, max_seq_length=256, cache_folder=cache)
    loader = DataLoader(
        rows,
        rows_per_process,
        sampler=StatefulSampler(rows, seed=42),
        collate_fn=lambda part: pack(part, range(len(part))),
    )
    optimizer = torch.optim.AdamW([p for p in crowd.parameters() if p.requires_grad], lr=4e-3)
    crowd, optimizer, loader = accelerator.prepare(crowd, optimizer, loader)
    losses = []
    for batch in islice(loader, steps):
        # DDP takes the mean over processes; a mean over targets needs the number of them in all processes.
        targets = accelerator.reduce(torch.tensor(batch.num_targets, device=accelerator.device), "sum")
        loss = -crowd(batch).log_probs.sum() / targets
        accelerator.backward(loss * accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    train()
