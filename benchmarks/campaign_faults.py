"""The faults of a campaign, in the processes of the trainer that they strike.

nan             the loss of one agent is NaN in one process
oom             the forward pass of one process runs out of memory
disk_full       the next checkpoint finds no space
write_fails     the next write of this process to its disk fails with EIO
store_refuses   the mirror's store refuses the next five objects
pause           a process stands still for a second
terminate       SIGTERM to one process: all save and end, and the same command is called again, as a scheduler does
walltime        the deadline has come: the same
kill            SIGKILL to one process
node            SIGKILL to all processes at once, the supervisor among them
lost_disk       the same, and the folder of the run is gone with them
damage          a byte of the newest checkpoint is flipped, then SIGKILL
hang            the main thread of one process never comes back
world           SIGTERM, and the next call has another number of processes
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

#: These decide what is learned, so that they strike whenever their step is computed; the others strike once.
CHANGES_MATHS = ("nan", "oom", "world")
ENDS_ATTEMPT = ("terminate", "walltime", "kill", "node", "lost_disk", "damage", "hang", "world")
MAIN_ONLY = ("disk_full", "store_refuses", "walltime", "damage")
REFUSALS = 5
LEDGER, PLAN = "ledger.jsonl", "plan.json"
#: Names the campaign in the environment of every process of it.
TOKEN = "CI_LLM_CAMPAIGN"


@dataclass(frozen=True)
class Fault:
    """What strikes, and in which 0-based optimizer step."""

    kind: str
    step: int

    @property
    def victim(self) -> int:
        """The index of the process that it strikes."""
        return 0 if self.kind in MAIN_ONLY else self.step % int(os.environ.get("WORLD_SIZE", "1"))


def ledger(folder: Path) -> list[dict[str, Any]]:
    """What the trainers noted: starts, and faults as they struck."""
    path = folder / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def arm() -> None:
    """Let the faults of the plan that are due in this process strike."""
    from ci_llm.run import job, loop

    plan = [Fault(**fault) for fault in json.loads(Path(PLAN).read_text())]
    own = int(os.environ.get("RANK", "0"))
    struck = {(line["kind"], line["step"]) for line in ledger(Path()) if line["kind"] not in CHANGES_MATHS}
    waiting = {fault.step: fault for fault in plan if fault.victim == own and (fault.kind, fault.step) not in struck}
    train, compute = job.train, loop.compute_gradients

    def begin(run: Any, *rest: Any) -> Any:
        if own == 0:
            _note("start", run.state.step)
        return train(run, *rest)

    def strike(run: Any, step: int, *rest: Any) -> Any:
        if fault := waiting.pop(step, None):
            _note(fault.kind, step)
            globals()[f"_{fault.kind}"](run)
        return compute(run, step, *rest)

    job.train, loop.compute_gradients = begin, strike


def _note(kind: str, step: int) -> None:
    line = {"kind": kind, "step": step, "time": time.time()}
    with Path(LEDGER).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _nan(_: Any) -> None:
    def spoil(output: Any) -> Any:
        factors = output.log_probs.new_ones(len(output.log_probs), 1)
        factors[0] = float("nan")
        return replace(output, log_probs=output.log_probs * factors)

    _at_next_forward(spoil)


def _oom(_: Any) -> None:
    def refuse(_: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    _at_next_forward(refuse)


def _at_next_forward(change: Callable[[Any], Any]) -> None:
    from ci_llm.crowd.crowd import Crowd

    original = Crowd.forward

    def once(crowd: Crowd, batch: Any) -> Any:
        Crowd.forward = original  # type: ignore[method-assign]
        return change(original(crowd, batch))

    Crowd.forward = once  # type: ignore[method-assign]


def _disk_full(_: Any) -> None:
    from ci_llm.checkpoints import store

    _fail(store, "commit", lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _write_fails(_: Any) -> None:
    from ci_llm.core.durable import Filesystem

    _fail(Filesystem, "write", lambda: OSError(errno.EIO, os.strerror(errno.EIO)))


def _store_refuses(_: Any) -> None:
    from ci_llm.errors import MirrorUnreachable
    from ci_llm.mirror.objects import FolderObjects

    refusal = MirrorUnreachable("503 Slow Down", where="the store of the campaign", hint="try again")
    _fail(FolderObjects, "put", lambda: refusal, times=REFUSALS)


def _fail(owner: Any, name: str, error: Callable[[], Exception], times: int = 1) -> None:
    """Let the next calls of a function raise."""
    original, left = getattr(owner, name), itertools.count(times - 1, -1)

    def fail(*_: Any, **__: Any) -> Any:
        if next(left) == 0:
            setattr(owner, name, original)
        raise error()

    setattr(owner, name, fail)


def _pause(_: Any) -> None:
    own = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep 1; kill -CONT {own}"])


def _terminate(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_world = _terminate


def _walltime(run: Any) -> None:
    run.interrupts.request_stop("walltime")


def _kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _node(run: Any, last_act: Callable[[], None] = lambda: None) -> None:
    others = [process for process in psutil.process_iter() if process.pid != os.getpid() and _belongs(process)]
    for process in others:
        process.kill()
    psutil.wait_procs(others, timeout=1)  # who has no parent left may stay in the table, but does nothing
    last_act()
    _kill(run)


def _belongs(process: psutil.Process) -> bool:
    try:
        return process.environ().get(TOKEN) == os.environ[TOKEN]
    except psutil.Error:
        return False


def _lost_disk(run: Any) -> None:
    _node(run, lambda: shutil.rmtree(run.config.run_folder))


def _damage(run: Any) -> None:
    run.manager.wait_until_finished()
    path = run.manager.path(run.manager.all_steps()[-1]) / "agent0" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _kill(run)


def _hang(_: Any) -> None:
    threading.Event().wait()
