"""The Trainer of Transformers on a small module; `--fault` sets one of its arguments as people do."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

ROWS = 64
FAULTS = {"ignore-data-skip": "repeated rows", "model-only": "moments"}


class Net(nn.Module):
    """Returns its loss, as the Trainer wants it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(rows)[:, 0]
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}


def main() -> None:
    """Train, or resume from the newest checkpoint in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    fault = parser.parse_args().fault
    torch.manual_seed(0)
    rows = torch.randn(ROWS, 8)
    data: Any = [{"rows": row, "labels": row.sum()} for row in rows]
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        max_steps=40,
        save_steps=5,
        logging_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ignore_data_skip=fault == "ignore-data-skip",
        save_only_model=fault == "model-only",
    )
    trainer = Trainer(Net(dropout=0.0), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)


if __name__ == "__main__":
    main()
