"""When a run writes its report by itself, and when it leaves it out. Tests of real reports are in tests/report/."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.config import Config
from ci_llm.run.result import write_page
from tests.report.folders import leave_run


def run(folder: Path, *, told_s_ago: float | None = None, held: bool = True, **keys: Any) -> Any:
    """The attempt at a run that stopped `told_s_ago` seconds ago."""
    return SimpleNamespace(
        config=Config(output_dir=str(folder), **keys),
        launch=SimpleNamespace(kill_delay_s=float("inf")),
        interrupts=SimpleNamespace(stop_requested_at=told_s_ago and time.monotonic() - told_s_ago),
        manager=SimpleNamespace(store=SimpleNamespace(holds_lease=lambda: held)),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return leave_run(tmp_path / "run")


def test_a_completed_run_writes_its_report(folder: Path) -> None:
    write_page(run(folder))
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    "why_not",
    [{"told_s_ago": 11.0}, {"held": False}],
    ids=["a third of the grace is over", "another process or attempt has the folder"],
)
def test_no_report_is_written_where_it_would_delay_the_exit(why_not: dict[str, Any], folder: Path) -> None:
    write_page(run(folder, grace_s=30.0, **why_not))
    assert not (folder / "report.html").exists()
