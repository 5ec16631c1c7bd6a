"""A loop that saves at `except KeyboardInterrupt`. TERM ends it at once, and at HUP it makes a file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

signal.signal(signal.SIGHUP, lambda *_: Path("hung up").touch())
try:
    if sys.argv[1:2] == ["launcher"]:  # it dies of the signal, and its trainer still has to save
        subprocess.Popen([sys.executable, __file__]).wait()
    print("ready", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    if sys.argv[1:2] == ["launcher"]:
        raise
    for part in range(20):
        Path("saving").write_text(str(part))
        subprocess.run(["sleep", "0.1"])
    Path("saved").touch()
