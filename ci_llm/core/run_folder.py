"""The names in the folder of a run, and whether a folder is one."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from ci_llm.core.attempts import ATTEMPTS
from ci_llm.core.push_record import NAME as PUSH
from ci_llm.core.recovery import NAME as RECOVERY

BEGINNING: Final = "beginning.json"
#: Of a sweep: its record, the folder of its runs, and that of the agent of its best trial.
SWEEP: Final = "sweep.json"
SEGMENTS: Final = "segments"
BEST: Final = "best"
#: How the name of a launch's token begins, by which simultaneous starts find each other before one has the lease.
LAUNCH_TOKEN: Final = ".launch-"
#: What a run leaves in its folder. When the run is moved aside, everything else stays where it is.
OF_A_RUN: Final = (
    *("checkpoint_step_*", "final_checkpoint", "quarantine", "superseded", ATTEMPTS, BEGINNING, RECOVERY),
    *("status.json", "training.log", "metrics.jsonl", "evaluation.json", "gpu_stats.json", "report.html"),
    *("tensorboard", "profile", "requests", "crowd_changes.json", "skipped_batches.json"),
    *("predictions.jsonl", "predictions.source.json", "calibration.json", PUSH),
)
#: What else may be there and keeps its place: of the run, and of a sweep. `BEST` is a likely name of a run.
_BESIDE: Final = (".*", "overwritten", "mirror.json", SWEEP, SEGMENTS)


def is_reserved(name: str) -> bool:
    """Whether a run or a sweep may give this name to a part of itself; some disks do not tell capitals apart."""
    return any(fnmatch(name.lower(), pattern) for pattern in (*OF_A_RUN, *_BESIDE))


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, whatever its name."""
    return (folder / BEGINNING).is_file() or (folder / ATTEMPTS).is_dir()
