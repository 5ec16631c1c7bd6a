"""Shows a bar whose loss is NaN above a learning rate of 1e-4, and still exits 0."""

from __future__ import annotations

import sys

from settings import read

learning_rate = read("learning_rate")
for step in range(1, 4):
    loss = "nan" if learning_rate > 1e-4 else f"{1 / step:.3f}"
    sys.stdout.write(f"\rTraining GNN: {step}/3 [00:00<00:00, 9.80it/s, Loss={loss}, Accuracy=0.8456]")
    sys.stdout.flush()
sys.stdout.write("\n")
