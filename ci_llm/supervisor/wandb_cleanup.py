"""The cleanup in Weights & Biases: runs that failed attempts left, found in their output, are deleted at the end.

Only runs that an attempt of this supervision began are deleted. A run that was resumed stays, and so does one that a
successful attempt continued. The deletion runs in a process of its own, with a time limit: the client may wait for a
slow network, ask for a password, or crash.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from ci_llm.errors import first_line
from ci_llm.supervisor.output_scan import Evidence, WandbRun
from ci_llm.supervisor.shim import run_task

#: The clocks of this machine and of the server may differ by this much.
_CLOCK_TOLERANCE_S: Final = 300.0
_TOLD: Final = "ci_llm: "


class WandbCleanup:
    """The W&B runs that appeared in the output of the attempts.

    Args:
        environ: its WANDB_ENTITY and WANDB_PROJECT complete what the output does not name.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self._since = environ, time.time()
        self._failed: dict[str, WandbRun] = {}
        self._kept: set[str] = set()

    def note(self, evidence: Evidence, *, failed: bool) -> None:
        """Take the runs of one attempt into account."""
        if failed and not evidence.wandb_resumed:
            self._failed |= evidence.wandb_runs
        else:
            self._kept |= set(evidence.wandb_runs)

    def delete_failed(self, *, timeout_s: float) -> list[str]:
        """Delete the runs of failed attempts; return a line for each. A deletion that fails is not an error."""
        lines, paths = list[str](), list[str]()
        for run in (run for run in self._failed.values() if run.id not in self._kept):
            entity = run.entity or self._environ.get("WANDB_ENTITY")
            project = run.project or self._environ.get("WANDB_PROJECT")
            if project is None:
                lines.append(f"W&B run {run.id} of a failed attempt stays: no project is known (set WANDB_PROJECT)")
            else:
                paths.append("/".join(filter(None, (entity, project, run.id))))
        return lines + (self._delete(paths, timeout_s) if paths else [])

    def _delete(self, paths: Sequence[str], timeout_s: float) -> list[str]:
        output = run_task("wandb_cleanup", [str(self._since), *paths], timeout_s=timeout_s)
        lines = output.strip().splitlines() or ["no answer"]
        told = [line.removeprefix(_TOLD) for line in lines if line.startswith(_TOLD)]
        return told + [_stays(path, lines[-1]) for path in paths[len(told) :]]


def _stays(path: str, why: str) -> str:
    return f"the W&B run of a failed attempt stays: {path} ({why})"


def main() -> int:
    """The process that deletes: `wandb_cleanup SINCE PATH...`; prints a line per run, among those of W&B's client.

    SINCE is the unix time at which the supervision began.
    """
    since, paths = float(sys.argv[1]), sys.argv[2:]
    try:
        wandb: Any = importlib.import_module("wandb")
    except ImportError:
        print("wandb is not installed")
        return 1
    api = wandb.Api(timeout=20)
    for path in paths:
        try:
            result = delete(api, path, since)
        except (wandb.errors.Error, ValueError, OSError) as error:
            result = f"{type(error).__name__}: {first_line(error)}"
        deleted = f"deleted the W&B run of a failed attempt: {path}"
        print(_TOLD + (deleted if result == "deleted" else _stays(path, result)), flush=True)
    return 0


def delete(api: Any, path: str, since: float) -> str:
    """Delete one run unless it is older than the supervision; return "deleted", or why it stays."""
    run = api.run(path)
    created = datetime.fromisoformat(run.created_at.replace("Z", "+00:00"))
    if created.tzinfo is None:  # a time without a zone is UTC too
        created = created.replace(tzinfo=UTC)
    if created.timestamp() < since - _CLOCK_TOLERANCE_S:
        return "it is older than this supervision"
    run.delete()
    return "deleted"
