"""The descendants of a supervisor are all found, also the orphan of a launcher that ends during the listing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.terminal import DEADLINE_S, ROOT, SCRIPTS


def end_of(folder: Path, *words: str) -> str:
    """The output of a script that ends its own descendants."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / words[0], *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("order", ["parent-first", "children-first"])
def test_an_orphan_whose_parent_ends_during_the_look_may_save(tmp_path: Path, order: str) -> None:
    assert end_of(tmp_path, "dying_launcher.py", order) == "killed [], saved True\n"


@pytest.mark.slow
def test_a_process_started_after_sigterm_may_save(tmp_path: Path) -> None:
    assert end_of(tmp_path, "saves_by_a_child.py") == "killed [], saved True\n"
