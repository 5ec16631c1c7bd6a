"""The sender of a mirror: a thread behind the training that sends what the run's folder has and the mirror has not.

It sends committed steps, the newest first, and the files beside them with which a fresh disk resumes: logs, metrics,
scores. It compares the folder with the mirror, and so needs no list of events: whatever it missed, because the store
was away or saves came faster than it sends, it finds in the folder. The training never waits for it, except at its end,
when the newest step goes first.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.layout import FINAL, committed
from ci_llm.checkpoints.manifest import MANIFEST, check_name, digest
from ci_llm.core.quantities import duration, size
from ci_llm.core.remote import without_secrets
from ci_llm.errors import CheckpointError, DamagedCheckpoint, MirrorUnreachable, WriterBusy
from ci_llm.mirror.head import Found, Head, Token, read_token, write_token
from ci_llm.mirror.objects import RateLimiter, backoff_s, open_objects
from ci_llm.mirror.reader import MirrorReader
from ci_llm.mirror.writer import MirrorWriter

logger = logging.getLogger(__name__)


#: A log that outgrows this does not follow: a file that has changed is sent again whole.
MAX_BYTES: Final = 256 << 20


def run_files(folder: Path, patterns: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the files of `folder` that match and may follow a run."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    for path in sorted(paths):
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or no file of ours
            name = check_name(path.relative_to(folder).as_posix())
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES:
                yield name, path.read_bytes()


#: A mirror that is behind for this long is worth a warning, and one more whenever that has doubled.
WARN_S: Final = 60.0
_POLL_S: Final = 5.0  # how often the thread looks at its lag while nothing happens


@dataclass(frozen=True)
class MirrorState:
    """The state of a mirror, for status.json.

    Attributes:
        step: the newest step that is committed there; None without any.
        behind_s: seconds for which the folder has had a newer one; 0: it has none.
        error: why nothing is sent at the moment.
    """

    url: str
    step: int | None = None
    behind_s: float = 0.0
    error: str | None = None


def _may_pass(error: Exception) -> bool:
    """True if another try is worth it: the store failed, or this machine, which may have too many files open."""
    if isinstance(error, DamagedCheckpoint | WriterBusy):
        return False
    return isinstance(error, MirrorUnreachable | OSError) or isinstance(error.__cause__, OSError)


class _GivenUpError(Exception):
    """What is being sent is given up: a newer step goes first, or the mirror was closed."""


class Mirror:
    """The mirror of one folder; used by one process.

    Args:
        url: the URL of the mirror.
        folder: the folder of the run.
        keep: numbered steps to keep, as `save_total_limit`; None for all. What the folder keeps beside them stays too.
        files: patterns of the other files that follow.
        max_mb_per_s: a bound on what is sent and read; None for no bound.
        on_change: called in the thread whenever the state has changed.

    Attributes:
        sending: the step that is being sent, which the folder should not prune meanwhile.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        keep: int | None = None,
        files: Collection[str] = (),
        max_mb_per_s: float | None = None,
        on_change: Callable[[MirrorState], object] = lambda state: None,
    ) -> None:
        self.folder = folder
        self.files = files
        self.on_change = on_change
        self._keep = keep
        self._limiter = RateLimiter(max_mb_per_s)
        self.reader = MirrorReader(open_objects(url), self._limiter)
        self._writer = MirrorWriter(self.reader.objects, self._pace)
        self._claim: Callable[[], object] | None = None  # what is to be called first
        self._swept = False
        self._newest_here: int | None = None  # kept, because the disk may fail while its error is told
        self.sending: frozenset[int] = frozenset()
        self._passed_over: set[str] = set()  # digests of manifests
        self._work, self._over, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._idle.set()
        self._lock = threading.Lock()  # of the three together
        self._thread: threading.Thread | None = None
        self._behind_since: float | None = None
        self._warn_at_s = WARN_S
        self.state = MirrorState(without_secrets(url))

    # Called by the training

    def begin(self, step: int, attempt: int, found: Found) -> None:
        """Claim the mirror for this attempt, and begin to send. The lease of the folder must be held.

        Args:
            step: the step from which the run resumes; -1 without one.
            found: what the mirror held when that step was decided.

        Raises:
            WriterBusy: the mirror holds another run, or another attempt has claimed it since.
        """
        token = read_token(self.folder)
        run = token.run if token else secrets.token_hex(16)
        self._claim = partial(self._writer.claim, run, attempt, step, found)
        with contextlib.suppress(MirrorUnreachable, OSError):  # the thread tries again
            self._claim_now()
        self._thread = threading.Thread(target=self._run, name="ci_llm mirror", daemon=True)
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """The folder has changed: look what is to be sent. Returns at once."""
        if self._thread is not None and not self._over.is_set():
            with self._lock:
                self._behind_since = time.monotonic() if self._behind_since is None else self._behind_since
                self._idle.clear()
                self._work.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the mirror holds what the folder holds, the newest step first; False if it does not in time."""
        if self._thread is None:
            return True
        self._limiter.hurry.set()
        self.wake()
        done = self._idle.wait(timeout_s)
        if not self._over.is_set():
            self._limiter.hurry.clear()
        return done and self.state.error is None

    def stop(self) -> None:
        """End the thread, whatever it is doing."""
        self._over.set()
        self._limiter.hurry.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(timeout=_POLL_S)
            self._thread = None

    def metrics(self) -> dict[str, float]:
        """The lag, for a line of metrics."""
        if self._thread is None:
            return {}
        return {"mirror/behind_s": round(self._look().behind_s, 3)}

    # In the thread

    def _run(self) -> None:
        failures = 0
        while not self._over.is_set():
            if not self._work.wait(_POLL_S):
                self._change()
                continue
            self._work.clear()
            try:
                self._pass()
                failures = 0
            except _GivenUpError:
                self._work.set()
            except Exception as error:  # noqa: BLE001 - a mirror that stops without a word is worse than none
                failures += 1
                what = error.what if isinstance(error, CheckpointError) else str(error)
                self._change(error=what)
                if _may_pass(error):
                    self._wait(what, failures)
                else:
                    self._give_up(error)

    def _wait(self, what: str, failures: int) -> None:
        if self._over.is_set():
            return
        if failures == 1:
            logger.warning(f"mirror    {what}; it is tried again, and the training continues")
        hurry = self._limiter.hurry  # a flush, or the end, wakes a thread that waits
        (self._over if hurry.is_set() else hurry).wait(backoff_s(failures, hurry=hurry.is_set()))
        self._work.set()

    def _give_up(self, error: Exception) -> None:
        known = isinstance(error, CheckpointError)
        logger.error(f"mirror    {error if known else f'the mirror has failed: {type(error).__name__}: {error}'}")
        self._over.set()
        self._idle.set()

    def _claim_now(self) -> None:
        if self._claim is not None:
            self._claim()
            write_token(self.folder, Token(self._writer.head.run, self._writer.head.writer))
            self._claim = None

    def _pass(self) -> None:
        """Bring the mirror to what the folder holds now."""
        self._claim_now()
        while (found := self._next()) is not None:
            self._send(*found)
        self._commit(self._writer.head)
        if not self._swept:
            if lost := self._writer.sweep():
                names = ", ".join(entry.name for entry in lost)
                logger.warning(f"mirror    {names} there lacked files; what this disk has of them is sent again")
                self._commit(self._writer.head.putting_aside(lambda entry: entry in lost))
                self._work.set()
            self._swept = True
        with self._lock:
            caught_up = not self._work.is_set()  # else the folder has changed meanwhile
            self._behind_since = None if caught_up else time.monotonic()
            if caught_up:
                self._idle.set()
        self._warn_at_s = WARN_S
        self._change(error=None)

    def _next(self) -> tuple[int, Path, str] | None:
        """Step, folder and the manifest's digest of the newest commit that the mirror lacks."""
        line = committed(self.folder)
        self._newest_here = line[0][0] if line else None
        for step, folder in line:
            with contextlib.suppress(OSError):  # pruned meanwhile
                known = digest([(folder / MANIFEST).read_bytes()])
                if known not in self._passed_over and not self._writer.head.holds(folder.name, known):
                    return step, folder, known
        return None

    def _send(self, step: int, folder: Path, known: str) -> None:
        began = time.perf_counter()
        self.sending = frozenset({step})
        try:
            entry = self._writer.send_step(folder)
            self._commit(self._writer.head.with_step(entry))
            took = duration(time.perf_counter() - began)
            logger.info(f"mirror    {folder.name}, {size(entry.nbytes)} sent in {took}")
        except DamagedCheckpoint as damage:
            self._passed_over.add(known)
            if folder.is_dir():  # else it was pruned, and a newer one is there
                logger.warning(f"mirror    {folder.name} is not sent: {damage}")
        finally:
            self.sending = frozenset()

    def _commit(self, head: Head) -> None:
        """Make a head count, with the other files as they are now.

        Steps beyond the limit leave it once the folder has pruned them.
        """
        files = {name: self._writer.send_file(name, data) for name, data in run_files(self.folder, self.files)}
        here = {folder.name for _, folder in committed(self.folder)}
        numbered = [entry.name for entry in head.line if entry.name != FINAL]
        beyond = {*numbered[self._keep :]} - here if self._keep is not None and here else ()
        line = tuple(entry for entry in head.line if entry.name not in beyond)
        self._writer.commit(replace(head, line=line, files=files))
        self._change(error=None)

    def _pace(self, nbytes: int) -> None:
        """Wait before bytes go, or give up what is being sent."""
        self._change()
        newest = self._next() if self._limiter.hurry.is_set() else None
        if self._over.is_set() or (newest is not None and newest[0] > max(self.sending, default=-1)):
            raise _GivenUpError
        self._limiter(nbytes)

    # The state

    def _look(self) -> MirrorState:
        newest = self._writer.head.newest
        since = self._behind_since  # read once: the other thread may change it
        behind_s = 0.0 if since is None else time.monotonic() - since
        step = None if newest is None else newest.step
        return replace(self.state, step=step, behind_s=behind_s)

    def _change(self, **values: Any) -> None:
        self.state = replace(self._look(), **values)
        if self.state.behind_s >= self._warn_at_s:
            self._warn_at_s = 2 * self.state.behind_s
            why = f" ({self.state.error})" if self.state.error else ""
            logger.warning(
                f"mirror    {duration(self.state.behind_s)} behind{why}: the newest step here is {self._newest_here},"
                f" there {self.state.step}; if this machine is lost now, the run resumes from that one"
            )
        self.on_change(self.state)
