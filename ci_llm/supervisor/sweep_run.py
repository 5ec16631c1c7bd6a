"""A sweep as a target: it reports in its folder as a run does, and its progress is that of all its segments."""

from __future__ import annotations

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.config import Config, default_file
from ci_llm.config.sweep import read_sweep
from ci_llm.supervisor.own_run import UNCHANGED, OwnRun


class SweepRun(OwnRun):
    """A target that is a sweep of this project; see `OwnRun` for its arguments."""

    def _read(self, words: list[str]) -> Config:
        return read_sweep(default_file(), words).config

    def close(self) -> list[str]:
        """Remove nothing: there is nothing temporary."""
        return [f"sweep: {self._folder}", UNCHANGED]

    def _newest_step(self) -> int:
        """The optimizer steps that the newest checkpoints of all segments hold."""
        segments = sorted((self._folder / "segments").glob("*"))
        return sum(max(CheckpointStore(folder).all_steps(), default=0) for folder in segments)
