"""The supervisor's own loop, classification and adjustments over attempts that are forks: no Python starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ci_llm.interrupts import Interrupts
from ci_llm.supervisor import loop
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.loop import SupervisorLog
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.own_run import OwnRun
from ci_llm.supervisor.policy import Policy


def supervise_forks(words: Sequence[str], log: Path, train: Callable[[Mapping[str, str]], Sequence[int]]) -> int:
    """Supervise a run of this project, without pauses before a relaunch.

    Args:
        words: `key=value`; with the run's folder, as this process sees it.
        log: what the supervisor tells.
        train: one attempt; called with the variables that the supervisor adds, returns the exit codes.

    Returns:
        the supervisor's exit code.
    """

    class Forked:
        evidence = Evidence()

        def __init__(self, command: object, environment: Mapping[str, str], **_: object) -> None:
            self._environment = {key: value for key, value in environment.items() if key not in os.environ}

        def __enter__(self) -> Forked:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, _: object) -> AttemptResult:
            began = time.monotonic()
            code, *_ = train(self._environment)
            return AttemptResult(self.evidence, code, duration_s=time.monotonic() - began)

    ends = os.pipe()
    try:
        with pytest.MonkeyPatch.context() as patch, SupervisorLog(log, fd=ends[1]):
            patch.setattr(loop, "Child", Forked)
            policy = Policy(first_wait_s=0.0, disk_wait_s=0.0)
            run = OwnRun(["train.py"], [*words])
            return loop.Supervisor(run, policy, Interrupts()).run()
    finally:
        for end in ends:
            os.close(end)
