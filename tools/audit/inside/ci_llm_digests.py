"""Digests of tensors, rows, modules, optimizers and generators. Only reads: no random number is drawn.

It imports nothing of this project: the script under audit may run in another environment.
"""

from __future__ import annotations

import hashlib
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any


def of_bytes(*parts: Any) -> str:
    """A short digest of some bytes."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def of_tensor(tensor: Any) -> str:
    """The digest of dtype, shape and bits of a tensor."""
    return of_bytes(str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode(), _bits(tensor))


def _bits(tensor: Any) -> Any:
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor: the part of this process
        tensor = tensor.to_local()
    flat = tensor.to("cpu", copy=False).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _parameter() -> Any:
    import torch

    return torch.nn.Parameter


class Cache:
    """Digests of tensors; a frozen parameter whose version counter stands where it stood is not read again.

    Buffers always are: batch normalisation changes its own without counting.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[int, int], str]] = {}

    def of(self, tensor: Any) -> str:
        if tensor.requires_grad or not isinstance(tensor, _parameter()):
            return of_tensor(tensor)
        key, version = id(tensor), (tensor._version, tensor.data_ptr())
        known = self._known.get(key)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        digest = of_tensor(tensor)
        self._known[key] = (weakref.ref(tensor), version, digest)
        return digest


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, tensor) of all data tensors in nested arguments. What needs a gradient was computed, and is no data."""
    import torch

    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            yield name, value
    elif hasattr(value, "items"):
        for key, each in value.items():
            yield from tensors_in(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, name)


def rows_of(arguments: Any) -> list[str]:
    """One digest per row of a batch; padding at the ends of a row does not count, so that it may differ by batch."""
    tensors = [tensor for name, tensor in tensors_in(arguments) if tensor.dim() and "mask" not in name]
    if not tensors:
        return []
    count = tensors[0].shape[0]
    alike = [tensor.detach().to("cpu") for tensor in tensors if tensor.shape[0] == count]
    return [of_bytes(*(_bits(_trimmed(tensor[row])) for tensor in alike)) for row in range(count)]


def _trimmed(row: Any) -> Any:
    """Without the runs of one value at both ends, but for one of each."""
    if row.dim() != 1 or row.is_floating_point() or row.numel() < 2:
        return row
    changes = (row[1:] != row[:-1]).nonzero().reshape(-1)
    return row[:1] if not changes.numel() else row[int(changes[0]) : int(changes[-1]) + 2]


def generators() -> dict[str, str]:
    """Digests of the global generators."""
    import torch

    found = {"torch": of_tensor(torch.get_rng_state()), "python": of_bytes(repr(random.getstate()).encode())}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        found["numpy"] = of_bytes(repr(state[0]).encode(), state[1].tobytes(), repr(state[2:]).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = of_bytes(*(_bits(state) for state in torch.cuda.get_rng_state_all()))
    return found


def moments(optimizer: Any) -> dict[str, str]:
    """{name of a moment: digest over all parameters}, in the order of the parameters."""
    import torch

    parts: dict[str, list[bytes]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                bits = of_tensor(value) if isinstance(value, torch.Tensor) else repr(value)
                parts.setdefault(str(key), []).append(bits.encode())
    return {key: of_bytes(*found) for key, found in sorted(parts.items())}


def settings(optimizer: Any) -> list[dict[str, str]]:
    """The plain settings of its groups, but for the learning rate, which has a place of its own."""
    left_out = ("params", "lr", "initial_lr")
    return [
        {
            key: repr(value)
            for key, value in group.items()
            if key not in left_out and isinstance(value, int | float | bool | str | tuple | None)
        }
        for group in optimizer.param_groups
    ]


def is_rounded(tensor: Any) -> bool:
    """Whether a tensor of float32 holds nothing that bfloat16 or float16 could not hold."""
    import torch

    if tensor.dtype is not torch.float32 or tensor.numel() < 8:
        return False
    value = tensor.detach()
    return any(bool((value == value.to(dtype).float()).all()) for dtype in (torch.bfloat16, torch.float16))
