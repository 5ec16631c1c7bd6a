"""Folders moved out of a run's line, whole and never deleted: to `quarantine/`, `superseded/` or `overwritten/`.

    quarantine/    checkpoints that did not verify
    superseded/    checkpoints newer than the step that a run went back to
    overwritten/   whole runs that were in the way of a new one

Each move goes by way of the attempt's work folder, because only the owner of the lease can rename into that. If the
disk refuses the second rename, the folder must not stay there: the end of an attempt removes its work folder with all
that it holds. So it is moved back to where it came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci_llm.core.durable import Filesystem, commit_folder, make_folders

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
    """What lies in a work folder on its way to a shelf: it must not be removed with that folder."""
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
