"""One committed folder by itself, at a path of the caller's choice: found, read, written; without a lease."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.commit import commit, refuse_run, require_space
from ci_llm.checkpoints.folders import FINAL, Opened, committed, is_named_checkpoint, open_folder
from ci_llm.checkpoints.manifest import MANIFEST, FileImage, Manifest
from ci_llm.checkpoints.state_files import State, read_snapshot, take_snapshot
from ci_llm.core.durable import DISK, Filesystem, make_folders, remove_tree, replace_folder
from ci_llm.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    state: dict[str, Any]
    manifest: Manifest
    folder: Path


def decode(opened: Opened) -> Checkpoint:
    """The checkpoint in a folder that was read. Raises DamagedCheckpoint: the files do not have their form."""
    return Checkpoint(read_snapshot(opened.manifest.forms, opened.files), opened.manifest, opened.folder)


def find_checkpoint(place: Path, *, final_first: bool = False) -> Path | None:
    """The committed folder that `place` means, unread: itself, or the newest of a run's folder; None: it is neither.

    Args:
        final_first: of a run's folder its `final_checkpoint`, if it has one: the result, where `place` is to be used.
    """
    if (place / MANIFEST).is_file() or (is_named_checkpoint(place) and place.is_dir()):
        return place
    line = [folder for _, folder in committed(place)]
    if final_first and place / FINAL in line:
        return place / FINAL
    return line[0] if line else None


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
    snapshot = take_snapshot(state)
    records = {name: image.record() for name, image in snapshot.files.items()}
    manifest = Manifest(step, 0, time.time(), snapshot.forms, records, info or {})
    write_files_as(folder, manifest, snapshot.files, disk=disk)
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
            _clear(work, disk)
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be written: {error}", where=str(folder)) from error


def _clear(work: Path, disk: Filesystem) -> None:
    """Remove what is needed no more; if that fails, what was committed is no less so."""
    try:
        remove_tree(work, disk=disk)
    except OSError as error:
        logger.warning("a leftover stays: %s", error)
