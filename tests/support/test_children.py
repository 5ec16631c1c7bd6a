"""No process that a test started outlives it, however the test ends."""

from __future__ import annotations

import psutil

from tests.support.children import DEADLINE_S, Child

LAUNCHER = """
import subprocess, sys
worker = [sys.executable, "-c", "import signal; signal.pause()"]
print("started", *(subprocess.Popen(worker, start_new_session=apart).pid for apart in (False, True)))
sys.stdin.read()
"""


def test_processes_started_by_a_child_end_with_it() -> None:
    with Child.python(LAUNCHER) as launcher:
        workers = [psutil.Process(int(pid)) for pid in launcher.read_until("started").split()[1:]]
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []
