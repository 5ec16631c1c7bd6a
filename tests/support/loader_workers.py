"""Signals to the worker processes of a DataLoader, as a terminal or SLURM sends them to a whole process group."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterable
from typing import Any

from tools.testbed.events import DEADLINE_S


def signal_workers(count: int) -> None:
    """Send the workers of this process what ends a run, by another process: a SIGTERM of their parent ends them."""
    made = multiprocessing.active_children()
    assert len(made) == count
    for name in ("TERM", "INT", "USR1", "USR2"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in made)], check=True, timeout=DEADLINE_S)


def batches_despite_signals(batches: Iterable[Any], workers: int) -> list[Any]:
    """Every batch of a pass whose workers get these signals once each of them has made a batch."""
    coming = iter(batches)
    found = [next(coming) for _ in range(workers)]
    signal_workers(workers)
    return [*found, *coming]
