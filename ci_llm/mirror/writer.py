"""The writer of a mirror: it claims the mirror, sends whole folders, and commits each change by replacing the head.

Of several writers the last one that claimed the mirror has it. What another one sends meanwhile lies beside what
counts: its next commit finds a head that it does not know, and raises `WriterBusy`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from ci_llm.checkpoints.manifest import MANIFEST, as_damage, digest, read_manifest
from ci_llm.core.durable import read_chunks
from ci_llm.errors import CheckpointError, DamagedCheckpoint, MirrorUnreachable, OtherFormat, WriterBusy
from ci_llm.mirror.head import HEAD, NOBODY, SENT, Entry, Found, Head, RunFile, digest_of
from ci_llm.mirror.objects import PART_BYTES, Conflict, Missing, Objects, Version, require_conditions
from ci_llm.mirror.reader import TRIES, MirrorReader

logger = logging.getLogger(__name__)

#: How often a claim is tried again after another writer was faster.
MAX_RACES: Final = 10


class MirrorWriter:
    """The writer of one mirror, from its claim on.

    Args:
        pace: called with the number of bytes before they are sent or read back; it may raise to give the step up.

    Attributes:
        head: what counts now.
    """

    def __init__(self, objects: Objects, pace: Callable[[int], object] = lambda nbytes: None) -> None:
        self._objects, self._pace = objects, pace
        self._reader = MirrorReader(objects, pace)
        self._version: Version | None = None
        self._name = secrets.token_hex(4)  # in all claims of this writer
        self._there: set[str] = set()  # keys that were sent and read back
        self.head = Head()

    # The claim

    def claim(self, run: str, attempt: int, resumed_from: int, seen: Found) -> None:
        """Become the writer; every step after `resumed_from` leaves the line.

        Args:
            run: the token of the run.
            attempt: its number.
            resumed_from: the step from which the run resumes; -1 without one.
            seen: what the mirror held when that step was decided.

        Raises:
            WriterBusy: the mirror holds another run, or another attempt has claimed it since.
            MirrorUnreachable.
        """
        for _ in range(MAX_RACES):
            found = self._reader.find_head()
            old = found.head or Head()
            if old.line and old.run != run:
                raise another_run(self._reader.url)
            self._require_seen(old.writer, seen.writer)
            number = int(old.writer.partition("-")[0] or 0) + 1
            new = old.putting_aside(lambda entry: entry.step > resumed_from or entry.place in seen.damage)
            writer = f"{number:06d}-{self._name}"
            with contextlib.suppress(Conflict):  # another writer was faster at this very moment
                self._put_head(replace(new, run=run, writer=writer, attempt=max(attempt, old.attempt)), found.version)
                require_conditions(self._objects, HEAD, self.head.dump())
                return
        raise MirrorUnreachable("other writers claim this mirror again and again", where=self._reader.url)

    def _require_seen(self, writer: str, seen: str | None) -> None:
        """Refuse a mirror that another attempt than `seen` has claimed since."""
        # A claim of this writer may have arrived although its answer was lost.
        if seen is not None and writer not in (seen, NOBODY) and not writer.endswith(self._name):
            raise WriterBusy(
                f"another attempt has claimed this mirror since this one read it (writer {writer}, read"
                f" {seen or 'nobody'}); its steps would be put aside",
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
            self._send(entry.key(name), _chunks(folder, name, record.digest), record.size, record.digest)
        self._send(entry.key(MANIFEST), [data], len(data), digest_of(entry.place))
        return entry

    def send_file(self, name: str, data: bytes) -> RunFile:
        """Send another file of the run, if it is not as the mirror has it. Raises MirrorUnreachable."""
        known = self.head.files.get(name)
        own = digest([data])
        if known is not None and digest_of(known.place) == own:
            return known
        file = RunFile(len(data), self._place(own))
        self._send(f"{file.place}/{name}", [data], len(data), own)
        return file

    def _place(self, known: str) -> str:
        return f"{self.head.writer}/{known}"

    def _send(self, key: str, chunks: Iterable[bytes], size: int, known: str) -> None:
        """Write an object and read it back, unless this writer has done so before."""
        if key in self._there:
            return
        paced = self._paced(chunks)
        self._objects.put(key, paced if size > PART_BYTES else b"".join(paced))
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
            WriterBusy: another writer has claimed the mirror; nothing has changed.
        """
        if new == self.head:
            return
        before = self.head
        self._put_head(new, self._version)
        self._remove(key for place in sorted(before.places - new.places) for key, _ in self._objects.list(place))

    def _put_head(self, new: Head, version: Version | None) -> None:
        """Replace the head of a version, and its copy.

        Raises:
            Conflict: at a claim. WriterBusy: later. MirrorUnreachable.
        """
        data = new.dump()
        what = "the store does not hold the head that was written"
        error: Exception = MirrorUnreachable(what, where=self._reader.url)
        try:
            self._objects.put_if_match(HEAD, data, version)
        except MirrorUnreachable as failure:
            error = failure
        except Conflict as failure:
            error = failure if self.head.writer == NOBODY else error
        found = self._reader.find_head()  # what failed may have arrived: the answer was lost, or its repetition refused
        if found.head != new or found.is_copy:
            writer = found.head.writer if found.head else NOBODY
            if self.head.writer not in (NOBODY, writer):
                raise WriterBusy(
                    f"another writer has claimed this mirror ({writer or '?'}, ours is {self.head.writer}):"
                    " this attempt sends nothing any more",
                    where=self._reader.url,
                    hint="end this process if the other one is the same run",
                )
            self._version = found.version
            raise error
        # At any moment one of the two is whole: the head is replaced only while the copy is, and the copy after it.
        # Nothing paces it: who gives a step up does so before its commit.
        copy = f"{new.writer}/{HEAD}"
        self._objects.put(copy, data)
        self._require_held(copy, map(self._objects.get, [copy]), digest([data]))
        self.head, self._version = new, found.version

    # Removing

    def sweep(self) -> list[Entry]:
        """Remove what earlier writers left, and look whether every step of the line and every file of the run is there.

        A later writer may need what this one does not know, so that is left alone. Where the store does not list its
        objects, nothing is done. A file of the run that is lost is sent again by the next `send_file`.

        Returns:
            the steps that are not whole; they can be sent again.
        """
        try:
            listed = dict(self._objects.list(""))
        except MirrorUnreachable as error:
            logger.debug("the mirror is not looked through: %s", error.what)
            return []
        kept = self.head.places
        number = self.head.writer.partition("-")[0]

        def is_left(key: str) -> bool:
            sent = SENT.match(key)
            return sent is not None and sent[1] < number and "/".join(key.split("/")[:2]) not in kept

        self._remove(filter(is_left, listed))
        lost = [entry for entry in self.head.line if not self._is_whole(entry, listed)]
        files = {
            name: file
            for name, file in self.head.files.items()
            if self._is_there(f"{file.place}/{name}", file.size, digest_of(file.place), listed)
        }
        self.head = replace(self.head, files=files)
        self._there.clear()  # what is sent again may have been sent by this writer
        return lost

    def _is_whole(self, entry: Entry, listed: Mapping[str, int]) -> bool:
        try:
            files = self._reader.manifest(entry).files
        except OtherFormat:
            return True  # of another version of this program, which can tell
        except DamagedCheckpoint:
            return False
        return all(
            self._is_there(entry.key(name), record.size, record.digest, listed) for name, record in files.items()
        )

    def _is_there(self, key: str, size: int, known: str, listed: Mapping[str, int]) -> bool:
        if listed.get(key) == size:
            return True
        for _ in range(TRIES):  # a listing may be stale
            with contextlib.suppress(Missing):
                if digest(self._reader.pieces(key, size)) == known:
                    return True
        return False

    def _remove(self, keys: Iterable[str]) -> None:
        """Remove objects. What the store does not let us list or remove stays until the next claim."""
        try:
            gone = sorted(keys)
            self._there.difference_update(gone)
            if gone:
                self._objects.delete(gone)
        except MirrorUnreachable as error:
            logger.debug("leftovers stay in the mirror: %s", error.what)


def _chunks(folder: Path, name: str, known: str) -> Iterator[bytes]:
    """The bytes of a file of a checkpoint, which need not lie in memory together.

    Raises:
        DamagedCheckpoint: at their end, they have another digest; or the disk does not give them. CheckpointError: this
            process cannot read them. An error of this disk must not look like one of the store.
    """
    whole = xxhash.xxh3_128()
    with as_damage(folder):
        for chunk in read_chunks(folder / name):
            whole.update(chunk)
            yield chunk
        if whole.hexdigest() != known:
            raise ValueError(f"{name} has another digest")


def another_run(url: str) -> CheckpointError:
    """The error about a mirror whose steps belong to another run."""
    return WriterBusy(
        "this mirror holds the checkpoints of another run",
        where=f"mirror: {url}",
        hint="give each run a prefix of its own; an empty output_dir resumes the run that is there",
    )
