"""The runs that a call names, as they are from look to look, and whether all of them have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Final, TypeAlias

from ci_llm.cluster.slurm import QueuedJob
from ci_llm.errors import BadInput
from ci_llm.watch.queue import JobQueue
from ci_llm.watch.reading import Reading, RunReader, find_runs

_PATIENCE_S: Final = 120.0  # for a supervisor to launch a run again, and for a folder that has gone
_WORST_FIRST: Final = (1, 75, 3)


@dataclass(frozen=True)
class Absent:
    """A folder in which no run can be read now.

    Attributes:
        why: for people.
        gone_s: seconds since its run was there; None if none was.
    """

    folder: Path
    why: str
    gone_s: float | None = None


Look: TypeAlias = Reading | Absent


class Scene:
    """Runs that come, go on and end.

    Args:
        words: folders of runs, folders that hold runs, or patterns.
        clock: unix seconds.

    Attributes:
        looks: at each run, as it was at the last `look`.
        jobs: what squeue says about their jobs, by id.
    """

    def __init__(
        self, words: Sequence[str], queue: JobQueue | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._words, self._queue, self._clock = words, queue or JobQueue(), clock
        self._readers: dict[Path, RunReader] = {}
        self._seen_at: dict[Path, float] = {}  # of each folder in which a run was there
        self.looks: list[Look] = []
        self.jobs: Mapping[str, QueuedJob] = {}

    def look(self, *, wait_for_squeue: bool = False) -> None:
        """Look at every run; one that was there stays, even if its folder has gone."""
        folders = dict.fromkeys([*find_runs(self._words), *self._seen_at])
        self.looks = [self._look_at(folder) for folder in folders]
        unfinished = {run.slurm_job for run in self._runs() if run.slurm_job and run.status.status != "completed"}
        self.jobs = self._queue.look(sorted(unfinished), wait=wait_for_squeue)

    def has_ended(self) -> bool:
        """Whether every run has ended and none will be started again."""
        return bool(self.looks) and all(map(self._is_over, self.looks))

    def exit_code(self) -> int:
        """That of `ci-llm status`; of several runs the worst: failed, interrupted, running, completed."""
        codes = {look.status.exit_code if isinstance(look, Reading) else 3 for look in self.looks}
        codes |= {1 for look in self.looks if isinstance(look, Absent) and look.gone_s is not None}
        return next((code for code in _WORST_FIRST if code in codes), 0)

    def _runs(self) -> list[Reading]:
        return [look for look in self.looks if isinstance(look, Reading)]

    def _look_at(self, folder: Path) -> Look:
        now = self._clock()
        try:
            found = self._readers.setdefault(folder, RunReader(folder)).look()
        except (BadInput, OSError) as error:
            if (seen_at := self._seen_at.get(folder)) is not None:
                return Absent(folder, "the run is not here any more", now - seen_at)
            is_there = exists(folder / "status.json")
            return Absent(folder, str(error) if is_there else "no run has begun here yet")
        self._seen_at[folder] = now
        return found

    def _is_over(self, look: Look) -> bool:
        if isinstance(look, Absent):
            return look.gone_s is not None and look.gone_s > _PATIENCE_S
        if look.status.status == "completed":
            return True
        if look.is_running or not self._queue.has_left(look.slurm_job):  # its job may be waiting to run it again
            return False
        return not look.is_supervised or look.heartbeat_age_s > _PATIENCE_S
