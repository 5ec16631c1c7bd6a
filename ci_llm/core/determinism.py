"""The random generators of a run: keyed ones, which have no state, and the global ones, captured and restored.

A sequential generator must be saved and restored at exactly the right moment. A keyed generator has no state to save:
what is drawn in a micro-step depends on (seed, step, process, micro-step) and on nothing that happened before.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and strings, by BLAKE2b: the same on every platform and in every version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits, which fit a signed integer


def generator_for(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one purpose, for example `generator_for(seed, "adapter", agent)`."""
    return torch.Generator(device).manual_seed(derive_seed(*parts))


def seed_everything(*parts: int | str) -> None:
    """Set the global generators of Python, NumPy and PyTorch (every device) from a key.

    Args:
        parts: such as seed, step and process; other parts give independent numbers.

    Examples:
        >>> ci_llm.seed_everything(42, 7)
        >>> first = torch.rand(2)
        >>> ci_llm.seed_everything(42, 7)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    key = derive_seed(*parts)
    random.seed(key)
    np.random.seed(key % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(key)


def capture() -> dict[str, Any]:
    """The state of every global generator of this process, as tensors and plain values, for `restore`."""
    # Tensors and plain values only: a checkpoint holds nothing that must be unpickled.
    version, internal, gauss = random.getstate()
    name, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "pos": int(pos),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # else this process has drawn nothing there
        state["cuda"] = {f"{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore(state: dict[str, Any]) -> str | None:
    """Set every global generator to a captured state.

    Returns:
        the generators that keep their state, because this machine has more or fewer GPUs; None if all are restored.
    """
    cuda = state.get("cuda", {})
    here = torch.cuda.device_count() if cuda or torch.cuda.is_initialized() else 0
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["pos"], numpy["has_gauss"], numpy["cached_gaussian"]))
    torch.set_rng_state(_bytes(state["torch"]))
    # With another number of GPUs there is no right assignment: all keep their present state, and the caller is told.
    if len(cuda) != here:
        return f"CUDA generators {len(cuda)} -> {here}"
    if cuda:
        torch.cuda.set_rng_state_all([_bytes(cuda[f"{i}"]) for i in range(here)])
    return None


def _bytes(state: Tensor) -> Tensor:
    return state.to(torch.uint8).cpu()
