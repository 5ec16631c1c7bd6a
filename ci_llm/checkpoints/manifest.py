"""The manifest of a committed folder, by which all of it is verified: sizes and digests of files.

`manifest.json` lists every other file of its folder and carries a digest of itself. A file that it does not list, a
link, a name that leaves the folder, and anything that could hold a pickle are refused.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeAlias

import xxhash
from pydantic import AfterValidator

from ci_llm.core.durable import Bytes, read_chunks, read_exactly
from ci_llm.core.run_folder import is_run
from ci_llm.core.typed_json import Json, as_type, decode, encode, seal, unseal
from ci_llm.errors import CheckpointError, DamagedCheckpoint, OtherFormat

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"checkpoint_step_(0|[1-9]\d*)$")
FORMAT_VERSION = 3  # one record for each agent in train_state.json
LAST_TO_READ = {1: "aff619e9", 2: "d83c017a"}  # by format the last commit that reads it
MAX_MANIFEST_BYTES = 256 << 20
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".joblib"})
NAMES_SHOWN = 5  # of damaged files in a message
OWN_KEYS = ("format_version", "step", "attempt", "wall_time", "forms", "files", "digest")
# Errors of this process, or of its way to the disk, and not of the checkpoint, which must not be quarantined for them.
# EIO is damage: it is what a bad block gives.
NOT_DAMAGE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    | {errno.ESTALE, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN}
    | {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
)

JsonObject: TypeAlias = "dict[str, Json]"
_SEAL = partial(hashlib.blake2b, digest_size=32)


def digest(parts: Iterable[Bytes]) -> str:
    """xxh3-128 of `parts` laid end to end, in hex: it finds damage, it does not protect against forgery."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


@dataclass(frozen=True)
class FileImage:
    """One file as it will be written, still in memory: its bytes, laid end to end."""

    parts: tuple[Bytes, ...]

    def record(self) -> FileRecord:
        """Size and digest of the very bytes that will be written."""
        return FileRecord(sum(memoryview(part).nbytes for part in self.parts), digest(self.parts))


@dataclass(frozen=True)
class FileRecord:
    """The record of one file in the manifest: its bytes, and their digest."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Args:
        step: optimizer step that the checkpoint holds.
        attempt: number of the launch that wrote it.
        wall_time: when, in seconds since 1970.
        forms: how each key of the state was written (see state_files.py).
        files: every file of the folder but the manifest, by its path in the folder.
        info: plain values of the caller, readable without the files: epoch, position, fingerprints.
    """

    step: int
    attempt: int
    wall_time: float
    forms: Mapping[str, str]
    files: Mapping[Annotated[str, AfterValidator(check_name)], FileRecord]
    info: Mapping[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def dump(self) -> bytes:
        """The bytes of `manifest.json`. Raises ValueError for a name that no checkpoint may hold."""
        for name in self.files:
            check_name(name)
        if clash := sorted(set(self.info) & set(OWN_KEYS)):
            raise ValueError(f"info must not use the manifest's own keys {clash}")
        body: JsonObject = {"format_version": FORMAT_VERSION, "step": self.step, "attempt": self.attempt}
        body |= {"wall_time": self.wall_time, **{key: encode(value) for key, value in self.info.items()}}
        body |= {"forms": dict(self.forms), "files": {name: asdict(file) for name, file in self.files.items()}}
        return seal(body, _SEAL)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Check the manifest's own digest and its form, byte for byte.

        Raises:
            ValueError: it is not what `dump` wrote.
            OtherFormat: it is whole, but of another format.
        """
        body = unseal(data, _SEAL, "the manifest")
        _check_version(body.get("format_version"))
        info = {key: decode(value) for key, value in body.items() if key not in OWN_KEYS}
        return as_type(cls, {**body, "info": info})


def _check_version(version: Json) -> None:
    if type(version) is int and version == FORMAT_VERSION:
        return
    newer = isinstance(version, int) and version > FORMAT_VERSION
    commit = LAST_TO_READ.get(version, LAST_TO_READ[1]) if isinstance(version, int) else LAST_TO_READ[1]
    older = f"commit {commit} of ci-llm is the last that reads it: finish or export it there, or begin a new run"
    raise OtherFormat(
        f"this checkpoint has format {version or 'none'}, and this program reads format {FORMAT_VERSION}",
        hint="use a newer ci-llm, at least the one that wrote it" if newer else older,
    )


def check_name(name: str) -> str:
    """Return `name` if it is a relative path that stays in its folder and cannot be a pickle.

    Raises:
        ValueError: it is not.
    """
    path = PurePosixPath(name)
    climbs = path.is_absolute() or any(part in ("", ".", "..") for part in name.split("/"))
    if not name or climbs or "\\" in name or not name.isprintable() or name == MANIFEST:
        raise ValueError(f"a checkpoint must not hold a file named {name!r}")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ValueError(f"a checkpoint holds no pickle: {name!r} is refused")
    return name


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, itself checked, the files not.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written, or has another step than the folder's name.
        OtherFormat: this program cannot read it.
    """
    with as_damage(folder):
        manifest = Manifest.parse(_bytes_of_manifest(folder))
        # A copy under a later number would be newer than every step that the run saves from then on.
        if (named := STEP_FOLDER.match(folder.name)) and int(named[1]) != manifest.step:
            raise ValueError(f"it is a copy of step {manifest.step} under another name")
        return manifest


def read_step(folder: Path) -> int:
    """The step of a committed folder, also of one whose format this program cannot read.

    Raises:
        DamagedCheckpoint: its manifest is missing or not as it was written.
    """
    with as_damage(folder):
        step = unseal(_bytes_of_manifest(folder), _SEAL, "the manifest").get("step")
        if not isinstance(step, int):
            raise ValueError("the manifest lacks a field")
        return step


def _bytes_of_manifest(folder: Path) -> bytes:
    if os.path.islink(folder):
        raise ValueError("it is a link, and no link is followed: the folder itself is needed")
    if not os.path.isdir(folder):
        raise ValueError("there is no such folder")
    if is_run(folder):
        raise ValueError("it is a run and not a checkpoint: move it out of this folder when it does not train")
    size = os.lstat(folder / MANIFEST).st_size
    if size > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest has {size} bytes")
    return read_exactly(folder / MANIFEST, size)


def verify_folder(folder: Path, *, from_disk: bool = False, but: Collection[str] = ()) -> Manifest:
    """Read every byte of a committed folder and compare it with the manifest.

    Args:
        from_disk: drop cached pages first, so that what the device holds is read.
        but: files that another process has just compared: only their sizes are checked.

    Raises:
        DamagedCheckpoint: something is missing, added or different; each such thing is named.
    """
    manifest = read_manifest(folder)
    with as_damage(folder):
        _check_listing(folder, manifest)
        _require_digests(folder, {n: r for n, r in manifest.files.items() if n not in but}, from_disk)
    return manifest


def copy_info(info: Mapping[str, object]) -> dict[str, Any]:
    """The info of a manifest, in containers of its own. Raises CheckpointError for a value that is not plain."""
    try:
        return {key: decode(encode(value)) for key, value in info.items()}
    except TypeError as error:
        raise CheckpointError(f"the info cannot be saved: {error}") from error


def verify_files(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Read some files of a folder from the device and compare them with what is to be in them.

    Raises:
        DamagedCheckpoint: the device does not hold what was written.
    """
    with as_damage(folder):
        _require_digests(folder, records, from_disk=True)


def _require_digests(folder: Path, records: Mapping[str, FileRecord], from_disk: bool) -> None:
    damaged = [
        f"{name} has another digest"
        for name, record in records.items()
        if digest(read_chunks(folder / name, from_disk=from_disk)) != record.digest
    ]
    if damaged:
        raise ValueError(_few(damaged, "; "))


class Opened(NamedTuple):
    """A committed folder of which every byte was read once and verified."""

    folder: Path
    manifest: Manifest
    files: dict[str, bytes]

    @property
    def images(self) -> dict[str, FileImage]:
        """The files, to be written again."""
        return {name: FileImage((data,)) for name, data in self.files.items()}


def open_folder(folder: Path) -> Opened:
    """The manifest and the bytes of every file; what is returned is what was verified.

    Raises:
        DamagedCheckpoint: something is missing, added or different.
    """
    manifest = read_manifest(folder)
    with as_damage(folder):
        _check_listing(folder, manifest)
        files = {name: _read_verified(folder, name, record) for name, record in manifest.files.items()}
    return Opened(folder, manifest, files)


def name_unlisted(folder: Path, manifest: Manifest) -> None:
    """Say in one line which files of a committed folder its manifest does not list. Nobody reads them."""
    there = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in there} - {*manifest.files, MANIFEST}
    if names:
        logger.warning(f"{folder.name}: not in its manifest, and so not read: {_few(sorted(names))}")


def read_file(folder: Path, name: str, record: FileRecord) -> bytes:
    """The bytes of one file of a committed folder.

    Raises:
        DamagedCheckpoint: it is missing, or not what the manifest says.
    """
    with as_damage(folder):
        return _read_verified(folder, name, record)


def _read_verified(folder: Path, name: str, record: FileRecord) -> bytes:
    content = read_exactly(folder / name, record.size)
    if digest([content]) != record.digest:
        raise ValueError(f"{name} has another digest")
    return content


def _check_listing(folder: Path, manifest: Manifest) -> None:
    sizes = dict(list_files(folder))
    sizes.pop(MANIFEST, None)
    if strange := sorted(set(sizes) - set(manifest.files)):
        raise ValueError(f"files that the manifest does not know: {_few(strange)}")
    if missing := sorted(set(manifest.files) - set(sizes)):
        raise ValueError(f"missing: {_few(missing)}")
    if wrong := [name for name, record in manifest.files.items() if sizes[name] != record.size]:
        raise ValueError(f"another size than the manifest says: {_few(wrong)}")


def _few(names: Sequence[str], separator: str = ", ") -> str:
    """The first names of a list, and how many more there are."""
    more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return separator.join([*names[:NAMES_SHOWN], *more])


def list_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Path and size of every regular file below `folder`.

    Raises:
        ValueError: there is a link or another special file.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from list_files(folder / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size
            else:
                raise ValueError(f"{prefix}{entry.name} is a link or a special file")


@contextmanager
def as_damage(folder: Path) -> Iterator[None]:
    """Turn what reading a folder raises into an error with the folder's name."""
    try:
        yield
    except CheckpointError as error:
        error.where = error.where or str(folder)
        raise
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in NOT_DAMAGE:
            raise CheckpointError(f"{folder.name} cannot be read: {error}", where=str(folder)) from error
        raise DamagedCheckpoint(f"{folder.name} is damaged: {error}", where=str(folder)) from error
