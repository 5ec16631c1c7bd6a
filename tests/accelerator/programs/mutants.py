"""A state that was just computed is copied on a side stream, as a save does it: as it is, and with each mutant.

It prints for each of them whether the copy holds the state.
"""

from __future__ import annotations

import json
from unittest import mock

import torch

from ci_llm.checkpoints.async_saver import Arena, Copy
from ci_llm.checkpoints.state_files import StateEntry
from tools.testbed.accelerator.__main__ import MUTANTS


def copied() -> bool:
    """Whether the copy is right."""
    weights = torch.full((64,), 2.0, device="cuda").add_(1)
    arena, entries = Arena(), [StateEntry("weights", "tensors", {"w": weights}, [weights])]
    Copy(arena, entries, later={weights.untyped_storage().data_ptr()}).finish()
    return torch.frombuffer(arena.bodies[0], dtype=torch.float32).tolist() == [3.0] * 64


found = {"none": copied()}
for name, (kind, method) in MUTANTS.items():
    with mock.patch.object(kind, method, return_value=None):
        found[name] = copied()
print(f"\nfound {json.dumps(found)}")
