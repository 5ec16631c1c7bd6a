"""A loop of plain torch with dropout, a schedule, a loss scaler and checkpoints; `--fault` plants one mistake."""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

ROWS, BATCH, SAVE_EVERY, STEPS = 64, 4, 5, 40
FAULTS = {
    "no-position": "repeated rows",
    "skip-twice": "skipped rows",
    "other-shuffle": "data order",
    "late-shuffle": "data order",
    "no-torch-generator": "dropout",
    "generator-before-iterator": "dropout",
    "no-numpy-generator": "generator",
    "no-python-generator": "generator",
    "eval-mode": "dropout",
    "no-moments": "moments",
    "no-schedule": "scheduler",
    "no-scaler": "scaler",
    "no-head": "weights",
    "no-buffers": "weights",
    "half-precision": "weights",
    "frozen-not-saved": "weights",
    "other-decay": "settings",
    "counts-from-zero": "number of steps",
    "inside-a-window": "skipped rows",
}


class Shuffled(Sampler[int]):
    """The rows of an epoch in an order that follows from its seed; the first ones may be left out."""

    def __init__(self, seed: int, skip: int) -> None:
        self.seed, self.skip = seed, skip

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return iter(order[self.skip :])

    def __len__(self) -> int:
        return ROWS - self.skip


class Net(nn.Module):
    """Something of everything: a frozen part, dropout, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 16)
        self.body = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 1)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.body(self.frozen(rows))))))


def main() -> None:
    """Train, or resume from the newest checkpoint in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    parser.add_argument("--window", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--plain", action="store_true", help="no dropout, no noise, and no generators in checkpoints")
    parser.add_argument("--stops", action="store_true", help="save and end after SIGTERM")
    Training(parser.parse_args()).run()


class Training:
    """The whole script."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.fault = options, options.fault
        options.out.mkdir(exist_ok=True)
        self.newest = max(options.out.glob("*.pt"), key=lambda path: int(path.stem), default=None)
        resumes = self.newest is not None
        torch.manual_seed(0 if not (resumes and self.fault == "frozen-not-saved") else 1)
        random.seed(0)
        np.random.seed(0)
        self.data = TensorDataset(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3)))
        self.net = Net()
        if options.plain:
            self.net.drop.p = 0.0
        decay = 0.1 if resumes and self.fault == "other-decay" else 0.01
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.step, self.epoch, self.batch = 0, 0, 0
        self.generators: Any = None
        self.stop = False
        if options.stops:
            signal.signal(signal.SIGTERM, self.ask_to_stop)
        if resumes:
            self.load(torch.load(self.newest, weights_only=False))

    def ask_to_stop(self, *_: object) -> None:
        """SIGTERM."""
        self.stop = True

    def run(self) -> None:
        """Epoch after epoch, until all steps are taken."""
        first = 0 if self.fault == "counts-from-zero" else self.step
        last = STEPS - self.step + first
        if self.fault == "counts-from-zero" and self.newest is not None:
            last = 8
        taken = first
        while taken < last:
            taken = self.run_epoch(taken, last)
            self.epoch, self.batch = self.epoch + 1, 0

    def run_epoch(self, taken: int, last: int) -> int:
        """What is left of an epoch; returns the steps taken so far."""
        resumes = self.newest is not None
        seed = self.epoch
        if self.fault == "other-shuffle" and resumes:
            seed += 1000
        if self.fault == "late-shuffle" and resumes and self.batch == 0:
            seed += 1000  # the first whole epoch after a resume
        skip = self.batch * BATCH * (2 if self.fault == "skip-twice" else 1)
        if self.fault == "no-position":
            skip, self.batch = 0, 0
        loader = DataLoader(self.data, batch_size=BATCH, sampler=Shuffled(seed, skip))
        if self.fault == "generator-before-iterator":
            self.restore_generators()
        batches = iter(loader)
        self.restore_generators()
        for (rows,) in batches:
            self.learn(rows)
            self.batch += 1
            if self.fault == "inside-a-window" and self.batch % (SAVE_EVERY * self.options.window) == 1:
                self.save()
            if self.batch % self.options.window:
                continue
            taken += 1
            self.update()
            if taken >= last:
                return taken
        return taken

    def learn(self, rows: Tensor) -> None:
        """One micro-batch."""
        if self.fault == "no-numpy-generator":
            rows = rows + torch.from_numpy(np.random.randn(*rows.shape)).float()
        if self.fault == "eval-mode" and self.newest is not None:
            self.net.eval()
        noise = random.random() if self.fault == "no-python-generator" else 1.0
        loss = ((self.net(rows) - noise * rows.sum(1, keepdim=True)) ** 2).mean() / self.options.window
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        """One optimizer step."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.stop or (self.step % SAVE_EVERY == 0 and self.fault != "inside-a-window"):
            self.save()
        if self.stop:
            raise SystemExit(0)

    def save(self) -> None:
        """A checkpoint, whole or not at all."""
        weights = self.net.state_dict()
        if self.fault == "no-head":
            weights = {name: value for name, value in weights.items() if not name.startswith("head")}
        if self.fault == "frozen-not-saved":
            weights = {name: value for name, value in weights.items() if not name.startswith("frozen")}
        if self.fault == "no-buffers":
            weights = {name: value for name, value in weights.items() if "running" not in name}
        if self.fault == "half-precision":
            weights = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
        path = self.options.out / f"{self.step}.pt"
        torch.save(
            {
                "weights": weights,
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "place": (self.step, self.epoch, self.batch),
                "generators": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
            },
            path.with_suffix(".tmp"),
        )
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, saved: dict[str, Any]) -> None:
        """What a checkpoint holds, but for what the fault forgets."""
        whole = self.fault not in ("no-head", "no-buffers", "frozen-not-saved")
        self.net.load_state_dict(saved["weights"], strict=whole)
        if self.fault != "no-moments":
            decay = self.optimizer.param_groups[0]["weight_decay"]
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.fault == "other-decay":
                self.optimizer.param_groups[0]["weight_decay"] = decay
        if self.fault != "no-schedule":
            self.schedule.load_state_dict(saved["schedule"])
        else:
            self.optimizer.param_groups[0]["lr"] = 1e-2
        if self.fault != "no-scaler":
            self.scaler.load_state_dict(saved["scaler"])
        self.step, self.epoch, self.batch = saved["place"]
        if not self.options.plain:
            self.generators = saved["generators"]

    def restore_generators(self) -> None:
        """Set what the checkpoint holds, once: after the loader's iterator exists, which draws from torch's."""
        if self.generators is None:
            return
        of_torch, of_python, of_numpy = self.generators
        if self.fault != "no-torch-generator":
            torch.set_rng_state(of_torch)
        if self.fault != "no-python-generator":
            random.setstate(of_python)
        if self.fault != "no-numpy-generator":
            np.random.set_state(of_numpy)
        self.generators = None


if __name__ == "__main__":
    main()
