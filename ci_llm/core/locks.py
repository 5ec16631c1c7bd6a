"""The lock of the operating system on a file: one process holds it, and it is free again when that process is gone."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: What some network filesystems say, which have no locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP})


@contextmanager
def locked(path: Path, *, create: bool = False, wait: bool = True, required: bool = True) -> Iterator[None]:
    """Hold the lock of a file.

    Args:
        create: make an empty file if there is none.
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
