"""Lightning's Trainer with checkpoints at the end of epochs; `--fault` places or fills them otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

ROWS, BATCH = 32, 4
FAULTS = {"inside-epochs": "repeated rows", "weights-only": "moments"}


class Shuffled(Sampler[int]):
    """Lightning calls `set_epoch`, also after a resume."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return ROWS


class Net(lightning.LightningModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        rows = batch[0]
        return ((self.layers(rows) - rows.sum(1, keepdim=True)) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, or resume from the newest checkpoint in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    fault = parser.parse_args().fault
    lightning.seed_everything(0, verbose=False)
    every = 5 if fault == "inside-epochs" else ROWS // BATCH
    saves = ModelCheckpoint("out", "{step}", every_n_train_steps=every, save_top_k=-1)
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 8)), batch_size=BATCH, sampler=Shuffled())
    trainer = lightning.Trainer(
        max_steps=40, accelerator="cpu", logger=False, callbacks=[saves], enable_progress_bar=False
    )
    newest = max(Path("out").glob("step=*.ckpt"), key=lambda path: int(path.stem[5:]), default=None)
    net = Net()
    if fault == "weights-only" and newest is not None:  # what many do: the weights, and a new fit
        net.load_state_dict(torch.load(newest, weights_only=False)["state_dict"])
        newest = None
    trainer.fit(net, loader, ckpt_path=newest)


if __name__ == "__main__":
    main()
