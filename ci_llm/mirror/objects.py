"""An object store as a mirror needs it: objects that appear whole, a conditional put, and a bound on speed.

It is S3, Google Cloud Storage, Azure or memory (`RemoteObjects`), or a folder (`FolderObjects`). Nothing depends on a
listing, except what looks for leftovers or for the copy of a damaged head: listings may be stale.

Credentials come from the environment. A URL that carries any is refused, and so none can reach a log.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from ci_llm.checkpoints.manifest import digest
from ci_llm.core.durable import locked, make_folders, write_parts
from ci_llm.core.remote import why_no_mirror
from ci_llm.errors import BadInput, CheckpointError, ConfigError, MirrorUnreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore


#: Seconds from an error to the next try: at first, and at most. They double from one to the next.
FIRST_TRY_S: Final = 1.0
LONGEST_S: Final = 60.0
#: When the run is about to end nobody can wait longer.
HURRY_S: Final = 1.0


class RateLimiter:
    """Spreads bytes over time.

    Args:
        max_mb_per_s: megabytes per second; None for no bound.
        clock: seconds, monotonic.

    Attributes:
        hurry: while set, nothing waits.
    """

    def __init__(self, max_mb_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = None if max_mb_per_s is None else max_mb_per_s * 1e6
        self._clock, self._free_at = clock, clock()
        self.hurry = threading.Event()

    def __call__(self, nbytes: int) -> None:
        """Wait until `nbytes` may go."""
        if self._bytes_per_s is None or self.hurry.is_set():
            return
        now = self._clock()
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        self.hurry.wait(self._free_at - now)


def backoff_s(failures: int, *, hurry: bool) -> float:
    """Seconds until the next try, after this number of failures in a row; with jitter: many runs may share a store."""
    longest = HURRY_S if hurry else LONGEST_S
    return min(FIRST_TRY_S * 2.0 ** min(failures - 1, 10), longest) * random.uniform(0.5, 1.0)


#: A larger object is sent and read in parts, so that no request lasts long. S3 takes no part below 5 MB.
PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 4
#: One request.
REQUEST_S: Final = 60
CONNECT_S: Final = 10
#: The library repeats a failed request this often by itself; what fails for longer is the mirror's business.
RETRIES: Final = 3
RETRY_S: Final = 15


class Missing(Exception):
    """There is no such object."""


class Conflict(Exception):
    """A conditional put found another object than it expected."""


#: What a store says about one version of an object: an `e_tag`, a `version`, or both.
Version: TypeAlias = "Mapping[str, str]"
#: No object has ever had this version.
NO_VERSION: Final[Version] = {"e_tag": '"9999999999999999"', "version": "1"}


class Objects(Protocol):
    """One prefix of a store. Every method raises MirrorUnreachable where the store fails or refuses."""

    url: str

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The whole object, or at most `length` bytes of it from `start` on. Raises Missing."""

    def get_version(self, key: str) -> tuple[bytes, Version]:
        """The whole object, and what `put_if_match` must know to replace this very one. Raises Missing."""

    def put(self, key: str, data: bytes | Iterator[bytes]) -> None:
        """Write an object, whatever is there; it appears whole. What comes in chunks is sent in parts."""

    def put_if_match(self, key: str, data: bytes, version: Version | None) -> None:
        """Write an object only if it still has `version`, or for None only if it is new. Raises Conflict."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; an object that is gone already is not an error."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Key and size of every object below `prefix`, perhaps as things were a while ago.

        In a folder also of what a kill has left of an unfinished put: a name that ends in `PARTIAL`.
        """


def open_objects(url: str, where: str = "mirror") -> Objects:
    """The store of a URL; no request is made.

    Raises:
        ConfigError: it is not the URL of a mirror, or it carries credentials, which must come from the environment.
        BadInput: its library is not installed, or does not take it.
    """
    if problem := why_no_mirror(url):
        what, hint = problem
        raise ConfigError(what, where=where, hint=hint)
    url = url.rstrip("/")
    return FolderObjects(url) if urlsplit(url).scheme == "file" else RemoteObjects(url, where)


_memory: dict[str, Any] = {}


def _open_store(url: str) -> ObjectStore:
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory://"):
        return cast("ObjectStore", _memory.setdefault(url, MemoryStore()))
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
    )


class _Store:
    """The common part of both kinds of `Objects`: how an error of the store is told."""

    url: str
    _failures: tuple[type[Exception], ...] = (OSError,)
    _noun = "store"
    _hint = "look at its address (AWS_ENDPOINT_URL), the credentials in the environment, and the network"

    @contextlib.contextmanager
    def _reaching(self, verb: str, key: str) -> Iterator[None]:
        """An error of the store in the block becomes Missing, if an object to be read is not there, or unreachable."""
        try:
            yield
        except self._failures as error:
            if verb == "read" and isinstance(error, FileNotFoundError | NotADirectoryError):
                raise Missing(key) from error
            what = f"the {self._noun} does not let us {verb} {key}: {_brief(error)}"
            raise MirrorUnreachable(what, where=self.url, hint=self._hint) from error


class RemoteObjects(_Store):
    """Objects of S3, Google Cloud Storage, Azure or memory, through obstore."""

    def __init__(self, url: str, where: str) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
        except ImportError as error:
            hint = "pip install 'ci-llm[mirror]'"
            raise BadInput("a mirror needs the package obstore", where=f"{where}: {url}", hint=hint) from error
        self.url = url
        self._api = obstore
        self._failures = (BaseError, OSError)
        try:
            self._store = _open_store(url)
        except (BaseError, ValueError) as error:
            raise BadInput(f"this store cannot be opened: {_brief(error)}", where=f"{where}: {url}") from error

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length is None:
            return self.get_version(key)[0]
        with self._reaching("read", key):
            return bytes(self._api.get_range(self._store, key, start=start, length=length))

    def get_version(self, key: str) -> tuple[bytes, Version]:
        with self._reaching("read", key):
            found = self._api.get(self._store, key)
            version = {"e_tag": found.meta["e_tag"], "version": found.meta["version"]}
            return bytes(found.bytes()), {name: value for name, value in version.items() if value is not None}

    def put(self, key: str, data: bytes | Iterator[bytes]) -> None:
        in_parts = not isinstance(data, bytes)
        with self._reaching("write", key):
            self._api.put(
                self._store, key, data, use_multipart=in_parts, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    def put_if_match(self, key: str, data: bytes, version: Version | None) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "create" if version is None else dict(version)
        with self._reaching("write", key):
            try:
                self._api.put(self._store, key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                raise Conflict(key) from error
            except FileNotFoundError as error:  # a store may say 404 where what was to be replaced is gone
                if version is None:
                    raise
                raise Conflict(key) from error

    def delete(self, keys: Sequence[str]) -> None:
        with self._reaching("remove", ", ".join(keys)), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, list(keys))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._reaching("list", prefix):
            for page in self._api.list(self._store, prefix):
                yield from ((each["path"], int(each["size"])) for each in page)


def _brief(error: Exception) -> str:
    """The first line of an error, whose other lines are a whole request and its answer; for one of a disk its words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = str(error).partition("\n")[0]
    found = re.search(r"status code: (\d+[^:]*)", line)
    return found[1].strip() if found else re.sub(r"https?://\S+", "the store", line)[:200]


def require_writable(objects: Objects) -> None:
    """Write, read, conditionally replace and remove an object that no mirror has.

    Raises:
        MirrorUnreachable: there is no such store, or it refuses one of these.
        CheckpointError: it ignores the condition of a put.
    """
    key, data = f"probe-{secrets.token_hex(8)}", b"ci_llm"
    objects.put(key, data)
    try:
        objects.get(key)
        require_conditions(objects, key, data)
    except Missing as error:
        raise MirrorUnreachable("the store does not give back what was written", where=objects.url) from error
    finally:
        objects.delete([key])


def require_conditions(objects: Objects, key: str, data: bytes) -> None:
    """Refuse a store that takes a conditional put although the condition does not hold. The put changes nothing.

    Args:
        data: what the object `key` holds.

    Raises:
        CheckpointError: the store is one. MirrorUnreachable.
    """
    try:
        objects.put_if_match(key, data, NO_VERSION)
    except Conflict:
        return
    raise CheckpointError(
        "this store ignores the condition of a put, so that two writers could mix",
        where=objects.url,
        hint="take a store with conditional writes (If-Match), or a newer version of this one",
    )


LOCK = ".lock"


class FolderObjects(_Store):
    """Objects are files below a folder; see `Objects`.

    They are for `file://`, because obstore neither syncs local files nor puts them conditionally. Here writes are
    durable, and a lock of the operating system guards the conditional put.
    """

    _noun, _hint = "folder", "look at its rights, and at the space on its disk"

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = Path(unquote(urlsplit(url).path))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._reaching("read", key), (self._root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def get_version(self, key: str) -> tuple[bytes, Version]:
        data = self.get(key)
        return data, {"e_tag": digest([data])}

    def put(self, key: str, data: bytes | Iterator[bytes]) -> None:
        path = self._root / key
        with self._reaching("write", key):
            make_folders(path.parent)
            write_parts(path, [data] if isinstance(data, bytes) else data)

    def put_if_match(self, key: str, data: bytes, version: Version | None) -> None:
        with contextlib.ExitStack() as held:
            with self._reaching("lock", key):
                make_folders(self._root)
                held.enter_context(locked(self._root / LOCK, create=True))
            now: Version | None = None
            with contextlib.suppress(Missing):
                now = self.get_version(key)[1]
            if now != version:
                raise Conflict(key)
            self.put(key, data)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._reaching("remove", key):
                (self._root / key).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for folder in Path(key).parents:
                    (self._root / folder).rmdir()  # as long as they are empty

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self._root / prefix):
            for name in sorted(names):
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield str(path.relative_to(self._root)), path.stat().st_size
