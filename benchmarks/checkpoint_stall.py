"""What a checkpoint costs the loop that saves it: stall, slow-down, time until durable; ours beside six others.

    python -m benchmarks.checkpoint_stall                       134.5 MB in 2688 tensors
    python -m benchmarks.checkpoint_stall --scale 4 --rounds 5  four times the bytes

Every way to save lives in a process of its own, with the same state and the same loop. They take turns, so that all
see the same machine; the first turn of each is not counted, but shown. Figures are medians. Orbax takes part where
it is installed (`pip install orbax-checkpoint jax`).

stall        the call, and the wait of the next optimizer step for the copy
slow-down    how much longer than usual the steps are while the save is in flight, all of them together
durable      from the call until its own way says that it is done, and every file and folder is fsynced; ours has
             also read everything back then
memory       peak above that of the loop, from the first save on
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_writers import WRITERS, Training, in_background

BASELINE_STEPS = 6
LIMIT_S = 120


@dataclass(frozen=True)
class Save:
    """One save: seconds, bytes."""

    stall_s: float
    slow_down_s: float
    durable_s: float
    nbytes: int
    memory: int


# ------------------------------------------------------------------------------------- in a process of its own


def serve(name: str, scale: int, home: Path, pipe: Connection) -> None:
    """Save into every folder that comes through the pipe, and answer with what it cost."""
    training = Training(scale)
    try:
        save = WRITERS[name][1](training, home / name)
    except ImportError as error:
        pipe.send(str(error))
        return
    training.after_other_hooks()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    for _ in range(BASELINE_STEPS):
        training.step()
    peak = memory_peak()
    pipe.send(None)
    while (folder := pipe.recv()) is not None:
        pipe.send(one_save(training, save, folder, peak))


def one_save(training: Training, save: Any, folder: Path, peak: int = 0) -> Save:
    """Save once while the loop runs; `peak` bytes are those of the loop without saves."""
    usual = statistics.median(timed_step(training) for _ in range(BASELINE_STEPS))
    began = time.perf_counter()
    wait = save(folder)
    stall = time.perf_counter() - began
    thread, ended = in_background(wait)
    slower, first = 0.0, True
    thread.join(1e-4)
    while thread.is_alive():
        slower += timed_step(training) - usual
        if first:
            stall, slower, first = stall + training.joined_s, slower - training.joined_s, False
        thread.join(0)
    synced = time.perf_counter()
    place = folder if folder.exists() else max(folder.parent.glob("ours*/checkpoint_step_*"), key=os.path.getmtime)
    nbytes = fsync_tree(place)
    durable = ended[0] - began + time.perf_counter() - synced
    return Save(stall, max(slower, 0.0), durable, nbytes, memory_peak() - peak)


def timed_step(training: Training) -> float:
    began = time.perf_counter()
    training.step()
    return time.perf_counter() - began


def fsync_tree(folder: Path) -> int:
    """Make a folder durable with all it holds; the bytes of its files."""
    nbytes = 0
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(place, name) for name in names), Path(place)):
            nbytes += path.stat().st_size if path.is_file() else 0
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    return nbytes


def memory_peak() -> int:
    """Most bytes that this process had resident since its peak was cleared."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# --------------------------------------------------------------------------------------------- in this process


@contextmanager
def worker(name: str, scale: int, home: Path) -> Iterator[Connection | None]:
    """A process that saves in one way; None where that way is not installed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(name, scale, home, there), daemon=True)
    process.start()
    try:
        missing = answer(here, name)
        if missing:
            print(f"{name} is left out: {missing}", flush=True)
        yield None if missing else here
        if not missing:
            here.send(None)
        process.join(LIMIT_S)
    finally:
        process.kill()
        process.join()


def answer(pipe: Connection, name: str) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"{name} does not answer")
    return pipe.recv()


def measure(names: list[str], scale: int, rounds: int, home: Path) -> dict[str, list[Save]]:
    """Every way in turn, `rounds` times and once before."""
    with ExitStack() as stack:
        pipes = {name: pipe for name in names if (pipe := stack.enter_context(worker(name, scale, home)))}
        costs: dict[str, list[Save]] = {name: [] for name in pipes}
        order = list(pipes)
        for turn in range(rounds + 1):
            for name in (*order[turn % len(order) :], *order[: turn % len(order)]):
                os.sync()
                pipes[name].send(home / f"{name}_{turn}")
                costs[name].append(answer(pipes[name], name))
                shutil.rmtree(home / f"{name}_{turn}", ignore_errors=True)
    return costs


def table(costs: dict[str, list[Save]]) -> str:
    """Medians in milliseconds and megabytes."""
    head = "| | stall, ms | slow-down, ms | durable, ms | written, MB | extra memory, MB | first stall, ms |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, (first, *saves) in costs.items():
        stall, slower, durable = (
            statistics.median(getattr(save, field) for save in saves) * 1e3
            for field in ("stall_s", "slow_down_s", "durable_s")
        )
        sizes = f"{saves[-1].nbytes / 1e6:.1f} | {saves[-1].memory / 1e6:.0f}"
        lines.append(
            f"| {WRITERS[name][0]} | {stall:.1f} | {slower:.0f} | {durable:.0f} | {sizes} | {first.stall_s * 1e3:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="multiplies the bytes of every tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS), metavar="WAY")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        home = Path(scratch).resolve()
        print(table(measure(options.only, options.scale, options.rounds, home)))


if __name__ == "__main__":
    main()
