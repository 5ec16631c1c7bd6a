"""Durable files: after a crash at any line a reader finds the old content or the new one.

A new file is written under another name, synced, renamed, and its folder is synced: a rename is atomic, and a name is
durable only after the sync of its folder. Only `append` may leave a part: of what was added last. This is the only
module that renames or syncs. Every change of a disk goes through a `Filesystem`, so that a test can crash before the
n-th change, or drop and reorder changes before a sync. `locked` is here for files that several processes change in
turn.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from ci_llm.core.typed_json import as_type, dump_json, load_json

logger = logging.getLogger(__name__)

T = TypeVar("T")
Bytes: TypeAlias = "bytes | bytearray | memoryview"

PARTIAL = ".partial"
CHUNK_BYTES = 1 << 22

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


class Filesystem:
    """The operations that change a disk, one method per system call."""

    def create(self, path: Path) -> int:
        """Open a file that must not exist yet, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def extend(self, path: Path) -> int:
        """Open an existing file for writing at its end."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, handle: int, data: Bytes) -> int:
        """Write some of `data`; returns how many bytes."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network filesystems have no fsync of a folder: their names are durable without it.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically. A file may replace a file; a folder may replace only an empty folder."""
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Exchange two names atomically. Raises OSError: ENOSYS or EINVAL where kernel or file system cannot do it."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(other))
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def touch(self, path: Path) -> None:
        """Set the time of an existing file or folder to the present time, by the clock of the disk."""
        os.utime(path)

    def free_bytes(self, path: Path) -> int:
        """Free bytes below `path`, as far as this user may use them."""
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize


DISK = Filesystem()


def write_bytes(path: Path | str, data: Bytes, *, staging: Path | None = None, disk: Filesystem = DISK) -> None:
    """Replace the file `path` by `data`, durably and atomically. Its folder must exist.

    Args:
        staging: folder of the unfinished file, on the same filesystem; the folder of `path` by default. Once the
            staging folder is renamed, its writer can no longer replace any file.
        disk: the operations on the disk.

    Raises:
        OSError: the disk refuses one of the operations.
    """
    write_parts(path, [data], staging=staging, disk=disk)


def write_parts(
    path: Path | str, parts: Iterable[Bytes], *, staging: Path | None = None, disk: Filesystem = DISK
) -> None:
    """`write_bytes` of concatenated parts, which may be made one by one while they are written.

    Raises:
        OSError: the disk refuses one of the operations; and what `parts` raises. The file is then as it was.
    """
    path = Path(path)
    # A random name: two writers of one file must not write into the same unfinished one.
    partial = (staging or path.parent) / f".{path.name}.{secrets.token_hex(4)}{PARTIAL}"
    try:
        write_new(partial, parts, disk=disk)
        disk.rename(partial, path)
    except Exception:
        with contextlib.suppress(OSError):  # the first error matters; the next start removes what remains
            disk.unlink(partial)
        raise
    # The rename is atomic for readers, but it survives a power cut only once the folder is synced.
    disk.sync_folder(path.parent)


def write_json(path: Path | str, value: object, *, staging: Path | None = None, disk: Filesystem = DISK) -> None:
    """`write_bytes` of typed JSON: plain JSON for plain values; tags keep int keys and tuples (typed_json.py)."""
    write_bytes(path, dump_json(value, indent=2), staging=staging, disk=disk)


def read_json(path: Path | str) -> object:
    """The value that `write_json` wrote, with its types.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, or holds an unknown tag.
    """
    return load_json(Path(path).read_bytes())


def read_object(path: Path | str) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError, and ValueError for a file that holds something else."""
    return read_as(dict[str, Any], path)


def read_as(kind: type[T], path: Path | str) -> T:
    """The dataclass, or another type with annotations, that a file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else; see `as_type`.
    """
    return as_type(kind, read_json(path))


def write_new(path: Path, parts: Iterable[Bytes], *, disk: Filesystem = DISK) -> int:
    """Create the file `path` from concatenated `parts` and sync it. The caller syncs its folder.

    Returns:
        the number of bytes.

    Raises:
        FileExistsError: `path` exists.
    """
    handle = disk.create(path)
    try:
        total = sum(_write_all(handle, memoryview(part).cast("B"), disk) for part in parts if len(part))
        disk.sync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)
    return total


def _write_all(handle: int, data: memoryview, disk: Filesystem) -> int:
    done = 0
    while done < len(data):  # write(2) may take only a part, for example on a disk that is nearly full
        written = disk.write(handle, data[done:])
        if written <= 0:
            raise OSError(errno.EIO, "the disk wrote no byte and reported no error")
        done += written
    return done


def append(path: Path, data: Bytes, *, disk: Filesystem = DISK) -> None:
    """Add `data` to the end of an existing file and sync it. After a crash a part of `data` may be there.

    Raises:
        OSError: the disk refuses it.
    """
    with _synced(disk.extend(path), disk) as handle:
        _write_all(handle, memoryview(data).cast("B"), disk)


def cut(path: Path, size: int) -> None:
    """Leave only the first `size` bytes of an existing file, durably.

    Raises:
        OSError: the disk refuses it.
    """
    with _synced(DISK.extend(path), DISK) as handle:
        os.ftruncate(handle, size)


@contextmanager
def _synced(handle: int, disk: Filesystem) -> Iterator[int]:
    """An open file, which is synced after the block and closed in any case."""
    try:
        yield handle
        disk.sync(handle)
    finally:
        disk.close(handle)


class Refusals:
    """Files that a run can do without: a disk that refuses one is a warning, once until the disk takes one again."""

    _told = False

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Continue after the block if the disk refuses; `what` is the beginning of the warning."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._told = True  # before the warning, which may come to the same file
                logger.warning(f"{what}: {error}")
        else:
            self._told = False


def make_folders(path: Path, *, disk: Filesystem = DISK) -> None:
    """Create `path` and its missing parents, durably. An existing folder is not an error."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process of the run has just created it
            disk.mkdir(folder)
        disk.sync_folder(folder.parent)


def commit_folder(source: Path, target: Path, *, disk: Filesystem = DISK) -> None:
    """Rename a complete, synced folder to its final name, durably. `target` must not exist, or be empty."""
    disk.rename(source, target)
    disk.sync_folder(target.parent)


def replace_folder(source: Path, target: Path, *, disk: Filesystem = DISK) -> None:
    """Put a complete, synced folder in the place of `target`, durably; what was there is then `source`, or beside it.

    A crash leaves the old one or the new one where the file system can exchange two names. Where it cannot, as on NFS,
    there are two renames, and a crash between them leaves nothing at `target`.

    Raises:
        OSError: the disk refuses; both are as they were.
    """
    with contextlib.ExitStack() as undo:
        if not (os.path.lexists(target) and _exchanged(source, target, disk, undo)):
            if os.path.lexists(target):
                old = source.with_name(f"{source.name}.old")
                disk.rename(target, old)
                undo.callback(disk.rename, old, target)
            disk.rename(source, target)
            undo.callback(disk.rename, target, source)
        disk.sync_folder(target.parent)
        undo.pop_all()


def _exchanged(source: Path, target: Path, disk: Filesystem, undo: contextlib.ExitStack) -> bool:
    try:
        disk.exchange(source, target)
    except OSError as error:
        if error.errno in _NO_EXCHANGE:
            return False
        raise
    undo.callback(disk.exchange, source, target)
    return True


@contextlib.contextmanager
def new_folder(target: Path, *, disk: Filesystem = DISK) -> Iterator[Path]:
    """A draft beside `target`, to be filled by anybody; it becomes `target`, synced and whole, or goes away.

    Raises:
        OSError: the disk refuses; or `target` has come into being meanwhile, and is not an empty folder.
    """
    make_folders(target.parent, disk=disk)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}{PARTIAL}"
    disk.mkdir(draft)
    try:
        yield draft
        for folder, _, names in os.walk(draft):
            for name in names:
                handle = os.open(Path(folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                with _synced(handle, disk):
                    pass  # others have written it
        sync_tree(draft, disk=disk)
        commit_folder(draft, target, disk=disk)
    finally:
        if draft.exists():
            remove_tree(draft, disk=disk)


def sync_tree(path: Path, *, disk: Filesystem = DISK) -> None:
    """Make the names in `path` and in every folder below it durable, deepest folder first."""
    for folder, _, _ in os.walk(path, topdown=False):
        disk.sync_folder(Path(folder))


def remove_tree(path: Path, *, disk: Filesystem = DISK) -> None:
    """Remove a file, a link, or a folder with its content. A link is removed and never followed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        disk.unlink(path)
        return
    for entry in sorted(os.listdir(path)):  # sorted: tests that crash before the n-th change need one order
        remove_tree(path / entry, disk=disk)
    disk.rmdir(path)


def read_chunks(path: Path, *, from_disk: bool = False) -> Iterator[bytes]:
    """The bytes of a regular file in chunks of 4 MiB.

    Args:
        from_disk: drop the cached pages of the kernel first, so that the bytes come from the device.

    Raises:
        OSError: the file cannot be read, or is a link.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if from_disk:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := os.read(handle, CHUNK_BYTES):
            yield chunk
    finally:
        os.close(handle)


def read_exactly(path: Path, size: int) -> bytes:
    """The bytes of a regular file of exactly `size` bytes. Of a larger file, little more than `size` is read.

    Raises:
        ValueError: the file has another size.
    """
    data = bytearray()
    for chunk in read_chunks(path):
        data += chunk
        if len(data) > size:  # a damaged or growing file must not fill the memory
            break
    if len(data) != size:
        raise ValueError(f"{path.name} does not have {size} bytes")
    return bytes(data)


#: Error numbers of network filesystems that have no locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP})


@contextmanager
def locked(path: Path, *, create: bool = False, wait: bool = True, required: bool = True) -> Iterator[None]:
    """Hold the lock of a file.

    It is the lock of the operating system: one process holds it, and it is free again when that process is gone.

    Args:
        create: make an empty file where the file does not exist.
        wait: until it is free; else it is an error that another process holds it.
        required: it is an error that the filesystem has no locks; else nothing is locked there.

    Raises:
        BlockingIOError: another process holds it. OSError: the file cannot be opened or locked.
    """
    # For writing: NFS grants an exclusive lock to no other handle.
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except PermissionError as error:  # how some systems say that another process holds it
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        except OSError as error:
            if required or error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)
