"""How stall and durable time of our checkpoints grow with the bytes and with the number of tensors of a state.

    python -m benchmarks.checkpoint_growth                                     prints the table
    python -m benchmarks.checkpoint_growth --svg docs/checkpoint_growth.svg    and draws it (pip install matplotlib)

One process whose steps take 0.2 s; everything belongs to its optimizer. Medians of a few saves after the first, which
makes the arena. Stall: the call, and the wait of the next step for the copy. Durable: until it is read back.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.checkpoint_writers import in_background
from ci_llm.checkpoints.manager import CheckpointManager

MEGABYTES = (1, 4, 16, 64, 256, 1024, 2048)
TENSORS_OF_EACH_SIZE = 128
COUNTS = (1, 10, 100, 1_000, 10_000)
MEGABYTES_OF_EACH_COUNT = 64
SAVES = 5
STEP_S = 0.2


@dataclass(frozen=True)
class Point:
    """Medians of the saves of one state."""

    megabytes: int
    tensors: int
    stall_ms: float
    durable_ms: float


def measure(megabytes: int, tensors: int, home: Path) -> Point:
    """Save a state of so many bytes in so many tensors while a loop runs."""
    size = megabytes * 1_000_000 // (4 * tensors)
    weights = {f"layers.{n}.weight": nn.Parameter(torch.ones(size)) for n in range(tensors)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    stalls, durables = [], []
    with CheckpointManager(home, max_to_keep=1, optimizers=[optimizer]) as manager:
        for step in range(SAVES + 1):
            began = time.perf_counter()
            assert manager.save(step, {"model": weights})
            called = time.perf_counter()
            thread, ended = in_background(manager.wait_until_finished)
            compute()
            stepped = time.perf_counter()
            optimizer.step()  # without gradients: it only waits
            stalls.append(called - began + time.perf_counter() - stepped)
            thread.join()
            durables.append(ended[0] - began)
    return Point(megabytes, tensors, statistics.median(stalls[1:]) * 1e3, statistics.median(durables[1:]) * 1e3)


def compute() -> None:
    """The forward and backward pass of a step: small products, for a fixed time."""
    factor, until = torch.ones(384, 384), time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        factor @ factor


def grow(home: Path) -> Iterator[Point]:
    """Growing bytes, then a growing number of tensors."""
    states = [(megabytes, TENSORS_OF_EACH_SIZE) for megabytes in MEGABYTES]
    states += [(MEGABYTES_OF_EACH_COUNT, tensors) for tensors in COUNTS]
    for number, (megabytes, tensors) in enumerate(states):
        yield measure(megabytes, tensors, home / str(number))


def draw(points: list[Point], target: Path) -> None:
    """Two panels, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ci_llm"}
    from matplotlib import pyplot

    figure, (by_size, by_count) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    sized, counted = points[: len(MEGABYTES)], points[len(MEGABYTES) :]
    for axes, line, xs in (
        (by_size, sized, [point.megabytes for point in sized]),
        (by_count, counted, [point.tensors for point in counted]),
    ):
        axes.loglog(xs, [point.durable_ms for point in line], "s-", color="#888888", label="durable and read back")
        axes.loglog(xs, [point.stall_ms for point in line], "o-", color="#c04000", label="stall of the loop")
        axes.grid(alpha=0.3)
    by_size.set(xlabel=f"megabytes, in {TENSORS_OF_EACH_SIZE} tensors", ylabel="milliseconds")
    by_count.set(xlabel=f"tensors, of {MEGABYTES_OF_EACH_COUNT} MB together")
    by_size.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Prints the table; draws it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path)
    target = parser.parse_args().svg
    torch.set_num_threads(1)
    points = []
    print("| MB | tensors | stall, ms | durable, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for point in grow(Path(scratch)):
            points.append(point)
            print(
                f"| {point.megabytes} | {point.tensors} | {point.stall_ms:.2f} | {point.durable_ms:.0f} |", flush=True
            )
    if target is not None:
        draw(points, target)


if __name__ == "__main__":
    main()
