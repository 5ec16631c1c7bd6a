"""What a run has measured of its cluster: how often it failed, how long it took to start, what a save cost."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Final

from ci_llm.checkpoints.folders import committed
from ci_llm.errors import BadInput
from ci_llm.report.attempts import Attempt
from ci_llm.report.facts import RunFacts, read_run

#: What `BestInterval` writes into the log.
_SAVE: Final = re.compile(r"a save holds the training for ([\d.e+-]+) s and is durable after ([\d.e+-]+) s")
_FAILED: Final = ("failed", "killed")


def observe(path: Path | str) -> dict[str, float]:
    """Values for the keys of a cluster, as far as a run tells them.

    Args:
        path: the folder of a run.

    Raises:
        BadInput: there is no run, or it tells nothing.
    """
    facts = read_run(path)
    known = {**_failures(facts), **_times(facts.attempts), **_saves(facts)}
    steps = [line["step_time_s"] for line in facts.metrics.lines if isinstance(line.get("step_time_s"), int | float)]
    if steps:
        known["step"] = median(steps)
    if not known:
        raise BadInput("this run tells nothing yet", where=str(path), hint="wait until it has taken some steps")
    return {key: value for key, value in known.items() if value > 0 or key in ("queue", "process_share")}


def _failures(facts: RunFacts) -> dict[str, float]:
    failed = sum(attempt.outcome in _FAILED for attempt in facts.attempts)
    silent = sum(attempt.reason == "hang" for attempt in facts.attempts)
    if not failed:
        return {}
    return {
        "job_mtbf": facts.wall_s / failed,
        "silent_share": silent / failed,
        "process_share": 1 - silent / failed,  # a run cannot tell whether the machine had gone as well
    }


def _times(attempts: tuple[Attempt, ...]) -> dict[str, float]:
    known = {}
    if starts := [attempt.seconds("start-up") for attempt in attempts if attempt.seconds("start-up")]:
        known["restart"] = median(starts)
    if pauses := [attempt.seconds("no process") for attempt in attempts[:-1]]:
        known["queue"] = median(pauses)
    return known


def _saves(facts: RunFacts) -> dict[str, float]:
    known = {}
    size_mb = 0.0
    for _, folder in committed(facts.folder)[:1]:
        size_mb = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        known["state_mb"] = size_mb
    saves = [found for attempt in facts.attempts for line in attempt.log if (found := _SAVE.search(line))]
    if saves:
        stall_s, durable_s = map(float, saves[-1].groups())
        known["stall"] = stall_s
        if size_mb and durable_s:
            known["storage_mb_per_s"] = size_mb / durable_s
    return known
