"""A shim whose command ends while its descendants are being listed; its orphan needs to save."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil

from ci_llm.supervisor import process_tree

TRAINER = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("saved").touch(), sys.exit()))
print("ready", flush=True)
while True:
    signal.pause()
"""
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"

process_tree.adopt_orphans()
launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, TRAINER], stdout=subprocess.PIPE)
assert launcher.stdout is not None
launcher.stdout.readline()


def end_the_launcher() -> None:
    if launcher.returncode is None:
        launcher.kill()
        launcher.wait()


make, iterate = psutil.Process.__init__, psutil.process_iter


def launcher_ends_at_its_turn(self: psutil.Process, pid: int | None = None) -> None:
    if pid == launcher.pid:
        end_the_launcher()
    make(self, pid)


def launcher_ends_before_its_turn(attrs: list[str]) -> Iterator[psutil.Process]:
    listed = list(iterate(attrs))  # its child stands here as its child
    end_the_launcher()
    return (process for process in listed if process.is_running())


if sys.argv[1] == "parent-first":
    psutil.Process.__init__ = launcher_ends_at_its_turn  # type: ignore[method-assign]
else:
    psutil.process_iter = launcher_ends_before_its_turn  # type: ignore[assignment]
killed = process_tree.end(300.0)
assert launcher.returncode is not None, "nobody looked"
print(f"killed {killed}, saved {os.path.exists('saved')}")
