"""Committed folders and their one writer: refused, taken over, pruned, damaged, forged, and out of space."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ci_llm.checkpoints import manifest
from ci_llm.checkpoints.layout import find_checkpoint, numbered_steps
from ci_llm.checkpoints.lease import OWNER_FILE, Lease, Owner, acquire_lease
from ci_llm.checkpoints.manifest import FORMAT_VERSION, MANIFEST, FileImage, check_name, digest, verify_folder
from ci_llm.checkpoints.state_files import read_safetensors
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.core.durable import DISK, Filesystem, write_bytes
from ci_llm.core.run_status import started_since_boot_s
from ci_llm.errors import CheckpointError, DamagedCheckpoint, WriterBusy
from tests.support.bit_flips import flip
from tools.testbed.disks import CachedDisk, FailingDisk, FullDisk, MortalDisk
from tools.testbed.events import DEADLINE_S


def files(step: int, size: int = 40) -> dict[str, FileImage]:
    text = f"step {step} ".encode() * size
    return {"agent0/adapter_config.json": FileImage((text[:9],)), "optimizer.safetensors": FileImage((text, b"end"))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def visible(folder: Path) -> list[str]:
    return [name for name in names(folder) if not name.startswith(".")]


class Run:
    """A folder and the stores opened on it, closed at the end; what was said is kept."""

    def __init__(self, directory: Path, said: list[str]) -> None:
        self.directory, self.said = directory, said
        self.stores: list[CheckpointStore] = []

    def open(self, *steps: int, **options: Any) -> CheckpointStore:
        """A store that has saved these steps."""
        options.setdefault("disk", CachedDisk())
        self.stores.append(CheckpointStore(self.directory, **options))
        for step in steps:
            self.stores[-1].save(step, files(step))
        return self.stores[-1]

    def silence(self, seconds: float = 1000.0) -> None:
        """Let every heartbeat be that old."""
        for work in self.directory.glob(".attempt-*/*/"):
            os.utime(work, (time.time() - seconds,) * 2)


@pytest.fixture
def run(tmp_path: Path, said: list[str]) -> Iterator[Run]:
    run = Run(tmp_path / "run", said)
    yield run
    for store in run.stores:
        store.close()


def elsewhere(number: int = 1, **changes: Any) -> Owner:
    """A writer on another machine."""
    return Owner(**{"machine": f"node{number}", "pid": 4711} | changes)


def round_of(job: str, number: str) -> dict[str, str]:
    """What torchrun tells of a round."""
    return {"elastic_job": job, "elastic_round": number}


# Committing and pruning


def test_a_checkpoint_is_committed_whole_with_its_manifest(run: Run) -> None:
    result = run.open().save(7, files(7), forms={"optimizer": "tensors"}, info={"epoch": 0.5, "rows": (1, 2)})
    assert (result.saved, result.note) == (True, "")
    _, manifest, contents = run.open().read(7)
    assert (manifest.step, manifest.attempt, manifest.info) == (7, 1, {"epoch": 0.5, "rows": (1, 2)})
    assert contents["optimizer.safetensors"] == b"step 7 " * 40 + b"end"
    assert result.nbytes == sum(map(len, contents.values()))
    written = json.loads((run.directory / "checkpoint_step_7" / MANIFEST).read_bytes())
    assert (written["step"], written["epoch"], written["format_version"]) == (7, 0.5, FORMAT_VERSION)


def test_steps_are_sorted_as_numbers(run: Run) -> None:
    store = run.open(9, 200, 1000, save_total_limit=2)
    assert numbered_steps(store.directory) == [200, 1000]
    assert store.latest_step() == 1000
    store.save(1001, files(1001))
    assert numbered_steps(store.directory) == [1000, 1001]


def test_a_damaged_folder_of_a_higher_number_does_not_push_out_the_new_one(run: Run) -> None:
    store = run.open(1, 5, save_total_limit=1)
    flip(run.directory / "checkpoint_step_5" / "optimizer.safetensors", 5)
    assert store.save(2, files(2)).saved
    assert store.latest_step() == 2


def test_a_copied_folder_with_a_higher_number_does_not_hide_later_steps(run: Run) -> None:
    store = run.open(3, save_total_limit=2)
    shutil.copytree(run.directory / "checkpoint_step_3", run.directory / "checkpoint_step_9")
    assert store.save(4, files(4)).saved
    assert store.latest_step() == 4
    assert "it is a copy of step 3 under another name" in run.said[-1]
    assert visible(run.directory) == ["checkpoint_step_3", "checkpoint_step_4", "quarantine"]


def test_saving_a_step_again_changes_nothing_and_says_so(run: Run) -> None:
    store = run.open(1)
    before = (run.directory / "checkpoint_step_1" / MANIFEST).read_bytes()
    result = store.save(1, files(99))
    assert (result.saved, result.note) == (False, "step 1 is saved already")
    assert (run.directory / "checkpoint_step_1" / MANIFEST).read_bytes() == before


def test_a_step_with_a_damaged_folder_can_be_saved_again(run: Run) -> None:
    store = run.open(1)
    flip(run.directory / "checkpoint_step_1" / "optimizer.safetensors", 5)
    assert store.save(1, files(1)).saved
    assert store.latest_step() == 1
    assert visible(run.directory) == ["checkpoint_step_1", "quarantine"]


def test_the_final_checkpoint_counts_with_its_step_and_is_written_again(run: Run) -> None:
    store = run.open()
    with pytest.raises(CheckpointError, match="no step is committed"):
        store.make_final()
    store.save(1, files(1))
    store.make_final({"README.md": b"one"})
    store.save(2, files(2))
    assert store.make_final({"README.md": b"two"}).step == 2
    final = run.directory / "final_checkpoint"
    assert (final / "README.md").read_bytes() == b"two"
    (final / "README.md").write_bytes(b"mine")  # a copy: editing it must not hurt the step
    verify_folder(store.path(2))
    shutil.rmtree(run.directory / "checkpoint_step_2")
    assert store.latest_step() == 1
    assert store.all_steps() == [1]
    store.make_final()
    shutil.rmtree(run.directory / "checkpoint_step_1")
    assert store.latest_step() == 1
    assert store.read(1).manifest.step == 1


def test_a_step_held_only_by_the_final_checkpoint_gets_a_folder_before_that_is_replaced(run: Run) -> None:
    store = run.open(1)
    step = run.directory / "checkpoint_step_1"
    inode = step.stat().st_ino
    store.make_final()
    assert step.stat().st_ino == inode, "a step that has its folder is not written again"
    store.delete(1)
    assert not step.exists()
    assert store.make_final({"README.md": b"two"}).saved
    assert verify_folder(store.path(1)).step == 1
    assert step.exists()
    assert not (step / "README.md").exists()


@pytest.mark.parametrize("holds_its_step", [False, True], ids=["of a newer step", "the only one of its step"])
def test_a_final_checkpoint_that_finds_no_space_is_dropped_and_the_one_before_stays(
    holds_its_step: bool, run: Run
) -> None:
    disk = FullDisk()
    disk.full = False
    store = run.open(1, disk=disk)
    assert store.make_final({"README.md": b"one"}).saved
    if holds_its_step:
        store.delete(1)
    else:
        store.save(2, files(2))
    disk.full = True
    result = store.make_final({"README.md": b"two"})
    assert (result.step, result.saved, result.cause is None) == (1 if holds_its_step else 2, False, False)
    assert "final_checkpoint is dropped" in result.note
    assert (run.directory / "final_checkpoint" / "README.md").read_bytes() == b"one"
    assert 1 in store.all_steps()


def test_a_step_below_0_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="counts from 0 on, not -1"):
        run.open().save(-1, files(1))


def test_going_back_moves_newer_ones_and_a_newer_final_aside(run: Run) -> None:
    store = run.open(1, 2, 3)
    store.make_final()
    moved = store.supersede(1)
    assert sorted(path.name for path in moved) == ["checkpoint_step_2", "checkpoint_step_3", "final_checkpoint"]
    assert store.latest_step() == 1
    store.save(2, files(22))
    store.supersede(1)
    assert names(run.directory / "superseded") == [
        "checkpoint_step_2",
        "checkpoint_step_2.2",
        "checkpoint_step_3",
        "final_checkpoint",
    ]
    verify_folder(run.directory / "superseded" / "checkpoint_step_2.2")


def test_a_whole_run_is_set_aside_under_a_number_that_no_other_had(run: Run) -> None:
    store = run.open()
    (run.directory / "overwritten" / "3").mkdir(parents=True)
    (run.directory / "overwritten" / "notes").mkdir()
    store.save(1, files(1))
    (run.directory / "metrics.jsonl").write_text("{}\n")
    place = store.set_aside([run.directory / "checkpoint_step_1", run.directory / "metrics.jsonl"])
    assert place == run.directory / "overwritten" / "4"
    assert names(place) == ["checkpoint_step_1", "metrics.jsonl"]
    verify_folder(place / "checkpoint_step_1")
    assert store.all_steps() == []
    store.save(1, files(1))
    assert store.set_aside([run.directory / "checkpoint_step_1"]).name == "5"


def test_readers_of_the_result_find_the_final_checkpoint_first(run: Run) -> None:
    store = run.open()
    assert find_checkpoint(run.directory) is None
    for step in (1, 2):
        store.save(step, files(step))
    step, final = run.directory / "checkpoint_step_2", run.directory / "final_checkpoint"
    assert find_checkpoint(run.directory, final_first=True) == step
    store.make_final()
    found = [find_checkpoint(run.directory, final_first=first) for first in (False, True)]
    assert found == [step, final]
    assert [find_checkpoint(folder) for folder in (step, final)] == [step, final]


def test_a_final_checkpoint_that_cannot_be_replaced_is_moved_back(run: Run) -> None:
    for lives in itertools.count():
        disk = FailingDisk(10**9, errno.EIO)
        store = run.open(1, disk=disk)
        assert store.make_final({"README.md": b"one"}).saved
        disk.lives = disk.changes + lives
        result = store.make_final({"README.md": b"two"})
        readme = (run.directory / "final_checkpoint" / "README.md").read_bytes()
        assert readme == (b"two" if result.saved else b"one"), lives
        store.close()
        if disk.changes <= disk.lives:
            break
    assert lives > 6


class BreakingDisk(FailingDisk):
    """Fails change number `lives`, and every one after it until `lives` is set higher."""

    def spend(self) -> None:
        self.changes += 1
        if self.changes > self.lives:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("whole_run", [False, True])
@pytest.mark.parametrize("kind", [FailingDisk, BreakingDisk], ids=["once", "from then on"])
def test_a_disk_that_refuses_a_move_loses_no_checkpoint(
    kind: type[FailingDisk], whole_run: bool, tmp_path: Path
) -> None:
    steps = ["checkpoint_step_1", "checkpoint_step_2", "checkpoint_step_3"]
    for lives in itertools.count():
        run, disk = Run(tmp_path / str(lives), []), kind(10**9, errno.EIO)
        store = run.open(1, 2, 3, disk=disk, owner=elsewhere(1))
        disk.lives = disk.changes + lives
        moved = False
        with contextlib.suppress(OSError):
            if whole_run:
                moved = store.set_aside([run.directory / step for step in steps]).is_dir()
            else:
                moved = len(store.supersede(1)) == 2
        if whole_run and kind is FailingDisk:
            assert moved or store.all_steps() == [1, 2, 3], "everything is where it was"
        store.close()
        run.silence()
        run.open(owner=elsewhere(2)).acquire_lease()
        held = [
            path for place in ("", "superseded/", "overwritten/*/") for path in run.directory.glob(f"{place}check*")
        ]
        assert sorted(path.name for path in held) == steps, lives
        for path in held:
            verify_folder(path)
        if moved:
            break
    assert lives > 6


# One writer


def test_a_second_live_writer_is_refused_with_the_name_of_the_first(run: Run) -> None:
    run.open().acquire_lease()
    with pytest.raises(WriterBusy, match=f"this very process .process {os.getpid()} on") as refusal:
        run.open(1)
    assert str(run.directory) in str(refusal.value)
    assert names(run.directory) == [".attempt-1"]


def test_a_writer_on_another_machine_lives_as_long_as_its_heartbeat_is_fresh(run: Run) -> None:
    run.open(owner=elsewhere(1)).acquire_lease()
    with pytest.raises(WriterBusy, match=r"process 4711 on node1 .*heartbeat \d+ s ago"):
        run.open(owner=elsewhere(2)).acquire_lease()
    run.silence(seconds=5)
    with pytest.raises(WriterBusy):
        run.open(owner=elsewhere(2)).acquire_lease()
    run.silence(seconds=600)
    assert run.open(owner=elsewhere(2)).acquire_lease() == 2
    assert "attempt 1 (process 4711 on node1) is taken over: no heartbeat for 10 min" in run.said[0]


def test_a_clock_that_was_set_back_does_not_keep_a_lease_alive(run: Run) -> None:
    store = run.open(1, owner=elsewhere(1))
    run.silence(seconds=-30)
    with pytest.raises(WriterBusy, match="writes to this folder"):
        run.open(owner=elsewhere(2)).acquire_lease()
    run.silence(seconds=-3600)
    assert run.open(owner=elsewhere(2)).acquire_lease() == 2
    assert "in the future: the clock was set back" in run.said[-1]
    assert not store.holds_lease()


def test_a_released_folder_is_free_at_once(run: Run) -> None:
    first = run.open()
    assert first.acquire_lease() == 1
    first.close()
    assert run.open().acquire_lease() == 2
    assert run.said == []


def test_a_process_that_is_gone_is_taken_over_at_once(run: Run) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = Owner.this_process()
    holder = Owner(here.machine, gone.pid, here.started_since_boot_s)
    run.open(owner=holder).acquire_lease()
    assert run.open().acquire_lease() == 2
    assert f"process {gone.pid} is gone" in run.said[0]


@pytest.mark.parametrize(
    ("then", "now", "dead"),
    [
        (elsewhere(1, slurm_job="7"), elsewhere(2, slurm_job="7"), False),
        (elsewhere(1, slurm_job="7"), elsewhere(2, slurm_job="7", slurm_restarts="1"), True),
        (elsewhere(1, slurm_job="7"), elsewhere(2, slurm_job="8"), False),
        (elsewhere(1), elsewhere(2), False),
        (elsewhere(1, **round_of("crowd", "a:1")), elsewhere(2, **round_of("crowd", "a:2")), True),
        (elsewhere(1, **round_of("crowd", "a:1")), elsewhere(2, **round_of("crowd", "a:1")), False),
        (elsewhere(1, **round_of("crowd", "a:1")), elsewhere(2, **round_of("other", "a:2")), False),
    ],
    ids=[
        *("another node of the job", "the job requeued", "another job", "no job"),
        *("a later round of torchrun", "the same round", "a round of another job"),
    ],
)
def test_a_job_or_a_round_that_was_started_again_has_no_earlier_writer(then: Owner, now: Owner, dead: bool) -> None:
    assert (then.why_gone(now, silent_s=1.0, timeout_s=60.0) is not None) == dead


def test_a_later_process_with_the_same_pid_is_not_the_writer() -> None:
    here = Owner.this_process()
    assert here.why_gone(here, 0.0, 60.0) is None
    assert here.started_since_boot_s is not None
    recycled = Owner(here.machine, here.pid, here.started_since_boot_s - 3600)
    assert recycled.why_gone(here, 0.0, 60.0) == f"process {here.pid} is gone"


def test_a_changed_clock_does_not_make_a_living_owner_look_dead(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run.open()
    store.acquire_lease()
    boot, start = psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 3600)  # the kernel computes it back from the present
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: start(process) + 3600)
    here = Owner.this_process()
    for other in (here, replace(here, pid=4711)):
        with pytest.raises(WriterBusy, match="writes to this folder"):
            run.open(owner=other).acquire_lease()
    assert store.holds_lease()


def test_a_zombie_counts_as_dead(run: Run) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Owner.this_process()
    holder = Owner(here.machine, zombie.pid, started_since_boot_s(zombie.pid))
    assert holder.why_gone(here, 0.0, 60.0) is None
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert holder.why_gone(here, 0.0, 60.0) is not None
    zombie.communicate()


@pytest.mark.parametrize("hurt", [lambda file: file.write_text("{"), Path.unlink], ids=["damaged", "lost"])
def test_an_owner_that_cannot_be_read_is_judged_by_its_heartbeat(run: Run, hurt: Callable[[Path], object]) -> None:
    run.open(owner=elsewhere(1)).acquire_lease()
    hurt(run.directory / ".attempt-1" / OWNER_FILE)
    with pytest.raises(WriterBusy, match="process 0 on unknown writes to this folder"):
        run.open(owner=elsewhere(2)).acquire_lease()
    run.silence()
    assert run.open(owner=elsewhere(2)).acquire_lease() == 2


class Interposed(MortalDisk):
    """A disk that calls a function before change number `moment`."""

    def __init__(self, moment: int, happen: Callable[[], object]) -> None:
        super().__init__()
        self._moment, self._happen = moment, happen

    def spend(self) -> None:
        self.changes += 1
        if self.changes == self._moment:
            self._happen()


@pytest.mark.parametrize("sweeps", [False, True])
def test_of_two_attempts_that_interleave_exactly_one_writes(sweeps: bool, tmp_path: Path) -> None:
    """The other attempt has already swept leftovers, the draft of this one included, or has not yet."""
    winners = []
    for moment in itertools.count(1):
        run = Run(tmp_path / str(moment), [])
        leases: list[Lease] = []
        other = run.open(owner=elsewhere(2))

        def get_in(run: Run = run, other: CheckpointStore = other, leases: list[Lease] = leases) -> None:
            with contextlib.suppress(WriterBusy):
                if sweeps:
                    other.acquire_lease()
                else:
                    leases.append(acquire_lease(run.directory, owner=elsewhere(2), timeout_s=60.0)[0])

        disk = Interposed(moment, get_in)
        one = run.open(owner=elsewhere(1), disk=disk)
        with contextlib.suppress(WriterBusy):
            one.acquire_lease()
        held = [one.holds_lease(), other.holds_lease() or any(lease.is_held() for lease in leases)]
        if disk.changes < moment:
            break
        assert sorted(held) == [False, True], moment
        assert len([name for name in names(run.directory) if name.startswith(".attempt")]) == 1
        winners.append(held.index(True))
        for end in (one.close, other.close, *(lease.release for lease in leases)):
            end()
    assert {*winners} == {0, 1}


@pytest.mark.parametrize("times", [1, 100])
def test_an_attempt_that_read_the_same_state_gives_way_and_tries_again(times: int, run: Run) -> None:
    """The other attempt reads before this rename and renames after it, to another number."""

    class Overtaken(CachedDisk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name.startswith(".attempt") and others:
                (target.parent / f".attempt-{others.pop()}").mkdir()

    others = [*range(10 * times, 0, -10)]
    if times == 1:
        assert run.open(disk=Overtaken()).acquire_lease() == 11
        assert names(run.directory) == [".attempt-11"]
    else:
        with pytest.raises(WriterBusy, match="again and again"):
            run.open(disk=Overtaken()).acquire_lease()
        assert not [name for name in names(run.directory) if name.startswith(".claim")]
        run.open().acquire_lease()


def test_of_many_attempts_that_start_at_once_one_writes(run: Run) -> None:
    for heat in range(10):
        barrier = threading.Barrier(6)
        stores = [run.open(owner=elsewhere(heat * 10 + i)) for i in range(6)]
        won: list[int] = []

        def race(store: CheckpointStore, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            with contextlib.suppress(WriterBusy):
                won.append(store.acquire_lease())

        threads = [threading.Thread(target=race, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [heat + 1]
        assert names(run.directory) == [f".attempt-{heat + 1}"]
        for store in stores:
            store.close()


def test_an_attempt_that_slept_through_a_takeover_can_change_nothing(run: Run) -> None:
    sleeper = run.open(1, owner=elsewhere(1), save_total_limit=1)
    staging = sleeper.staging
    run.silence()
    owner = run.open(2, owner=elsewhere(2))
    owner.make_final()
    before = sorted(run.directory.rglob("*"))
    attempts: list[Callable[[], object]] = [
        lambda: sleeper.save(3, files(3)),
        lambda: sleeper.make_final(),
        lambda: sleeper.supersede(0),
        lambda: sleeper.delete(2),
        lambda: sleeper.staging,
    ]
    for attempt in attempts:
        with pytest.raises(WriterBusy, match="attempt 1 was taken over"):
            attempt()
    with pytest.raises(FileNotFoundError):
        write_bytes(run.directory / "status.json", b"I am the owner", staging=staging)
    assert (sleeper.holds_lease(), owner.holds_lease()) == (False, True)
    sleeper.close()
    assert sorted(run.directory.rglob("*")) == before
    assert owner.save(3, files(3)).saved


class FallsAsleep(CachedDisk):
    """Lets another attempt take over just before the n-th rename, as a machine that was suspended there."""

    def __init__(self, renames: int, meanwhile: Callable[[], object]) -> None:
        self.renames, self.meanwhile = renames, meanwhile

    def rename(self, source: Path, target: Path) -> None:
        self.renames -= 1
        if self.renames == 0:
            self.meanwhile()
        super().rename(source, target)


@pytest.mark.parametrize("rename", [2, 3], ids=["before the commit", "before pruning"])
def test_a_takeover_in_the_middle_of_a_save_stops_it_there(run: Run, rename: int) -> None:
    first = run.open(1, owner=elsewhere(1))
    first.close()

    def meanwhile() -> None:
        run.silence()
        run.open(owner=elsewhere(3)).acquire_lease()

    sleeper = run.open(owner=elsewhere(2), save_total_limit=1, disk=FallsAsleep(rename + 1, meanwhile))
    sleeper.acquire_lease()
    with pytest.raises(WriterBusy):
        sleeper.save(2, files(2))
    assert visible(run.directory) == ["checkpoint_step_1", "checkpoint_step_2"][: rename - 1]
    assert run.open().latest_step(quarantine=False) == rename - 1


SLEEPER = """
import sys
from pathlib import Path
from ci_llm.errors import WriterBusy
from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"a.json": FileImage((b"1",))})
print("saved", flush=True)
sys.stdin.readline()
try:
    store.save(2, {"a.json": FileImage((b"2",))})
except WriterBusy as refusal:
    print(refusal.what, flush=True)
    sys.exit(refusal.exit_code)
"""


def test_a_stopped_process_is_taken_over_and_can_write_nothing_when_it_wakes(run: Run) -> None:
    """A real process with its real heartbeat is stopped by SIGSTOP and later continued."""
    command = [sys.executable, "-c", SLEEPER, str(run.directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as sleeper:  # type: ignore[call-overload]
        try:
            assert sleeper.stdout.readline() == "saved\n"
            with pytest.raises(WriterBusy, match=f"process {sleeper.pid} on"):
                run.open().acquire_lease()
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)  # from here on its heart beats no more
            run.silence()
            owner = run.open(3)
            os.kill(sleeper.pid, signal.SIGCONT)
            told, _ = sleeper.communicate("continue\n", timeout=DEADLINE_S)
            assert sleeper.returncode == WriterBusy.exit_code
            assert "attempt 1 was taken over" in told
        finally:
            sleeper.kill()
    assert numbered_steps(owner.directory) == [1, 3]
    assert owner.latest_step() == 3


@pytest.mark.parametrize("refusals", [[], [errno.EIO, errno.ESTALE]], ids=["a sound disk", "a disk that hiccups"])
def test_the_lease_is_renewed_until_it_is_released(refusals: list[int], run: Run) -> None:
    beats = threading.Semaphore(0)

    class Heartbeat(CachedDisk):
        def touch(self, path: Path) -> None:
            beating = threading.current_thread().name == "ci_llm lease"
            if beating and refusals:
                raise OSError(refusals.pop(), "a hiccup")
            super().touch(path)
            if beating:
                beats.release()

    before = set(threading.enumerate())
    store = run.open(writer_timeout=0.06, disk=Heartbeat())
    store.acquire_lease()
    assert all(beats.acquire(timeout=DEADLINE_S) for _ in range(3))
    store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()


def test_a_lease_that_could_not_be_acquired_does_not_block_others(run: Run) -> None:
    for lives in range(100):
        disk = FailingDisk(lives, errno.EIO)
        store = run.open(disk=disk, owner=elsewhere(1))
        with contextlib.suppress(CheckpointError):
            store.acquire_lease()
        if store._lease is None:
            store = run.open(owner=elsewhere(2))
            store.acquire_lease()
        if disk.changes <= lives:
            break
        disk.lives = 10**9  # releasing the lease is not what fails here
        store.close()
    assert 8 < lives < 99


def test_a_lease_that_is_not_on_the_disk_is_not_held(run: Run) -> None:
    class Liar(CachedDisk):
        def write(self, handle: int, data: Any) -> int:
            return len(data)

    with pytest.raises(CheckpointError, match="does not hold what was written"):
        run.open(disk=Liar()).acquire_lease()
    assert names(run.directory) == []


def test_a_forked_child_neither_holds_nor_releases_the_lease(run: Run) -> None:
    store = run.open()
    store.acquire_lease()
    if (pid := os.fork()) == 0:
        store.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.holds_lease()


def test_leftovers_of_dead_attempts_are_swept_and_half_moved_checkpoints_arrive(run: Run) -> None:
    dead = run.open(1, 2, owner=elsewhere(1))
    (dead.staging / "draft-half").mkdir()
    (dead.staging / "superseded").mkdir()
    (run.directory / "checkpoint_step_2").rename(dead.staging / "superseded" / "checkpoint_step_2")
    (run.directory / ".status.json.0a.partial").write_bytes(b"half")
    (run.directory / ".status.json.0b.partial").write_bytes(b"at work")
    for token in (".launch-0a.json", ".launch-0b.json"):
        (run.directory / token).write_bytes(b"{}")
    for old in (".status.json.0a.partial", ".launch-0a.json"):
        os.utime(run.directory / old, (0, 0))
    (run.directory / ".claim-lost").mkdir()
    run.silence()
    run.open(owner=elsewhere(2)).acquire_lease()
    young = [".launch-0b.json", ".status.json.0b.partial"]
    assert names(run.directory) == [".attempt-2", *young, "checkpoint_step_1", "superseded"]
    verify_folder(run.directory / "superseded" / "checkpoint_step_2")


def test_a_disk_that_fails_while_the_lease_is_acquired_is_one_message(run: Run) -> None:
    class Broken(CachedDisk):
        def touch(self, path: Path) -> None:
            if ".attempt-" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().touch(path)

    with pytest.raises(CheckpointError, match=r"no checkpoint can be written: .*Input/output error"):
        run.open(disk=Broken()).acquire_lease()


# Damage


@pytest.mark.slow
def test_every_flipped_bit_and_every_lost_byte_is_noticed_and_heals(run: Run) -> None:
    """300 draws over every byte of every file, the manifest included."""
    writer = run.open(1)
    writer.save(2, files(2), info={"epoch": 0.25, "fingerprints": {"data": "abc"}})
    folder, kept = run.directory / "checkpoint_step_2", run.directory / "kept"
    shutil.copytree(folder, kept)
    draw = random.Random(0)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    assert len(paths) == 3
    for trial in range(300):
        [path] = draw.choices(paths, sizes)
        if trial % 3:
            flip(path, draw.randrange(path.stat().st_size * 8))
        else:
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        with pytest.raises(DamagedCheckpoint, match="checkpoint_step_2 is damaged"):
            verify_folder(folder)
        assert writer.latest_step() == 1
        shutil.rmtree(run.directory / "quarantine")
        shutil.copytree(kept, folder)
        assert writer.latest_step() == 2
        writer.free_read_bytes()  # what it has read is sound, whatever becomes of the disk
    assert len(run.said) == 300


def test_a_damaged_checkpoint_is_named_and_moved_and_the_one_before_is_taken(run: Run) -> None:
    writer = run.open(1, 2)
    writer.close()
    flip(run.directory / "checkpoint_step_2" / "optimizer.safetensors", 100)
    assert run.open().latest_step(quarantine=False) == 1
    assert "optimizer.safetensors has another digest" in run.said[-1]
    assert run.said[-1].endswith("; passed over")
    reader = run.open()
    assert reader.latest_step() == 1
    assert "checkpoint_step_2 is damaged: optimizer.safetensors" in run.said[-1]
    assert visible(run.directory) == ["checkpoint_step_1", "quarantine"]
    assert not reader.holds_lease(), "who only reads keeps no training away"
    flip(run.directory / "checkpoint_step_1" / "optimizer.safetensors", 100)
    writer.acquire_lease()
    assert writer.latest_step() is None
    assert writer.holds_lease()


def reading_is_preceded_by(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` before the next manifest is read."""
    real = manifest.read_exactly

    def read(path: Path, size: int) -> bytes:
        monkeypatch.setattr(manifest, "read_exactly", real)
        act()
        return real(path, size)

    monkeypatch.setattr(manifest, "read_exactly", read)


def test_a_read_error_does_not_quarantine_a_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run.open(1)
    reading_is_preceded_by(fail, monkeypatch)
    assert run.stores[0].latest_step() == 1
    assert (run.said, visible(run.directory)) == ([], ["checkpoint_step_1"])


def test_a_reader_finds_the_step_that_a_writer_commits_while_it_reads(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = run.open(1, save_total_limit=1)
    reading_is_preceded_by(lambda: writer.save(2, files(2)), monkeypatch)
    assert run.open().latest_step(quarantine=False) == 2


def test_a_damaged_checkpoint_is_skipped_and_not_moved_while_another_process_writes(run: Run) -> None:
    writer = run.open(1, 2, owner=elsewhere(1))
    flip(run.directory / "checkpoint_step_2" / "optimizer.safetensors", 100)
    assert run.open(owner=elsewhere(2)).latest_step() == 1
    assert "passed over where it is: process 4711 on node1" in run.said[-1]
    assert numbered_steps(writer.directory) == [1, 2]


def test_a_damaged_final_checkpoint_is_quarantined_too(run: Run) -> None:
    store = run.open(1)
    store.make_final()
    flip(run.directory / "final_checkpoint" / MANIFEST, 100)
    assert store.latest_step() == 1
    assert visible(run.directory) == ["checkpoint_step_1", "quarantine"]
    store.make_final()
    flip(run.directory / "checkpoint_step_1" / "optimizer.safetensors", 100)
    assert run.open().read(1).files.keys() == {"agent0/adapter_config.json", "optimizer.safetensors"}
    assert store.latest_step() == 1
    assert visible(run.directory) == ["final_checkpoint", "quarantine"]


@pytest.mark.parametrize("name", ["final_checkpoint", "checkpoint_step_1", "checkpoint_step_2", "checkpoint_step_9"])
@pytest.mark.parametrize("mark", ["beginning.json", "attempts/1/began.json"])
def test_a_run_that_has_the_name_of_a_checkpoint_is_left_alone(name: str, mark: str, run: Run) -> None:
    """Such a run was moved to quarantine, or pruned, while it was training."""
    record = run.directory / name / mark
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    store = run.open(save_total_limit=1)
    for step in (2, 3):
        assert store.save(step, files(step)).saved == (name != f"checkpoint_step_{step}")
    assert store.latest_step() == 3
    assert (store.make_final().saved, record.read_text()) == (name != "final_checkpoint", "{}")
    assert all(path.name not in ("quarantine", "superseded") for path in run.directory.iterdir())
    assert all("it is a run" in line for line in run.said)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ENOTCONN])
def test_a_file_without_read_permission_is_not_quarantined(
    run: Run, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run.open(1)

    def refuse(*_: object) -> bytes:
        raise OSError(code, os.strerror(code))

    [name, record], *_ = store.read(1).manifest.files.items()
    monkeypatch.setattr(manifest, "read_exactly", refuse)  # and not by chmod: root may read everything
    monkeypatch.setattr(Path, "read_bytes", refuse)
    for read in (store.latest_step, lambda: manifest.read_file(run.directory / "checkpoint_step_1", name, record)):
        with pytest.raises(CheckpointError, match="checkpoint_step_1 cannot be read") as refusal:
            read()
        assert not isinstance(refusal.value, DamagedCheckpoint)
    assert visible(run.directory) == ["checkpoint_step_1"]


def test_a_checkpoint_that_cannot_be_read_back_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run.open(1)
    failing_once(monkeypatch)
    result = store.save(2, files(2))
    assert result.note == f"checkpoint_step_2 is dropped: {OSError(errno.ESTALE, os.strerror(errno.ESTALE))}"
    assert visible(run.directory) == ["checkpoint_step_1"]
    failing_once(monkeypatch)
    (run.directory / "draft").mkdir()
    part = {"w.safetensors": FileImage((b"weights",))}
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        store.write_part(Path("draft"), part, {name: image.record() for name, image in part.items()})


def failing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file that is verified cannot be read, as where a network holds the disk."""
    read = manifest.read_chunks

    def fail(*_: object, **__: object) -> Iterator[bytes]:
        monkeypatch.setattr(manifest, "read_chunks", read)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(manifest, "read_chunks", fail)


# Forgery


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a manifest as somebody would who knows the format, digest and all."""
    body = json.loads((folder / MANIFEST).read_bytes())
    del body["digest"]
    change(body)
    text = json.dumps(body, indent=1) + "\n"
    body["digest"] = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(body, indent=1) + "\n")


def entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "digest": digest([data])}


@pytest.fixture
def target(run: Run) -> Path:
    run.open(1)
    return run.directory / "checkpoint_step_1"


def refused(folder: Path) -> str:
    with pytest.raises(DamagedCheckpoint) as refusal:
        verify_folder(folder)
    return refusal.value.what


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: (folder / "agent0/evil.json").write_bytes(b"{}"), "does not know: agent0/evil.json"),
        (lambda folder: os.mkfifo(folder / "pipe.json"), "pipe.json is a link or a special file"),
        (lambda folder: os.truncate(folder / MANIFEST, 1 << 30), f"the manifest has {1 << 30} bytes"),
        (
            lambda folder: os.truncate(folder / "optimizer.safetensors", 1 << 40),
            "another size than the manifest says: optimizer.safetensors",
        ),
    ],
    ids=["planted", "special", "a huge manifest", "a file that grew"],
)
def test_a_file_that_was_never_written_so_is_refused_and_not_read(
    target: Path, harm: Callable[[Path], object], told: str
) -> None:
    harm(target)
    assert told in refused(target)


@pytest.mark.parametrize("name", ["optimizer.pkl", "agent0/model.bin", "x.PT", "rng.pickle", "y.npz"])
def test_a_pickle_is_refused_even_if_the_manifest_knows_it(target: Path, name: str) -> None:
    (target / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    forge(target, lambda body: body["files"].update({name: entry((target / name).read_bytes())}))
    assert "holds no pickle" in refused(target)


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "a/../../secret.json", "a//b", ".", "a\\b", "", "a\0b"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(target: Path, name: str) -> None:
    (target.parent / "secret.json").write_bytes(b"{}")
    forge(target, lambda body: body["files"].update({name: entry(b"{}")}))
    assert "must not hold a file named" in refused(target)
    with pytest.raises(ValueError, match="must not hold"):
        check_name(name)


def test_nothing_is_written_outside(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not hold a file named"):
        run.open().save(1, {"../../outside.json": FileImage((b"x",))})
    assert names(tmp_path) == ["run"]
    assert visible(run.directory) == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("file", "optimizer.safetensors is a link"),
        ("folder", "agent0 is a link"),
        ("checkpoint", "it is a link"),
        ("manifest", os.strerror(errno.ELOOP)),
    ],
)
def test_links_are_refused(target: Path, what: str, told: str) -> None:
    aside = target.parent / "aside"
    victim = {
        "file": target / "optimizer.safetensors",
        "folder": target / "agent0",
        "checkpoint": target,
        "manifest": target / MANIFEST,
    }[what]
    victim.rename(aside)
    victim.symlink_to(aside)
    assert told in refused(target)


@pytest.mark.parametrize("length", [1 << 40, 101_000_000, 2**64 - 1])
def test_a_huge_header_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="header"):
        read_safetensors(length.to_bytes(8, "little") + b"{" + b" " * 100)


# Space and failing disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_older_checkpoints_stay_and_the_next_save_works_whichever_change_fails(
    tmp_path: Path, code: int, said: list[str]
) -> None:
    before = {}
    for lives in range(200):
        said.clear()
        run = Run(tmp_path / f"{lives}", said)
        run.open(1)
        run.stores[0].close()
        disk = FailingDisk(10**9, code)
        store = run.open(disk=disk, save_total_limit=1)
        store.acquire_lease()
        disk.lives = disk.changes + lives
        result = store.save(2, files(2))
        before[lives] = result
        assert run.open().latest_step(quarantine=False) == (2 if result.saved else 1), result
        if not result.saved:
            assert "checkpoint_step_2 is dropped" in result.note
            assert os.strerror(code) in result.note
        disk.lives = 10**9
        assert store.save(3, files(3)).saved
        assert names(run.directory / ".attempt-2" / store.staging.name) == [] or "pruned" in result.note or run.said
        store.close()
        if disk.changes <= lives or (result.saved and not result.note and not run.said):
            break
    assert lives > 15


def test_bytes_lost_without_an_error_are_noticed_by_reading_back(run: Run) -> None:
    class Liar(CachedDisk):
        def write(self, handle: int, data: Any) -> int:
            if b"step 2" in bytes(data):
                return len(data)
            return super().write(handle, data)

    store = run.open(1, disk=Liar())
    result = store.save(2, files(2))
    assert not result.saved
    assert "another size" in result.note
    assert store.latest_step() == 1


def test_without_space_nothing_is_even_begun(run: Run) -> None:
    disk = FullDisk()
    store = run.open(disk=disk)
    result = store.save(1, files(1))
    assert not result.saved
    assert "are needed, 0 are free" in result.note
    disk.full = False
    assert store.save(1, files(1)).saved


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of two megabytes."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here ({done.stderr.strip()}); run as root, with SYS_ADMIN")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


class Optimist(Filesystem):
    """A disk that always reports free space, so that the kernel must refuse the write."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 60


@pytest.mark.parametrize("disk", [DISK, Optimist()], ids=["asked before", "met while writing"])
def test_a_full_disk_drops_the_new_checkpoint_and_no_old_one(
    small_disk: Path, disk: Filesystem, said: list[str]
) -> None:
    store = CheckpointStore(small_disk / "run", disk=disk)
    results = [store.save(step, files(step, size=60_000)) for step in range(1, 7)]
    kept = [result.step for result in results if result.saved]
    assert 1 <= len(kept) < 6
    assert all("checkpoint_step" in result.note for result in results if not result.saved)
    assert [verify_folder(store.path(step)).step for step in kept] == kept
    assert store.latest_step() == kept[-1]
    store.delete(kept[0])
    assert store.save(7, files(7, size=60_000)).saved
    store.close()
