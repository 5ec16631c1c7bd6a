"""Every checkpoint that a run's folder holds, whole or damaged, in the line of the run or set aside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ci_llm.checkpoints.line import FINAL, committed
from ci_llm.checkpoints.manifest import read_manifest, verify_folder
from ci_llm.checkpoints.pruning import pinned_steps
from ci_llm.checkpoints.store import QUARANTINE, SUPERSEDED
from ci_llm.errors import BadInput, DamagedCheckpoint

Line: TypeAlias = Literal["current", "superseded", "quarantine"]


@dataclass(frozen=True)
class Entry:
    """One checkpoint.

    Attributes:
        name: its folder, relative to that of the run.
        step, attempt, wall_time, nbytes: as its manifest says; None if that cannot be read.
        damage: what does not verify; None if all does.
        line: "current": the run goes on from the newest of these. "superseded": newer than a step that the run
            went back to. "quarantine": did not verify when the run looked.
        final: whether it is the `final_checkpoint`.
        pinned: whether it is the best by validation, which pruning spares.
    """

    name: str
    step: int | None
    attempt: int | None
    wall_time: float | None
    nbytes: int | None
    damage: str | None
    line: Line
    final: bool
    pinned: bool


def list_checkpoints(directory: Path, *, read_all: bool = True) -> list[Entry]:
    """The checkpoints of a run: the current line first, the newest first. Changes nothing.

    Args:
        read_all: read every byte and compare it with its digest; otherwise the manifests alone.

    Raises:
        BadInput: there is no such folder.
        CheckpointError: one has a format that is newer than this program.
    """
    if not directory.is_dir():
        raise BadInput("there is no such folder", where=str(directory), cure="give the output_dir of a run")
    lines: dict[Line, list[Path]] = {
        "current": current_line(directory),
        "superseded": _shelf(directory / SUPERSEDED),
        "quarantine": _shelf(directory / QUARANTINE),
    }
    pinned = pinned_steps(directory)
    entries = [_entry(directory, folder, line, read_all) for line, folders in lines.items() for folder in folders]
    return [replace(entry, pinned=entry.line == "current" and entry.step in pinned) for entry in entries]


def current_line(directory: Path) -> list[Path]:
    """The folders that a run goes on from, the newest first; before them a `final_checkpoint` that tells no step."""
    found = [folder for _, folder in committed(directory)]
    final = directory / FINAL
    return found if final in found or not final.exists() else [final, *found]


def _shelf(place: Path) -> list[Path]:
    return sorted(folder for folder in place.iterdir() if folder.is_dir()) if place.is_dir() else []


def _entry(directory: Path, folder: Path, line: Line, read_all: bool) -> Entry:
    manifest, damage = None, None
    try:
        manifest = read_manifest(folder)
        if read_all:
            verify_folder(folder)
    except DamagedCheckpoint as error:
        damage = error.what
    return Entry(
        name=str(folder.relative_to(directory)),
        step=manifest.step if manifest else None,
        attempt=manifest.attempt if manifest else None,
        wall_time=manifest.wall_time if manifest else None,
        nbytes=manifest.nbytes if manifest else None,
        damage=damage,
        line=line,
        final=folder.name.startswith(FINAL),
        pinned=False,
    )
