"""Two checkpoints compared bit by bit: which tensors and values differ, and by how much.

The state decides: adapters, moments, generators, position, plain values, the fingerprints of base and data. Some
things differ between two runs with the same bits and are listed separately: files kept verbatim (`config.yaml` holds
the name of the output folder), run ids of trackers, the machine and its library versions. Time and attempt are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.checkpoints.manifest import MANIFEST

Path: TypeAlias = "tuple[str, ...]"

NOT_STATE: tuple[Path, ...] = (("trackers",), (MANIFEST, "surroundings"))


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on both sides.

    Attributes:
        where: the key of the state, then the names on the way to the tensor or value.
        what: in words.
        counts: whether it makes the checkpoints different; False for what is not part of the state.
        largest: of a tensor of real or complex numbers with the same shape and dtype on both sides, the largest
            difference of two elements.
    """

    where: str
    what: str
    counts: bool = True
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What was compared, and every difference: the tensors with the largest first, then the rest by name."""

    differences: tuple[Difference, ...]
    num_tensors: int
    num_values: int

    @property
    def identical(self) -> bool:
        """Whether the states are the same to the last bit."""
        return not any(difference.counts for difference in self.differences)


def compare(one: Checkpoint, other: Checkpoint) -> Comparison:
    """Compare two checkpoints that were read; nothing is rounded, and -0 is not 0."""
    ours, theirs = _leaves_of(one), _leaves_of(other)
    found = [
        difference
        for path in sorted({**ours, **theirs})
        if (difference := _compare(path, ours.get(path, _MISSING), theirs.get(path, _MISSING))) is not None
    ]
    found.sort(key=lambda difference: -1.0 if difference.largest is None else -difference.largest)
    found.sort(key=lambda difference: (not difference.counts, difference.largest is None))
    tensors = sum(isinstance(leaf, Tensor) for leaf in ours.values())
    return Comparison(tuple(found), tensors, len(ours) - tensors)


_MISSING = object()


def _leaves_of(checkpoint: Checkpoint) -> dict[Path, Any]:
    manifest = checkpoint.manifest
    everything = {**checkpoint.state, MANIFEST: {"step": manifest.step, **manifest.info}}
    return dict(_leaves(everything, ()))


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every tensor and plain value with its address; of an empty container, the container."""
    items: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    if not items:
        yield path, torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    for key, item in items:
        yield from _leaves(item, (*path, key if isinstance(key, str) else f"[{key!r}]"))


def _compare(path: Path, one: Any, other: Any) -> Difference | None:
    verbatim = isinstance(one, bytes) or isinstance(other, bytes)
    counts = not (verbatim or any(path[: len(place)] == place for place in NOT_STATE))
    where = ".".join(path).replace(".[", "[")
    if one is _MISSING or other is _MISSING:
        return Difference(where, f"only in {'B' if one is _MISSING else 'A'}", counts)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _compare_tensors(where, one, other)
    if isinstance(one, bytes) and isinstance(other, bytes):
        return None if one == other else Difference(where, "other bytes", counts)
    if repr(one) == repr(other):  # tells 1 from 1.0 and from True, and takes NaN for NaN
        return None
    return Difference(where, f"{_shown(one)} in A, {_shown(other)} in B", counts)


def _compare_tensors(where: str, one: Tensor, other: Tensor) -> Difference | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return Difference(where, f"{_shown(one)} in A, {_shown(other)} in B")
    if torch.equal(_raw(one), _raw(other)):
        return None
    rows = (one.reshape(-1, 1).contiguous().view(torch.uint8), other.reshape(-1, 1).contiguous().view(torch.uint8))
    changed = int((rows[0] != rows[1]).any(1).sum())
    if not (one.is_floating_point() or one.is_complex()):
        return Difference(where, f"{changed} of {one.numel()} elements, by at most {_largest_gap(one, other)}")
    gaps = (one.to(torch.complex128) - other.to(torch.complex128)).abs() if one.is_complex() else _gaps(one, other)
    largest = float(gaps.max())
    return Difference(where, f"{changed} of {one.numel()} elements, by at most {largest:.3g}", largest=largest)


def _largest_gap(one: Tensor, other: Tensor) -> int:
    """The largest absolute difference of integers or booleans, exact: a float64 does not tell 2^60 from 2^60 + 1."""
    wide = np.int64 if one.dtype.is_signed else np.uint64
    first, second = (tensor.reshape(-1).numpy().astype(wide) for tensor in (one, other))
    # Modulo 2^64, which no difference reaches.
    gaps = np.maximum(first, second).view(np.uint64) - np.minimum(first, second).view(np.uint64)
    return int(gaps.max())


def _gaps(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences; infinite where just one side is a number, 0 where neither is."""
    first, second = one.double(), other.double()
    gaps = (first - second).abs()
    neither = first.isnan() & second.isnan() | (first == second)
    return gaps.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(neither, 0.0)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
