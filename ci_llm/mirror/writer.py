"""The writer of a mirror: it claims the mirror, sends whole folders, and commits each change by replacing the head.

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

from ci_llm.checkpoints.manifest import MANIFEST, digest, read_manifest
from ci_llm.core.durable import read_chunks
from ci_llm.errors import CheckpointError, DamagedCheckpoint, MirrorUnreachable, WriterBusy
from ci_llm.mirror.head import HEAD, NOBODY, SENT, Entry, Found, Head, RunFile, digest_of
from ci_llm.mirror.objects import PART_BYTES, Conflict, Missing, Objects, Version, require_conditions
from ci_llm.mirror.reader import FoundHead, MirrorReader

logger = logging.getLogger(__name__)

#: How often a claim is tried again after another writer was faster.
MAX_RACES = 10


class LostClaim(WriterBusy):
    """Another writer has claimed the mirror."""


class MirrorWriter:
    """The writer of one mirror, from its claim on.

    Args:
        pace: called with the number of bytes before they are sent or read back; it may raise to give the step up.

    Attributes:
        head: what counts now.
        sent_bytes: the size of everything that was sent since the claim.
    """

    def __init__(self, objects: Objects, pace: Callable[[int], object] = lambda nbytes: None) -> None:
        self._objects, self._pace = objects, pace
        self._reader = MirrorReader(objects, pace)
        self._version: Version | None = None
        self._claims: set[str] = set()  # the names under which this writer tried to claim the mirror
        self._there: set[str] = set()  # keys that were sent and read back
        self.head = Head()
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
            old = found.head or Head()
            self._require_seen(old, run, seen.writer)
            new = replace(
                old.claimed().quarantined(seen.damage).going_back(resumed_from),
                run=run or old.run or secrets.token_hex(16),
                attempt=max(attempt, old.attempt),
            )
            self._claims.add(new.writer)
            with contextlib.suppress(Conflict):
                self._put_head(new, found.version)
                require_conditions(self._objects, HEAD, new.dump())
                return
        raise MirrorUnreachable("other writers claim this mirror again and again", where=self._reader.url)

    def _require_seen(self, head: Head, run: str | None, writer: str | None) -> None:
        """Refuse a mirror of another run, and one that another attempt than `writer` has claimed since."""
        if run is not None and head.line and head.run != run:
            raise another_run(self._reader.url)
        # A claim of this writer may have arrived although its answer was lost.
        if writer is not None and head.writer not in (writer, NOBODY, *self._claims):
            raise LostClaim(
                f"another attempt has claimed this mirror since this one read it (writer {head.writer}, read"
                f" {writer or 'nobody'}); its steps would be put aside",
                where=self._reader.url,
                hint="call it again when the other attempt has ended: it resumes from the newest step of both",
            )

    # Sending

    def send_step(self, folder: Path) -> Entry:
        """Send a committed folder, its manifest last, and read all of it back. It counts from the next `commit` on.

        Raises:
            DamagedCheckpoint: the folder is not as it was written, or is gone. MirrorUnreachable.
        """
        manifest = read_manifest(folder)
        data = manifest.dump()
        entry = Entry(folder.name, manifest.step, manifest.nbytes, self._place(digest([data])))
        for name, record in manifest.files.items():
            self._send(entry.key(name), _chunks(folder / name, record.digest), record.size, record.digest)
        self._send(entry.key(MANIFEST), [data], len(data), digest_of(entry.place))
        return entry

    def send_file(self, name: str, data: bytes) -> RunFile:
        """Send another file of the run, if it is not as the mirror has it. Raises MirrorUnreachable."""
        known = self.head.files.get(name)
        file = RunFile(len(data), self._place(digest([data])))
        if known is not None and digest_of(known.place) == digest_of(file.place):
            return known
        self._send(f"{file.place}/{name}", [data], file.size, digest_of(file.place))
        return file

    def _place(self, known: str) -> str:
        return f"{self.head.writer}/{known}"

    def _send(self, key: str, chunks: Iterable[bytes], size: int, known: str) -> None:
        """Write an object and read it back, unless this writer has done so before."""
        if key in self._there:
            return
        paced = self._paced(chunks)
        self._objects.put(key, paced if size > PART_BYTES else b"".join(paced))
        self.sent_bytes += size
        self._require_held(key, self._reader.pieces(key, size), known)
        self._there.add(key)

    def _require_held(self, key: str, read: Iterable[bytes], known: str) -> None:
        with contextlib.suppress(Missing):
            if digest(read) == known:
                return
        raise MirrorUnreachable(f"the store does not hold what was written to {key}", where=self._reader.url)

    def _paced(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._pace(len(chunk))
            yield chunk

    # The commit

    def commit(self, new: Head) -> None:
        """Make `new` count, and remove what nothing refers to any more.

        Raises:
            LostClaim: another writer has claimed the mirror; nothing has changed.
        """
        if new == self.head:
            return
        before = self.head
        self._put_head(new, self._version)
        with self._leaving():
            self._remove(self._gone(before))

    def _put_head(self, new: Head, version: Version | None) -> None:
        """Replace the head of a version, and its copy. Raises Conflict at a claim, LostClaim later."""
        data = new.dump()
        error: Exception | None = None
        try:
            self._objects.swap(HEAD, data, version)
        except (Conflict, MirrorUnreachable) as failure:
            error = failure  # it may have arrived nevertheless: the answer was lost, or its repetition refused
        found = self._reader.find_head()
        if found.head != new or found.is_copy:
            raise self._failure(found, error, claiming=new.writer != self.head.writer)
        # At any moment one of the two is whole: the head is replaced only while the copy is, and the copy after it.
        # Nothing paces it: who gives a step up does so before its commit.
        copy = f"{new.writer}/{HEAD}"
        self._objects.put(copy, data)
        self._require_held(copy, map(self._objects.get, [copy]), digest([data]))
        self.head, self._version = new, found.version
        self.sent_bytes += 2 * len(data)

    def _failure(self, found: FoundHead, error: Exception | None, *, claiming: bool) -> Exception:
        if claiming:
            return error or Conflict(HEAD)
        if found.head is None or found.head.writer != self.head.writer:
            return LostClaim(
                f"another writer has claimed this mirror ({found.head.writer if found.head else '?'}, ours is"
                f" {self.head.writer}): this attempt sends nothing any more",
                where=self._reader.url,
                hint="end this process if the other one is the same run",
            )
        self._version = found.version
        if isinstance(error, MirrorUnreachable):
            return error
        return MirrorUnreachable("the store does not hold the head that was written", where=self._reader.url)

    def holds(self, folder: Path) -> bool:
        """True if this very step, and not another one of its name, is in the line."""
        known = digest([(folder / MANIFEST).read_bytes()])
        return any(entry.name == folder.name and digest_of(entry.place) == known for entry in self.head.line)

    # Removing

    def _gone(self, before: Head) -> list[str]:
        """The keys to which a head before referred and this one does not."""
        files = [f"{file.place}/{name}" for name, file in before.files.items() if self.head.files.get(name) != file]
        steps = [entry.place for entry in before.entries if entry.place not in self.head.places]
        return files + [key for place in steps for key, _ in self._objects.list(place)]

    def _remove(self, keys: Collection[str]) -> None:
        self._there.difference_update(keys)
        if keys:
            self._objects.delete(sorted(keys))

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """A block in which the store may refuse to remove something: that stays until the next claim."""
        try:
            yield
        except MirrorUnreachable as error:
            logger.debug("leftovers stay in the mirror: %s", error.what)

    def sweep(self) -> dict[str, str]:
        """Remove what earlier writers left, and look whether everything that counts is there.

        Returns:
            what is missing, by the places of the steps; it is sent again.
        """
        listed, kept = dict(self._objects.list("")), self.head.places
        with self._leaving():
            self._remove([key for key in listed if self._is_older(key) and "/".join(key.split("/")[:2]) not in kept])
        damage: dict[str, str] = {}
        for entry in self.head.line:
            try:
                self._require_listed(entry, listed)
            except DamagedCheckpoint as error:
                damage[entry.place] = f"{entry.name}: {error.what}"
                self._there = {key for key in self._there if not key.startswith(entry.place)}
        return damage

    def _is_older(self, key: str) -> bool:
        """True if an earlier writer has sent it; a later one may need what this one does not know."""
        sent = SENT.match(key)
        return sent is not None and sent[1] < self.head.writer.partition("-")[0]

    def _require_listed(self, entry: Entry, listed: Mapping[str, int]) -> None:
        sizes = {name: record.size for name, record in self._reader.manifest(entry).files.items()}
        if any(listed.get(entry.key(name)) != size for name, size in sizes.items()):
            self._reader.open(entry)  # a listing may be stale


def _chunks(path: Path, known: str) -> Iterator[bytes]:
    """The bytes of a file of a checkpoint.

    Raises:
        DamagedCheckpoint: at their end, they have another digest; or the file is gone. CheckpointError: it cannot be
            read. An error of this disk must not look like one of the store.
    """
    whole = xxhash.xxh3_128()
    try:
        for chunk in read_chunks(path):
            whole.update(chunk)
            yield chunk
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path.parent.name} is gone: {error}", where=str(path)) from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}", where=str(path)) from error
    if whole.hexdigest() != known:
        raise DamagedCheckpoint(f"{path.name} of {path.parent.name} has another digest", where=str(path))


def another_run(url: str) -> CheckpointError:
    """The error about a mirror whose steps belong to another run."""
    return WriterBusy(
        "this mirror holds the checkpoints of another run",
        where=f"mirror: {url}",
        hint="give each run a prefix of its own; an empty output_dir resumes the run that is there",
    )
