"""A state is copied behind a step, with or without what makes that right: `mutants.py none|no_synchronize|no_wait_event`.

It prints whether the copy holds what the state was, or poison.
"""

from __future__ import annotations

import sys

import torch

from tools.testbed.accelerator.__main__ import MUTANTS

device = torch.device("cuda", 0)
MUTANTS.get(sys.argv[1], lambda: None)()
