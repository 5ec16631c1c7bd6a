"""The checkpoints in a run's folder: listed with their state, and pruned on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from ci_llm.checkpoints.layout import FINAL, QUARANTINE, SUPERSEDED, committed, numbered_steps, step_folder
from ci_llm.checkpoints.manifest import MANIFEST, Manifest, read_manifest, verify_folder
from ci_llm.checkpoints.store import DISK_FULL, CheckpointStore
from ci_llm.core.run_folder import ATTEMPTS, BEGINNING, SWEEP
from ci_llm.core.run_status import last_status
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint, OtherFormat

Shelf: TypeAlias = Literal["current", "superseded", "quarantine"]
#: What the folder of a run or of a training loop has before its first checkpoint.
_BEGUN: Final = ("status.json", ATTEMPTS, BEGINNING, SWEEP, ".attempt-*", ".taken-over-*")


@dataclass(frozen=True)
class CatalogEntry:
    """One checkpoint.

    Attributes:
        name: its folder, relative to the folder of the run.
        step, attempt, wall_time, nbytes: as its manifest says; None if that cannot be read.
        damage: what does not verify; None if all does.
        refused: why this program does not read it, and what does; None if it does.
        line: where it is. "current": the run resumes from the newest of these. "superseded": newer than a step that
            the run went back to. "quarantine": it did not verify when the run started.
        final: whether it is the `final_checkpoint`.
        pinned: whether it is the best by validation, which pruning spares.
    """

    name: str
    step: int | None = None
    attempt: int | None = None
    wall_time: float | None = None
    nbytes: int | None = None
    damage: str | None = None
    refused: str | None = None
    line: Shelf = "current"
    final: bool = False
    pinned: bool = False


def list_checkpoints(directory: Path, *, read_all: bool = True) -> list[CatalogEntry]:
    """The checkpoints of a run: the current line first, the newest first. Changes nothing.

    Args:
        read_all: read every byte and compare it with its digest; otherwise the manifests alone.

    Raises:
        BadInput: there is no such folder, it is a checkpoint itself, or it holds nothing of a run.
    """
    if not directory.is_dir():
        raise BadInput("there is no such folder", where=str(directory), hint="give the output_dir of a run")
    if (directory / MANIFEST).is_file():
        hint = "give the output_dir of its run; ci-llm checkpoints verify takes one checkpoint"
        raise BadInput("this is a checkpoint, and not a run", where=str(directory), hint=hint)
    lines: dict[Shelf, list[Path]] = {
        "current": current_line(directory),
        "superseded": _shelf(directory / SUPERSEDED),
        "quarantine": _shelf(directory / QUARANTINE),
    }
    pinned: frozenset[int] = frozenset()
    with contextlib.suppress(BadInput):
        pinned = pinned_steps(directory)
    entries = [
        entry_of(
            str(folder.relative_to(directory)),
            line,
            partial(read_manifest, folder),
            partial(verify_folder, folder) if read_all else None,
        )
        for line, folders in lines.items()
        for folder in folders
    ]
    if not entries and not any(fnmatch(path.name, each) for path in directory.iterdir() for each in _BEGUN):
        what = "this folder holds nothing of a run"
        raise BadInput(what, where=str(directory), hint="give the output_dir of a run")
    return [replace(entry, pinned=entry.line == "current" and entry.step in pinned) for entry in entries]


def current_line(directory: Path) -> list[Path]:
    """The folders that a run may resume from, the newest first; before them a `final_checkpoint` that tells no step."""
    found = [folder for _, folder in committed(directory)]
    final = directory / FINAL
    return found if final in found or not final.exists() else [final, *found]


def _shelf(place: Path) -> list[Path]:
    return sorted(folder for folder in place.iterdir() if folder.is_dir()) if place.is_dir() else []


def entry_of(
    name: str, line: Shelf, read: Callable[[], Manifest], verify: Callable[[], object] | None = None
) -> CatalogEntry:
    """The entry of a checkpoint by its manifest, which `read` returns.

    Both calls may raise DamagedCheckpoint, and `read` may raise OtherFormat.
    """
    told: dict[str, Any] = {}
    try:
        manifest = read()
        told = {key: getattr(manifest, key) for key in ("step", "attempt", "wall_time", "nbytes")}
        if verify is not None:
            verify()
    except DamagedCheckpoint as error:
        told["damage"] = error.what
    except OtherFormat as error:
        told["refused"] = f"{error.what}; {error.hint}"
    return CatalogEntry(name, **told, line=line, final=Path(name).name.startswith(FINAL))


# Pruning


@dataclass(frozen=True)
class Pruning:
    """The steps that `prune` has kept and removed, or would.

    Attributes:
        kept, removed: steps, the newest first; those kept include the pinned ones.
        damaged: what is wrong with those that were passed over.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    damaged: tuple[str, ...]
    freed_bytes: int


def prune(directory: Path, keep: int, *, dry_run: bool = False) -> Pruning:
    """Keep the `keep` newest numbered checkpoints that verify, byte by byte, and remove what is older.

    A damaged one among the newer is named and left: it does not count, and the next start of the run sets it aside.
    The best step by validation, the `final_checkpoint` and what was set aside stay.

    Raises:
        BadInput: there is no numbered checkpoint here, `keep` is below 1, or status.json does not tell the best step.
        WriterBusy: a run holds the folder; a dry run only looks.
        DamagedCheckpoint: none verifies; nothing is removed. OtherFormat: nor is it if this program cannot read one.
    """
    if keep < 1:
        raise BadInput("at least one checkpoint must be kept", where=f"--keep {keep}", hint="give 1 or more")
    steps = numbered_steps(directory)
    if not steps:
        raise BadInput("no numbered checkpoint is here", where=str(directory), hint="give the output_dir of a run")
    return _plan(directory, steps, keep) if dry_run else _remove(directory, keep)


def _remove(directory: Path, keep: int) -> Pruning:
    store = CheckpointStore(directory)
    try:
        _acquire_lease(store, keep)
        plan = _plan(directory, numbered_steps(directory), keep)
        for step in reversed(plan.removed):
            store.delete(step)
    except OSError as error:
        raise CheckpointError(f"not everything could be removed: {error}", where=str(directory)) from error
    finally:
        store.close()
    return plan


def _acquire_lease(store: CheckpointStore, keep: int) -> None:
    """Become the writer of the folder. Raises CheckpointError: a full disk, with what to remove by hand, or another."""
    try:
        store.acquire_lease()
    except CheckpointError as error:
        is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL
        removed = _plan(store.directory, numbered_steps(store.directory), keep).removed if is_full else ()
        if not removed:
            raise
        raise CheckpointError(
            "the disk is so full that nothing can be removed safely: the lease of this folder needs a few bytes",
            where=str(store.directory),
            hint=f"make space, or remove the oldest yourself: rm -r {step_folder(store.directory, removed[-1])}",
        ) from error


def pinned_steps(directory: Path) -> frozenset[int]:
    """Steps that stay whatever their age: the best one by validation, as the run's status tells.

    Raises:
        BadInput: there is a status.json that cannot be read, so that nobody knows.
    """
    status = last_status(directory)
    return frozenset() if status is None or status.best_step is None else frozenset({status.best_step})


def _plan(directory: Path, steps: list[int], keep: int) -> Pruning:
    try:
        pinned = pinned_steps(directory)
    except BadInput as error:
        what = f"which step is the best is not known, and nothing was removed: {error.what}"
        raise BadInput(what, where=error.where, hint="the next start of the run writes it again") from error
    kept: list[int] = []
    damaged: list[str] = []
    older = sorted(steps, reverse=True)
    while older and len(kept) < keep:
        step = older.pop(0)
        try:
            verify_folder(step_folder(directory, step))
            kept.append(step)
        except DamagedCheckpoint as error:
            damaged.append(error.what)
    if not kept:
        raise DamagedCheckpoint(
            f"none of these checkpoints verifies, and nothing was removed: {'; '.join(damaged)}", where=str(directory)
        )
    kept += [step for step in older if step in pinned]
    removed = [step for step in older if step not in pinned]
    freed = sum(_size(step_folder(directory, step)) for step in removed)
    return Pruning(tuple(kept), tuple(removed), tuple(damaged), freed)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
