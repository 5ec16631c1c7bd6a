"""A whole run moved out of the way of a new one, in the same folder: all of it or nothing, and nothing is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ci_llm.checkpoints.store import OVERWRITTEN, CheckpointStore
from ci_llm.core.durable import DISK, Filesystem, make_folders


def set_aside(store: CheckpointStore, entries: Sequence[Path], disk: Filesystem = DISK) -> Path:
    """Move `entries` of the store's folder to `overwritten/<n>/`, by way of the attempt's own: only a claim can.

    Returns:
        where they are now.

    Raises:
        WriterBusy: another attempt holds the folder.
        OSError: the disk refuses it; everything is where it was.
    """
    shelf = store.directory / OVERWRITTEN
    make_folders(shelf, disk=disk)
    bundle = store.staging / OVERWRITTEN / str(1 + sum(1 for _ in shelf.iterdir()))
    make_folders(bundle, disk=disk)
    place, moved = bundle, list[Path]()
    try:
        for entry in entries:
            disk.rename(entry, bundle / entry.name)
            moved.append(entry)
        disk.sync_folder(bundle)
        disk.sync_folder(store.directory)
        disk.rename(bundle, shelf / bundle.name)
        place = shelf / bundle.name
        disk.sync_folder(shelf)
    except OSError:
        for entry in moved:  # what lies in the folder of an attempt would end with it
            disk.rename(place / entry.name, entry)
        raise
    return place
