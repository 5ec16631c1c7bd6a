"""A script that takes key=value alone, one of which is config=FILE; other values win over those of the file."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

given = dict(word.split("=", 1) for word in sys.argv[1:])
print("config", given["config"])
values = yaml.safe_load(Path(given.pop("config")).read_text()) | given
learning_rate = float(values["lr"])
print(f"{{'loss': '{'nan' if learning_rate > 1e-4 else 0.5}', 'learning_rate': {learning_rate:.3g}}}")
