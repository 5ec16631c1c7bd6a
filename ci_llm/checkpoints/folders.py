"""Which checkpoints a run's folder holds, and the bytes of one of them; read only, without a lease.

checkpoint_step_<N>/    committed; never written again
final_checkpoint/       the last step once more, made for use; counts with its step
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from ci_llm.checkpoints.manifest import STEP_FOLDER, Manifest, read_folder, read_manifest
from ci_llm.core.run_folder import is_run
from ci_llm.errors import CheckpointError, DamagedCheckpoint

FINAL = "final_checkpoint"


class Opened(NamedTuple):
    """A committed folder of which every byte was read once and verified."""

    folder: Path
    manifest: Manifest
    files: dict[str, bytes]


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"checkpoint_step_{step}"


def is_named_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name of a checkpoint, whatever it holds."""
    return folder.name == FINAL or STEP_FOLDER.match(folder.name) is not None


def numbered_steps(directory: Path) -> list[int]:
    """The steps that have a folder of their own, ascending. A run with such a name is none: nothing may remove it."""
    if not directory.is_dir():
        return []
    matches = [(path, STEP_FOLDER.match(path.name)) for path in directory.iterdir()]
    return sorted(int(match[1]) for path, match in matches if match and not is_run(path))


def committed(directory: Path) -> list[tuple[int, Path]]:
    """Step and folder, the newest first; a numbered folder before the final one of the same step.

    A final checkpoint without a readable manifest has no step, and is left out.
    """
    found = [(step, step_folder(directory, step)) for step in numbered_steps(directory)]
    with contextlib.suppress(DamagedCheckpoint):
        found.append((read_manifest(directory / FINAL).step, directory / FINAL))
    return sorted(found, key=lambda each: (-each[0], each[1].name))


def folders_of(directory: Path, step: int) -> list[Path]:
    """The folders that hold a step, the numbered one first.

    Raises:
        CheckpointError: there is none.
    """
    line = committed(directory)
    if found := [folder for known, folder in line if known == step]:
        return found
    steps = ", ".join(str(known) for known in sorted({known for known, _ in line})) or "none"
    raise CheckpointError(f"there is no step {step}; committed: {steps}", where=str(directory))


def open_folder(folder: Path) -> Opened:
    """Read and verify one committed folder. Raises DamagedCheckpoint: it is not as it was written."""
    return Opened(folder, *read_folder(folder))


def open_step(directory: Path, step: int) -> Opened:
    """Read and verify a step; its final checkpoint if the numbered folder is damaged.

    Raises:
        DamagedCheckpoint: no folder of this step is as it was written. CheckpointError: there is none.
    """
    *others, last = folders_of(directory, step)
    for folder in others:
        with contextlib.suppress(DamagedCheckpoint):
            return open_folder(folder)
    return open_folder(last)
