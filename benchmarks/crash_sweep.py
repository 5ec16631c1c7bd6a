"""Kill or fail a writer at every system call that touches a checkpoint folder, and look what is left.

    python -m benchmarks.crash_sweep                     every point of every scenario
    python -m benchmarks.crash_sweep --sample 200        a seeded sample, with all short writes, as in the tests
    python -m benchmarks.crash_sweep --scenario "replace behind" "prune behind"

A victim is forked from a process that has imported PyTorch and run nothing; `strace` is attached to it and
injects, at its n-th call of one name: SIGKILL before the call, EIO, ENOSPC, or a write that claims to have
taken half and has taken nothing. In the scenarios named `behind` the state is saved asynchronously, and the thread
that writes is struck. Afterwards a fresh process reads. What must hold at every point:

    the newest checkpoint that verifies is the old or the new one, with the right numbers in it;
    a victim that said it had saved has saved;
    a victim that lived, and a new process after one that died, can save the next step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.errors import CiLlmError

KILL, EIO, ENOSPC, SHORT = "SIGKILL", "EIO", "ENOSPC", "short write"
VICTIM_LIMIT_S = 60
PR_SET_PTRACER = 0x59616D61
CALL = re.compile(r"(\w+)\((.*)")
SAVED, SAID_NO, RAISED, BROKEN = 0, 10, 11, 12  # how a victim that lives has ended


@dataclass(frozen=True)
class Scenario:
    """A folder before, what the victim does to it, and the newest step before and after."""

    name: str
    before: Callable[[Path], None]
    act: Callable[[CheckpointManager], bool]
    old: int | None
    new: int | None
    limit: int | None = None
    behind: bool = False


@dataclass(frozen=True)
class Point:
    """A strike: at the n-th call of one name, and in which way."""

    scenario: str
    call: str
    number: int
    fault: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.scenario}: {self.fault} at {self.call} number {self.number}"


# What the victims do


def state(step: int) -> dict[str, object]:
    return {
        "agent0/adapter_model": {"a": torch.full((4, 4), float(step))},
        "optimizer": {"state": {0: {"step": torch.full((), float(step))}}, "lr": 0.1},
        "progress": {"step": step},
        "config.yaml": b"seed: 42\n",
    }


def manager(root: Path, limit: int | None = None, behind: bool = False) -> CheckpointManager:
    return CheckpointManager(root, max_to_keep=limit, async_save=behind)


def saved_behind(step: int) -> Callable[[CheckpointManager], bool]:
    def act(writer: CheckpointManager) -> bool:
        writer.save(step, state(step))
        writer.wait_until_finished()
        return writer.last_result is not None and writer.last_result.saved

    return act


def with_steps(*steps: int) -> Callable[[Path], None]:
    def before(root: Path) -> None:
        with manager(root) as writer:
            for step in steps:
                writer.save(step, state(step))

    return before


def with_dead_writer(root: Path) -> None:
    """Step 1, and a writer that died with a draft half written and a checkpoint on its way to `superseded/`."""
    writer = manager(root)
    writer.save(1, state(1))
    writer.save(5, state(5))
    work = writer.store.staging
    (work / "superseded").mkdir()
    (root / "checkpoint_step_5").rename(work / "superseded" / "checkpoint_step_5")
    (work / "draft-0").mkdir()
    (work / "draft-0" / "half.json").write_bytes(b"{")
    os._exit(0)


def with_final(root: Path) -> None:
    with_steps(1)(root)
    with manager(root) as writer:
        writer.saver.make_final({"README.md": b"the first"})
        writer.save(2, state(2))


def with_damage(root: Path) -> None:
    with_steps(1, 2)(root)
    hurt = root / "checkpoint_step_2" / "progress.json"
    hurt.write_bytes(hurt.read_bytes().replace(b"2", b"3"))


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first", lambda root: None, lambda m: m.save(1, state(1)), None, 1),
        Scenario("replace", with_steps(1), lambda m: m.save(2, state(2)), 1, 2, limit=1),
        Scenario("prune", with_steps(1, 2, 3), lambda m: m.save(1000, state(1000)), 3, 1000, limit=2),
        Scenario("take over", with_dead_writer, lambda m: m.save(2, state(2)), 1, 2, limit=1),
        Scenario("finish", with_final, lambda m: m.saver.make_final({"README.md": b"the last"}), 2, 2),
        Scenario("go back", with_steps(1, 2, 3), lambda m: len(m.store.supersede(1)) == 2, 3, 1),
        Scenario("first behind", lambda root: None, saved_behind(1), None, 1, behind=True),
        Scenario("replace behind", with_steps(1), saved_behind(2), 1, 2, limit=1, behind=True),
        Scenario("prune behind", with_steps(1, 2, 3), saved_behind(1000), 3, 1000, limit=2, behind=True),
        Scenario("heal", with_damage, lambda m: m.latest_step() == 1, 1, 1),
    )
}


# One point


def fork(work: Callable[[], int]) -> int:
    """Run `work` in a child, whose exit code is what it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        torch.set_num_threads(1)
        signal.alarm(VICTIM_LIMIT_S)
        code = work()
    finally:
        os._exit(code)


def fork_victim(root: Path, scenario: Scenario, work: Callable[[CheckpointManager], int]) -> tuple[int, int]:
    """Run `work` in a child that waits for SIGCONT first; its number, and that of the thread to strike."""
    told, tell = os.pipe()

    def victim() -> int:
        writer = manager(root, scenario.limit, scenario.behind)
        os.write(tell, str(writing_thread(writer)).encode())
        allow_any_tracer()
        os.kill(os.getpid(), signal.SIGSTOP)
        return work(writer)

    pid = fork(victim)
    os.waitpid(pid, os.WUNTRACED)
    thread = int(os.read(told, 20))
    os.close(told)
    os.close(tell)
    return pid, thread


def writing_thread(writer: CheckpointManager) -> int:
    """The kernel's number of the thread that will write."""
    if not writer.saver._asynchronous:
        return threading.get_native_id()
    return writer.saver.behind._pool.submit(threading.get_native_id).result()


def allow_any_tracer() -> None:
    """Let `strace`, which is a sibling and no parent, attach also where Yama restricts it."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def wait(pid: int) -> int | None:
    """Exit code of a child; None if a signal ended it."""
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def act_under_fire(root: Path, scenario: Scenario, writer: CheckpointManager) -> int:
    """Act; then, if still alive, show that the next save works."""
    try:
        code = SAVED if scenario.act(writer) else SAID_NO
    except (CiLlmError, OSError):
        code = RAISED
    found = manager(root).store.latest_step(quarantine=False)
    allowed = {scenario.new} if code == SAVED else {scenario.old, scenario.new}
    return code if found in allowed and next_step_works(writer) else BROKEN


def next_step_works(writer: CheckpointManager) -> bool:
    """The disk is well again: the same writer saves, and a fresh reader finds it."""
    writer.save(2000, state(2000))
    writer.wait_until_finished()
    return manager(writer.directory).latest_step() == 2000


def reader(root: Path, scenario: Scenario, victim_code: int | None) -> int:
    """A fresh process: what is the newest, is it right, and can this process resume from it?"""
    fresh = manager(root, scenario.limit)
    found = fresh.latest_step()
    if victim_code is None and found not in (scenario.old, scenario.new):
        return BROKEN
    if victim_code is not None and found != 2000:
        return BROKEN
    if found is not None:
        restored = fresh.restore(found)
        right = bool((restored["agent0/adapter_model"]["a"] == found).all())
        if not right or restored["progress"] != {"step": found}:
            return BROKEN
    fresh.save(3000, state(3000))
    return 0 if manager(root).latest_step() == 3000 else BROKEN


def strace(thread: int, *options: str) -> subprocess.Popen[str]:
    """Attach to one thread of a stopped child and return when attached."""
    command = ["strace", "-p", str(thread), *options]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    if "attached" not in (line := tracer.stderr.readline()):
        os.kill(thread, signal.SIGKILL)
        raise SystemExit(f"strace cannot attach: {line}")
    return tracer


def run_traced(root: Path, scenario: Scenario, *options: str) -> int | None:
    pid, thread = fork_victim(root, scenario, lambda writer: act_under_fire(root, scenario, writer))
    tracer = strace(thread, *options)
    try:
        os.kill(pid, signal.SIGCONT)
        return wait(pid)
    finally:
        tracer.communicate(timeout=VICTIM_LIMIT_S)


def points_of(scenario: Scenario, template: Path, scratch: Path) -> Iterator[Point]:
    """Every call of an undisturbed victim that names the folder or a file in it, until its deed is done."""
    root, log = scratch / "run", scratch / "trace"
    shutil.copytree(template, root, symlinks=True)
    # It ends at once: a writer that goes looks into its folder, which the victims that are struck do later, if at all.
    pid, thread = fork_victim(root, scenario, lambda writer: os._exit(0 if scenario.act(writer) else SAID_NO))
    tracer = strace(thread, "-y", "-s", "0", "-o", str(log), "-e", "trace=%file,%desc")
    os.kill(pid, signal.SIGCONT)
    code = wait(pid)
    tracer.communicate(timeout=VICTIM_LIMIT_S)
    if code != 0:
        raise SystemExit(f"the undisturbed victim of {scenario.name!r} ended with {code}")
    shutil.rmtree(root)
    numbers: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        if match := CALL.match(line):
            call = match[1]
            numbers[call] += 1
            if str(root) in match[2]:
                yield from faults(scenario.name, call, numbers[call], match[2])


def faults(scenario: str, call: str, number: int, rest: str) -> Iterator[Point]:
    for fault in (KILL, EIO, ENOSPC):
        yield Point(scenario, call, number, fault)
    if call == "write" and (size := int(rest.rsplit("= ", 1)[1].split()[0])) > 1:
        yield Point(scenario, call, number, SHORT, size)


def strike(point: Point, template: Path, scratch: Path) -> str:
    """Run one point; "" or what is wrong."""
    scenario, root = SCENARIOS[point.scenario], scratch / "run"
    shutil.copytree(template, root, symlinks=True)
    how = {KILL: "signal=KILL", EIO: "error=EIO", ENOSPC: "error=ENOSPC", SHORT: f"retval={point.size // 2}"}
    inject = f"inject={point.call}:{how[point.fault]}:when={point.number}"
    code = run_traced(root, scenario, "-o", "/dev/null", "-e", f"trace={point.call}", "-e", inject)
    verdict = wait(fork(lambda: reader(root, scenario, code)))
    listing = sorted(path.name for path in root.iterdir()) if root.exists() else []
    shutil.rmtree(root, ignore_errors=True)
    if (code is None) != (point.fault == KILL):
        return f"the victim ended with {code}"
    if code == BROKEN or verdict != 0:
        return f"victim {code}, reader {verdict}, left {listing}"
    return ""


# The sweep


def sweep(names: list[str], sample: int | None, seed: int, scratch: Path) -> tuple[Counter[str], list[str]]:
    """Points struck, by scenario and fault; and the violations."""
    templates: dict[str, Path] = {}
    points: list[Point] = []
    for name in names:
        scenario = SCENARIOS[name]
        template = templates[name] = scratch / f"template {name}"
        wait(fork(lambda scenario=scenario, template=template: scenario.before(template) or 0))  # type: ignore[misc]
        template.mkdir(exist_ok=True)
        points += points_of(scenario, template, scratch)
    print(f"{len(points)} points in {len(names)} scenarios", flush=True)
    if sample is not None and sample < len(points):
        rare = [point for point in points if point.fault == SHORT]
        others = [point for point in points if point.fault != SHORT]
        points = rare + random.Random(seed).sample(others, sample - len(rare))
    struck: Counter[str] = Counter()
    violations: list[str] = []
    for point in points:
        struck[f"{point.scenario}, {point.fault}"] += 1
        if wrong := strike(point, templates[point.scenario], scratch):
            violations.append(f"{point}: {wrong}")
            print(violations[-1], flush=True)
    return struck, violations


def words_for(description: str | None) -> argparse.ArgumentParser:
    """The command line of a sweep."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="strike only this many points, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object at the end")
    return parser


def report(run: Callable[[Path], tuple[Counter[str], list[str]]], as_json: bool) -> int:
    """Run a sweep in a scratch folder and print what it found; the exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crashes_") as scratch:
        struck, violations = run(Path(scratch).resolve())
    for what, count in sorted(struck.items()):
        print(f"{count:6d}  {what}")
    print(f"{sum(struck.values())} points struck, {len(violations)} violations, {time.monotonic() - began:.0f} s")
    if as_json:
        print(json.dumps({"points": sum(struck.values()), "violations": violations}))
    return 1 if violations else 0


def main() -> int:
    parser = words_for(__doc__)
    parser.add_argument("--scenario", nargs="*", choices=sorted(SCENARIOS), default=list(SCENARIOS))
    options = parser.parse_args()
    return report(lambda scratch: sweep(options.scenario, options.sample, options.seed, scratch), options.json)


if __name__ == "__main__":
    sys.exit(main())
