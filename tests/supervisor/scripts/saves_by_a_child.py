"""A shim whose command saves by a program that it starts after its TERM, and that is still there at three looks."""

import pathlib
import subprocess
import sys

import psutil

from ci_llm.supervisor import process_tree

HELPER = """
import pathlib, time
while not pathlib.Path("looked").exists():
    time.sleep(0.01)
pathlib.Path("saved").touch()
"""
TRAINER = """
import pathlib, signal, subprocess, sys
def save(*_):
    helper = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
    pathlib.Path("helper").write_text(str(helper.pid))
    helper.wait()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    signal.pause()
"""

process_tree.adopt_orphans()
trainer = subprocess.Popen([sys.executable, "-c", TRAINER, HELPER], stdout=subprocess.PIPE)
assert trainer.stdout is not None
trainer.stdout.readline()
living, looks = process_tree.living, 0


def counted() -> list[psutil.Process]:
    global looks
    found = living()
    told = pathlib.Path("helper").read_text() if pathlib.Path("helper").exists() else ""
    looks += told in {str(process.pid) for process in found}
    if looks == 3:
        pathlib.Path("looked").touch()
    return found


process_tree.living = counted
killed = process_tree.end(300.0)
print(f"killed {killed}, saved {pathlib.Path('saved').exists()}")
