"""A folder as an object store, for `file://`: durable writes, and a lock of the operating system for the swap."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ci_llm.checkpoints.manifest import digest
from ci_llm.checkpoints.mirror.objects import Conflict, Missing, Version
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.locks import locked
from ci_llm.errors import CiLlmError, MirrorUnreachable

LOCK = ".lock"


class FolderObjects:
    """Objects are files below a folder; see `Objects`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = Path(unquote(urlsplit(url).path))

    def get(self, key: str) -> bytes:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Missing(key) from error
        except OSError as error:
            raise self._unreachable("read", key, error) from error

    def get_version(self, key: str) -> tuple[bytes, Version]:
        data = self.get(key)
        return data, {"e_tag": digest([data])}

    def put(self, key: str, data: bytes) -> None:
        path = self._root / key
        try:
            make_folders(path.parent)
            write_bytes(path, data)
        except OSError as error:
            raise self._unreachable("write", key, error) from error

    def swap(self, key: str, data: bytes, version: Version | None) -> None:
        with self._locked(key):
            try:
                now: Version | None = self.get_version(key)[1]
            except Missing:
                now = None
            if now != version:
                raise Conflict(key)
            self.put(key, data)

    def size(self, key: str) -> int | None:
        try:
            return (self._root / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreachable("read", key, error) from error

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        path = self._root / key
        try:
            path.unlink(missing_ok=True)
            for folder in path.relative_to(self._root).parents:
                (self._root / folder).rmdir()  # as long as they are empty
        except OSError as error:
            if path.exists():
                raise self._unreachable("remove", key, error) from error

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self._root / prefix):
            for name in sorted(names):
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield str(path.relative_to(self._root)), path.stat().st_size

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                make_folders(self._root)
                held.enter_context(locked(self._root / LOCK, create=True))
            except OSError as error:
                raise self._unreachable("lock", key, error) from error
            yield

    def _unreachable(self, verb: str, key: str, error: OSError) -> CiLlmError:
        what = f"the folder does not let us {verb} {key}: {error.strerror}"
        return MirrorUnreachable(what, where=self.url, hint="look at its rights, and at the space on its disk")
