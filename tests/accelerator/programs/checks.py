"""The checks `gpu ...` of the dry run on a simulated GPU: as they are, and each with what it must see.

It prints for each check what it says of a device that works, and what of its mutant.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ci_llm.dry_run import gpu
from ci_llm.errors import CiLlmError
from tools.testbed.accelerator import face

DEVICE = torch.device("cuda")
FOLDER = Path(tempfile.mkdtemp())
_TO = torch.Tensor.to


def _reads_the_future(query: Any, key: Any, value: Any, left: int, scale: float | None) -> Any:
    """A kernel without the causal mask."""
    return face._SDPA(query, key, value, scale=scale, enable_gqa=query.shape[0] != key.shape[0])


def _with_noise(toy: gpu.Toy, dtype: torch.dtype | None = None, _exact: Any = gpu.Toy.gradients) -> torch.Tensor:
    """Gradients that are summed in another order at each call."""
    found: torch.Tensor = _exact(toy, dtype)
    return found + 1e-7 * torch.rand(1, device=found.device)


def _flips_a_bit(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A bus that changes a bit on the way to the device."""
    there = _TO(tensor, *args, **kwargs)
    if args and torch.device(args[0]).type == "cuda" and there.dtype == torch.int64:
        there[3] ^= 1
    return there


#: Check -> its call, and what breaks what it looks at.
CASES: dict[str, tuple[Callable[[], str], Callable[[], AbstractContextManager[Any]]]] = {
    "autocast": (
        lambda: gpu.autocast(DEVICE),
        lambda: mock.patch.object(torch.optim.AdamW, "step", return_value=None),
    ),
    "attention": (
        lambda: gpu.attention(DEVICE),
        lambda: mock.patch.object(face, "_row_of", _reads_the_future),
    ),
    "determinism": (
        lambda: gpu.determinism(DEVICE, required=True),
        lambda: mock.patch.object(gpu.Toy, "gradients", _with_noise),
    ),
    "copies": (
        lambda: gpu.copies(DEVICE),
        lambda: mock.patch.object(torch.Tensor, "to", _flips_a_bit),
    ),
    "checkpoint": (
        lambda: gpu.checkpoint(DEVICE, Path(tempfile.mkdtemp(dir=FOLDER))),
        lambda: mock.patch.object(face.Stream, "synchronize", return_value=None),
    ),
    "memory": (
        lambda: gpu.memory(DEVICE),
        lambda: mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 80 << 30)),
    ),
}


def said(check: Callable[[], str]) -> str:
    """What a check says; "refused: ..." if it fails."""
    try:
        return check()
    except CiLlmError as error:
        return f"refused: {error}"


found = {}
for name, (check, breaks) in CASES.items():
    well = said(check)
    with breaks():
        found[name] = [well, said(check)]
print(f"\nfound {json.dumps(found)}")
