"""The SLURM jobs of runs: squeue is asked in a thread, because its answer may take longer than a picture may."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ci_llm.cluster.slurm import QueuedJob, query_queue

Query = Callable[[Sequence[str]], dict[str, QueuedJob] | None]

_INTERVAL_S: Final = 10.0  # a controller serves the whole cluster


class JobQueue:
    """What squeue said last about some jobs; nothing where squeue is not installed.

    Args:
        query: asks for jobs by id.
        is_there: whether it can be asked.
    """

    def __init__(self, query: Query = query_queue, is_there: bool | None = None) -> None:
        self._query = query
        self._is_there = shutil.which("squeue") is not None if is_there is None else is_there
        self._ids: tuple[str, ...] = ()
        self._asked_at = -_INTERVAL_S
        self._thread: threading.Thread | None = None
        self._answer: tuple[frozenset[str], Mapping[str, QueuedJob]] = (frozenset(), {})

    def look(self, ids: Sequence[str], *, wait: bool = False) -> Mapping[str, QueuedJob]:
        """The last answer; asks again for these jobs if it is old.

        Args:
            wait: until the question under way is answered.
        """
        if ids and self._is_there and self._is_due(tuple(ids)):
            self._ids, self._asked_at = tuple(ids), time.monotonic()
            self._thread = threading.Thread(target=self._ask, args=(self._ids,), name="ci_llm squeue", daemon=True)
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        return self._answer[1]

    def has_left(self, job: str | None) -> bool:
        """Whether a job is known to be in the queue no more; also where there is no job, and no queue."""
        known, listed = self._answer
        return job is None or not self._is_there or (job in known and job not in listed)

    def _is_due(self, ids: tuple[str, ...]) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        return ids != self._ids or time.monotonic() - self._asked_at >= _INTERVAL_S

    def _ask(self, ids: tuple[str, ...]) -> None:
        found = self._query(ids)
        if found is not None:  # else the last answer holds: a controller may be busy, or away
            self._answer = frozenset(ids), found
