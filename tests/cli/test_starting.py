"""How the commands that train start: a dry run heeds the signals of the run that it proves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.cli import train
from ci_llm.cli.main import main
from ci_llm.interrupts import Interrupts
from ci_llm.run.job import Result
from tools.testbed.events import DEADLINE_S


@pytest.fixture
def harmless() -> Iterator[None]:
    """SIGHUP does not end this process where the command does not heed it."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize(("command", "module"), [("train", "run.job"), ("check", "dry_run.plan")])
def test_a_dry_run_stops_by_the_signals_of_the_run(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def job(config: Any, interrupts: Interrupts, *_: Any, **named: Any) -> Any:
        assert told == ["SIGHUP"]  # of the end of the launcher
        os.kill(os.getpid(), signal.SIGHUP)
        interrupts.wait(DEADLINE_S)
        told.append(interrupts.stop_reason)
        return 0 if command == "check" else Result("completed", 0, tmp_path)

    def launch(read: Any = train.read_launch, **named: Any) -> Any:
        return replace(read(**named), launcher="accelerate")

    monkeypatch.setitem(sys.modules, f"ci_llm.{module}", SimpleNamespace(run_job=job, dry_run=job))
    monkeypatch.setattr(train, "read_launch", launch)
    monkeypatch.setattr(train, "die_with_parent", told.append)
    words = ["--config", os.devnull, f"output_dir={tmp_path / 'run'}"]
    assert main([command, *words, "stop_signals=SIGHUP,SIGUSR2"]) == 0
    assert told == ["SIGHUP", "signal:SIGHUP"]
