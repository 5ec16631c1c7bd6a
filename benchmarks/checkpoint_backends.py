"""Both checkpoint backends in one run: who writes how much, how long until it is durable, what the training waits for.

    python -m benchmarks.checkpoint_backends                          134 MB, 2 and 4 processes
    python -m benchmarks.checkpoint_backends --megabytes 536 --saves 5

The state is that of K=4 agents of rank 16: per agent the adapter's tensors, and two moments of the same sizes in a
tree. The processes form a gloo world on this machine; both backends save the same steps in turns, everything on, as in
a run: digests, fsync, reading back from the device. A save begins with a barrier.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.durable import Filesystem
from tools.testbed.crews import enter
from tools.testbed.forkserver import ForkServer

AGENTS, TENSORS = 4, 224
BACKENDS = ("vanilla", "distributed")


def state(megabytes: int) -> dict[str, Any]:
    """A third is weights, two thirds are moments; AGENTS x TENSORS of each kind."""
    size = megabytes * 1_000_000 // 4 // (3 * AGENTS * TENSORS)

    def tensors() -> dict[str, torch.Tensor]:
        return {f"layers.{n}.weight": torch.ones(size) for n in range(TENSORS)}

    moments = {f"agent{k}": {"exp_avg": tensors(), "exp_avg_sq": tensors()} for k in range(AGENTS)}
    return {**{f"agent{k}/adapter_model": tensors() for k in range(AGENTS)}, "optimizer": moments}


class Counted:
    """Bytes that this process has given to the disk."""

    def __init__(self) -> None:
        self.nbytes = 0
        write = Filesystem.write

        def counting(disk: Filesystem, handle: int, data: Any) -> int:
            done = write(disk, handle, data)
            self.nbytes += done
            return done

        Filesystem.write = counting  # type: ignore[method-assign]


def saving(directory: str, megabytes: int, saves: int) -> int:
    """In turns; the first save of each backend, which makes its arena, does not count."""
    rank, counted, kept = enter(), Counted(), state(megabytes)
    folders = {backend: Path(directory) / backend for backend in BACKENDS}
    managers = {b: CheckpointManager(f, max_to_keep=1, checkpoint_backend=b) for b, f in folders.items()}  # type: ignore[arg-type]
    told: dict[str, dict[str, list[float]]] = {b: {"stall_ms": [], "durable_ms": [], "bytes": []} for b in BACKENDS}
    for step in range(saves + 1):
        for backend, manager in managers.items():
            dist.barrier()
            before, began = counted.nbytes, time.perf_counter()
            assert manager.save(step, kept)
            stalled = time.perf_counter() - began
            manager.wait_until_finished()
            dist.barrier()
            if step:
                told[backend]["stall_ms"].append(1e3 * stalled)
                told[backend]["durable_ms"].append(1e3 * (time.perf_counter() - began))
                told[backend]["bytes"].append(counted.nbytes - before)
    for manager in managers.values():
        manager.close()
    Path(directory, f"process{rank}.json").write_text(json.dumps(told))
    return 0


def measure(server: ForkServer, ranks: int, megabytes: int, saves: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="backends_", dir=Path.cwd()) as scratch:
        log = Path(scratch) / "log"
        codes = server.run(saving, log, ranks=ranks, directory=scratch, megabytes=megabytes, saves=saves)
        if codes != [0] * ranks:
            raise SystemExit(log.read_text())
        told = [json.loads((Path(scratch) / f"process{rank}.json").read_text()) for rank in range(ranks)]
    return {
        backend: {
            "MB per process": [round(max(each[backend]["bytes"]) / 1e6, 1) for each in told],
            "stall ms": [round(statistics.median(each[backend]["stall_ms"]), 1) for each in told],
            "durable ms": round(statistics.median(told[0][backend]["durable_ms"])),
            "fastest ms": round(min(told[0][backend]["durable_ms"])),
        }
        for backend in BACKENDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=134)
    parser.add_argument("--saves", type=int, default=7, help="that count, of each backend")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    with ForkServer("benchmarks.checkpoint_backends") as server:
        for ranks in options.processes:
            for backend, row in measure(server, ranks, options.megabytes, options.saves).items():
                print(f"{ranks} processes, {backend:12}", json.dumps(row), flush=True)


if __name__ == "__main__":
    from benchmarks import checkpoint_backends  # the fork server knows what it forks by the name of the module

    checkpoint_backends.main()
