"""The writer of a mirror: it claims the mirror, sends blocks that are not there, and commits each change with the head.

Of several writers the last one that claimed the mirror has it. What another one sends meanwhile lies beside what
counts: its next commit finds a head that it does not know, and raises `LostClaim`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import xxhash

from ci_llm.checkpoints.manifest import MANIFEST, Manifest, digest, read_manifest
from ci_llm.core.durable import PARTIAL, read_chunks
from ci_llm.errors import CheckpointError, DamagedCheckpoint, MirrorUnreachable, WriterBusy
from ci_llm.mirror.head import (
    BLOCKS,
    HEAD,
    RECORDS,
    UNKNOWN_RUN,
    Block,
    Compression,
    Entry,
    Found,
    Head,
    Record,
    blocks_of,
    compressed,
    generation_of,
)
from ci_llm.mirror.objects import Conflict, Missing, Objects, Version, require_conditions
from ci_llm.mirror.reader import FoundHead, MirrorReader

logger = logging.getLogger(__name__)


#: How often a claim is tried again after another writer was faster.
MAX_RACES = 10


class LostClaim(WriterBusy):
    """Another writer has claimed the mirror."""


class MirrorWriter:
    """The writer of one mirror, from its claim on. It remembers which blocks are there, and sends none of them twice.

    Args:
        check: called before each block is sent; it may raise to give the step up.
        limiter: called with the number of bytes before each block.
        compression: how blocks that are not there yet are compressed.

    Attributes:
        head: what counts now.
        sent_bytes: the size of all blocks and documents that were sent since the claim.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        check: Callable[[], object] = lambda: None,
        limiter: Callable[[int], object] = lambda nbytes: None,
        compression: Compression = "none",
    ) -> None:
        self._objects, self._check, self._limiter, self._compression = objects, check, limiter, compression
        self._reader = MirrorReader(objects, limiter)
        self._version: Version | None = None
        self._is_rebuilt = False
        self._claims: set[str] = set()  # the stamps of the heads with which this writer tried to claim the mirror
        self._there: dict[tuple[str, int], Block] = {}
        self._records: dict[str, Record] = {}
        self.head = Head(run=UNKNOWN_RUN)
        self.sent_bytes = 0

    # The claim

    def claim(self, run: str | None, attempt: int, resumed_from: int, seen: Found) -> None:
        """Become the writer; every step after `resumed_from` leaves the line.

        Args:
            run: the token of the run; None for the token of the mirror, from which the disk was filled.
            attempt: its number.
            resumed_from: the step from which the run resumes; -1 without one.
            seen: what the mirror held when that step was decided.

        Raises:
            WriterBusy: the mirror holds another run. LostClaim: another attempt has claimed it since.
            MirrorUnreachable.
        """
        for _ in range(MAX_RACES):
            found = self._reader.find_head()
            old = found.head or Head(run=UNKNOWN_RUN)
            self._require_seen(old, run, seen.generation)
            new = replace(
                old,
                run=run or old.run or secrets.token_hex(16),
                generation=old.generation + 1,
                attempt=max(attempt, old.attempt),
            )
            new = new.quarantined(seen.damage).going_back(resumed_from).stamped()
            self._claims.add(new.stamp)
            with contextlib.suppress(Conflict):
                self._put_head(new, found.version)
                require_conditions(self._objects, HEAD, new.dump())
                self._know(new)
                self._is_rebuilt = found.is_rebuilt
                return
        raise MirrorUnreachable("other writers claim this mirror again and again", where=self._reader.url)

    def _require_seen(self, head: Head, run: str | None, generation: int | None) -> None:
        """Refuse a mirror of another run, and one that another attempt has claimed since `generation`."""
        if run is not None and head.line and head.run not in (run, UNKNOWN_RUN):
            raise another_run(self._reader.url)
        # A claim of this writer may have arrived although its answer was lost.
        if generation is not None and head.generation > generation and head.stamp not in self._claims:
            raise LostClaim(
                f"another attempt has claimed this mirror since this one read it (generation {head.generation}, read"
                f" {generation}); its steps would be put aside",
                where=self._reader.url,
                hint="call it again when the other attempt has ended: it resumes from the newest step of both",
            )

    def _know(self, head: Head) -> None:
        """Learn from the records which blocks are there. What is kept aside may be damaged: its blocks do not count."""
        for entry in head.entries:
            with contextlib.suppress(DamagedCheckpoint):
                self._records[entry.record] = self._reader.record(entry)[0]
        line = [self._records[entry.record] for entry in head.line if entry.record in self._records]
        blocks = set(blocks_of(head.files)).union(*(record.all_blocks for record in line))
        self._there = {(block.digest, block.size): block for block in blocks}

    def forget(self, blocks: Iterable[Block]) -> None:
        """Send these blocks again when they are needed: they are missing or damaged."""
        for block in blocks:
            if self._there.get((block.digest, block.size)) == block:
                del self._there[block.digest, block.size]

    # Sending

    def send_step(self, folder: Path) -> Entry:
        """Send a committed folder, and verify all of it there. It counts from the next `commit` on.

        Raises:
            DamagedCheckpoint: the folder is not as it was written, or is gone. MirrorUnreachable.
        """
        manifest = read_manifest(folder)
        try:
            blocks = {name: self._send_file(folder / name, manifest, name) for name in manifest.files}
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{folder.name} is gone: {error}", where=str(folder)) from error
        record = Record(self.head.generation, folder.name, manifest.dump(), blocks)
        key, data = record.dump()
        self._send(key, data)
        self._records[key] = record
        return Entry(folder.name, manifest.step, key, manifest.nbytes)

    def _send_file(self, path: Path, manifest: Manifest, name: str) -> tuple[Block, ...]:
        whole = xxhash.xxh3_128()

        def parts() -> Iterator[bytes]:
            for chunk in read_chunks(path):
                whole.update(chunk)
                yield chunk

        blocks = self.send_blocks(parts())
        if whole.hexdigest() != manifest.files[name].digest:
            raise DamagedCheckpoint(f"{name} of {path.parent.name} has another digest", where=str(path))
        return blocks

    def send_blocks(self, parts: Iterable[bytes]) -> tuple[Block, ...]:
        """Send what is not there yet. Raises MirrorUnreachable."""
        return tuple(map(self._block, parts))

    def _block(self, data: bytes) -> Block:
        self._check()
        known = (digest([data]), len(data))
        if known not in self._there:
            frame = compressed(data, self._compression)
            block = Block(self.head.generation, *known, None if frame is None else len(frame))
            self._send(block.key, data if frame is None else frame)
            self._there[known] = block
        return self._there[known]

    def _send(self, key: str, data: bytes) -> None:
        """Write an object and read it back."""
        self._limiter(len(data))
        self._objects.put(key, data)
        self.sent_bytes += len(data)
        self._limiter(len(data))
        with contextlib.suppress(Missing):
            if self._objects.get(key) == data:
                return
        raise MirrorUnreachable(f"the store does not hold what was written to {key}", where=self._reader.url)

    # The commit

    def commit(self, new: Head) -> None:
        """Make `new` count, and remove what nothing refers to any more.

        Raises:
            LostClaim: another writer has claimed the mirror; nothing has changed.
        """
        if new == self.head:
            return
        before = self._referred(self.head)
        self._put_head(new.stamped(), self._version)
        self._remove(before - self._referred(self.head))

    def _put_head(self, new: Head, version: Version | None) -> None:
        """Replace the head of a version. Raises Conflict at a claim, LostClaim later."""
        data = new.dump()
        error: Exception | None = None
        try:
            self._objects.swap(HEAD, data, version)
        except (Conflict, MirrorUnreachable) as failure:
            error = failure  # it may have arrived nevertheless: the answer was lost, or its repetition refused
        found = self._reader.find_head()
        if found.head == new:
            self.head, self._version = new, found.version
            self.sent_bytes += len(data)
            return
        raise self._failure(found, error, claiming=new.generation != self.head.generation)

    def _failure(self, found: FoundHead, error: Exception | None, *, claiming: bool) -> Exception:
        if claiming:
            return error or Conflict(HEAD)
        damaged = found.is_rebuilt and found.head is not None and found.head.generation <= self.head.generation
        if not damaged and (found.head is None or found.head.stamp != self.head.stamp):
            return LostClaim(
                f"another writer has claimed this mirror (generation {found.head.generation if found.head else '?'},"
                f" ours is {self.head.generation}): this attempt sends nothing any more",
                where=self._reader.url,
                hint="end this process if the other one is the same run",
            )
        self._version = found.version
        if isinstance(error, MirrorUnreachable):
            return error
        return MirrorUnreachable("the store does not hold the head that was written", where=self._reader.url)

    # Removing

    def _referred(self, head: Head) -> set[str]:
        keys = {block.key for block in blocks_of(head.files)}
        for entry in head.entries:
            record = self._records.get(entry.record)
            keys |= {entry.record} | ({block.key for block in record.all_blocks} if record else set())
        return keys

    def holds(self, folder: Path) -> bool:
        """Whether this very step, and not another one of its name, is in the line."""
        manifest = (folder / MANIFEST).read_bytes()
        records = [self._records.get(entry.record) for entry in self.head.line if entry.name == folder.name]
        return any(record is not None and record.manifest == manifest for record in records)

    def _remove(self, keys: Collection[str]) -> None:
        """Remove objects; what the store refuses stays until the next claim.

        Nothing is removed where a record cannot be read: nobody knows what that step needs.
        """
        if any(entry.record not in self._records for entry in self.head.entries):
            return
        if not keys:
            return
        self.forget(Block.parse(key) for key in keys if key.startswith(BLOCKS) and not key.endswith(PARTIAL))
        try:
            self._objects.delete(sorted(keys))
        except MirrorUnreachable as error:
            logger.debug("leftovers stay in the mirror: %s", error.what)

    def sweep(self) -> dict[str, str]:
        """Remove what dead writers left, and look whether everything that counts is there.

        After a claim whose head was rebuilt nothing is removed: a stale listing may have hidden a step that counts. Its
        bytes stay until the next attempt, whose head does not refer to them.

        Returns:
            what is missing, by the keys of the records; its blocks are sent again.
        """
        listed = dict(self._objects.list(BLOCKS)) | dict(self._objects.list(RECORDS))
        referred = self._referred(self.head)
        if not self._is_rebuilt:
            self._remove([key for key in listed if key not in referred and self._is_older(key)])
        return self._missing(listed)

    def _is_older(self, key: str) -> bool:
        """Whether an earlier writer has sent it; a later one may need what this one does not know."""
        generation = generation_of(key)
        return generation is not None and generation < self.head.generation

    def _missing(self, listed: Mapping[str, int]) -> dict[str, str]:
        damage: dict[str, str] = {}
        for entry in self.head.line:
            record = self._records.get(entry.record)
            if record is None:
                damage[entry.record] = f"{entry.name}: its record is damaged or missing"
                continue
            hurt = [block for block in record.all_blocks if not self._is_there(block, listed)]
            if hurt:
                self.forget(hurt)
                damage[entry.record] = f"{entry.name}: {len(hurt)} blocks are missing"
        return damage

    def _is_there(self, block: Block, listed: Mapping[str, int]) -> bool:
        # A listing may be stale: what it lacks is asked for by name.
        return listed.get(block.key) == block.stored or self._objects.size(block.key) == block.stored


def another_run(url: str) -> CheckpointError:
    """For a mirror whose steps belong to another run."""
    return WriterBusy(
        "this mirror holds the checkpoints of another run",
        where=f"mirror: {url}",
        hint="give each run a prefix of its own; an empty output_dir resumes the run that is there",
    )
