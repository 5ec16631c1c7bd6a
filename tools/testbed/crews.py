"""Loops on several processes over the distributed backend: what tests run in processes of their own."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.checkpoints.backends import distributed
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.durable import Filesystem
from ci_llm.errors import CheckpointError, PeerLost


def state(step: int) -> dict[str, Any]:
    """One of everything: files for others, a tree with most of the bytes, plain values, bytes; equal everywhere."""
    draw = torch.Generator().manual_seed(step)

    def rand(size: int) -> Tensor:
        return torch.rand(size, generator=draw)

    return {
        **{f"agent{k}/adapter_model": {"a": rand(40), "b": rand(3)} for k in range(2)},
        "optimizer": {
            "state": {k: {"step": torch.tensor(float(step)), "m": rand(43), "v": rand(43)} for k in range(2)},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}],
        },
        "counts": {"seen": torch.arange(5), "mask": torch.tensor([True, False])},
        "progress": {"step": step},
        "config.yaml": b"seed: 42\n",
    }


def enter() -> int:
    """Form the world that the fork server has announced; returns the rank."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        # Process 0 has its world before the others have theirs, and whoever of them is late asks it for addresses: a
        # trial that then has nothing to say to the others would be over, and its process gone.
        dist.barrier()
        return dist.get_rank()
    return 0


def saving(directory: str, steps: list[int], backend: str, behind: bool) -> int:
    """Save the steps, one after the other; everybody hears what became of each."""
    enter()
    with CheckpointManager(directory, async_save=behind, checkpoint_backend=backend) as manager:  # type: ignore[arg-type]
        for step in steps:
            assert manager.save(step, state(step))
            manager.wait_until_finished()
            if (result := manager.last_result) is not None:  # with the other backend only process 0 knows
                assert (result.step, result.saved) == (step, True), result
    return 0


def restoring(directory: str, step: int) -> int:
    """Restore what any backend has saved, into objects and as plain values, bit for bit."""
    enter()
    with CheckpointManager(directory) as manager:
        assert (newest := manager.latest_step()) == step, newest
        into = state(step + 1)
        manager.restore(step, into=into)
        for found in (into, manager.restore(step)):
            assert same(found, state(step)), found
    return 0


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return equal and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def failing(directory: str, victim: int, fault: str, behind: bool) -> int:
    """One process fails at its first byte of step 2: it is not committed, all get an error, step 3 works again."""
    rank = enter()
    manager = CheckpointManager(directory, async_save=behind, checkpoint_backend="distributed")
    assert manager.save(1, state(1))
    manager.wait_until_finished()
    if rank == victim:
        strike_once(fault)
    raised = whatever_goes_wrong(lambda: (manager.save(2, state(2)), manager.wait_until_finished()))
    expected_error = fault == "bug" and (not behind or rank in (0, victim))
    assert (raised is not None) == expected_error, (rank, raised)
    assert manager.last_result is not None
    if not expected_error:
        assert (manager.last_result.step, manager.last_result.saved) == (2, False), manager.last_result
        assert fault != "disk" or "No space left on device" in manager.last_result.note
    dist.barrier()
    assert manager.all_steps() == [1]
    assert not list(Path(directory).glob(".attempt-1/*/draft*"))
    dist.barrier()
    assert manager.save(3, state(3))
    manager.close()
    assert CheckpointManager(directory).latest_step() == 3
    return 0


def strike_once(fault: str) -> None:
    real = Filesystem.write

    def write(disk: Filesystem, handle: int, data: Any) -> int:
        Filesystem.write = real  # type: ignore[method-assign]
        if fault == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ZeroDivisionError("a bug")

    Filesystem.write = write  # type: ignore[method-assign]


def whatever_goes_wrong(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except (CheckpointError, RuntimeError, ZeroDivisionError, IndexError) as error:
        return error
    return None


def killed_while_writing(directory: str, victim: int, behind: bool) -> int:
    """One process is killed at its first byte of step 2: an error for all others, in no more than moments."""
    rank = enter()
    manager = CheckpointManager(directory, async_save=behind, checkpoint_backend="distributed")
    assert manager.save(1, state(1))
    manager.wait_until_finished()
    if rank == victim:
        Filesystem.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    try:
        manager.save(2, state(2))
        manager.wait_until_finished()
    except (PeerLost, RuntimeError):
        return 0
    return 1


def not_one_state(directory: str) -> int:
    """Tensors that differ between processes are refused on all of them, by name; plain values are process 0's."""
    rank = enter()
    manager = CheckpointManager(directory, async_save=False, checkpoint_backend="distributed")
    error = whatever_goes_wrong(
        lambda: manager.save(1, {"mine": {"w": torch.full((3,), float(rank))}, "n": {"r": rank}})
    )
    assert isinstance(error, CheckpointError)
    assert "process 1 does not hold the state of process 0: mine" in error.what, error
    ours = {"big": {"w": torch.ones(9)}, "ours": {"w": torch.ones(3), "r": rank}, "n": {"r": rank}}
    assert manager.save(2, ours)
    found = manager.restore(2)
    assert (found["n"], found["ours"]["r"]) == ({"r": 0}, 0)
    more = {"a": torch.ones(3)} | ({"b": torch.ones(3)} if rank else {})
    error = whatever_goes_wrong(lambda: manager.save(3, {**ours, "more": more}))
    assert error is not None or (manager.last_result is not None and not manager.last_result.saved)
    assert manager.all_steps() == [2]
    return 0


def hopeless(directory: str) -> int:
    """A state that one process cannot hand off is an error of all, before anything is begun."""
    rank = enter()
    manager = CheckpointManager(directory, async_save=False, checkpoint_backend="distributed")
    error = whatever_goes_wrong(lambda: manager.save(1, {"value": {1, 2} if rank == 1 else 1}))
    assert isinstance(error, CheckpointError)
    assert ("cannot be saved" if rank == 1 else "another process") in error.what
    real = distributed.contents
    if rank == 1:
        distributed.contents = lambda _: [][1]
    error = whatever_goes_wrong(lambda: manager.save(1, state(1)))
    assert isinstance(error, IndexError if rank == 1 else CheckpointError)
    distributed.contents = real
    assert manager.save(2, state(2))
    return 0


def without_thread(directory: str) -> int:
    """One process cannot start its save: no other waits for it, all get an error, the next step works again."""
    rank = enter()
    manager = CheckpointManager(directory, checkpoint_backend="distributed")
    assert manager.save(1, state(1))
    manager.wait_until_finished()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    if rank == 1:
        manager.saver.behind._pool.submit = refuse  # type: ignore[union-attr, method-assign, assignment]
    error = whatever_goes_wrong(lambda: manager.save(2, state(2)))
    assert (error is None) == (rank != 1), error
    assert rank != 1 or str(error).startswith("can't start new thread")
    in_the_thread = whatever_goes_wrong(manager.wait_until_finished)
    assert (in_the_thread is None) == (rank > 0), in_the_thread
    assert manager.save(3, state(3))
    manager.close()
    assert CheckpointManager(directory).all_steps() == [1, 3]
    return 0
