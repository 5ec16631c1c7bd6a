"""A single committed folder, at any path and without a lease: read, written, compared with another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ci_llm.checkpoints.manifest import MANIFEST, FileImage, Manifest, Opened, open_folder
from ci_llm.checkpoints.state_files import State, entries_of, files_of, read_state
from ci_llm.checkpoints.store import clear, commit, refuse_run, require_space
from ci_llm.core.durable import DISK, Filesystem, make_folders, replace_folder
from ci_llm.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    state: dict[str, Any]
    manifest: Manifest
    folder: Path


def decode(opened: Opened) -> Checkpoint:
    """The checkpoint in a folder that was read. Raises DamagedCheckpoint: the files do not have their form."""
    return Checkpoint(read_state(opened.manifest.forms, opened.files), opened.manifest, opened.folder)


def load_checkpoint(folder: Path | str) -> Checkpoint:
    """Read one committed folder, wherever it lies.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
    """
    return decode(open_folder(Path(folder)))


def write_checkpoint(
    folder: Path,
    state: State,
    *,
    step: int = 0,
    info: Mapping[str, object] | None = None,
    disk: Filesystem = DISK,
) -> Manifest:
    """Commit `state` as `folder`, which is then the new one, whole and read back; or what it was before.

    The same holds after a kill, except where the file system cannot exchange two names, as on NFS
    (`durable.replace_folder`). What was unfinished stays beside `folder` under a hidden name.

    Raises:
        CheckpointError: the state holds a value that cannot be saved, or the disk failed.
    """
    entries = entries_of(state)
    files = files_of(entries)
    forms = {entry.key: entry.form for entry in entries}
    records = {name: image.record() for name, image in files.items()}
    manifest = Manifest(step, 0, time.time(), forms, records, info or {})
    write_files_as(folder, manifest, files, disk=disk)
    return manifest


def write_files_as(
    folder: Path, manifest: Manifest, files: Mapping[str, FileImage], *, disk: Filesystem = DISK
) -> None:
    """Commit `files` as `folder`, under a manifest that is theirs. Raises CheckpointError: the disk failed."""
    work = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    try:
        refuse_run(folder)
        make_folders(folder.parent, disk=disk)
        require_space(folder.parent, manifest, disk)
        disk.mkdir(work)
        try:
            commit(work / folder.name, files, manifest, work, disk)
            replace_folder(work / folder.name, folder, disk=disk)
        finally:
            clear(work, disk)
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be written: {error}", where=str(folder)) from error


LeafPath: TypeAlias = "tuple[str, ...]"

NOT_STATE: tuple[LeafPath, ...] = (("trackers",), (MANIFEST, "surroundings"))


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on both sides.

    Attributes:
        where: the key of the state, then the names on the way to the tensor or value.
        what: in words.
        counts: whether it makes the checkpoints different; False for what is not part of the state.
        largest: of a tensor of real numbers with the same shape and dtype on both sides, the largest difference of two
            elements.
    """

    where: str
    what: str
    counts: bool = True
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The differences of two checkpoints: the tensors with the largest first, then the rest by name."""

    differences: tuple[Difference, ...]
    num_tensors: int
    num_values: int

    @property
    def identical(self) -> bool:
        """True if the states are the same to the last bit."""
        return not any(difference.counts for difference in self.differences)


def compare(one: Checkpoint, other: Checkpoint) -> Comparison:
    """Compare two checkpoints that were read; nothing is rounded, and -0 is not 0.

    The state decides: adapters, moments, generators, position, plain values, the fingerprints of base and data. Some
    things differ between two runs with the same bits and are listed separately: files kept verbatim (`config.yaml`
    holds the name of the output folder), run ids of trackers, the machine and its library versions. Time and attempt
    are ignored.
    """
    ours, theirs = _leaves_of(one), _leaves_of(other)
    paths = sorted({**ours, **theirs})
    compared = [_compare(path, ours.get(path, _MISSING), theirs.get(path, _MISSING)) for path in paths]
    found = [difference for difference in compared if difference is not None]
    found.sort(key=lambda each: (not each.counts, each.largest is None, -(each.largest or 0.0)))
    tensors = sum(isinstance(leaf, Tensor) for leaf in ours.values())
    return Comparison(tuple(found), tensors, len(ours) - tensors)


_MISSING = object()


def _leaves_of(checkpoint: Checkpoint) -> dict[LeafPath, Any]:
    manifest = checkpoint.manifest
    everything = {**checkpoint.state, MANIFEST: {"step": manifest.step, **manifest.info}}
    return dict(_leaves(everything, ()))


def _leaves(value: object, path: LeafPath) -> Iterator[tuple[LeafPath, Any]]:
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


def _compare(path: LeafPath, one: Any, other: Any) -> Difference | None:
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
    ours, theirs = (tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (one, other))
    changed = int((ours != theirs).any(1).sum())
    if not changed:
        return None
    if not one.is_floating_point():  # Python's integers are exact: a float64 does not tell 2^60 from 2^60 + 1
        gap = max(abs(a - b) for a, b in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True))
        return Difference(where, f"{changed} of {one.numel()} elements, by at most {gap}")
    largest = float(_gaps(one, other).max())
    return Difference(where, f"{changed} of {one.numel()} elements, by at most {largest:.3g}", largest=largest)


def _gaps(one: Tensor, other: Tensor) -> Tensor:
    """Absolute differences; infinite where just one side is a number, 0 where neither is."""
    first, second = one.double(), other.double()
    gaps = (first - second).abs()
    neither = first.isnan() & second.isnan() | (first == second)
    return gaps.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(neither, 0.0)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
