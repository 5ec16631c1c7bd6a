"""The reader of a mirror: its head, its steps listed and verified byte by byte, and the newest that verifies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ci_llm.checkpoints.catalog import CatalogEntry, Shelf, entry_of
from ci_llm.checkpoints.manifest import MANIFEST, Manifest, Opened, digest
from ci_llm.core.remote import without_secrets
from ci_llm.errors import CheckpointError, DamagedCheckpoint
from ci_llm.mirror.head import COPY, HEAD, NOT_DUMPED, Entry, Head, RunFile, digest_of
from ci_llm.mirror.objects import PART_BYTES, Missing, Objects, Version

logger = logging.getLogger(__name__)

#: An answer may be damaged on its way.
TRIES = 3


class FoundHead(NamedTuple):
    """The head as it is now.

    Attributes:
        version: the version that `put_if_match` replaces; None if there is no head yet.
        is_copy: it is damaged, and `head` is its copy.
    """

    head: Head | None
    version: Version | None
    is_copy: bool = False


class MirrorReader:
    """One mirror, read only.

    Args:
        pace: called with the number of bytes before each request that reads some.
    """

    def __init__(self, objects: Objects, pace: Callable[[int], object] = lambda nbytes: None) -> None:
        self.objects, self._pace = objects, pace
        self.url = without_secrets(objects.url)

    def head(self) -> Head | None:
        """The head; None if nobody has written to the mirror. Raises MirrorUnreachable."""
        return self.find_head().head

    def find_head(self) -> FoundHead:
        """The head and its version; where it is damaged, the copy of the last writer in its place.

        Raises:
            CheckpointError: another version of this program wrote it, or the copy is damaged too. MirrorUnreachable.
        """
        damage: Exception | None = None
        version: Version | None = None
        for _ in range(TRIES):
            try:
                data, version = self.objects.get_version(HEAD)
                return FoundHead(Head.parse(data), version)
            except Missing:
                return FoundHead(None, None)
            except NOT_DUMPED as error:
                damage = error
        logger.warning(f"the head of the mirror is damaged ({damage}); its copy is taken")
        return FoundHead(self._copy(), version, is_copy=True)

    def _copy(self) -> Head:
        keys = sorted(key for key, _ in self.objects.list("") if COPY.fullmatch(key))
        for key in keys[-1:] * TRIES:  # never the copy of an earlier writer: what it says was true once
            with contextlib.suppress(*NOT_DUMPED, Missing):
                return Head.parse(self.objects.get(key))
        hint = "keep what is there, and give the run another prefix"
        raise CheckpointError("the head of this mirror and its copy are damaged", where=self.url, hint=hint)

    def pieces(self, key: str, size: int) -> Iterator[bytes]:
        """An object of this size, piece by piece. Raises Missing, MirrorUnreachable."""
        for start in range(0, max(size, 1), PART_BYTES):
            self._pace(min(size, PART_BYTES))
            yield self.objects.get(key) if size <= PART_BYTES else self.objects.get(key, start, PART_BYTES)

    def _read(self, key: str, size: int, known: str) -> bytes:
        """An object, verified. Raises DamagedCheckpoint: missing, or other bytes."""
        what = "is missing"
        for _ in range(TRIES):
            with contextlib.suppress(Missing):
                data = b"".join(self.pieces(key, size))
                if digest([data]) == known:
                    return data
                what = "has another digest"
        raise DamagedCheckpoint(f"{key.split('/', 2)[2]} {what}", where=self.url)

    def manifest(self, entry: Entry) -> Manifest:
        """The manifest of a step. Raises DamagedCheckpoint: missing, or not as it was written."""
        try:
            return Manifest.parse(self._read(entry.key(MANIFEST), 0, digest_of(entry.place)))
        except NOT_DUMPED as error:
            raise DamagedCheckpoint(f"the manifest of {entry.name} is damaged: {error}", where=self.url) from error

    def open(self, entry: Entry) -> Opened:
        """The manifest and the files of a step; what is returned is what was verified.

        Raises:
            DamagedCheckpoint: something is missing or different. MirrorUnreachable.
        """
        manifest = self.manifest(entry)
        files = {
            name: self._read(entry.key(name), record.size, record.digest) for name, record in manifest.files.items()
        }
        return Opened(Path(entry.name), manifest, files)

    def file(self, name: str, file: RunFile) -> bytes:
        """The bytes of another file of the run. Raises DamagedCheckpoint, MirrorUnreachable."""
        return self._read(f"{file.place}/{name}", file.size, digest_of(file.place))

    def newest(self, head: Head, *, after: int = -1) -> tuple[Opened | None, dict[str, str]]:
        """The newest step that verifies, and what is wrong with those passed over, by their places.

        Args:
            after: only steps newer than this one are looked at.
        """
        damage: dict[str, str] = {}
        for entry in head.line:
            if entry.step <= after:
                break
            try:
                return self.open(entry), damage
            except DamagedCheckpoint as error:
                logger.warning(f"{error.what}; passed over in the mirror")
                damage[entry.place] = error.what
        return None, damage

    def damage(self, head: Head) -> dict[str, str]:
        """Read every byte of the line: what is wrong with it, by place. Raises MirrorUnreachable."""
        listed = list_mirror(self, replace(head, aside=()))
        return {entry.place: each.damage for entry, each in zip(head.line, listed, strict=True) if each.damage}

    def entry(self, head: Head, name: str) -> Entry:
        """The entry of a step by its name. Raises CheckpointError: the mirror holds no such step."""
        for entry in head.line + head.aside:
            if entry.name == name:
                return entry
        held = ", ".join(entry.name for entry in head.line)
        raise CheckpointError(f"there is no {name} in this mirror: it holds {held}", where=self.url)


def list_mirror(reader: MirrorReader, head: Head, *, read_all: bool = True) -> list[CatalogEntry]:
    """The counterpart of `catalog.list_checkpoints`: the current line first, the newest first.

    It is for `ci-llm checkpoints list` and `verify` of a URL.

    Args:
        read_all: read every byte and compare it with its digest; otherwise the manifests alone.
    """

    def listed(entry: Entry, name: str, shelf: Shelf) -> CatalogEntry:
        verify = partial(reader.open, entry) if read_all else None
        found = entry_of(name, shelf, partial(reader.manifest, entry), verify)
        return replace(found, step=entry.step, nbytes=entry.nbytes)

    current = [listed(entry, entry.name, "current") for entry in head.line]
    return current + [listed(entry, f"superseded/{entry.name}", "superseded") for entry in head.aside]
