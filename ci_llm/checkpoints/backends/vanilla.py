"""The `vanilla` backend: process 0 alone writes the checkpoint, from its own state."""

from __future__ import annotations

from collections.abc import Callable

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.backends import SaveRequest
from ci_llm.checkpoints.state_files import Snapshot
from ci_llm.checkpoints.store import SaveResult
from ci_llm.distributed.side_channel import ProcessGroup, SaveResultChannel, has_other_processes


class Backend:
    """Process 0 writes its own state. The others wait for its result, if they do not stand still meanwhile."""

    all_write = False

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._results: SaveResultChannel | None = None

    def connect(self, *, asynchronous: bool) -> None:
        if asynchronous and has_other_processes():
            self._results = self._results or SaveResultChannel()

    def prepare(self, request: SaveRequest) -> SaveTask | None:
        step, results = request.step, self._results
        if self._processes.process_index == 0:
            return SaveTask(request.entries, lambda take: self._save(request, take), lambda: self._send(step, False))
        return None if results is None else SaveTask((), lambda take: SaveResult(step, results.receive(step)))

    def _save(self, request: SaveRequest, take: Callable[[], Snapshot]) -> SaveResult:
        saved = False
        try:
            result = request.commit(take())
            saved = result.saved
            return result
        finally:
            self._send(request.step, saved)

    def _send(self, step: int, saved: bool) -> None:
        if self._results is not None:
            self._results.send(step, saved)
