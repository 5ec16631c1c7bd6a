"""The layout of a run's checkpoints on disk: which folders count, and where those go that leave the run's line.

    checkpoint_step_<N>/    committed; never written again
    final_checkpoint/       the last step once more, made for use; counts with its step
    quarantine/             checkpoints that did not verify
    superseded/             checkpoints newer than the step that a run went back to
    overwritten/            whole runs that were in the way of a new one

Reading needs no lease. A folder that leaves the line is moved whole and never deleted. Each move goes by way of the
attempt's work folder, because only the owner of the lease can rename into that. If the disk refuses the second rename,
the folder must not stay there: the end of an attempt removes its work folder with all that it holds. So it is moved
back to where it came from.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci_llm.checkpoints.manifest import MANIFEST, STEP_FOLDER, Opened, open_folder, read_step
from ci_llm.core.durable import Filesystem, commit_folder, make_folders
from ci_llm.core.run_folder import is_run
from ci_llm.errors import CheckpointError, DamagedCheckpoint

FINAL = "final_checkpoint"


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"checkpoint_step_{step}"


def is_checkpoint_name(name: str) -> bool:
    """True if a folder of this name is a checkpoint by its name, whatever it holds."""
    return name == FINAL or STEP_FOLDER.fullmatch(name) is not None


def numbered_steps(directory: Path) -> list[int]:
    """The steps that have a folder of their own, ascending; not a run with such a name, which nothing may remove."""
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
        found.append((read_step(directory / FINAL), directory / FINAL))
    return sorted(found, key=lambda each: (-each[0], each[1].name))


def find_checkpoint(place: Path, *, final_first: bool = False) -> Path | None:
    """The committed folder that `place` means, unread: itself, or the newest of a run's folder; None if it is neither.

    Args:
        final_first: prefer the `final_checkpoint` of a run's folder, for whoever uses the result.
    """
    if (place / MANIFEST).is_file() or (is_checkpoint_name(place.name) and place.is_dir()):
        return place
    line = [folder for _, folder in committed(place)]
    if final_first and place / FINAL in line:
        return place / FINAL
    return line[0] if line else None


def folders_of(directory: Path, step: int) -> list[Path]:
    """The folders that hold a step, the numbered one first.

    Raises:
        CheckpointError: no folder holds it.
    """
    line = committed(directory)
    if found := [folder for known, folder in line if known == step]:
        return found
    steps = ", ".join(str(known) for known in sorted({known for known, _ in line})) or "none"
    raise CheckpointError(f"there is no step {step}; committed: {steps}", where=str(directory))


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


QUARANTINE = "quarantine"
SUPERSEDED = "superseded"
OVERWRITTEN = "overwritten"
SHELVES = (QUARANTINE, SUPERSEDED, OVERWRITTEN)


def move_to_shelf(folder: Path, shelf: str, work: Path, disk: Filesystem) -> Path:
    """Move one checkpoint to a shelf of its directory.

    Args:
        folder: a checkpoint in the run's folder.
        work: the work folder of the attempt that holds the lease.

    Returns:
        where it is now: under its own name, with a number if that name is taken.

    Raises:
        OSError: the disk refuses it; the checkpoint is where it was.
    """
    transit = work / shelf
    if not transit.exists():
        disk.mkdir(transit)  # never with parents: after a takeover this must fail
    place = folder.parent / shelf
    make_folders(place, disk=disk)
    return _move({folder: transit / folder.name}, transit / folder.name, _free_name(place, folder.name), disk)


def set_aside(directory: Path, entries: Sequence[Path], work: Path, disk: Filesystem) -> Path:
    """Move `entries` of a run's folder together to `overwritten/<n>/`.

    Returns:
        where they are now.

    Raises:
        OSError: the disk refuses it; every entry is where it was.
    """
    place = directory / OVERWRITTEN
    make_folders(place, disk=disk)
    # After the largest number, not their count: people delete old runs to make space.
    last = max((int(entry.name) for entry in place.iterdir() if entry.name.isdecimal()), default=0)
    bundle = work / OVERWRITTEN / str(last + 1)
    make_folders(bundle, disk=disk)
    return _move({entry: bundle / entry.name for entry in entries}, bundle, place / bundle.name, disk)


def finish_moves(work: Path, directory: Path, disk: Filesystem) -> None:
    """Finish the moves that an attempt had begun when it died.

    Args:
        work: its work folder, which has been taken over.
        directory: the run's folder.
    """
    for folder in in_transit(work):
        place = directory / folder.parent.name
        make_folders(place, disk=disk)
        commit_folder(folder, _free_name(place, folder.name), disk=disk)


def in_transit(work: Path) -> list[Path]:
    """The entries of a work folder on their way to a shelf: they must not be removed with it."""
    found = sorted(entry for shelf in SHELVES for entry in (work / shelf).glob("*"))
    return [entry for entry in found if entry.is_symlink() or not entry.is_dir() or any(entry.iterdir())]


def _move(entries: Mapping[Path, Path], bundle: Path, target: Path, disk: Filesystem) -> Path:
    """Rename each entry to its place in the work folder, then what holds them all, `bundle`, to `target`."""
    moved: dict[Path, Path] = {}
    arrived = False
    try:
        for entry, transit in entries.items():
            disk.rename(entry, transit)
            moved[entry] = transit
        # The new names first: a crash between the two must not lose the old ones.
        for directory in (*{transit.parent for transit in moved.values()}, *{entry.parent for entry in moved}):
            disk.sync_folder(directory)
        disk.rename(bundle, target)
        arrived = True
        disk.sync_folder(target.parent)
    except OSError:
        for entry, transit in moved.items():
            disk.rename(target / transit.relative_to(bundle) if arrived else transit, entry)
        raise
    return target


def _free_name(place: Path, name: str) -> Path:
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(place / each for each in names if not (place / each).exists())
