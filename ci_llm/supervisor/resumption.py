"""How an external script resumes from its own checkpoints: by words on its command line, once it has a checkpoint."""

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
    """The words of --on-retry, and the attempts that get them.

    Without --goes-on-from every attempt but the first gets them; the first one of a job that SLURM has requeued is a
    second one too. With --goes-on-from every attempt gets them for which a file or folder matches: the first attempt of
    a call then resumes from what an earlier call left.

    Args:
        on_retry: the words as typed; `{checkpoint}` in them stands for the newest match.
        goes_on_from: a glob pattern that the script's checkpoints match.

    Raises:
        ConfigError: the words cannot be split, or name a checkpoint without a pattern that finds it.
    """

    def __init__(self, on_retry: str | None, goes_on_from: str | None, environ: Mapping[str, str] = os.environ) -> None:
        self._words, self._pattern = _split(on_retry or ""), goes_on_from
        if goes_on_from is None and any(_NEWEST in word for word in self._words):
            raise ConfigError(
                f"{_NEWEST} stands for nothing",
                where=f"--on-retry {on_retry}",
                hint="say what the script's checkpoints look like: --goes-on-from 'out/checkpoint-*'",
            )
        self._job = read_job(environ)
        self._is_retry = self._job is not None and self._job.restarts > 0

    def note_retry(self) -> None:
        """Take note that an attempt has run: the next one is a retry."""
        self._is_retry = True

    def words(self) -> list[str]:
        """Return what the next attempt gets in addition."""
        newest = self.newest()
        if self._pattern is None:
            return self._words if self._is_retry else []
        return [word.replace(_NEWEST, newest[0]) for word in self._words] if newest else []

    def newest(self) -> tuple[str, int] | None:
        """Return the path of the newest checkpoint and its time in ns; None if there is none."""
        # By time and not by name: "checkpoint-900" sorts after "checkpoint-1000".
        found = glob.glob(self._pattern, recursive=True) if self._pattern else []
        return max(((path, _newest_ns(Path(path))) for path in found), key=lambda one: one[1], default=None)

    @property
    def rerun_effect(self) -> str:
        """What the same call does after an interruption; the end of a sentence."""
        if not self._words:
            return "the script begins anew next time, unless it resumes by itself (--on-retry can tell it to)"
        if self._pattern is None:
            told = shlex.join(self._words)
            requeued = "" if self._job is None else ", which a job gets that SLURM puts back"
            return f"the same command begins anew; with {told} it goes on{requeued}"
        if words := self.words():
            return f"the same command goes on, with {shlex.join(words)}"
        return f"the same command begins anew, for there is no {self._pattern}"


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the words cannot be told apart: {error}", where=f"--on-retry {text}") from error


def _newest_ns(path: Path) -> int:
    """When a file, or anything in a folder, was written last. Some scripts write over their checkpoint in place."""
    return max((_modified_ns(one) for one in [path, *path.rglob("*")]), default=0)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # the script has just deleted it
        return 0
