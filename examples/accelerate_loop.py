"""A crowd in a plain Accelerate loop, reduced by DDP: run it by python, accelerate launch or torchrun, also once more.

Killed and started again, it resumes from the last state. It ends with the agents of `train.py` with the same settings:
rows in their order, schedule, and each agent clipped by itself.
"""

import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_scheduler

import ci_llm
from ci_llm import Config, Crowd, LoraSettings, StatefulSampler, load_base, load_rows, pack, tokenize

SETTINGS = Config(max_train_samples=160, batch_size=4, gradient_accumulation_steps=2, lora_rank=4, learning_rate=4e-3)


def train(config: Config = SETTINGS, folder: Path = Path("ci_llm_output/plain"), save_steps: int = 10) -> list[float]:
    """Train for one epoch, from the newest state in `folder` on.

    Returns:
        the loss of every step of this call, in nats per target token, summed over the agents.
    """
    window = config.gradient_accumulation_steps
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=window,
        dataloader_config=DataLoaderConfiguration(even_batches=False),  # which would train on some rows twice
    )
    base = load_base(config.model_name, device=accelerator.device, model_dtype=config.model_dtype)
    settings = LoraSettings(config.num_agents, config.lora_rank, config.lora_alpha, config.lora_dropout)
    crowd = Crowd(base.model, settings, base.name)
    agents = [[p for pair in agent.adapters.values() for p in pair] for agent in crowd.agents]
    found = load_rows(config, "train")
    with accelerator.main_process_first():
        rows = tokenize(found, base.tokenizer, max_seq_length=256, cache_folder=folder / "cache")
    loader = DataLoader(
        rows,
        config.batch_size,
        sampler=StatefulSampler(rows, seed=config.seed),
        collate_fn=lambda part: pack(part, range(len(part))),
    )
    parameters = [p for p in crowd.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay)
    crowd, optimizer, loader = accelerator.prepare(crowd, optimizer, loader)
    steps = math.ceil(len(loader) / window)
    # Accelerate moves a prepared schedule by as many steps as there are processes.
    planned = [count * accelerator.num_processes for count in (config.warmup_steps(steps), steps)]
    schedule = accelerator.prepare(get_scheduler(config.lr_scheduler_type, optimizer, *planned))
    ci_llm.register_hooks(accelerator)
    done = 0
    if (state := ci_llm.latest_state(folder)) is not None:
        accelerator.load_state(str(state))
        done = int(state.name.removeprefix("step_"))
    losses: list[float] = []
    total, targets = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in accelerator.skip_first_batches(loader, done * window) if done else loader:
        with accelerator.accumulate(crowd):
            # Accelerate divides by the window and DDP by the processes. What is wanted is the mean over the targets of
            # the whole step, whose number is known at its end.
            loss = -crowd(batch).log_probs.sum()
            accelerator.backward(loss * window * accelerator.num_processes)
            total, targets = total + loss.detach(), targets + batch.num_targets
            if accelerator.sync_gradients:
                total, targets = accelerator.reduce(torch.stack((total, targets)), "sum")
                for parameter in parameters:
                    parameter.grad /= targets
                for agent in agents if config.max_grad_norm else ():
                    torch.nn.utils.clip_grad_norm_(agent, config.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            losses.append(float(total / targets))
            accelerator.print(f"step {done}: loss {losses[-1]:.4f}")
            total, targets = torch.zeros_like(total), torch.zeros_like(targets)
            if done % save_steps == 0:
                accelerator.save_state(str(folder / f"step_{done}"))
    return losses


if __name__ == "__main__":
    train()
