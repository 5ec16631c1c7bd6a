"""Killed before any operation on the disk, the trainer resumes, to the bits of the run that was never killed.

The crash sweep strikes the manager at every system call; here the whole program is struck at a few, drawn by seed.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.durable import Filesystem
from tests.support.campaign import sampled, size
from tests.support.crowds import bits_in_company
from tools.testbed.disks import CHANGES
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Trials, account, differences, train_watched

# References that the tests share.
pytestmark = pytest.mark.slow

CELL = Cell(dropout=0.1)
PARTS = Cell(dropout=0.1, ranks=2)
#: The others write as time passes: a run that is faster than the one that counted would have fewer operations.
WRITERS = ("MainThread", "ci_llm checkpoint")
SAVING = {"save_steps": 2, "save_total_limit": 2}
#: Adapters whose moments are more than half of a checkpoint, so that both of two processes write a part of them.
LARGE = SAVING | {"lora_rank": 16}


def struck(folder: str, arguments: list[str], number: int, victim: int = 0) -> int:
    """A trial: `train.py` of which one process dies before its disk operation `number`; -1: it lives, and counts."""
    if int(os.environ.get("RANK", "0")) != victim:
        return train_watched(folder, arguments, None)
    count = itertools.count()

    def guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(disk: Filesystem, *args: Any) -> Any:
            if threading.current_thread().name.startswith(WRITERS) and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(disk, *args)

        return act

    for name in CHANGES:
        setattr(Filesystem, name, guarded(getattr(Filesystem, name)))
    code = train_watched(folder, arguments, None)
    Path(folder, "operations").write_text(str(next(count)))
    return code


@bits_in_company
def test_a_run_killed_at_a_drawn_disk_operation_resumes_to_the_same_bits(server: ForkServer, trials: Trials) -> None:
    reference = trials.reference(CELL)  # tokenises, so that every run from here on has the same operations

    def strike(folder: Path, number: int) -> list[int]:
        arguments = trials.arguments(CELL, **SAVING)
        return server.run(struck, folder / "log", folder=str(folder), arguments=arguments, number=number)

    alive = trials.new_folder()
    assert strike(alive, -1) == [0]
    total = int((alive / "operations").read_text())
    assert total > 200
    for number in random.Random(20).sample(range(total), size(2, 10)):
        folder = trials.new_folder()
        assert strike(folder, number) == [-signal.SIGKILL], f"operation {number} of {total}"
        assert trials.train(CELL, folder, **SAVING) == [0], (folder / "log").read_text()
        assert not differences(reference, account(folder)), f"operation {number} of {total}"


@pytest.fixture(scope="module")
def undisturbed(trials: Trials) -> Path:
    folder = trials.new_folder()
    assert trials.train(PARTS, folder, **LARGE) == [0, 0], (folder / "log").read_text()
    return folder


@pytest.mark.parametrize("victim", sampled([0, 1], [1]))
def test_a_run_resumes_after_either_of_two_writers_was_killed(
    victim: int, server: ForkServer, trials: Trials, undisturbed: Path
) -> None:
    """The next attempt may use either backend."""
    keys = LARGE | {"checkpoint_backend": "distributed"}
    reference = account(undisturbed)

    def strike(folder: Path, number: int) -> list[int]:
        place = {"folder": str(folder), "arguments": trials.arguments(PARTS, **keys)}
        return server.run(struck, folder / "log", ranks=2, number=number, victim=victim, **place)

    alive = trials.new_folder()
    assert strike(alive, -1) == [0, 0], (alive / "log").read_text()
    assert list(alive.glob("run/checkpoint_step_12/optimizer-0000*-of-00002.safetensors"))
    assert not differences(reference, account(alive))
    total = int((alive / "operations").read_text())
    for number in random.Random(victim).sample(range(total), size(1, 2)):
        folder = trials.new_folder()
        assert strike(folder, number)[victim] == -signal.SIGKILL, f"operation {number} of {total}"
        taking_over = keys if victim else LARGE
        assert trials.train(PARTS, folder, **taking_over) == [0, 0], (folder / "log").read_text()
        assert not differences(reference, account(folder)), f"operation {number} of {total}"
