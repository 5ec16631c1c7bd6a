"""How another script goes on from checkpoints of its own: by words on its command line, once there is a checkpoint."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ci_llm.cluster.slurm import read_job
from ci_llm.errors import ConfigError

_NEWEST: Final = "{checkpoint}"


class Resumption:
    """The words of --on-retry, and when they are due.

    Without --goes-on-from that is from the second attempt on, and from the first of a job that SLURM has put back. With
    it, whenever a file or folder matches: the first attempt of a call then goes on from what an earlier call left.

    Args:
        on_retry: the words as typed; `{checkpoint}` in them stands for the newest match.
        goes_on_from: a glob pattern of its checkpoints.

    Raises:
        ConfigError: the words cannot be read, or name a checkpoint that nobody can find.
    """

    def __init__(self, on_retry: str | None, goes_on_from: str | None, environ: Mapping[str, str] = os.environ) -> None:
        self._words, self._pattern = _split(on_retry or ""), goes_on_from
        if goes_on_from is None and any(_NEWEST in word for word in self._words):
            raise ConfigError(
                f"{_NEWEST} stands for nothing",
                where=f"--on-retry {on_retry}",
                hint="--goes-on-from 'out/checkpoint-*' says what the script's checkpoints look like",
            )
        self._job = read_job(environ)
        self._retries = self._job is not None and self._job.restarts > 0

    def note_retry(self) -> None:
        """From now on every attempt is a second one."""
        self._retries = True

    def words(self) -> list[str]:
        """What the next attempt gets in addition."""
        newest = self.newest()
        if self._pattern is None:
            return self._words if self._retries else []
        return [word.replace(_NEWEST, newest[0]) for word in self._words] if newest else []

    def newest(self) -> tuple[str, int] | None:
        """The newest checkpoint, and when it was written."""
        found = glob.glob(self._pattern, recursive=True) if self._pattern else []
        return max(((path, _written_ns(Path(path))) for path in found), key=lambda one: one[1], default=None)

    @property
    def called_again(self) -> str:
        """What the same call does after an interruption, as the end of a sentence."""
        if not self._words:
            return "the script begins anew next time, unless it resumes by itself (--on-retry can tell it to)"
        if self._pattern is None:
            told = shlex.join(self._words)
            put_back = "" if self._job is None else ", which a job gets that SLURM puts back"
            return f"the same command begins anew; with {told} it goes on{put_back}"
        if words := self.words():
            return f"the same command goes on, with {shlex.join(words)}"
        return f"the same command begins anew, for there is no {self._pattern}"


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the words cannot be told apart: {error}", where=f"--on-retry {text}") from error


def _written_ns(path: Path) -> int:
    """When a file, or anything in a folder, was written last; 0 for what has just gone."""
    return max((_modified_ns(one) for one in [path, *path.rglob("*")]), default=0)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
