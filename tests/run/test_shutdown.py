"""The last words of a run that was interrupted: what is saved, whatever the disk says, and the command that goes on."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ci_llm.cluster.launch import Launch
from ci_llm.cluster.slurm import record_attempt
from ci_llm.core.run_status import RunStatus, read_status
from ci_llm.run import shutdown


def interrupted(folder: Path, steps: list[int], began_at: int = 0, trained: int = 0) -> tuple[Any, list[str]]:
    """A run at its end, with checkpoints of these steps; and what it says."""
    said: list[str] = []
    status = RunStatus(folder, 1)
    status.step = trained
    run = SimpleNamespace(
        began_at=began_at,
        config=SimpleNamespace(run_folder=folder, requeue="auto", max_requeues=9),
        processes=SimpleNamespace(is_main=True, launch=launch("python")),
        manager=SimpleNamespace(all_steps=lambda: steps, store=SimpleNamespace(still_held=lambda: True)),
        status=status,
        log=SimpleNamespace(say=said.append),
    )
    return run, said


def launch(launcher: str) -> Launch:
    return Launch(launcher, 1, 0, 0, 1, None, {})


@pytest.mark.parametrize(
    ("steps", "began_at", "step", "where"),
    [
        ([3, 5], 3, 5, "step 5 is saved"),
        ([], 0, 0, "no step is saved"),
        ([], 50, 50, "step 50 is saved"),  # it went on from a checkpoint elsewhere, and will do so again
    ],
)
def test_the_step_of_an_interruption_is_the_one_that_is_saved(
    steps: list[int], began_at: int, step: int, where: str, tmp_path: Path
) -> None:
    """Steps that were trained and not saved, because of a second Ctrl-C or a full disk, will be done again."""
    run, said = interrupted(tmp_path, steps, began_at, trained=60)
    shutdown.leave(run, "signal:SIGINT")
    assert read_status(tmp_path).step == step
    assert f"interrupted (signal:SIGINT): {where}; go on with: " in said[0]


def test_steps_that_no_checkpoint_holds_are_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(shutdown, "put_back", lambda *_, **keys: asked.update(keys))
    for attempt in (1, 2):
        record_attempt(tmp_path, attempt, 5, None)
    run, _ = interrupted(tmp_path, [5], began_at=5, trained=9)
    shutdown.leave(run, "signal:SIGTERM")
    assert asked["in_vain"] == 2


def test_a_full_disk_hides_no_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ci_llm.core.run_status.write_json", full)
    monkeypatch.setattr(shutdown, "put_back", lambda *_, **__: "SLURM job 7 is put back into the queue")
    run, said = interrupted(tmp_path, [5])
    shutdown.leave(run, "signal:SIGTERM")
    refused, ended, queued = said
    assert "status.json cannot be written: [Errno 28]" in refused
    assert "interrupted (signal:SIGTERM): step 5 is saved" in ended
    assert "put back" in queued


# The command


def parent(command: list[str]) -> Callable[[], Any]:
    return lambda: SimpleNamespace(parent=lambda: SimpleNamespace(cmdline=lambda: command))


PATH = {"python": "/usr/bin/python", "python3": "/usr/bin/python3", "torchrun": "/venv/bin/torchrun"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "/venv/bin/torchrun", "--nnodes=1", "train.py"], "torchrun --nnodes=1 train.py"),
        (["/usr/bin/python3", "-m", "torch.distributed.run", "train.py"], "python3 -m torch.distributed.run train.py"),
        (["/usr/bin/python3", "-u", "/venv/bin/torchrun", "train.py"], "python3 -u /venv/bin/torchrun train.py"),
        (["/usr/bin/python3", "/odd/bin/torchrun", "train.py"], "python3 /odd/bin/torchrun train.py"),
        ([], "python train.py"),  # a zombie has no command line
    ],
)
def test_the_command_that_goes_on_is_the_launcher_s(
    command: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "train.py"])
    monkeypatch.setattr(psutil, "Process", parent(command))
    monkeypatch.setattr(shutil, "which", PATH.get)
    assert shutdown.command_line(launch("torchrun")) == expected
    assert shutdown.command_line(launch("python")) == "python train.py"


def test_a_command_of_ours_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python3", "/venv/bin/ci-llm", "train", "num_agents=2"])
    monkeypatch.setattr(shutil, "which", {"ci-llm": "/venv/bin/ci-llm"}.get)
    assert shutdown.command_line(launch("python")) == "ci-llm train num_agents=2"


@pytest.mark.parametrize("program", [".venv/bin/python", "/venv/bin/python", "/usr/bin/python3.12"])
def test_a_program_that_its_name_does_not_start_is_named_in_full(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make train` starts one that is not on the path: its bare name would be another interpreter, or none."""
    monkeypatch.setattr(sys, "orig_argv", [program, "train.py"])
    monkeypatch.setattr(shutil, "which", PATH.get)
    assert shutdown.command_line(launch("python")) == f"{program} train.py"
