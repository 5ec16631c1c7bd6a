"""A run of Lightning's Trainer, made crash-proof in two marked places.

Kill it, by Ctrl-C or in any other way, and start it again: it resumes, and ends with the same bits.
"""

from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ci_llm import LightningCheckpoints


class Net(lightning.LightningModule):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(folder: Path, workers: int = 0, **changes: object) -> str | None:
    """Why it was interrupted, if it was; `changes` are arguments of the Trainer."""
    lightning.seed_everything(0)
    x = torch.randn(100, 8)
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(rows, 4, shuffle=True, num_workers=workers)
    how = {
        "max_epochs": 3,
        "accumulate_grad_batches": 2,
        "val_check_interval": 6,
        "enable_checkpointing": False,
        "logger": False,
        "default_root_dir": folder,
    }
    checkpoints = LightningCheckpoints(folder / "run", save_interval_steps=5)  # <- 1
    trainer = lightning.Trainer(callbacks=[checkpoints], **{**how, **changes})
    trainer.fit(Net(), loader, DataLoader(rows, 50), ckpt_path=checkpoints.resume())  # <- 2
    return checkpoints.interrupted


if __name__ == "__main__":
    if reason := train(Path("ci_llm_output", "lightning_trainer")):
        print(f"interrupted ({reason}): start it again to resume")
