"""An object store as a mirror needs it: whole objects, and one conditional put that decides who has committed.

`RemoteObjects` speaks to S3, Google Cloud Storage, Azure and memory through obstore. A folder (`file://`) is
`folder_objects.py`: obstore neither syncs local files nor swaps them conditionally. Nothing here depends on a listing,
except what looks for leftovers: listings may be stale.

Credentials come from the environment. A URL that carries any is refused, and so none can reach a log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

from ci_llm.core.urls import why_no_mirror
from ci_llm.errors import BadInput, CiLlmError, ConfigError, MirrorUnreachable

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

EXTRA: Final = "pip install 'ci-llm[mirror]'"
#: One request: an object has a few megabytes at most.
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

    def get(self, key: str) -> bytes:
        """The whole object. Raises Missing."""

    def get_version(self, key: str) -> tuple[bytes, Version]:
        """The whole object, and what `swap` must know to replace this very one. Raises Missing."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever is there."""

    def swap(self, key: str, data: bytes, version: Version | None) -> None:
        """Write an object only if it is still that of `version`; with None, only if there is none. Raises Conflict."""

    def size(self, key: str) -> int | None:
        """Bytes of an object; None: there is none."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; it is no error if one of them is gone."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Key and size of every object below `prefix`, perhaps as things were a while ago.

        In a folder also of what a kill has left of an unfinished put: a name that ends in `PARTIAL`.
        """


def check_url(url: str, where: str) -> str:
    """The URL of a mirror, without a slash at its end.

    Raises:
        ConfigError: it is none, or it carries credentials, which must come from the environment.
    """
    if problem := why_no_mirror(url):
        what, hint = problem
        raise ConfigError(what, where=where, hint=hint)
    return url.rstrip("/")


def open_objects(url: str, where: str = "mirror") -> Objects:
    """The store of a URL; no request is made.

    Raises:
        ConfigError: the URL is none of a mirror. BadInput: its library is not installed, or does not take it.
    """
    url = check_url(url, where)
    if urlsplit(url).scheme == "file":
        from ci_llm.checkpoints.mirror.folder_objects import FolderObjects

        return FolderObjects(url)
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise BadInput("a mirror needs the package obstore", where=f"{where}: {url}", hint=EXTRA) from error
    return RemoteObjects(url, where)


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


class RemoteObjects:
    """Objects of S3, Google Cloud Storage, Azure or memory, through obstore."""

    def __init__(self, url: str, where: str) -> None:
        from obstore.exceptions import BaseError

        self.url = url
        self._failures = (BaseError, OSError)
        try:
            self._store = _open_store(url)
        except (BaseError, ValueError) as error:
            raise BadInput(f"this store cannot be opened: {_brief(error)}", where=f"{where}: {url}") from error

    def get(self, key: str) -> bytes:
        return self.get_version(key)[0]

    def get_version(self, key: str) -> tuple[bytes, Version]:
        import obstore

        try:
            found = obstore.get(self._store, key)
            version = {"e_tag": found.meta["e_tag"], "version": found.meta["version"]}
            return bytes(found.bytes()), {name: value for name, value in version.items() if value is not None}
        except FileNotFoundError as error:
            raise Missing(key) from error
        except self._failures as error:
            raise self._unreachable("read", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        import obstore

        try:
            obstore.put(self._store, key, data, use_multipart=False)
        except self._failures as error:
            raise self._unreachable("write", key, error) from error

    def swap(self, key: str, data: bytes, version: Version | None) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            obstore.put(
                self._store,
                key,
                data,
                mode="create" if version is None else cast("UpdateVersion", dict(version)),
                use_multipart=False,
            )
        except (AlreadyExistsError, PreconditionError) as error:
            raise Conflict(key) from error
        except self._failures as error:  # a store may say 404 where what was to be replaced is gone
            if version is not None and isinstance(error, FileNotFoundError):
                raise Conflict(key) from error
            raise self._unreachable("write", key, error) from error

    def size(self, key: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None
        except self._failures as error:
            raise self._unreachable("read", key, error) from error

    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        try:
            obstore.delete(self._store, list(keys))
        except FileNotFoundError:
            return
        except self._failures as error:
            raise self._unreachable("remove", ", ".join(keys), error) from error

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        import obstore

        try:
            for page in obstore.list(self._store, prefix):
                yield from ((each["path"], int(each["size"])) for each in page)
        except self._failures as error:
            raise self._unreachable("list", prefix, error) from error

    def _unreachable(self, verb: str, key: str, error: Exception) -> CiLlmError:
        return MirrorUnreachable(
            f"the store does not let us {verb} {key}: {_brief(error)}",
            where=self.url,
            hint="look at its address (AWS_ENDPOINT_URL), the credentials in the environment, and the network",
        )


def _brief(error: Exception) -> str:
    """The first line of an error of the library, which goes on with the whole request and its answer."""
    line = str(error).partition("\n")[0]
    found = re.search(r"status code: (\d+[^:]*)", line)
    return found[1].strip() if found else re.sub(r"https?://\S+", "the store", line)[:200]
