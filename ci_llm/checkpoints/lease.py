"""One writer per folder: an attempt claims the folder, keeps its claim alive, and loses it in one instant.

    .attempt-<n>/holder.json     who writes: host, process, SLURM job
    .attempt-<n>/<token>/        where that attempt works; its time is the heartbeat, and it is gone at the end

All that an attempt commits leaves its work folder by a rename, and all that it prunes enters it by one.
Taking over renames `.attempt-<n>` away, and from that moment neither path exists: an attempt that slept
through it can neither overwrite nor remove anything, whatever it last believed.
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

import psutil

from ci_llm.core.durable import (
    DISK,
    PARTIAL,
    Filesystem,
    make_folders,
    read_json,
    remove_tree,
    sync_tree,
    write_new,
)
from ci_llm.core.run_status import is_alive, pid_space
from ci_llm.core.typed_json import dump_json
from ci_llm.errors import CheckpointError, WriterBusy

HOLDER = "holder.json"
HEARTBEATS_PER_TIMEOUT = 6
RACES_LOST = 20

_ATTEMPT = re.compile(r"\.attempt-(\d+)$")
_NUMBERED = re.compile(r"\.(?:attempt|taken-over)-(\d+)(?:-|$)")
_LEFTOVER = re.compile(r"\.(?:taken-over|claim)-")


@dataclass(frozen=True)
class Owner:
    """Who holds a folder. `machine` is the set of processes in which `pid` has a meaning; it begins with the host."""

    machine: str
    pid: int
    started: float
    slurm_job: str | None = None
    slurm_restarts: str = "0"

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            machine=pid_space(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            slurm_job=os.environ.get("SLURM_JOB_ID"),
            slurm_restarts=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )

    def why_gone(self, me: Owner, silent_s: float, timeout_s: float) -> str | None:
        """The reason to take over from this holder; None while it must be taken for alive.

        Args:
            silent_s: seconds since its last heartbeat.
        """
        same_machine = self.machine == me.machine
        if same_machine and not is_alive(self.pid, self.started):
            return f"process {self.pid} is gone"
        restarted = self.slurm_restarts != me.slurm_restarts
        if self.slurm_job and self.slurm_job == me.slurm_job and (restarted or not same_machine):
            return f"SLURM job {self.slurm_job} was started again"
        if silent_s > timeout_s:
            return f"no heartbeat for {silent_s:.0f} s"
        return None

    def __str__(self) -> str:
        job = f", SLURM job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.machine.split()[0]}{job}"


class Lease:
    """The right of one attempt to change a folder; made by `acquire_lease`.

    Attributes:
        attempt: its number, one more than that of the attempt before.
        work: the folder in which it works and from which it commits.
    """

    def __init__(self, folder: Path, token: str, holder: Owner, timeout_s: float, disk: Filesystem) -> None:
        self.attempt = _number(folder)
        self.folder, self.work = folder, folder / token
        ended = threading.Event()
        interval_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        heart = (self.work, interval_s, ended, disk)
        threading.Thread(target=_beat, args=heart, name="ci_llm heartbeat", daemon=True).start()
        # Also runs when the claim is garbage or the interpreter ends: a folder is not held by the forgotten.
        self.release = weakref.finalize(self, _let_go, self.work, ended, os.getpid(), disk)

    def still_held(self) -> bool:
        """Whether no other attempt has taken over; looked up by path, for that is what others take."""
        return self.work.is_dir()

    def require(self) -> None:
        """Raises WriterBusy if another attempt has taken over, CheckpointError if the folder was removed."""
        if self.still_held():
            return
        place = self.folder.parent
        if not place.is_dir() or not any(_NUMBERED.match(path.name) for path in place.iterdir()):
            raise CheckpointError(
                "the folder of this run was removed or moved while it was running",
                where=str(place),
                hint="put it back where it was, and start again: the run goes on from the newest checkpoint in it",
            )
        raise WriterBusy(
            f"attempt {self.attempt} was taken over by another attempt and must not write any more",
            where=str(place),
            hint="end this process; the other one goes on",
        )


def _beat(work: Path, interval_s: float, ended: threading.Event, disk: Filesystem) -> None:
    while not ended.wait(interval_s):
        try:
            disk.touch(work)
        except FileNotFoundError:
            return  # taken over
        except OSError:
            continue  # a disk that hiccups may be there for the next beat; the timeout judges


def _let_go(work: Path, ended: threading.Event, pid: int, disk: Filesystem) -> None:
    """Clear the work away: an attempt without a work folder has ended."""
    if os.getpid() != pid:
        return  # a forked child, whose claim it never was
    ended.set()
    with contextlib.suppress(OSError):  # taken over, or the disk is gone: the process will be gone as well
        remove_tree(work, disk=disk)


def acquire_lease(
    directory: Path, *, holder: Owner, timeout_s: float, disk: Filesystem = DISK
) -> tuple[Lease, str | None]:
    """Become the one writer of `directory`; take over from a holder that is gone.

    Returns:
        the claim, and what was taken over from whom and why, if anything was.

    Raises:
        WriterBusy: a holder is alive; it is named.
    """
    make_folders(directory, disk=disk)
    token = secrets.token_hex(8)
    try:
        for _ in range(RACES_LOST):
            # Each way to lose a race is a path that another attempt has renamed a moment ago: look again.
            with contextlib.suppress(FileNotFoundError, FileExistsError, _LostRaceError):
                story = _evict_the_gone(directory, token, holder, timeout_s, disk)
                folder = _take(directory, token, holder, disk)
                return Lease(folder, token, holder, timeout_s, disk), story
        raise WriterBusy("other processes claim this folder again and again", where=str(directory))
    finally:
        with contextlib.suppress(OSError):  # there is none after a success; the next start sweeps what stays
            remove_tree(directory / f".claim-{token}", disk=disk)


class _LostRaceError(Exception):
    """Another attempt was faster."""


def _evict_the_gone(directory: Path, token: str, me: Owner, timeout_s: float, disk: Filesystem) -> str | None:
    """Rename the folders of dead attempts away; returns the story of the last one that had not ended."""
    story = None
    for folder in sorted(_attempts(directory), key=_number):
        beats = [entry.stat().st_mtime for entry in folder.iterdir() if entry.is_dir()]
        if beats:  # it has not ended
            silent_s = _disk_time(directory, token, disk) - max(beats)
            story = _why_over(_holder_of(folder), me, silent_s, timeout_s, folder)
        disk.rename(folder, directory / f".taken-over-{_number(folder)}-{token}")
    return story


def _why_over(holder: Owner, me: Owner, silent_s: float, timeout_s: float, folder: Path) -> str:
    if holder == me:
        raise WriterBusy(
            f"this very process ({holder}) writes to this folder already",
            where=str(folder.parent),
            hint="close the other manager of this folder first, or save with that one",
        )
    if (why := holder.why_gone(me, silent_s, timeout_s)) is None:
        raise WriterBusy(
            f"{holder} writes to this folder (heartbeat {max(silent_s, 0.0):.0f} s ago)",
            where=str(folder.parent),
            hint="wait until it has ended, stop it, or use another output_dir",
        )
    return f"attempt {_number(folder)} ({holder}) is taken over: {why}"


def _holder_of(folder: Path) -> Owner:
    """Who made an attempt's folder; an unknown one, of whom only the heartbeat tells, if that is damaged."""
    try:
        values = read_json(folder / HOLDER)
        return Owner(**values) if isinstance(values, dict) else Owner("unknown", 0, 0.0)
    except (ValueError, TypeError):
        return Owner("unknown", 0, 0.0)


def _disk_time(directory: Path, token: str, disk: Filesystem) -> float:
    """The present by the clock that stamps the heartbeats, which on a network disk is not ours."""
    draft = directory / f".claim-{token}"
    if not draft.exists():
        disk.mkdir(draft)
    disk.touch(draft)
    return draft.stat().st_mtime


def _take(directory: Path, token: str, holder: Owner, disk: Filesystem) -> Path:
    """Give a prepared folder the next number by a rename, which only one attempt can win."""
    draft = _prepare(directory, token, holder, disk)
    used = [path for path in directory.iterdir() if _NUMBERED.match(path.name)]
    if any(_ATTEMPT.match(path.name) for path in used):
        raise _LostRaceError  # it came after we had looked who is there
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
            raise _LostRaceError  # one of us two slept between look and rename: whoever sees both gives way
    except (OSError, _LostRaceError):
        disk.rename(folder, draft)  # a claim that failed must not lock anybody out
        raise
    return folder


def _prepare(directory: Path, token: str, holder: Owner, disk: Filesystem) -> Path:
    draft, told = directory / f".claim-{token}", dump_json(asdict(holder), indent=2)
    if not (draft / token).exists():
        _disk_time(directory, token, disk)
        disk.mkdir(draft / token)
        write_new(draft / HOLDER, [told], disk=disk)
        sync_tree(draft, disk=disk)
    if (draft / HOLDER).read_bytes() != told:  # nobody could tell whether such a holder lives
        raise OSError(errno.EIO, "the disk does not hold what was written")
    return draft


def _attempts(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if _ATTEMPT.match(path.name))


def _number(folder: Path) -> int:
    match = _NUMBERED.match(folder.name)
    if match is None:
        raise CheckpointError(f"{folder.name} is not the folder of an attempt", where=str(folder))
    return int(match[1])


def leftovers(directory: Path, older_than: float) -> Iterator[Path]:
    """What dead attempts left: folders taken over, claims that lost, files that were never finished.

    Args:
        older_than: time of the disk's clock; an unfinished file that is younger may be at work.
    """
    for path in sorted(directory.iterdir()):
        unfinished = path.name.startswith(".") and path.name.endswith(PARTIAL)
        if _LEFTOVER.match(path.name) or (unfinished and _is_older(path, older_than)):
            yield path


def _is_older(path: Path, than: float) -> bool:
    try:
        return path.lstat().st_mtime < than
    except FileNotFoundError:  # its writer has given it its name just now
        return False
