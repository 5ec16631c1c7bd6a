"""What saves and resumes cost: collectives in the training thread, and bytes read from a checkpoint's files."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.saver import EachProcess
from tools.testbed.crews import enter

#: Everything of torch.distributed in which a process waits for the others.
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("gather", "gather_object", "reduce", "reduce_scatter", "scatter", "barrier", "monitored_barrier", "new_group"),
)


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that this thread enters in the block, in order."""
    entered: list[str] = []
    thread = threading.current_thread()
    depth = 0  # some collectives are made of others

    def counted(name: str, real: Any) -> Any:
        def collective(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            if threading.current_thread() is not thread:
                return real(*arguments, **named)
            if depth == 0:
                entered.append(name)
            depth += 1
            try:
                return real(*arguments, **named)
            finally:
                depth -= 1

        return collective

    real = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in real.items():
        setattr(dist, name, counted(name, function))
    try:
        yield entered
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@contextmanager
def bytes_read() -> Iterator[Counter[str]]:
    """How many bytes of each file are read in the block, by path, as the operating system is asked for them."""
    read: Counter[str] = Counter()
    real = os.read

    def counted(handle: int, size: int) -> bytes:
        data = real(handle, size)
        read[os.readlink(f"/proc/self/fd/{handle}")] += len(data)
        return data

    os.read = counted
    try:
        yield read
    finally:
        os.read = real


def saving(directory: str, backend: str) -> int:
    """Count the collectives of three calls: a save that is decided, one that turns out to be due, and one that is not.

    What each process has of its own comes back from the checkpoint.
    """
    rank = enter()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with CheckpointManager(
        directory,
        save_interval_steps=10,
        optimizers=[optimizer],
        checkpoint_backend=backend,  # type: ignore[arg-type]
    ) as manager:
        state = {"weights": {"w": torch.ones(3)}, "rng": EachProcess({"seed": torch.full((9000,), rank)}), "n": 1}
        assert manager.save(1, state, force=True)  # builds what is built once
        manager.wait_until_finished()
        counts = {}
        for name, step, force in (("decided", 2, True), ("due", 10, False), ("not due", 11, False)):
            with collectives() as entered:
                assert manager.save(step, state, force=force) == (name != "not due")
            counts[name] = entered
            manager.wait_until_finished()
        found = manager.restore(10)
    assert list(found) == ["weights", "rng", "n"]
    assert [int(part["seed"][0]) for part in found["rng"].values()] == list(range(dist.get_world_size()))
    Path(directory, f"costs{rank}.json").write_text(json.dumps(counts))
    return 0


def training(directory: str, arguments: list[str]) -> int:
    """Train, and count the collectives of each save after the first."""
    from ci_llm.cli.main import main
    from ci_llm.run import loop

    real, counts = loop.save, []

    def counted(*given: Any) -> None:
        with collectives() as entered:
            real(*given)
        counts.append(entered)

    loop.save = counted
    code = main(["train", *arguments])
    rank = os.environ.get("RANK", "0")
    Path(directory, f"costs{rank}.json").write_text(json.dumps(counts[1:]))
    return code
