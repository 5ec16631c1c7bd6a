"""Ignores SIGTERM and SIGINT; so do its child in a session of its own, its orphan and its grandchild."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SLEEPER = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "print(flush=True); signal.pause()"
)
PARENT = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); p.wait()"
LEAVES = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)"

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
ready = []
for code in (SLEEPER, PARENT, LEAVES):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=code == SLEEPER)
    assert process.stdout is not None
    ready.append(process.stdout.read(1))
    if code == LEAVES:
        process.wait()
print("ready", os.getpid(), flush=True)
if sys.argv[-1] != "end":
    signal.pause()
