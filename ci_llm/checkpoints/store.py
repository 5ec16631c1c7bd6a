"""Committed folders: a checkpoint is there as a whole or not at all, and one attempt at a time changes them.

    checkpoint_step_<N>/, final_checkpoint/    see line.py
    quarantine/    what did not verify
    superseded/    what was newer than the step that a run went back to
    overwritten/   whole runs that were in the way of a new one

One checkpoint goes one way: written in the attempt's own folder, every file synced, the manifest last, the
folders synced; renamed into its place, the place synced; read back from the device; only then are old ones
pruned. The room knows names and bytes; it never sees a tensor.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import operator
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ci_llm.checkpoints.commit import NOBODY, Others, commit, draft_in, require_space, write_files
from ci_llm.checkpoints.folders import FINAL, committed, folders_of, numbered_steps, read_step, step_folder
from ci_llm.checkpoints.lease import Lease, Owner, acquire_lease, leftovers
from ci_llm.checkpoints.manifest import FileImage, FileRecord, Manifest, read_manifest, verify_files, verify_folder
from ci_llm.core.durable import DISK, Filesystem, commit_folder, make_folders, remove_tree
from ci_llm.errors import CheckpointError, DamagedCheckpoint

QUARANTINE = "quarantine"
SUPERSEDED = "superseded"
OVERWRITTEN = "overwritten"
WRITER_TIMEOUT_S = 60.0
PAUSE_S = 10.0
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """What became of one checkpoint.

    Attributes:
        step: its step.
        saved: whether it is committed and was read back; if not, every older one is as it was.
        note: what people should know: why it was dropped, what could not be pruned. Empty if all is well.
        nbytes: bytes of its files.
        seconds: from the first byte until it was read back and old ones were pruned.
        pruned: steps removed.
        cause: the error that dropped it.
    """

    step: int
    saved: bool
    note: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    pruned: tuple[int, ...] = ()
    cause: Exception | None = None


class CheckpointStore:
    """The checkpoints of one folder. Reading needs no right; the first change claims the folder.

    Args:
        directory: the run's folder; made when it is claimed.
        save_total_limit: how many numbered checkpoints to keep; None keeps all.
        on_disk_full: "drop" the new checkpoint and go on, or "pause" until there is space.
        writer_timeout: seconds without heartbeat after which another writer counts as dead.
        holder: who writes; this process by default.
        say: called with one line for people.
        stop_waiting: asked while paused, with the seconds so far; True gives the new checkpoint up.
        disk, sleep: the real ones by default.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        save_total_limit: int | None = None,
        on_disk_full: Literal["drop", "pause"] = "drop",
        writer_timeout: float = WRITER_TIMEOUT_S,
        holder: Owner | None = None,
        say: Callable[[str], None] = _LOGGER.warning,
        stop_waiting: Callable[[float], bool] = lambda paused_s: False,
        disk: Filesystem = DISK,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if save_total_limit is not None and save_total_limit < 1:
            raise CheckpointError("at least one checkpoint must be kept", where="save_total_limit")
        if on_disk_full not in ("drop", "pause"):
            raise CheckpointError(f"{on_disk_full!r} is neither drop nor pause", where="on_disk_full")
        self.directory = Path(directory)
        self._limit, self._on_disk_full = save_total_limit, on_disk_full
        self._timeout, self._holder = writer_timeout, holder
        self._say, self._stop_waiting, self._disk, self._sleep = say, stop_waiting, disk, sleep
        self._claim: Lease | None = None

    # One writer

    @property
    def attempt(self) -> int | None:
        """The number of this attempt, once the folder is claimed."""
        return self._claim.attempt if self._claim else None

    def claim(self) -> int:
        """Become the one writer, sweep what dead attempts left, and return this attempt's number.

        Raises:
            WriterBusy: another live process writes here, or has taken over from this one.
            CheckpointError: the folder cannot be written.
        """
        if self._claim is None:
            holder = self._holder or Owner.this_process()
            try:
                self._claim, story = acquire_lease(
                    self.directory, holder=holder, timeout_s=self._timeout, disk=self._disk
                )
                if story:
                    self._say(story)
                self._sweep(self._claim)
            except OSError as error:
                raise CheckpointError(f"no checkpoint can be written: {error}", where=str(self.directory)) from error
        return self._claim.attempt

    def still_held(self) -> bool:
        """Whether this attempt holds the folder: ask before writing anything else in it."""
        return self._claim is not None and self._claim.still_held()

    @property
    def staging(self) -> Path:
        """Where to begin files of this folder (`durable.write_bytes(staging=...)`); gone after a takeover."""
        return self._held().work

    def close(self) -> None:
        """Give the folder free."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _held(self) -> Lease:
        self.claim()
        assert self._claim is not None
        self._claim.require()
        return self._claim

    def _sweep(self, claim: Lease) -> None:
        self._disk.touch(claim.work)
        older_than = claim.work.stat().st_mtime - self._timeout
        for leftover in leftovers(self.directory, older_than):
            try:
                self._forward(leftover)
                remove_tree(leftover, disk=self._disk)
            except OSError as error:
                self._say(f"a leftover of an earlier attempt stays: {error}")

    def _forward(self, leftover: Path) -> None:
        """A dead attempt may have died while it moved something to where people find it: finish that."""
        for shelf in (QUARANTINE, SUPERSEDED, OVERWRITTEN):
            for folder in sorted(leftover.glob(f"*/{shelf}/*")):
                self._shelve(folder, shelf)

    # Looking

    def path(self, step: int) -> Path:
        """The folder of a committed step; the final checkpoint if only that one holds it.

        Raises:
            CheckpointError: there is no such step.
        """
        return folders_of(self.directory, step)[0]

    def all_steps(self) -> list[int]:
        """Every committed step, ascending, the final checkpoint's included; not verified."""
        return sorted({step for step, _ in committed(self.directory)})

    def numbered_steps(self) -> list[int]:
        """The steps that have a `checkpoint_step_<N>`, ascending."""
        return numbered_steps(self.directory)

    def verify(self, step: int) -> Manifest:
        """Read every byte of a step and return its manifest. Raises DamagedCheckpoint, CheckpointError."""
        return verify_folder(self.path(step))

    def read(self, step: int) -> tuple[Manifest, dict[str, bytes]]:
        """The manifest and the files of a step, verified. Raises DamagedCheckpoint, CheckpointError."""
        return read_step(self.directory, step)

    def latest(self, *, heal: bool = True, at_most: int | None = None) -> int | None:
        """The newest step that verifies. What does not is named.

        Args:
            heal: move what does not verify to `quarantine/`, unless another attempt writes here.
            at_most: steps after this one are passed over, unread; None: any will do.
        """
        final = self.directory / FINAL
        if os.path.lexists(final):  # without a manifest it holds no step, and has no place in the line
            self._verifies(final, heal, read_manifest)
        seen = committed(self.directory)
        for step, folder in seen:
            if (at_most is None or step <= at_most) and self._verifies(folder, heal):
                return step
        # Its writer may have committed one and pruned those that we knew while we were reading.
        return self.latest(heal=heal, at_most=at_most) if set(committed(self.directory)) - set(seen) else None

    def _verifies(self, folder: Path, heal: bool, look: Callable[[Path], Manifest] = verify_folder) -> bool:
        with contextlib.suppress(DamagedCheckpoint):
            look(folder)
            return True
        try:
            look(folder)  # a disk may fail once: nothing is condemned at the first look
        except DamagedCheckpoint as damage:
            self._condemn(folder, damage, heal)
            return False
        return True

    # Changing

    def save(
        self,
        step: int,
        files: Mapping[str, FileImage],
        *,
        forms: Mapping[str, str] | None = None,
        info: Mapping[str, object] | None = None,
        keep: Collection[int] = (),
        others: Others = NOBODY,
    ) -> SaveResult:
        """Commit one checkpoint and prune old ones. A disk that fails drops this one, never an older one.

        Args:
            keep: steps that pruning spares; they are kept beside the newest ones of the limit.
            others: processes that write files of the same checkpoint.

        Raises:
            WriterBusy: another attempt holds the folder.
            ValueError: a name that no checkpoint may hold, a step below 0.
        """
        if (step := operator.index(step)) < 0:
            raise ValueError(f"a step counts from 0 on, not {step}")
        claim = self._held()
        target = step_folder(self.directory, step)
        if os.path.lexists(target) and self._verifies(target, heal=True):
            return SaveResult(step, False, f"step {step} is saved already")
        began = time.monotonic()
        records = {**{name: image.record() for name, image in files.items()}, **others.records}
        manifest = Manifest(step, claim.attempt, time.time(), forms or {}, records, info or {})
        if cause := self._commit(target, files, manifest, others):
            return _dropped(target, step, cause, began)
        pruned, note = self._prune(step, keep)
        return SaveResult(step, True, note, manifest.nbytes, time.monotonic() - began, pruned)

    def write_part(self, draft: Path, files: Mapping[str, FileImage], records: Mapping[str, FileRecord]) -> None:
        """Write files of a checkpoint that another process commits, and read them back from the device.

        Args:
            draft: its folder, seen from the directory of this store.

        Raises:
            OSError: the disk failed. DamagedCheckpoint: the device does not hold what was written.
        """
        write_files(self.directory / draft, files, self._disk)
        verify_files(self.directory / draft, records)

    def finish(self, extra: Mapping[str, bytes] | None = None, *, step: int | None = None) -> SaveResult:
        """Make `final_checkpoint` anew from a committed step, with `extra` files beside its own.

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
        if (newest := self.latest()) is None:
            raise CheckpointError("no step is committed to make it from", where=str(final))
        if self.path(newest) == final and (cause := self._copy_out(newest)):
            return _dropped(final, newest, cause, began)
        manifest, contents = self.read(newest if step is None else step)
        added = {name: FileImage((data,)) for name, data in (extra or {}).items()}
        files = {name: FileImage((data,)) for name, data in contents.items()} | added
        records = {**manifest.files, **{name: image.record() for name, image in added.items()}}
        forms = {**manifest.forms, **dict.fromkeys(added, "bytes")}
        whole = replace(manifest, files=records, forms=forms)
        if cause := self._commit(final, files, whole):
            return _dropped(final, manifest.step, cause, began)
        return SaveResult(manifest.step, True, "", whole.nbytes, time.monotonic() - began)

    def _copy_out(self, step: int) -> Exception | None:
        """Give the final checkpoint's step a folder of its own: nobody else has it while the final one is replaced."""
        manifest, contents = self.read(step)
        files = {name: FileImage((data,)) for name, data in contents.items()}
        return self._commit(step_folder(self.directory, step), files, manifest)

    def supersede(self, after_step: int) -> list[Path]:
        """Move every checkpoint newer than `after_step` to `superseded/`; returns where they are now."""
        self._held()
        newer = [folder for step, folder in committed(self.directory) if step > after_step]
        # The newest goes last: until then `latest` is what it was, and afterwards it is `after_step`.
        newer.reverse()
        return [self._withdraw_to(SUPERSEDED, folder) for folder in newer]

    def delete(self, step: int) -> None:
        """Remove a committed step. Raises CheckpointError if there is none."""
        self._remove(self.path(step))

    # Committing

    def _commit(
        self, target: Path, files: Mapping[str, FileImage], manifest: Manifest, others: Others = NOBODY
    ) -> Exception | None:
        """Write, commit, read back; the error if that failed, after everything was put back as it was."""
        paused_at: float | None = None
        while True:
            try:
                require_space(self.directory, manifest, self._disk)
                old = commit(target, files, manifest, self._held().work, self._disk, others)
            except (OSError, DamagedCheckpoint) as error:
                self._held()
                paused_at = paused_at or time.monotonic()
                if not (isinstance(error, OSError) and error.errno in DISK_FULL and self._pause(error, paused_at)):
                    return error
            else:
                self._clear(old)
                return None

    def _pause(self, error: OSError, since: float) -> bool:
        """Wait for space if that is wanted; False if the checkpoint is to be given up."""
        if self._on_disk_full != "pause" or self._stop_waiting(time.monotonic() - since):
            return False
        self._say(f"the disk is full ({error}); this checkpoint is tried again in {PAUSE_S:.0f} s")
        self._sleep(PAUSE_S)
        return True

    def _clear(self, draft: Path) -> None:
        """Remove what this attempt needs no more; if that fails the next attempt sweeps it."""
        try:
            if draft.exists():
                remove_tree(draft, disk=self._disk)
        except OSError as error:
            self._say(f"a leftover stays until the next start: {error}")

    # Removing

    def _prune(self, saved: int, keep: Collection[int]) -> tuple[tuple[int, ...], str]:
        """Remove the oldest beyond the limit; returns the steps removed, and why it stopped if it failed.

        The step just saved was read back and stays, whatever lies there with a higher number.
        """
        older = [step for step in self.numbered_steps() if step < saved]
        excess = older[: max(len(older) + 1 - self._limit, 0)] if self._limit else []
        pruned: list[int] = []
        for step in (step for step in excess if step not in keep):
            try:
                self._remove(step_folder(self.directory, step))
            except OSError as error:
                self._held()
                return tuple(pruned), f"step {step} could not be pruned: {error}"
            pruned.append(step)
        return tuple(pruned), ""

    def _remove(self, folder: Path) -> None:
        draft = draft_in(self._held().work)
        self._disk.rename(folder, draft)
        # The name must be gone for good before its files go, or a crash brings half a checkpoint back.
        self._disk.sync_folder(self.directory)
        self._clear(draft)

    def _condemn(self, folder: Path, damage: DamagedCheckpoint, heal: bool) -> None:
        if not heal:
            self._say(f"{damage.what}; passed over")
            return
        try:
            self._say(f"{damage.what}; moved to {self._withdraw_to(QUARANTINE, folder)}")
        except (CheckpointError, OSError) as hindrance:
            self._say(f"{damage.what}; passed over where it is: {hindrance}")

    def _withdraw_to(self, shelf: str, folder: Path) -> Path:
        """Move a checkpoint out of the line of the run, by way of our own folder: only a claim can."""
        aside = self._held().work / shelf
        if not aside.exists():
            self._disk.mkdir(aside)
        self._disk.rename(folder, aside / folder.name)
        self._disk.sync_folder(self.directory)
        return self._shelve(aside / folder.name, shelf)

    def _shelve(self, folder: Path, shelf: str) -> Path:
        place = self.directory / shelf
        make_folders(place, disk=self._disk)
        names = itertools.chain([folder.name], (f"{folder.name}.{n}" for n in itertools.count(2)))
        target = next(place / name for name in names if not (place / name).exists())
        commit_folder(folder, target, disk=self._disk)
        return target


def _dropped(target: Path, step: int, cause: Exception, began: float) -> SaveResult:
    note = f"{target.name} is dropped: {cause}"
    return SaveResult(step, False, note, seconds=time.monotonic() - began, cause=cause)
