"""Old checkpoints removed on request: never under a run that writes, and never the last that verifies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ci_llm.checkpoints.line import numbered_steps, step_folder
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint
from ci_llm.status import read_status


@dataclass(frozen=True)
class Pruning:
    """What `prune` has removed, or would remove.

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
        BadInput: there is no numbered checkpoint here, or `keep` is below 1.
        WriterBusy: a run holds the folder; a dry run only looks.
        DamagedCheckpoint: none verifies; nothing is removed.
    """
    if keep < 1:
        raise BadInput("at least one checkpoint must be kept", where=f"--keep {keep}", cure="give 1 or more")
    if not (steps := numbered_steps(directory)):
        raise BadInput("no numbered checkpoint is here", where=str(directory), cure="give the output_dir of a run")
    return _plan(directory, steps, keep) if dry_run else _remove(directory, keep)


def _remove(directory: Path, keep: int) -> Pruning:
    store = CheckpointStore(directory)
    try:
        store.claim()
        plan = _plan(directory, numbered_steps(directory), keep)
        for step in reversed(plan.removed):
            store.delete(step)
    except OSError as error:
        raise CheckpointError(f"not everything could be removed: {error}", where=str(directory)) from error
    finally:
        store.close()
    return plan


def pinned_steps(directory: Path) -> frozenset[int]:
    """Steps that stay whatever their age: the best one by validation, as the run's status tells."""
    try:
        best = read_status(directory).best_step
    except BadInput:  # no run of ours, or none that has begun
        return frozenset()
    return frozenset() if best is None else frozenset({best})


def _plan(directory: Path, steps: list[int], keep: int) -> Pruning:
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
    pinned = pinned_steps(directory)
    kept += [step for step in older if step in pinned]
    removed = [step for step in older if step not in pinned]
    freed = sum(_size(step_folder(directory, step)) for step in removed)
    return Pruning(tuple(kept), tuple(removed), tuple(damaged), freed)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
