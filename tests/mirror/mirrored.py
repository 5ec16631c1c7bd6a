"""A loop that saves and mirrors, as it runs in a process that may be killed at any request."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import FileRecord
from ci_llm.checkpoints.state_files import entries_of, files_of
from ci_llm.errors import MirrorUnreachable
from ci_llm.mirror import objects
from ci_llm.mirror import sender as mirror_module
from ci_llm.mirror.filling import fill
from ci_llm.mirror.head import Found
from ci_llm.mirror.sender import Mirror
from tools.testbed.events import DEADLINE_S
from tools.testbed.object_store import CREDENTIALS

RUN_FILES = ("metrics.jsonl",)
KEEP = 2
ACKNOWLEDGED = "acknowledged"


def state(step: int) -> dict[str, Any]:
    """What changes with every step, what never does, and a file that is larger than a block of `run_files`."""
    draw = torch.Generator().manual_seed(step)
    return {
        "agent0/adapter_model": {"a": torch.rand(40, generator=draw)},
        "optimizer": {"m": torch.rand(200, generator=draw), "step": step},
        "config.yaml": b"seed: 42\n",
        "tokenizer/tokenizer.json": b"{}" * 1000,
    }


def records(step: int) -> dict[str, FileRecord]:
    """What the manifest of a step must say of its files."""
    return {name: image.record() for name, image in files_of(entries_of(state(step))).items()}


def speak_to(address: str, request_s: float = DEADLINE_S) -> None:
    """Take the server at this address, and try again soon.

    Args:
        request_s: after which a request counts as lost; short only where one will be.
    """
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=address)
    torch.set_num_threads(1)
    objects.REQUEST_S = request_s  # type: ignore[misc]
    objects.RETRIES = 1  # type: ignore[misc]
    objects.FIRST_TRY_S = 0.05  # type: ignore[misc]
    mirror_module._POLL_S = 0.2  # type: ignore[misc]


def save_and_mirror(folder: str, url: str, address: str, step: int, wiped: bool, request_s: float) -> int:
    """Go on from the newest step of both places, save `step`, and leave a note once the mirror has it."""
    run = _begin(folder, address, wiped, request_s)
    with CheckpointManager(run, max_to_keep=KEEP) as manager:
        mirror = Mirror(url, run, keep=KEEP, files=RUN_FILES)
        found = _found(mirror, manager)
        newest = manager.latest_step()
        assert newest is None or dict(manager.metadata(newest).files) == records(newest), "wrong bytes restored"
        mirror.begin(-1 if newest is None else newest, manager.store.acquire_lease(), found)
        manager.saver.after_save = lambda result: mirror.wake()
        with (run / RUN_FILES[0]).open("a") as metrics:
            metrics.write(f'{{"step": {step}}}\n')
        assert manager.save(step, state(step))
        manager.wait_until_finished()
        if mirror.flush(DEADLINE_S):
            (Path(folder) / ACKNOWLEDGED).write_text(str(step))
        mirror.stop()
    return 0


def _found(mirror: Mirror, manager: CheckpointManager) -> Found:
    """As who starts the run again after an error."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(MirrorUnreachable):
            return fill(mirror.reader, manager, RUN_FILES)
    raise AssertionError(f"not within {DEADLINE_S:.0f} s: the mirror can be read")


def _begin(folder: str, address: str, wiped: bool, request_s: float) -> Path:
    speak_to(address, request_s)
    run = Path(folder, "run")
    Path(folder, "pid").write_text(str(os.getpid()))
    if wiped:
        shutil.rmtree(run, ignore_errors=True)
    return run
