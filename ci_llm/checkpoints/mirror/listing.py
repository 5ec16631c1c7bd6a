"""The checkpoints of a mirror, listed and verified: what `ci-llm checkpoints list` and `verify` show of a URL."""

from __future__ import annotations

from collections.abc import Iterator

from ci_llm.checkpoints.catalog import CatalogEntry, Shelf
from ci_llm.checkpoints.folders import FINAL
from ci_llm.checkpoints.manifest import Manifest
from ci_llm.checkpoints.mirror.head import Entry, Head
from ci_llm.checkpoints.mirror.reader import MirrorReader
from ci_llm.errors import DamagedCheckpoint


def list_mirror(reader: MirrorReader, head: Head, *, read_all: bool = True) -> list[CatalogEntry]:
    """As `catalog.list_checkpoints`: the current line first, the newest first.

    Args:
        read_all: read every byte and compare it with its digest; otherwise the records alone.
    """
    return [_entry(reader, entry, shelf, read_all) for shelf, entry in _shelved(head)]


def _shelved(head: Head) -> Iterator[tuple[Shelf, Entry]]:
    yield from (("current", entry) for entry in head.line)
    yield from (("superseded", entry) for entry in head.superseded)
    yield from (("quarantine", entry) for entry, _ in head.quarantine)


def _entry(reader: MirrorReader, entry: Entry, shelf: Shelf, read_all: bool) -> CatalogEntry:
    manifest: Manifest | None = None
    damage = None
    try:
        manifest = reader.record(entry)[1]
        if read_all:
            reader.open(entry)
    except DamagedCheckpoint as error:
        damage = error.what
    return CatalogEntry(
        name=entry.name if shelf == "current" else f"{shelf}/{entry.name}",
        step=entry.step,
        attempt=manifest.attempt if manifest else None,
        wall_time=manifest.wall_time if manifest else None,
        nbytes=entry.nbytes,
        damage=damage,
        line=shelf,
        final=entry.name == FINAL,
        pinned=False,
    )
