"""Training loops that use only the manager of this package; tests run them in processes of their own."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

import ci_llm.orbax as ocp
from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.checkpoints.layout import numbered_steps, step_folder
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.durable import Filesystem
from ci_llm.errors import CheckpointError
from ci_llm.integrations.saver import LoopSaver
from tools.testbed.events import DEADLINE_S


def train_step(state: dict[str, Any]) -> dict[str, Any]:
    print(state["steps"], flush=True)
    return {"weight": state["weight"] * 1.5 + 1, "steps": state["steps"] + 1}


def orbax_loop(manager: CheckpointManager) -> None:
    """The loop of Orbax's documentation, as it stands."""
    state: Any = {"weight": torch.ones(3, dtype=torch.float64), "steps": 0}
    start = 0
    if manager.latest_step() is not None:
        start = manager.latest_step()
        state = manager.restore(start)
    for step in range(start, 1_000_000):
        state = train_step(state)
        manager.save(step, state)
        if manager.reached_preemption(step):
            manager.wait_until_finished()
            sys.exit()


def ends_twice(run: Callable[..., list[int]], root: Path, *, kill_at: int, stop_after: int) -> list[Path]:
    """The last checkpoint of a loop that saves every fifth step, undisturbed and disturbed: they have the same bits.

    Args:
        run: a call of the loop, in a folder and with a signal that it gets, if any; returns its exit codes.
        kill_at: the step of its first call in which the disturbed loop is killed.
        stop_after: steps of its second call, after which it is asked to stop.
    """
    straight, again = root / "straight", root / "again"
    for folder in (straight, again):
        folder.mkdir()
    assert {*run(straight)} == {0}, (straight / "log").read_text()
    assert run(again, sent="SIGKILL", step=kill_at)[0] == -signal.SIGKILL
    assert 5 in numbered_steps(again / "run"), "saved before the save at step 10 began"
    assert {*run(again, sent="SIGTERM", step=stop_after)} == {75}, (again / "log").read_text()
    stopped_at = {saved + stop_after + late for saved in (5, 10) for late in (0, 1)}
    assert numbered_steps(again / "run")[-1] in stopped_at, "the step in which the signal came, or the next"
    assert {*run(again)} == {0}, (again / "log").read_text()
    last = [step_folder(each / "run", numbered_steps(straight / "run")[-1]) for each in (straight, again)]
    assert not [found for found in compare(*map(load_checkpoint, last)).differences if found.counts]
    assert {*run(again)} == {0}, "nothing is left to do"
    assert numbered_steps(again / "run")[-1] == numbered_steps(straight / "run")[-1]
    return last


def preempted_together(directory: str, signalled: int) -> int:
    """One of several processes gets a signal between two steps; all stop at the same step, which is saved."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    manager = CheckpointManager(directory, save_interval_steps=100, async_save=False, accelerator=accelerator)
    saved = []
    for step in range(50):
        if manager.save(step, {"weight": torch.full((2,), float(step)), "rank": rank}):
            saved.append(step)
        if manager.reached_preemption(step):
            break
        if step == 6 and rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
    manager.close()
    dist.destroy_process_group()
    return 0 if (step, saved) == (7, [0, 7]) else 1


def failing_together(directory: str, hopeless: str) -> int:
    """A state or info that process 0 cannot save is an error on every process, and none is left waiting."""
    dist.init_process_group("gloo")
    manager = CheckpointManager(directory, async_save=False)
    values: dict[str, Any] = {"state": [1, 2, 3], "info": 1.0, hopeless: {1, 2, 3}}
    try:
        manager.save(0, {"rows": values["state"]}, info={"reward": values["info"]})
    except CheckpointError as error:
        told = f"the {hopeless} cannot be saved" if dist.get_rank() == 0 else "another process"
        code = 0 if told in str(error) else 1
    else:
        code = 2
    saved = manager.save(1, {"fine": 1}) and manager.saver.make_final()
    dist.destroy_process_group()
    return code if saved else 3


def busy_together(directory: str) -> int:
    """A folder that another run holds is refused on every process."""
    dist.init_process_group("gloo")
    manager = CheckpointManager(directory)
    try:
        manager.save(0, {"fine": 1})
    except CheckpointError as error:
        print(f"{type(error).__name__}\n", end="", flush=True)  # at once: another process writes here too
        return 0
    return 1


def failing_behind_together(directory: str) -> int:
    """A save that fails in its thread is an error of every process at the next step of a library's loop."""
    dist.init_process_group("gloo")
    saver = LoopSaver(directory, {}, torch.device("cpu"))
    saver.save(0, lambda: {"a": 1})
    saver.manager.wait_until_finished()
    if dist.get_rank() == 0:
        Path(directory, ".attempt-1").rename(Path(directory, ".attempt-9"))
    saver.save(1, lambda: {"a": 1})
    if dist.get_rank() == 0:
        saver.manager.saver.behind._job.exception(DEADLINE_S)  # type: ignore[union-attr]
    try:
        saver.save(2, lambda: {"a": 1})
    except CheckpointError as error:
        print(f"{type(error).__name__}\n", end="", flush=True)  # at once: another process writes here too
        return 0
    return 1


def restoring_their_own(directory: str) -> int:
    """Each of several processes restores its own part of a state and saves it again."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = CheckpointManager.EachProcess
    with CheckpointManager(directory, async_save=False) as manager:
        manager.save(0, {"weight": torch.ones(2), "own": own({"draws": torch.full((2,), float(rank))})})
        objects: dict[str, Any] = {"weight": torch.zeros(2), "own": own(None)}
        manager.restore(0, into=objects)
        assert objects["own"].value["draws"].tolist() == [rank, rank]
        objects["own"].value["draws"] += 10
        manager.save(1, objects)
    dist.destroy_process_group()
    return 0


def some_with_their_own(directory: str) -> int:
    """A part that only some processes have is refused on all of them, before anything is copied or written."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with CheckpointManager(directory) as manager:
        for has_one in (0, 1):
            own = {"own": CheckpointManager.EachProcess(rank)} if rank == has_one else {}
            try:
                manager.save(has_one, {"weight": torch.ones(2), **own})
            except CheckpointError as error:
                if (f"process {1 - has_one} has none" in str(error), error.where) == (True, "own"):
                    continue
            return 1
        code = 0 if manager.save(2, {"weight": torch.ones(2)}) else 2
    dist.destroy_process_group()
    return code


def waiting_together(directory: str, full: bool) -> int:
    """Process 1 waits for the save of process 0 and gets the same result: the step or none."""
    dist.init_process_group("gloo")
    rank, gate, write = dist.get_rank(), Path(directory).with_name("gate"), Filesystem.write

    def held_back(disk: Filesystem, handle: int, data: Any) -> int:
        while not gate.exists():
            time.sleep(0.01)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(disk, handle, data)

    with CheckpointManager(directory, save_interval_steps=100) as manager:
        assert manager.save(0, {"a": 1}, force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
        assert not manager.reached_preemption(0)  # it listens from here on
        if rank == 0:
            Filesystem.write = held_back  # type: ignore[method-assign]
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        step = 0
        while not manager.reached_preemption(step := step + 1):
            assert not manager.save(step, {"a": 2})
        assert manager.save(step, {"a": 2})
        in_flight, saver = True, manager.saver.behind
        if rank == 1:  # the save continues only when this process waits for it
            in_flight, wait = manager.saver.behind.busy, saver.wait
            saver.wait = lambda: (gate.touch(), wait())[1]
        steps = manager.all_steps()
        gate.touch()  # a listing that waits for nothing is over by now
        manager.wait_until_finished()
        code = 0 if (in_flight, steps) == (True, [0] if full else [0, step]) else 1
        code += 2 * (not manager.should_save(100) or manager.should_save(0))
    dist.destroy_process_group()
    return code


def leaving_before_the_save_ends(directory: str) -> int:
    """The process group is destroyed while the last save is in flight: it is committed, and every process learns it."""
    dist.init_process_group("gloo")
    left, write = threading.Event(), Filesystem.write

    def held_back(disk: Filesystem, handle: int, data: Any) -> int:
        assert left.wait(DEADLINE_S)
        return write(disk, handle, data)

    with CheckpointManager(directory) as manager:
        if dist.get_rank() == 0:
            manager.store.acquire_lease()
            Filesystem.write = held_back  # type: ignore[method-assign]
        assert manager.save(0, {"a": 1})
        dist.destroy_process_group()
        left.set()
        manager.wait_until_finished()
        assert manager.last_result is not None
        return 0 if manager.last_result.saved else 1


def forking(directory: str) -> int:
    """A child that ends in the ordinary way while a save of its parent is in flight."""
    reached, gate, write = threading.Event(), threading.Event(), Filesystem.write

    def held_back(disk: Filesystem, handle: int, data: Any) -> int:
        reached.set()
        assert gate.wait(DEADLINE_S)
        return write(disk, handle, data)

    with CheckpointManager(directory) as manager:
        manager.store.acquire_lease()
        Filesystem.write = held_back  # type: ignore[method-assign]
        assert manager.save(1, {"a": 1})
        assert reached.wait(DEADLINE_S)
        if (pid := os.fork()) == 0:
            signal.alarm(60)
            atexit._run_exitfuncs()
            os._exit(0)
        code = os.waitpid(pid, 0)[1]
        gate.set()
        manager.wait_until_finished()
        return code if manager.all_steps() == [1] else 1


if __name__ == "__main__":
    options = ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=3)
    orbax_loop(ocp.CheckpointManager(sys.argv[1], ocp.PyTreeCheckpointer(), options))
