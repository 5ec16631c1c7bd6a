"""The commit of one checkpoint: written in a draft, synced, renamed into its place, and read back.

The order is what makes it safe: each file is synced, the manifest last; then the folders; then the rename; then the
folder of the new name; then the device is read. If any step fails, the disk holds what it held before.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

from ci_llm.checkpoints.manifest import MANIFEST, FileImage, FileRecord, Manifest, verify_files, verify_folder
from ci_llm.core.durable import Filesystem, commit_folder, remove_tree, sync_tree, write_new
from ci_llm.core.run_folder import is_run
from ci_llm.errors import CheckpointError, DamagedCheckpoint

BLOCK_BYTES = 4096
MARGIN_BYTES = 1 << 20


class OtherWriters:
    """The other processes that write a part of a checkpoint, for the one that commits it. This class stands for none.

    Attributes:
        records: the files that they will write; none of them is among those of the committing process.
    """

    records: Mapping[str, FileRecord] = {}

    def writing(self, draft: Path) -> AbstractContextManager[None]:
        """A context in which they write: at its end their files are in `draft`, synced and read back.

        Raises:
            OSError, DamagedCheckpoint: one of them could not.
        """
        return contextlib.nullcontext()


NO_OTHERS = OtherWriters()


def require_space(directory: Path, manifest: Manifest, disk: Filesystem) -> None:
    """Raises OSError (ENOSPC) if the disk of `directory` cannot take the checkpoint and a margin."""
    sizes = [record.size for record in manifest.files.values()] + [len(manifest.dump())]
    needed = sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes) + MARGIN_BYTES
    if (free := disk.free_bytes(directory)) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def commit(
    target: Path,
    files: Mapping[str, FileImage],
    manifest: Manifest,
    work: Path,
    disk: Filesystem,
    others: OtherWriters = NO_OTHERS,
) -> Path:
    """Make `target` a committed folder of `files`, or leave everything as it was and raise.

    Args:
        work: folder of the attempt, on the same filesystem.
        others: the writers of the files that the manifest lists beside `files`.

    Returns:
        where the old `target` is now, if there was one.

    Raises:
        OSError: the disk failed, or a run stands there. DamagedCheckpoint: the device does not hold what was written.
    """
    refuse_run(target)
    draft, old = draft_in(work), draft_in(work)
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_if_there, draft, disk)
        _write_folder(draft, files, manifest, disk, others)
        if target.exists() or target.is_symlink():
            disk.rename(target, old)
            undo.callback(disk.rename, old, target)
        undo.callback(_take_back, target, draft, disk)
        commit_folder(draft, target, disk=disk)
        with _reading_back():
            verify_folder(target, from_disk=True, but=others.records)
        undo.pop_all()
    return old


def refuse_run(target: Path) -> None:
    """Raises OSError (EEXIST) if `target` is a run."""
    if is_run(target):
        raise FileExistsError(errno.EEXIST, "a run stands there, which is left alone", str(target))


@contextlib.contextmanager
def _reading_back() -> Iterator[None]:
    """What keeps this process from reading what it has written is an error of the disk, as in writing."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except CheckpointError as error:
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None


def draft_in(work: Path) -> Path:
    """A name in `work` that nothing has yet."""
    return work / f"draft-{secrets.token_hex(4)}"


def _write_folder(
    draft: Path, files: Mapping[str, FileImage], manifest: Manifest, disk: Filesystem, others: OtherWriters
) -> None:
    # Never with parents: after a takeover the work folder is gone, and the draft must fail instead of making it anew.
    disk.mkdir(draft)
    for folder in sorted({parent for name in manifest.files for parent in PurePosixPath(name).parents}):
        if folder.name:
            disk.mkdir(draft / folder)
    with others.writing(draft):
        write_files(draft, files, disk)
    write_new(draft / MANIFEST, [manifest.dump()], disk=disk)
    sync_tree(draft, disk=disk)


def write_part(
    draft: Path, files: Mapping[str, FileImage], records: Mapping[str, FileRecord], disk: Filesystem
) -> None:
    """Write files of a draft that another process commits, and read them back from the device.

    Raises:
        OSError: the disk failed. DamagedCheckpoint: the device does not hold what was written.
    """
    write_files(draft, files, disk)
    with _reading_back():
        verify_files(draft, records)


def write_files(draft: Path, files: Mapping[str, FileImage], disk: Filesystem) -> None:
    """Create and sync `files` in `draft`, in which their folders must exist."""
    for name, image in files.items():
        write_new(draft / name, image.parts, disk=disk)


def _take_back(target: Path, draft: Path, disk: Filesystem) -> None:
    if not draft.exists():  # it was renamed, and something after that failed
        disk.rename(target, draft)


def _remove_if_there(path: Path, disk: Filesystem) -> None:
    if path.exists():
        remove_tree(path, disk=disk)
