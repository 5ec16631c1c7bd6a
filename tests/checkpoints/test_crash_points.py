"""Real crashes: a seeded sample of the sweep over every system call that touches a checkpoint folder.

In a campaign: all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import campaign

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
POINTS = 100  # of 7,000


def why_not() -> str | None:
    """Why system calls cannot be injected here."""
    if shutil.which("strace") is None:
        return "there is no strace; apt-get install strace"
    probe = ["strace", "-f", "-o", os.devnull, "-e", "inject=getppid:error=EIO", "true"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"strace is refused here ({done.stderr.strip()}); run with SYS_PTRACE" if done.returncode else None


def test_a_crash_at_a_sampled_system_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    how_many = [] if campaign.in_full else ["--sample", str(POINTS)]
    command = [sys.executable, "-m", "benchmarks.crash_sweep", "--json", *how_many]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    sweep = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        told, _ = sweep.communicate()  # each of its victims has a deadline
    finally:
        if sweep.poll() is None:
            os.killpg(sweep.pid, signal.SIGKILL)
            sweep.wait()
    print(told)
    result = json.loads(told.splitlines()[-1])
    assert result["violations"] == []
    assert result["points"] > POINTS if campaign.in_full else result["points"] == POINTS
    assert sweep.returncode == 0
