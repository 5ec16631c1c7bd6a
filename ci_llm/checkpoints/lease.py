"""The lease of a folder, which makes one attempt its only writer: acquired, renewed, and lost in one instant.

    .attempt-<n>/holder.json     the owner: host, process, SLURM job
    .attempt-<n>/<token>/        its work folder; the time of that folder is the heartbeat, and its absence the end

Everything that an attempt commits leaves its work folder by a rename, and everything that it prunes enters it by one. A
takeover renames `.attempt-<n>` away. From that moment neither path exists, so an attempt that was suspended meanwhile
can neither overwrite nor remove anything. No clock and no lock of the operating system decides this, because neither
can be trusted on a network disk: a rename on one disk has one winner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ci_llm.checkpoints.layout import in_transit
from ci_llm.cluster.launch import job_and_round
from ci_llm.core.durable import DISK, PARTIAL, Filesystem, make_folders, read_as, remove_tree, sync_tree, write_new
from ci_llm.core.quantities import duration
from ci_llm.core.run_folder import LAUNCH_TOKEN
from ci_llm.core.run_status import is_alive, pid_space, started_since_boot_s
from ci_llm.core.typed_json import dump_json
from ci_llm.errors import CheckpointError, WriterBusy

OWNER_FILE = "holder.json"
#: The number of heartbeats that may fail in a row before another attempt takes over.
HEARTBEATS_PER_TIMEOUT = 6
#: How often an attempt tries again after another one was faster.
MAX_RACES = 20

# Folders that were taken over keep their number and count for the next one: a number never comes again, and so an old
# attempt that wakes up finds nothing under its own path.
_ATTEMPT = re.compile(r"\.attempt-(\d+)$")
_NUMBERED = re.compile(r"\.(?:attempt|taken-over)-(\d+)(?:-|$)")
_LEFTOVER = re.compile(r"\.(?:taken-over|claim)-")


@dataclass(frozen=True)
class Owner:
    """Who writes to a folder.

    Attributes:
        machine: the set of processes in which `pid` has a meaning; it begins with the name of the host.
        started_since_boot_s: when the process started: a later process may get the same pid. None if it is not known:
            then the pid alone decides, and then the heartbeat.
        elastic_job, elastic_round: from torchrun, which ends the processes of a round before the next one begins.
    """

    machine: str
    pid: int
    started_since_boot_s: float | None = None
    slurm_job: str | None = None
    slurm_restarts: str = "0"
    elastic_job: str | None = None
    elastic_round: str | None = None

    @classmethod
    def this_process(cls) -> Owner:
        slurm = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(pid_space(), os.getpid(), started_since_boot_s(), *slurm, *job_and_round())

    def why_gone(self, me: Owner, silent_s: float, timeout_s: float) -> str | None:
        """The reason to take over from this owner; None while it may be alive.

        Args:
            silent_s: seconds since its last heartbeat; negative if the clock was set back since.
        """
        if self.machine == me.machine and not is_alive(self.pid, self.started_since_boot_s):
            return f"process {self.pid} is gone"
        # Without a restart, the other process of the same job may be alive on another node of it, or in a container.
        if self.slurm_job and self.slurm_job == me.slurm_job and self.slurm_restarts != me.slurm_restarts:
            return f"SLURM job {self.slurm_job} was started again"
        if self.elastic_job and self.elastic_job == me.elastic_job and self.elastic_round != me.elastic_round:
            return f"torchrun has begun another round of {self.elastic_job}"
        if silent_s > timeout_s:
            return f"no heartbeat for {duration(round(silent_s))}"
        if silent_s < -timeout_s:  # a living owner sets it right with its next heartbeat
            return f"its last heartbeat is {duration(-silent_s)} in the future: the clock was set back"
        return None

    def __str__(self) -> str:
        job = f", SLURM job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.machine.split()[0]}{job}"


class Lease:
    """The right of one attempt to change a folder; made by `acquire_lease`.

    Attributes:
        attempt: its number; the attempt before has one less.
        work: the folder in which it works and from which it commits.
    """

    def __init__(self, folder: Path, token: str, timeout_s: float, disk: Filesystem) -> None:
        self.attempt = _number(folder)
        self.folder = folder
        self.work = folder / token
        ended = threading.Event()
        interval_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        # The thread must not refer to the lease itself, or the lease would never become garbage.
        heartbeat = (self.work, interval_s, ended, disk)
        threading.Thread(target=_renew, args=heartbeat, name="ci_llm lease", daemon=True).start()
        # It also runs when the lease is garbage or the interpreter ends: a folder whose manager is forgotten is free.
        self.release = weakref.finalize(self, _release, self.work, ended, os.getpid(), disk)

    def is_held(self) -> bool:
        """True if no other attempt has taken over; looked up by path, because a takeover renames the path."""
        return self.work.is_dir()

    def require(self) -> None:
        """Raises WriterBusy if another attempt has taken over, CheckpointError if the folder was removed."""
        if self.is_held():
            return
        place = self.folder.parent
        if not place.is_dir() or not any(_NUMBERED.match(path.name) for path in place.iterdir()):
            raise CheckpointError(
                "the folder of this run was removed or moved while it was running",
                where=str(place),
                hint="put it back where it was, and start again: the run resumes from the newest checkpoint in it",
            )
        raise WriterBusy(
            f"attempt {self.attempt} was taken over by another attempt and must not write any more",
            where=str(place),
            hint="end this process; the other one continues",
        )


def _renew(work: Path, interval_s: float, ended: threading.Event, disk: Filesystem) -> None:
    while not ended.wait(interval_s):
        try:
            disk.touch(work)
        except FileNotFoundError:
            return  # taken over
        except OSError:
            continue  # the disk may be back at the next heartbeat; if not, the timeout of the others decides


def _release(work: Path, ended: threading.Event, pid: int, disk: Filesystem) -> None:
    """Remove the work folder: an attempt without one has ended."""
    if os.getpid() != pid:
        return  # a forked child, which never had the lease
    ended.set()
    with contextlib.suppress(OSError):  # taken over, or the disk is gone: then the timeout ends this attempt
        with contextlib.suppress(OSError):
            if not in_transit(work):
                remove_tree(work, disk=disk)
                return
        # What the disk refused to move on, to move back or to remove: the next attempt finishes that.
        disk.rename(work.parent, work.parent.with_name(f".taken-over-{_number(work.parent)}-{work.name}"))


def acquire_lease(
    directory: Path, *, owner: Owner, timeout_s: float, taken_after_s: float | None = None, disk: Filesystem = DISK
) -> tuple[Lease, str | None]:
    """Become the one writer of `directory`; take over from an owner that is gone.

    Args:
        timeout_s: seconds without heartbeat after which others take over.
        taken_after_s: after which this one does; the same by default.

    Returns:
        the lease, and from whom it was taken over and why, if it was.

    Raises:
        WriterBusy: the owner is alive; it is named.
    """
    make_folders(directory, disk=disk)
    token = secrets.token_hex(8)
    try:
        for _ in range(MAX_RACES):
            # A race is lost where a path is gone that another attempt has just renamed: look again.
            with contextlib.suppress(FileNotFoundError, FileExistsError, _LostRaceError):
                takeover = _evict_dead(directory, token, owner, taken_after_s or timeout_s, disk)
                folder = _take_number(directory, token, owner, disk)
                return Lease(folder, token, timeout_s, disk), takeover
        raise WriterBusy("other processes take this folder again and again", where=str(directory))
    finally:
        with contextlib.suppress(OSError):  # it is gone after a success; the next start sweeps what stays
            remove_tree(directory / f".claim-{token}", disk=disk)


class _LostRaceError(Exception):
    """Another attempt was faster."""


def _evict_dead(directory: Path, token: str, me: Owner, timeout_s: float, disk: Filesystem) -> str | None:
    """Rename the folders of dead attempts away; returns a line about the last one that had not ended by itself."""
    takeover = None
    for folder in sorted(_attempts(directory), key=_number):
        heartbeats = [entry.stat().st_mtime for entry in folder.iterdir() if entry.is_dir()]
        if heartbeats:  # its work folder is there, so it has not ended by itself
            silent_s = _disk_time(directory, token, disk) - max(heartbeats)
            takeover = _why_over(_owner_of(folder), me, silent_s, timeout_s, folder)
        # The token makes the name one of its own: of two that evict the same attempt, one finds the source gone.
        disk.rename(folder, directory / f".taken-over-{_number(folder)}-{token}")
    return takeover


def _why_over(owner: Owner, me: Owner, silent_s: float, timeout_s: float, folder: Path) -> str:
    if owner == me:
        raise WriterBusy(
            f"this very process ({owner}) writes to this folder already",
            where=str(folder.parent),
            hint="close the other manager of this folder first, or save with that one",
        )
    why = owner.why_gone(me, silent_s, timeout_s)
    if why is None:
        raise WriterBusy(
            f"{owner} writes to this folder (heartbeat {duration(round(max(silent_s, 0.0)))} ago)",
            where=str(folder.parent),
            hint="wait until it has ended, stop it, or use another output_dir",
        )
    return f"attempt {_number(folder)} ({owner}) is taken over: {why}"


def _owner_of(folder: Path) -> Owner:
    """Who made an attempt's folder; an unknown owner if the file is damaged or lost: then only the heartbeat tells."""
    try:
        return read_as(Owner, folder / OWNER_FILE)
    except (FileNotFoundError, ValueError):
        os.stat(folder)  # it is gone if another attempt has just renamed it, and then the race is lost
        return Owner("unknown", 0)


def _disk_time(directory: Path, token: str, disk: Filesystem) -> float:
    """The present time by the clock of the disk, which stamps the heartbeats. A network disk has a clock of its own."""
    draft = directory / f".claim-{token}"
    if not draft.exists():
        disk.mkdir(draft)
    disk.touch(draft)
    return draft.stat().st_mtime


def count_on_from(directory: Path, attempt: int) -> None:
    """Let the next attempt have a number above `attempt`, which the run had reached in another folder."""
    make_folders(directory)
    if max((_number(path) for path in directory.iterdir() if _NUMBERED.match(path.name)), default=0) < attempt:
        with contextlib.suppress(FileExistsError):  # another start was faster
            DISK.mkdir(directory / f".attempt-{attempt}")  # an attempt without a work folder has ended


def _take_number(directory: Path, token: str, owner: Owner, disk: Filesystem) -> Path:
    """Give a prepared folder the next number by a rename, which only one attempt can win."""
    draft = _write_claim(directory, token, owner, disk)
    used = [path for path in directory.iterdir() if _NUMBERED.match(path.name)]
    if any(_ATTEMPT.match(path.name) for path in used):
        raise _LostRaceError  # it came after `_evict_dead` had looked
    folder = directory / f".attempt-{1 + max(map(_number, used), default=0)}"
    try:
        disk.rename(draft, folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _LostRaceError from error
        raise
    try:
        disk.sync_folder(directory)
        if any(other != folder for other in _attempts(directory)):
            # Both looked before either renamed. Each looks again after its own rename, so at least one sees the other
            # and gives way; if both do, both try again.
            raise _LostRaceError
    except (OSError, _LostRaceError):
        disk.rename(folder, draft)  # an attempt that failed here must not lock the others out
        raise
    return folder


def _write_claim(directory: Path, token: str, owner: Owner, disk: Filesystem) -> Path:
    draft = directory / f".claim-{token}"
    told = dump_json(asdict(owner), indent=2)
    if not (draft / token).exists():
        _disk_time(directory, token, disk)
        disk.mkdir(draft / token)
        write_new(draft / OWNER_FILE, [told], disk=disk)
        sync_tree(draft, disk=disk)
    if (draft / OWNER_FILE).read_bytes() != told:  # nobody could tell whether such an owner lives
        raise OSError(errno.EIO, "the disk does not hold what was written")
    return draft


def _attempts(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if _ATTEMPT.match(path.name))


def _number(folder: Path) -> int:
    match = _NUMBERED.match(folder.name)
    assert match is not None, folder
    return int(match[1])


def leftovers(directory: Path, older_than: float) -> Iterator[Path]:
    """What dead attempts have left: folders taken over or beaten in a race, unfinished files, tokens.

    Args:
        older_than: a time of the disk's clock. A younger unfinished file may still be written. A younger token may be
            of a launch that has not asked for the lease yet.
    """
    for path in sorted(directory.iterdir()):
        unfinished = path.name.startswith(".") and path.name.endswith(PARTIAL)
        aged = unfinished or path.name.startswith(LAUNCH_TOKEN)
        with contextlib.suppress(FileNotFoundError):  # its writer has given it its name just now
            if _LEFTOVER.match(path.name) or (aged and path.lstat().st_mtime < older_than):
                yield path
