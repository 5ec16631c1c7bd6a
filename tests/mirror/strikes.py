"""A save mirrored to a real S3 server, struck at every request; what a fresh disk gets back, beside "sync the folder".

The server is moto's, as a process of its own; a proxy before it strikes the n-th request of a process that resumes from
the newest step, saves the next one and sends it. After each trial the bucket is read without the proxy:

    newest broken      the newest step that the bucket shows does not verify
    committed lost     a step that the process had acknowledged is not there, or no step verifies at all
    wrong bytes        what a restore gives differs from what was saved, and nobody says so
    stuck              the next process, on an empty disk and without faults, cannot resume and send the next step

The rival copies the folder after every save: new files up, gone ones away; its restore takes the highest number.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ci_llm.checkpoints.layout import numbered_steps, step_folder
from ci_llm.checkpoints.manifest import digest, verify_folder
from ci_llm.errors import DamagedCheckpoint
from ci_llm.mirror.objects import open_objects
from ci_llm.mirror.reader import MirrorReader
from tests.mirror import mirrored
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer
from tools.testbed.object_store import BUCKET, FaultProxy, Plan, s3_server

LOST_S = 1.0  # after which a request counts as lost in a trial that loses some


@dataclass(frozen=True)
class Strike:
    """One trial: a fault, the first request that it strikes, how many in a row, and whether the disk is empty."""

    fault: str
    at: int
    times: int = 1
    wiped: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one trial; `fired` is false if the process made fewer requests."""

    strike: Strike
    fired: bool
    harms: frozenset[str]
    saved: bool
    log: str = ""


class History:
    """One bucket's prefix over many trials: each continues where the one before stopped.

    Args:
        act: `mirrored.save_and_mirror` or `mirrored.save_and_sync`.
    """

    def __init__(self, server: ForkServer, proxy: FaultProxy, address: str, folder: Path, act: Callable[..., int]):
        self._server, self._proxy, self._address, self._act = server, proxy, address, act
        self._folder, self._count = folder, itertools.count()
        self._renew()

    def _renew(self) -> None:
        """Begin a new prefix with two steps in it: a trial has left the old one broken."""
        self._home = self._folder / f"{self._act.__name__}{next(self._count)}"
        self._home.mkdir(parents=True)
        self._url, self._step = f"s3://{BUCKET}/{self._home.name}", 0
        for _ in range(2):
            assert self._save(Plan()), self.log

    @property
    def log(self) -> str:
        """What the processes of this prefix have said."""
        return (self._home / "log").read_text()

    def _save(self, plan: Plan, *, wiped: bool = False) -> bool:
        """Save the next step and send it; whether the process says that it is there."""
        plan.kill = lambda: os.kill(int((self._home / "pid").read_text()), signal.SIGKILL)
        self._proxy.plan = plan
        self._step += 1
        (self._home / mirrored.ACKNOWLEDGED).unlink(missing_ok=True)
        arguments = {"folder": self._home, "url": self._url, "address": self._proxy.address}
        arguments["request_s"] = LOST_S if plan.fault == "timeout" else DEADLINE_S
        self._server.run(self._act, self._home / "log", **arguments, step=self._step, wiped=wiped)
        return (self._home / mirrored.ACKNOWLEDGED).exists()

    def strike(self, strike: Strike) -> Outcome:
        """One trial, and whether the next process can resume."""
        plan = Plan(strike.fault, strike.at, strike.times)
        saved = self._save(plan, wiped=strike.wiped)
        harms = set(self._harms(self._step if saved else self._step - 1))
        if not self._save(Plan(), wiped=True) or set(self._harms(self._step)):
            harms.add("stuck")
        outcome = Outcome(strike, bool(plan.struck), frozenset(harms), saved, self.log if harms else "")
        if harms:
            self._renew()
        return outcome

    def _harms(self, promised: int) -> Iterator[str]:
        mirrored.speak_to(self._address)
        look = _newest_of_mirror if self._act is mirrored.save_and_mirror else _newest_of_copy
        with tempfile.TemporaryDirectory() as scratch:
            found = look(self._url, Path(scratch))
        if found.newest_broken:
            yield "newest broken"
        if found.step is None or found.step < promised:
            yield "committed lost"
        if found.wrong_bytes:
            yield "wrong bytes"


@dataclass(frozen=True)
class Found:
    """What a fresh disk gets from the bucket: the newest step that verifies, and what is wrong with newer ones."""

    step: int | None
    newest_broken: bool
    wrong_bytes: bool


def _newest_of_mirror(url: str, _: Path) -> Found:
    reader = MirrorReader(open_objects(url))
    head = reader.head()
    assert head is not None
    opened, damage = reader.newest(head)
    if opened is None:
        return Found(None, True, False)
    step = opened.manifest.step
    wrong = {name: digest([data]) for name, data in opened.files.items()} != {
        name: record.digest for name, record in mirrored.records(step).items()
    }
    return Found(step, bool(damage), wrong)


def _newest_of_copy(url: str, scratch: Path) -> Found:
    """Every file of the bucket copied down; the newest is the highest number, as whoever copies takes it."""
    store = open_objects(url)
    for name, _ in store.list(""):
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(name))
    steps = numbered_steps(scratch)
    verified = [step for step in steps if _verifies(step_folder(scratch, step))]
    newest = steps[-1] if steps else None
    silently = newest is not None and newest not in verified and _looks_whole(step_folder(scratch, newest), newest)
    return Found(verified[-1] if verified else None, newest not in verified, silently)


def _verifies(folder: Path) -> bool:
    with contextlib.suppress(DamagedCheckpoint):
        verify_folder(folder)
        return True
    return False


def _looks_whole(folder: Path, step: int) -> bool:
    """Whether all files are there with their sizes, so that a restore without digests takes them."""
    files = {name: record.size for name, record in mirrored.records(step).items()}
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())


def strikes(faults: Iterable[str], generator: random.Random, sample: int | None, most: int) -> list[Strike]:
    """Every fault at every request, for one request and five in a row, with the disk and without it; or a sample."""
    all_of_them = [
        Strike(fault, at, times, wiped)
        for fault in faults
        for wiped in (False, True)
        for times in ((1,) if fault.startswith("kill") else (1, 5))
        for at in range(1, most + 1)
    ]
    return all_of_them if sample is None else generator.sample(all_of_them, min(sample, len(all_of_them)))


def campaign(act: Callable[..., int], wanted: Iterable[Strike], folder: Path) -> list[Outcome]:
    """Run the strikes; those that found no request to strike are left out."""
    outcomes = []
    with s3_server() as address, FaultProxy(address) as proxy, ForkServer("tests.mirror.mirrored") as server:
        history = History(server, proxy, address, folder, act)
        for strike in wanted:
            outcome = history.strike(strike)
            if outcome.fired:
                outcomes.append(outcome)
    return outcomes
