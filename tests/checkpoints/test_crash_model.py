"""Crashes without a kernel: every state of the disk that a crash may leave, and random histories of runs."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ci_llm.checkpoints.layout import numbered_steps
from ci_llm.checkpoints.manifest import FileImage, verify_folder
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.core.durable import Filesystem
from ci_llm.errors import CheckpointError, DamagedCheckpoint
from tests.checkpoints.test_store import Run, elsewhere
from tests.support.campaign import size
from tools.testbed.disks import Crash, Log, MortalDisk, build

STATES_PER_POINT = 24


MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small trees, and none must last


def content(step: int, serial: int = 0) -> dict[str, FileImage]:
    text = f"step {step} serial {serial} ".encode()
    return {"a.bin.safetensors": FileImage((text * 9,)), "agent0/b.json": FileImage((text,))}


def open_store(root: Path, disk: Filesystem, number: int = 1, limit: int | None = None) -> CheckpointStore:
    return CheckpointStore(root, save_total_limit=limit, owner=elsewhere(number), disk=disk)


def newest(root: Path) -> int | None:
    """What a fresh reader finds, with its contents checked."""
    store = CheckpointStore(root)
    step = store.latest_step(quarantine=False)
    if step is not None:
        files = store.read(step).files
        assert files["agent0/b.json"].startswith(f"step {step} ".encode())
    return step


# What a crash may leave


class Replay(Log):
    """A disk that checks, after every change, each state that a crash may leave there."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root)
        self.draw = random.Random(seed)
        self.allowed: set[int | None] = {None}
        self.seen: set[int | None] = set()
        self.points = self.states_checked = 0
        self.watching = True

    def _took_place(self) -> None:
        if not self.watching:
            return
        self.points += 1
        for tree in self.crashes(self.draw, STATES_PER_POINT):
            self.states_checked += 1
            with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
                build(Path(scratch) / "run", tree)
                found = newest(Path(scratch) / "run")
            self.watching = found in self.allowed
            assert self.watching, f"a crash here leaves {found}, not one of {self.allowed}"
            self.seen.add(found)

    def expect(self, change: Callable[[], object], old: int | None, new: int | None) -> None:
        """A crash during `change` leaves the old or the new checkpoint; after its return there is the new one."""
        self.allowed = {old, new}
        change()
        self.allowed = {new}
        self._took_place()


def replay_a_life(root: Path, disk: Replay) -> None:
    """Save, replace, prune, finish, go back, and take over from a writer that died."""
    store = open_store(root, disk, limit=1)
    disk.expect(lambda: store.save(1, content(1)), None, 1)
    disk.expect(lambda: store.save(2, content(2)), 1, 2)
    disk.expect(lambda: store.make_final({"README.md": b"what it is"}), 2, 2)
    disk.expect(lambda: store.make_final({"README.md": b"what it is now"}), 2, 2)
    store = open_store(root, disk, number=2)
    Run(root, []).silence()
    disk.expect(lambda: store.save(3, content(3)), 2, 3)
    disk.expect(lambda: store.supersede(2), 3, 2)
    disk.expect(lambda: store.save(3, content(3, 1)), 2, 3)
    disk.expect(lambda: store.delete(3), 3, 2)
    disk.expect(lambda: store.delete(2), 2, 2)
    disk.expect(lambda: store.make_final({"README.md": b"of the step that only this folder holds"}), 2, 2)
    assert disk.seen == {None, 1, 2, 3}


@pytest.mark.slow
def test_every_state_that_a_crash_may_leave_holds_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    disk = Replay(root, seed=0)
    replay_a_life(root, disk)
    print(f"{disk.states_checked} states of a disk after crashes at {disk.points} points, 0 violations")
    assert disk.points > 150


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_replay_notices_a_forgotten_sync(tmp_path: Path, forgotten: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    disk = Replay(root, seed=0)
    setattr(disk, forgotten, lambda anything: None)
    with pytest.raises(AssertionError, match="a crash here leaves"):
        replay_a_life(root, disk)


def test_the_replay_keeps_synced_changes_and_may_lose_others(tmp_path: Path) -> None:
    disk = Log(tmp_path)
    handle = disk.create(tmp_path / "a")
    disk.write(handle, b"hello")
    trees = list(disk.crashes(random.Random(0), 64))
    assert {} in trees
    assert any("a" in tree for tree in trees)
    disk.sync(handle)
    disk.sync_folder(tmp_path)
    assert list(disk.crashes(random.Random(0), 64)) == [{"a": b"hello"}]
    disk.rename(tmp_path / "a", tmp_path / "b")
    assert list(disk.crashes(random.Random(0), 64)) == [{"a": b"hello"}, {"b": b"hello"}]


def sound(folder: Path) -> bool:
    try:
        verify_folder(folder)
    except DamagedCheckpoint:
        return False
    return True


# Random histories


class Histories(RuleBasedStateMachine):
    """Save, crash, prune, load, go back, take over: the newest that verifies is the old or the new one."""

    numbers = itertools.count(2)

    @initialize()
    def begin(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(dir=MEMORY))
        self.root = self.scratch / "run"
        self.newest: int | None = None
        self.serial = 0
        self.retired: list[CheckpointStore] = []
        self.disk = MortalDisk()
        self.store = open_store(self.root, self.disk)

    def teardown(self) -> None:
        for store in [*getattr(self, "retired", []), getattr(self, "store", None)]:
            if store is not None and store._lease is not None:
                store._lease.release.detach()
        if hasattr(self, "scratch"):
            shutil.rmtree(self.scratch)

    def change(self, work: Callable[[], object], new: int | None, lives: int | None) -> bool:
        """Do `work` and return whether it ended; with `lives` the machine dies before that change of the disk."""
        old = self.newest
        self.disk.lives = None if lives is None else self.disk.changes + lives
        try:
            work()
        except Crash:
            event("crashed")
            self.newest = newest(self.root)
            assert self.newest in (old, new)
            return False
        self.disk.lives = None
        self.newest = newest(self.root)
        assert self.newest == new
        return True

    def new_writer(self, limit: int | None = None) -> None:
        Run(self.root, []).silence()
        self.retired.append(self.store)
        self.disk = MortalDisk()
        self.store = open_store(self.root, self.disk, next(self.numbers), limit)

    @rule(distance=st.integers(1, 400), lives=st.none() | st.integers(0, 90), limit=st.none() | st.integers(1, 3))
    def save(self, distance: int, lives: int | None, limit: int | None) -> None:
        step = (self.newest or 0) + distance
        self.serial += 1
        self.store._limit = limit
        files = content(step, self.serial)
        if not self.change(lambda: self.store.save(step, files), step, lives):
            self.new_writer()

    @rule(lives=st.none() | st.integers(0, 90))
    @precondition(lambda self: self.newest is not None)
    def finish(self, lives: int | None) -> None:
        if not self.change(lambda: self.store.make_final({"README.md": b"hello"}), self.newest, lives):
            self.new_writer()

    @rule(lives=st.none() | st.integers(0, 40), which=st.integers(0, 5))
    @precondition(lambda self: self.newest is not None)
    def go_back(self, lives: int | None, which: int) -> None:
        steps = [step for step in numbered_steps(self.store.directory) if sound(self.store.path(step))]
        target = steps[which % len(steps)] if steps else self.newest
        if not self.change(lambda: self.store.supersede(target), target, lives):
            self.new_writer()

    @rule(lives=st.none() | st.integers(0, 60))
    @precondition(lambda self: len(numbered_steps(self.store.directory)) > 1)
    def damage_and_quarantine(self, lives: int | None) -> None:
        """Flip a bit of the newest checkpoint: the one before is found, wherever the repair is killed."""
        hurt = self.store.path(numbered_steps(self.store.directory)[-1]) / "agent0/b.json"
        hurt.write_bytes(hurt.read_bytes()[:-1] + b"!")
        self.newest = newest(self.root)
        self.store.free_read_bytes()
        if not self.change(self.store.latest_step, self.newest, lives):
            self.new_writer()

    @rule(lives=st.none() | st.integers(0, 60))
    def take_over(self, lives: int | None) -> None:
        self.new_writer()
        if not self.change(self.store.acquire_lease, self.newest, lives):
            self.new_writer()

    @rule()
    @precondition(lambda self: bool(self.retired))
    def a_sleeper_wakes_up(self) -> None:
        """A writer that was taken over can change nothing, whatever it tries."""
        self.store.acquire_lease()
        before = listing(self.root)
        sleeper = self.retired[-1]
        if sleeper._lease is None:
            return
        sleeper._disk = Filesystem()
        for attempt in (
            lambda: sleeper.save((self.newest or 0) + 1, content(1)),
            lambda: sleeper.make_final(),
            lambda: sleeper.supersede(0),
        ):
            with pytest.raises(CheckpointError):
                attempt()
        assert listing(self.root) == before

    @invariant()
    def a_fresh_reader_finds_it(self) -> None:
        if hasattr(self, "root"):
            assert newest(self.root) == self.newest


def listing(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in sorted(root.rglob("*"))]


Histories.TestCase.settings = settings(
    max_examples=size(60, 250),
    stateful_step_count=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = pytest.mark.slow(Histories.TestCase)
