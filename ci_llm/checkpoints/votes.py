"""What the processes say about one step: counted once, and the same for whoever asks about that step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ci_llm.distributed.side_channel import ProcessGroup, run_collectively


class Votes(NamedTuple):
    """A count of processes each."""

    stop: int
    save_requested: int
    due: int
    newer: int

    @property
    def wanted(self) -> bool:
        return bool(self.due or self.stop or self.save_requested)


class Ballot:
    """The votes on the step that the loop is at."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._counted: tuple[int, Votes] | None = None

    def on(self, step: int, own: Callable[[], Votes]) -> Votes:
        """The votes of all processes. A collective unless this step was voted on already, which all know alike."""
        if self._counted is None or self._counted[0] != step:
            self._counted = step, Votes(*run_collectively(self._processes, lambda: own()))
        return self._counted[1]

    def anew(self, step: int, *, force: bool) -> None:
        """Forget votes by which `step` is not to be saved: what they rest on may have gone. On every process."""
        if force or (self._counted is not None and self._counted[0] == step and not self._counted[1].newer):
            self._counted = None

    def saved(self, step: int) -> None:
        """`step` has been saved: whoever asks again hears that it is not newer."""
        if self._counted is not None:
            self._counted = step, self._counted[1]._replace(newer=0)

    def forget(self) -> None:
        """What was voted on rests on checkpoints that are gone. On every process."""
        self._counted = None
