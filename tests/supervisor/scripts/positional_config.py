"""A script of argparse with its configuration as a positional argument; it takes nothing that it does not know."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

parser = argparse.ArgumentParser()
parser.add_argument("config", type=Path)
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--config", type=Path, dest="also")
arguments = parser.parse_args()
optim = yaml.safe_load(arguments.config.read_text())["optim"]
if arguments.also is not None:
    assert arguments.also.read_text() == arguments.config.read_text()
learning_rate = arguments.learning_rate or float(optim["lr"])
print(f"config {arguments.config} {arguments.also}")
print(f"step 1 lr {learning_rate:.3g} loss {'nan' if learning_rate > 1e-4 else 0.5}")
