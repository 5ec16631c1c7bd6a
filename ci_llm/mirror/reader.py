"""The reader of a mirror: its head, its steps listed and verified byte by byte, and the newest that verifies."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ci_llm.checkpoints.catalog import CatalogEntry, Shelf, entry_of
from ci_llm.checkpoints.layout import Opened
from ci_llm.checkpoints.manifest import Manifest, digest
from ci_llm.core.durable import PARTIAL
from ci_llm.core.remote import without_secrets
from ci_llm.errors import CheckpointError, DamagedCheckpoint
from ci_llm.mirror.head import HEAD, NOT_DUMPED, RECORDS, Block, Entry, Head, Record, rebuilt, restored
from ci_llm.mirror.objects import Missing, Objects, Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundHead:
    """The head as it is now.

    Attributes:
        version: the version that `swap` replaces; None if there is no head yet.
        is_rebuilt: it is damaged, and made of the records again.
    """

    head: Head | None
    version: Version | None
    is_rebuilt: bool = False


class MirrorReader:
    """One mirror, read only.

    Args:
        limiter: called with the number of bytes before each block.
    """

    def __init__(self, objects: Objects, limiter: Callable[[int], object] = lambda nbytes: None) -> None:
        self.objects, self._limiter = objects, limiter
        self.url = without_secrets(objects.url)

    def head(self) -> Head | None:
        """What the mirror holds; None if nobody has written to it. Raises MirrorUnreachable."""
        return self.find_head().head

    def find_head(self) -> FoundHead:
        """The head and its version. A damaged one is rebuilt from the records, which say all but whose run it is.

        Raises:
            CheckpointError: another version of this program wrote it. MirrorUnreachable.
        """
        damage: Exception | None = None
        version: Version | None = None
        for _ in range(3):  # an answer may be damaged on its way
            try:
                data, version = self.objects.get_version(HEAD)
                return FoundHead(Head.parse(data), version)
            except Missing:
                return FoundHead(None, None)
            except NOT_DUMPED as error:
                damage = error
        logger.warning(f"the head of the mirror is damaged ({damage}); it is rebuilt from its records")
        return FoundHead(rebuilt(list(self._all_records())), version, is_rebuilt=True)

    def _all_records(self) -> Iterable[tuple[str, Record, Manifest]]:
        for key, _ in self.objects.list(RECORDS):
            if key.endswith(PARTIAL):
                continue
            try:
                yield key, *self._read_record(key)
            except (DamagedCheckpoint, Missing) as damage:
                logger.warning(f"passed over: {damage}")

    def record(self, entry: Entry) -> tuple[Record, Manifest]:
        """The record of a step. Raises DamagedCheckpoint: missing, or not as it was written."""
        last: Exception = DamagedCheckpoint(f"{entry.name} has no record", where=self.url)
        for _ in range(2):
            try:
                return self._read_record(entry.record)
            except DamagedCheckpoint as error:
                last = error
            except Missing:
                continue
        raise last

    def _read_record(self, key: str) -> tuple[Record, Manifest]:
        data = self.objects.get(key)
        self._limiter(len(data))
        try:
            if hashlib.sha256(data).hexdigest() not in key:
                raise ValueError("another digest than its name says")
            return Record.parse(data)
        except NOT_DUMPED as error:
            raise DamagedCheckpoint(f"{key} is damaged: {error}", where=self.url) from error

    def block(self, block: Block) -> bytes:
        """Some bytes, verified. Raises DamagedCheckpoint: missing, or other bytes."""
        what = "is missing"
        for _ in range(2):
            self._limiter(block.stored)
            try:
                data = self.objects.get(block.key)
                data = data if block.compressed is None else restored(data, block.size)
            except Missing:
                continue
            except ValueError:
                data = b""
            if len(data) == block.size and digest([data]) == block.digest:
                return data
            what = "holds other bytes than its name says"
        raise DamagedCheckpoint(f"{block.key} {what}", where=self.url)

    def open(self, entry: Entry) -> Opened:
        """The manifest and the files of a step; what is returned is what was verified.

        Raises:
            DamagedCheckpoint: something is missing or different. MirrorUnreachable.
        """
        record, manifest = self.record(entry)
        if (record.name, manifest.step) != (entry.name, entry.step):
            raise DamagedCheckpoint(f"the record of {entry.name} is that of another step", where=self.url)
        files = {}
        for name, file in manifest.files.items():
            try:
                files[name] = self.file(record.blocks[name])
            except DamagedCheckpoint as damage:
                raise DamagedCheckpoint(f"{entry.name} is damaged: {name}: {damage.what}", where=self.url) from damage
            if digest([files[name]]) != file.digest:
                raise DamagedCheckpoint(f"{entry.name} is damaged: {name} has another digest", where=self.url)
        return Opened(Path(entry.name), manifest, files)

    def file(self, blocks: Iterable[Block]) -> bytes:
        """The bytes of a file. Raises DamagedCheckpoint, MirrorUnreachable."""
        return b"".join(map(self.block, blocks))

    def newest(self, head: Head, *, after: int = -1) -> tuple[Opened | None, dict[str, str]]:
        """The newest step that verifies, and what is wrong with those passed over, by the keys of their records.

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
                damage[entry.record] = error.what
        return None, damage

    def damage(self, head: Head) -> dict[str, str]:
        """Read every byte of the line: what is wrong with it, by the keys of the records. Raises MirrorUnreachable."""
        found: dict[str, str] = {}
        for entry in head.line:
            try:
                self.open(entry)
            except DamagedCheckpoint as error:
                found[entry.record] = error.what
        return found

    def entry(self, head: Head | None, name: str) -> Entry:
        """The entry of a step by its name. Raises CheckpointError: the mirror holds no such step."""
        for entry in head.entries if head else ():
            if entry.name == name:
                return entry
        held = ", ".join(entry.name for entry in head.line) if head else "nothing"
        raise CheckpointError(f"there is no {name} in this mirror: it holds {held}", where=self.url)


def list_mirror(reader: MirrorReader, head: Head, *, read_all: bool = True) -> list[CatalogEntry]:
    """The counterpart of `catalog.list_checkpoints`: the current line first, the newest first.

    It is for `ci-llm checkpoints list` and `verify` of a URL.

    Args:
        read_all: read every byte and compare it with its digest; otherwise the records alone.
    """
    return [_entry(reader, entry, shelf, read_all) for shelf, entry in _shelved(head)]


def _entry(reader: MirrorReader, entry: Entry, shelf: Shelf, read_all: bool) -> CatalogEntry:
    name = entry.name if shelf == "current" else f"{shelf}/{entry.name}"
    verify = partial(reader.open, entry) if read_all else None
    found = entry_of(name, shelf, lambda: reader.record(entry)[1], verify)
    return replace(found, step=entry.step, nbytes=entry.nbytes)


def _shelved(head: Head) -> Iterator[tuple[Shelf, Entry]]:
    yield from (("current", entry) for entry in head.line)
    yield from (("superseded", entry) for entry in head.superseded)
    yield from (("quarantine", entry) for entry, _ in head.quarantine)
