"""Run commands of ours on simulated GPUs: `python -m tools.testbed.accelerator [--trace FILE] [...] train key=value`.

Words after `then` are one more command of the same process, and its phases are named "2: step 1" and so on.
`--program FILE [WORDS]` runs a program instead. The trace is left in FILE, or in FILE.<rank> on several processes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.testbed.accelerator import face  # before anything imports torch

from ci_llm.cluster import deadline  # isort: skip
from ci_llm.distributed import processes  # isort: skip


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.testbed.accelerator", description=__doc__)
    parser.add_argument("--trace", type=Path, help="where what happened on the device is left, as JSON")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--memory-mb", type=float, default=80 << 10, help="of each device")
    parser.add_argument("--memory-mb-of", nargs=2, type=float, metavar=("RANK", "MB"), help="of one process alone")
    parser.add_argument("--capability", type=int, nargs=2, default=face.HOPPER)
    parser.add_argument("--program", nargs=argparse.REMAINDER, default=[], metavar="FILE [WORDS]")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser


#: Methods without which a save on a side stream is wrong, by the name of the mutant.
MUTANTS = {
    "no_synchronize": (face.Stream, "synchronize"),
    "no_wait_event": (face.Stream, "wait_event"),
    "no_event": (face.Event, "record"),
}


def _name_phases() -> None:
    """Every step of a run is a phase of its own, and so is what lies between two of them."""

    def begin_step(self: deadline.Pace) -> None:
        face.TRACE.step += 1
        face.TRACE.phase = f"step {face.TRACE.step}"
        begin(self)

    def end_step(self: deadline.Pace, *args: object) -> None:
        end(self, *args)
        face.TRACE.phase = f"after step {face.TRACE.step}"

    begin, end = deadline.Pace.begin_step, deadline.Pace.end_step
    deadline.Pace.begin_step = begin_step
    deadline.Pace.end_step = end_step


def _commands(words: list[str]) -> int:
    """Run one after the other; the code of the first that fails."""
    from ci_llm.cli.main import main as command

    while words:
        end = words.index("then") if "then" in words else len(words)
        own, words = words[:end], words[end + 1 :]
        face.TRACE.begin_command()
        if code := command(own):
            return code
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Install the devices, run, and leave the trace whatever happens; by default the words of this process."""
    options = _options().parse_args(words)
    rank, memory_mb = int(os.environ.get("RANK", "0")), options.memory_mb
    if options.memory_mb_of and int(options.memory_mb_of[0]) == rank:
        memory_mb = options.memory_mb_of[1]
    face.install(options.devices, int(memory_mb * 2**20), tuple(options.capability))
    processes._backend = lambda on_cpu: "gloo"  # which lends itself the memory of the device
    _name_phases()
    try:
        if options.program:
            sys.argv = options.program
            try:
                runpy.run_path(options.program[0], run_name="__main__")
            except SystemExit as end:  # which would end a process of its own, and not a fork
                return end.code if isinstance(end.code, int) else int(end.code is not None)
            return 0
        return _commands(options.words)
    finally:
        if options.trace:
            file = options.trace if "RANK" not in os.environ else options.trace.with_suffix(f".{rank}")
            device, current = face.DEVICE, face.DEVICE.current_device()
            face.TRACE.written(file, contexts=device.contexts(), current=current, peak=device.peak(current))


if __name__ == "__main__":
    sys.exit(main())
