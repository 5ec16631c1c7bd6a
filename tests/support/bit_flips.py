"""Flip a bit or cut a file short in the newest checkpoint, and read: is it noticed, and is the one before taken?

Two of three trials flip one bit, drawn over every byte of every file, the manifest included; the third cuts a file.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path

import torch

from ci_llm.checkpoints.manager import CheckpointManager
from tools.testbed import crews
from tools.testbed.forkserver import ForkServer

PACKAGE = logging.getLogger("ci_llm")


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; -1 is the last."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def write_behind(folder: Path) -> None:
    """Steps 1 and 2, copied and written behind the training."""
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(folder, optimizers=[optimizer]) as manager:
        for step in (1, 2):
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            manager.save(step, {"model": model, "optimizer": optimizer, "step": step, "config.yaml": b"seed: 42\n"})


def write_in_parts(folder: Path) -> None:
    """Steps 1 and 2 by three processes, each of which writes its part."""
    log = folder.with_name(f"{folder.name}.log")
    with ForkServer("tools.testbed.crews") as server:
        arguments = {"directory": str(folder), "steps": [1, 2], "backend": "distributed", "behind": True}
        if any(server.run(crews.saving, log, ranks=3, **arguments)):
            raise SystemExit(log.read_text())


def noticed(way: Callable[[Path], None], trials: int, seed: int, folder: Path) -> int:
    """In how many of `trials` a damaged step 2 is named and put aside, and step 1 taken."""
    way(folder)
    newest, kept = folder / "checkpoint_step_2", folder.with_name(f"{folder.name}_kept")
    shutil.copytree(newest, kept)
    draw, found = random.Random(seed), 0
    paths = sorted(path for path in newest.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    for trial in range(trials):
        [path] = draw.choices(paths, sizes)
        damage(path, draw, cut=trial % 3 == 2)
        log = BufferingHandler(1000)
        PACKAGE.addHandler(log)
        with CheckpointManager(folder) as manager:
            found += manager.latest_step() == 1 and "checkpoint_step_2 is damaged" in log.buffer[0].getMessage()
        PACKAGE.removeHandler(log)
        shutil.rmtree(newest, ignore_errors=True)
        shutil.rmtree(folder / "quarantine", ignore_errors=True)
        shutil.copytree(kept, newest)
    return found


def damage(path: Path, draw: random.Random, cut: bool) -> None:
    """Lose the end of a file, or change one bit of it."""
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
