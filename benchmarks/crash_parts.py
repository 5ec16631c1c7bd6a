"""Kill or fail one of several writers at every operation on the disk, and look what is left.

    python -m benchmarks.crash_parts                     every point of both victims
    python -m benchmarks.crash_parts --sample 30         a seeded sample, as in the tests

Two processes replace checkpoint 1 by 2 over the distributed backend, each writing its part, plainly and behind. One of
them strikes at its n-th operation: SIGKILL before it, EIO, ENOSPC, or a write that claims to have taken half and has
taken nothing. What must hold at every point:

    the newest checkpoint that verifies is the old or the new one, with the right numbers in it;
    if any process said that it was saved, it is the new one;
    no process waits for one that is gone, and all that live can save the next step, or a new process can.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.crash_sweep import BROKEN, EIO, ENOSPC, KILL, RAISED, SAID_NO, SAVED, SHORT, report, words_for
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.durable import Filesystem
from ci_llm.errors import CiLlmError
from tools.testbed.crews import enter, same, state
from tools.testbed.disks import CHANGES
from tools.testbed.forkserver import ForkServer

RANKS = 2
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Point:
    """A strike: at the n-th operation of one process, and in which way."""

    victim: int
    number: int
    operation: str
    fault: str
    behind: bool

    def __str__(self) -> str:
        how = "behind" if self.behind else "plainly"
        return f"{self.fault} at operation {self.number} ({self.operation}) of process {self.victim}, saving {how}"


# In the processes


def replacing(directory: str, victim: int, number: int, fault: str, behind: bool) -> int:
    """Replace step 1 by 2; strike at an operation; then, if all processes live, show that saving still works."""
    rank = enter()
    manager = CheckpointManager(directory, max_to_keep=1, async_save=behind, checkpoint_backend="distributed")
    manager.should_save(2)  # claims the folder: that is another scenario
    seen = strike_at(number, fault) if rank == victim else []
    try:
        code = SAVED if saves(manager, 2) else SAID_NO
    except (CiLlmError, OSError):
        code = RAISED
    except RuntimeError:
        return RAISED  # a peer is gone
    if number < 0 and rank == victim:
        Path(directory).with_name("operations").write_text(json.dumps(seen))
    try:
        return code if saves(manager, 2000) else BROKEN
    except (CiLlmError, RuntimeError):
        return code if fault == KILL else BROKEN


def saves(manager: CheckpointManager, step: int) -> bool:
    manager.save(step, state(step))
    manager.wait_until_finished()
    result = manager.last_result
    return result is not None and (result.step, result.saved) == (step, True)


def strike_at(number: int, fault: str) -> list[str]:
    """Fail one operation, counted from now on; returns a list to which the names of all are added."""
    seen: list[str] = []

    def guarded(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(disk: Filesystem, *arguments: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == number:
                if fault == KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == SHORT:
                    return len(arguments[1]) // 2
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code))
            return operation(disk, *arguments)

        return act

    for name in CHANGES:
        setattr(Filesystem, name, guarded(name, getattr(Filesystem, name)))
    return seen


# The sweep


class Sweep:
    """Strikes points in fresh copies of a folder that holds step 1.

    Args:
        scratch: an empty folder.
    """

    def __init__(self, server: ForkServer, scratch: Path) -> None:
        self._server, self._scratch = server, scratch
        self._root, self._log = scratch / "run", scratch / "log"
        with CheckpointManager(scratch / "template", async_save=False) as manager:
            manager.save(1, state(1))

    def points(self) -> list[Point]:
        """Every operation of either victim until step 2 is saved, with every fault; saving plainly, and behind."""
        found = []
        for victim, behind in itertools.product(range(RANKS), (False, True)):
            assert self._run(Point(victim, -1, "", "", behind)) == [SAVED] * RANKS, self._log.read_text()
            for number, name in enumerate(json.loads((self._scratch / "operations").read_text())):
                faults = [KILL, EIO, ENOSPC] + [SHORT] * (name == "write")
                found += [Point(victim, number, name, fault, behind) for fault in faults]
        return found

    def strike(self, point: Point) -> str:
        """Run one point; "" or what is wrong."""
        codes = self._run(point)
        if (codes[point.victim] == KILLED) != (point.fault == KILL) or BROKEN in codes:
            return f"the processes ended with {codes}: {self._log.read_text()[-500:]}"
        fresh = CheckpointManager(self._root, async_save=False)
        found = fresh.latest_step()
        allowed = {2000} if point.fault != KILL else {2} if SAVED in codes else {1, 2}
        if found not in allowed or not same(fresh.restore(found), state(found)):
            return f"codes {codes}, newest {found}"
        with fresh:
            return "" if fresh.save(3000, state(3000)) and fresh.latest_step() == 3000 else "no new process can save"

    def _run(self, point: Point) -> list[int]:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._scratch / "template", self._root)
        self._log.unlink(missing_ok=True)
        arguments = {name: getattr(point, name) for name in ("victim", "number", "fault", "behind")}
        return self._server.run(replacing, self._log, ranks=RANKS, directory=str(self._root), **arguments)


def sweep(sample: int | None, seed: int, scratch: Path) -> tuple[Counter[str], list[str]]:
    """Points struck, by victim and fault; and the violations."""
    struck: Counter[str] = Counter()
    violations: list[str] = []
    with ForkServer("benchmarks.crash_parts") as server:
        all_points = Sweep(server, scratch)
        points = all_points.points()
        print(f"{len(points)} points", flush=True)
        for point in random.Random(seed).sample(points, min(sample or len(points), len(points))):
            struck[f"process {point.victim}, {point.fault}"] += 1
            if wrong := all_points.strike(point):
                violations.append(f"{point}: {wrong}")
                print(violations[-1], flush=True)
    return struck, violations


def main() -> int:
    options = words_for(__doc__).parse_args()
    return report(lambda scratch: sweep(options.sample, options.seed, scratch), options.json)


if __name__ == "__main__":
    from benchmarks import crash_parts  # the fork server knows what it forks by the name of the module

    sys.exit(crash_parts.main())
