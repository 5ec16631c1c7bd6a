"""What descends from a supervisor: nobody is overlooked, least of all the orphan of a launcher that ends meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.terminal import DEADLINE_S, ROOT, SCRIPTS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are found by their session")
@pytest.mark.parametrize("order", ["parent-first", "children-first"])
def test_an_orphan_whose_parent_ends_during_the_look_may_save(tmp_path: Path, order: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "dying_launcher.py", order],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "killed [], saved True\n", done.stderr
