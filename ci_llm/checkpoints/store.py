"""The store of a run's checkpoints: each is there as a whole or not at all, and one attempt at a time changes them.

The order of a save is what makes it safe: its files are written in the attempt's work folder, each synced, the manifest
last; the folders are synced; the draft is renamed into its place, and the place is synced; then it is read back from
the device. If any step fails, the disk holds what it held before. Only after that old checkpoints are pruned.
This file handles names and bytes, never tensors.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ci_llm.checkpoints import layout
from ci_llm.checkpoints.layout import FINAL, committed, step_folder
from ci_llm.checkpoints.lease import Lease, Owner, acquire_lease, leftovers
from ci_llm.checkpoints.manifest import (
    MANIFEST,
    FileImage,
    FileRecord,
    Manifest,
    Opened,
    open_folder,
    read_manifest,
    verify_files,
    verify_folder,
)
from ci_llm.core.durable import DISK, Filesystem, commit_folder, remove_tree, sync_tree, write_new
from ci_llm.core.run_folder import is_run
from ci_llm.errors import CheckpointError, DamagedCheckpoint

logger = logging.getLogger(__name__)


BLOCK_BYTES = 4096
MARGIN_BYTES = 1 << 20


class OtherWriters:
    """The other processes that write a part of a checkpoint, for the one that commits it. This class stands for none.

    Attributes:
        records: the files that they will write; the committing process writes none of them.
    """

    records: Mapping[str, FileRecord] = {}

    def writing(self, draft: Path) -> AbstractContextManager[None]:
        """A context in which they write: at its end their files are in `draft`, synced and read back.

        Raises:
            OSError, DamagedCheckpoint: one of them could not.
        """
        return contextlib.nullcontext()


NO_OTHERS = OtherWriters()


def require_space(directory: Path, manifest: Manifest, disk: Filesystem) -> None:
    """Raises OSError (ENOSPC) if the disk of `directory` cannot take the checkpoint and a margin."""
    sizes = [record.size for record in manifest.files.values()] + [len(manifest.dump())]
    needed = sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes) + MARGIN_BYTES
    free = disk.free_bytes(directory)
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {free:,} are free")


def commit(
    target: Path,
    files: Mapping[str, FileImage],
    manifest: Manifest,
    work: Path,
    disk: Filesystem,
    others: OtherWriters = NO_OTHERS,
) -> Path:
    """Make `target` a committed folder of `files`, or leave everything as it was and raise.

    Args:
        work: folder of the attempt, on the same filesystem.
        others: the writers of the files that the manifest lists beside `files`.

    Returns:
        where the old `target` is now, if there was one.

    Raises:
        OSError: the disk failed, or a run stands there. DamagedCheckpoint: the device does not hold what was written.
    """
    refuse_run(target)
    draft, old = draft_in(work), draft_in(work)
    with contextlib.ExitStack() as undo:
        undo.callback(clear, draft, disk)
        _write_folder(draft, files, manifest, disk, others)
        if target.exists() or target.is_symlink():
            disk.rename(target, old)
            undo.callback(disk.rename, old, target)
        undo.callback(_take_back, target, draft, disk)
        commit_folder(draft, target, disk=disk)
        with _reading_back():
            verify_folder(target, from_disk=True, but=others.records)
        undo.pop_all()
    return old


def refuse_run(target: Path) -> None:
    """Raises OSError (EEXIST) if `target` is a run."""
    if is_run(target):
        raise FileExistsError(errno.EEXIST, "a run stands there, which is left alone", str(target))


@contextlib.contextmanager
def _reading_back() -> Iterator[None]:
    """Raise the OSError that kept this process from reading back what it wrote: it is an error of the disk."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except CheckpointError as error:
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from None


def draft_in(work: Path) -> Path:
    """A name in `work` that nothing has yet."""
    return work / f"draft-{secrets.token_hex(4)}"


def _write_folder(
    draft: Path, files: Mapping[str, FileImage], manifest: Manifest, disk: Filesystem, others: OtherWriters
) -> None:
    # Never with parents: after a takeover the work folder is gone, and the draft must fail instead of making it again.
    disk.mkdir(draft)
    for folder in sorted({parent for name in manifest.files for parent in PurePosixPath(name).parents}):
        if folder.name:
            disk.mkdir(draft / folder)
    with others.writing(draft):
        _write_files(draft, files, disk)
    write_new(draft / MANIFEST, [manifest.dump()], disk=disk)
    sync_tree(draft, disk=disk)


def _write_files(draft: Path, files: Mapping[str, FileImage], disk: Filesystem) -> None:
    """Create and sync `files` in `draft`, in which their folders must exist."""
    for name, image in files.items():
        write_new(draft / name, image.parts, disk=disk)


def _take_back(target: Path, draft: Path, disk: Filesystem) -> None:
    if not draft.exists():  # it was renamed, and something after that failed
        disk.rename(target, draft)


def clear(leftover: Path, disk: Filesystem) -> None:
    """Remove what is not needed any more. If that fails, it is logged: what was committed stays committed."""
    try:
        if leftover.exists():
            remove_tree(leftover, disk=disk)
    except OSError as error:
        logger.warning("a leftover stays: %s", error)


WRITER_TIMEOUT_S = 60.0
SURVIVOR_TIMEOUT_S = 15.0  # of a process that has lost a peer; the others renew their leases every 10 s
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


@dataclass(frozen=True)
class SaveResult:
    """The result of one save.

    Attributes:
        step: its step.
        saved: whether it is committed and was read back; if not, every older one is as it was.
        note: what people should know: why it was dropped, what could not be pruned. Empty if all is well.
        nbytes: bytes of its files.
        seconds: from the first byte until it was read back and old ones were pruned.
        cause: the error that dropped it.
    """

    step: int
    saved: bool
    note: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    cause: Exception | None = None


class CheckpointStore:
    """The checkpoints of one folder. Reading needs no right; the first change acquires the lease.

    Args:
        directory: the run's folder; made with the lease.
        save_total_limit: how many numbered checkpoints to keep; None keeps all.
        writer_timeout: seconds without heartbeat after which another writer counts as dead.
        owner: who writes; this process by default.
        disk: the real one by default.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        save_total_limit: int | None = None,
        writer_timeout: float = WRITER_TIMEOUT_S,
        owner: Owner | None = None,
        disk: Filesystem = DISK,
    ) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise CheckpointError("at least one checkpoint must be kept", where="save_total_limit")
        self.directory = Path(directory)
        self._limit = save_total_limit
        self._timeout = writer_timeout
        self._owner = owner
        self._disk = disk
        self._lease: Lease | None = None
        self._opened: Opened | None = None  # read and verified by `latest_step`, for the `read` that follows it
        self._verified: int | None = None  # the step that `read` has returned last
        self._newest_known: tuple[int | None] | None = None  # the newest step, once it was looked for

    # One writer

    def acquire_lease(self, timeout_s: float | None = None) -> int:
        """Become the one writer, sweep what dead attempts left, and return this attempt's number.

        Raises:
            WriterBusy: another live process writes here, or has taken over from this one.
            CheckpointError: the folder cannot be written.
        """
        if self._lease is None:
            owner = self._owner or Owner.this_process()
            try:
                timeouts = {"timeout_s": self._timeout, "taken_after_s": timeout_s or self._timeout}
                self._lease, takeover = acquire_lease(self.directory, owner=owner, disk=self._disk, **timeouts)
                if takeover:
                    logger.warning(takeover)
                self._sweep(self._lease)
            except OSError as error:
                raise CheckpointError(f"no checkpoint can be written: {error}", where=str(self.directory)) from error
        return self._lease.attempt

    def holds_lease(self) -> bool:
        """True if this attempt is the one writer of the folder: ask before you write anything else into it."""
        return self._lease is not None and self._lease.is_held()

    @property
    def staging(self) -> Path:
        """The folder in which files of this one begin (`durable.write_bytes(staging=...)`); gone after a takeover."""
        return self._held().work

    def close(self) -> None:
        """Release the lease, and free the bytes that `latest_step` has kept."""
        self.free_read_bytes()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _held(self) -> Lease:
        self.acquire_lease()
        assert self._lease is not None
        self._lease.require()
        return self._lease

    def _sweep(self, lease: Lease) -> None:
        self._disk.touch(lease.work)
        older_than = lease.work.stat().st_mtime - self._timeout
        for leftover in leftovers(self.directory, older_than):
            try:
                for work in sorted(leftover.glob("*/")):
                    layout.finish_moves(work, self.directory, self._disk)
                remove_tree(leftover, disk=self._disk)
            except OSError as error:
                logger.warning("a leftover of an earlier attempt stays: %s", error)

    # Reading

    def path(self, step: int) -> Path:
        """The folder of a committed step; the final checkpoint if only that one holds it.

        Raises:
            CheckpointError: there is no such step.
        """
        return layout.folders_of(self.directory, step)[0]

    def all_steps(self) -> list[int]:
        """Every committed step, ascending, the final checkpoint's included; not verified."""
        return sorted({step for step, _ in committed(self.directory)})

    def latest_step(self, *, quarantine: bool = True, at_most: int | None = None) -> int | None:
        """The newest step that verifies. A checkpoint that does not verify is named in the log.

        Every byte is read. The bytes stay in memory for the `read` that follows, and are read again only if the
        folder has changed.

        Args:
            quarantine: move what does not verify to `quarantine/`, unless another attempt writes here; the lease that
                this needs is released again.
            at_most: steps after this one are passed over.
        """
        if self._opened is None or not self._is_newest(self._opened, at_most):
            self._opened = None  # the old one goes first: never two in memory
            self._opened = self._newest(open_folder, quarantine, at_most)
        newest = None if self._opened is None else self._opened.manifest.step
        if at_most is None:
            self._newest_known = (newest,)
        return newest

    def read(self, step: int) -> Opened:
        """The manifest and the files of a step, verified. Raises DamagedCheckpoint, CheckpointError."""
        opened = self._opened
        self._opened = None
        if opened is None or opened.manifest.step != step:
            opened = layout.open_step(self.directory, step)
        self._verified = step
        return opened

    def newest(self) -> int | None:
        """`latest_step` for the one writer, which remembers it until `reload`, and keeps no bytes."""
        if self._newest_known is None:
            self.acquire_lease()
            found = self._newest(verify_folder, quarantine=True, at_most=None)
            self._newest_known = (None if found is None else found.step,)
        return self._newest_known[0]

    def free_read_bytes(self) -> None:
        """Free the bytes that `latest_step` has kept."""
        self._opened = None

    def reload(self) -> None:
        """Forget what is known of the folder, because something else than a save has changed it."""
        self._opened = self._verified = self._newest_known = None

    def _is_newest(self, opened: Opened, at_most: int | None = None) -> bool:
        """True if a folder that was read is still the newest, and still the same checkpoint; reads its manifest."""
        line = [folder for step, folder in committed(self.directory) if at_most is None or step <= at_most]
        if line[:1] != [opened.folder]:
            return False
        with contextlib.suppress(DamagedCheckpoint):
            return read_manifest(opened.folder) == opened.manifest
        return False

    def _newest(self, verify: Callable[[Path], T], quarantine: bool, at_most: int | None) -> T | None:
        """The value of `verify` for the newest folder that it does not find damaged."""
        final = self.directory / FINAL
        if os.path.lexists(final):  # without a manifest it has no step, and `committed` does not list it
            self._verify_twice(final, quarantine, read_manifest)
        seen = committed(self.directory)
        for step, folder in seen:
            if at_most is not None and step > at_most:
                continue
            found = self._verify_twice(folder, quarantine, verify)
            if found is not None:
                return found
        # A live writer may have committed a new one, and pruned those seen here, during the reading.
        return self._newest(verify, quarantine, at_most) if set(committed(self.directory)) - set(seen) else None

    def _verify_twice(self, folder: Path, quarantine: bool, verify: Callable[[Path], T]) -> T | None:
        """The value of `verify`; None if it finds damage twice: a disk or a network may fail once."""
        with contextlib.suppress(CheckpointError):
            return verify(folder)
        try:
            return verify(folder)
        except DamagedCheckpoint as damage:
            self._set_damaged_aside(folder, damage, quarantine)
            return None

    # Changing

    def save(
        self,
        step: int,
        files: Mapping[str, FileImage],
        *,
        forms: Mapping[str, str] | None = None,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
        others: OtherWriters = NO_OTHERS,
    ) -> SaveResult:
        """Commit one checkpoint and prune old ones. A disk that fails drops this one, never an older one.

        Args:
            keep: steps that pruning spares; they are kept beside the newest ones of the limit.
            others: processes that write files of the same checkpoint.

        Raises:
            WriterBusy: another attempt holds the folder.
            ValueError: a name that no checkpoint may hold, a step below 0.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"a step counts from 0 on, not {step}")
        lease = self._held()
        target = step_folder(self.directory, step)
        if os.path.lexists(target) and self._verify_twice(target, True, verify_folder) is not None:
            self.reload()  # somebody else has written it
            return SaveResult(step, False, f"step {step} is saved already")
        began = time.monotonic()
        records = {**{name: image.record() for name, image in files.items()}, **others.records}
        manifest = Manifest(step, lease.attempt, time.time(), forms or {}, records, info or {})
        if cause := self._commit(target, files, manifest, others):
            return _not_saved(target, step, cause, began)
        if self._newest_known is not None:
            self._newest_known = (max(step, self._newest_known[0] or 0),)
        note = self._prune(step, keep)
        return SaveResult(step, True, note, manifest.nbytes, time.monotonic() - began)

    def write_part(self, draft: Path, files: Mapping[str, FileImage], records: Mapping[str, FileRecord]) -> None:
        """Write files of a checkpoint that another process commits, and read them back from the device.

        Args:
            draft: its folder, seen from the directory of this store.

        Raises:
            OSError: the disk failed. DamagedCheckpoint: the device does not hold what was written.
        """
        _write_files(self.directory / draft, files, self._disk)
        with _reading_back():
            verify_files(self.directory / draft, records)

    def make_final(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> SaveResult:
        """Make `final_checkpoint` again from a committed step, with `extra` files beside its own.

        It is a copy and not a set of links: people edit what they publish, and the committed step must not
        change with it.

        Args:
            step: the newest one by default.

        Raises:
            CheckpointError: nothing is committed yet, or not this step. DamagedCheckpoint, WriterBusy.
        """
        self._held()
        began = time.monotonic()
        final = self.directory / FINAL
        newest = self.latest_step()
        if newest is None:
            raise CheckpointError("no step is committed to make it from", where=str(final))
        opened = self.read(newest)
        own = step_folder(self.directory, newest).name
        cause = self._put(opened, own) if opened.folder == final else None  # nobody else has it meanwhile
        if cause:
            return _not_saved(final, newest, cause, began)
        if step not in (None, newest):
            opened = self.read(step)
        manifest = opened.manifest
        added = {name: FileImage((data,)) for name, data in (extra or {}).items()}
        records = {**manifest.files, **{name: image.record() for name, image in added.items()}}
        forms = {**manifest.forms, **dict.fromkeys(added, "bytes")}
        whole = replace(manifest, files=records, forms=forms)
        cause = self._commit(final, opened.images | added, whole)
        if cause:
            return _not_saved(final, manifest.step, cause, began)
        return SaveResult(manifest.step, True, "", whole.nbytes, time.monotonic() - began)

    def adopt(self, opened: Opened) -> None:
        """Commit a checkpoint that was read elsewhere, under its own name and as it is.

        Raises:
            CheckpointError: the disk refuses it. WriterBusy: another attempt holds the folder.
        """
        self.reload()
        if cause := self._put(opened, opened.folder.name):
            raise CheckpointError(f"{opened.folder.name} is dropped: {cause}", where=str(self.directory)) from cause

    def supersede(self, after_step: int) -> list[Path]:
        """Move every checkpoint newer than `after_step` to `superseded/`; returns where they are now.

        Raises:
            WriterBusy: another attempt holds the folder. OSError: the disk refuses one, which is where it was.
        """
        verified = self._verified
        self.reload()
        if verified == after_step:  # it was read byte by byte, and is the newest now: no save has to look again
            self._newest_known = (after_step,)
        self._held()
        newer = [folder for step, folder in committed(self.directory) if step > after_step]
        # The newest goes last: until then it is the latest step, and afterwards `after_step` is.
        newer.reverse()
        return [self._move_to_shelf(folder, layout.SUPERSEDED) for folder in newer]

    def set_aside(self, entries: Sequence[Path]) -> Path:
        """Move a whole run, `entries` of this folder, to `overwritten/<n>/`; returns where they are now.

        Raises:
            WriterBusy: another attempt holds the folder. OSError: the disk refuses it; everything is where it was.
        """
        self.reload()
        return layout.set_aside(self.directory, entries, self._held().work, self._disk)

    def delete(self, step: int) -> None:
        """Remove a committed step. Raises CheckpointError if there is no such step."""
        self.reload()
        self._remove(self.path(step))

    # Committing

    def _put(self, opened: Opened, name: str) -> Exception | None:
        return self._commit(self.directory / name, opened.images, opened.manifest)

    def _commit(
        self, target: Path, files: Mapping[str, FileImage], manifest: Manifest, others: OtherWriters = NO_OTHERS
    ) -> Exception | None:
        """Write, commit, read back; the error if that failed, after everything was put back as it was."""
        try:
            require_space(self.directory, manifest, self._disk)
            old = commit(target, files, manifest, self._held().work, self._disk, others)
        except (OSError, DamagedCheckpoint) as error:
            self._held()
            return error
        clear(old, self._disk)
        return None

    # Removing

    def _prune(self, saved: int, keep: Collection[int]) -> str:
        """Remove the oldest beyond the limit; returns why it stopped if it failed.

        The step just saved was read back and stays, whatever lies there with a higher number.
        """
        older = [step for step in layout.numbered_steps(self.directory) if step < saved]
        excess = older[: max(len(older) + 1 - self._limit, 0)] if self._limit else []
        for step in sorted({*excess} - {*keep}):
            try:
                self._remove(step_folder(self.directory, step))
            except OSError as error:
                self._held()
                return f"step {step} could not be pruned: {error}"
        return ""

    def _remove(self, folder: Path) -> None:
        draft = draft_in(self._held().work)
        self._disk.rename(folder, draft)
        # The name must be gone for good before its files go, or a crash brings half a checkpoint back.
        self._disk.sync_folder(self.directory)
        clear(draft, self._disk)

    def _set_damaged_aside(self, folder: Path, damage: DamagedCheckpoint, quarantine: bool) -> None:
        if not quarantine or is_run(folder):
            logger.warning("%s; passed over", damage.what)
            return
        only_reads = self._lease is None
        try:
            logger.warning("%s; moved to %s", damage.what, self._move_to_shelf(folder, layout.QUARANTINE))
        except (CheckpointError, OSError) as hindrance:
            logger.warning("%s; passed over where it is: %s", damage.what, hindrance)
        if only_reads:  # a notebook that has looked at a run must not keep its training away
            self.close()

    def _move_to_shelf(self, folder: Path, shelf: str) -> Path:
        return layout.move_to_shelf(folder, shelf, self._held().work, self._disk)


def _not_saved(target: Path, step: int, cause: Exception, began: float) -> SaveResult:
    note = f"{target.name} is dropped: {cause}"
    return SaveResult(step, False, note, seconds=time.monotonic() - began, cause=cause)
