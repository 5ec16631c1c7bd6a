"""A save mirrored to a real S3 server, struck at every request; what a fresh disk gets back.

The server is moto's, as a process of its own; a proxy before it strikes the n-th request of a process that resumes from
the newest step, saves the next one and sends it. After each trial the bucket is read without the proxy:

    newest broken      the newest step that the bucket shows does not verify
    committed lost     a step that the process had acknowledged is not there, or no step verifies at all
    wrong bytes        what a restore gives differs from what was saved, and nobody says so
    stuck              the next process, on an empty disk and without faults, cannot resume and send the next step
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ci_llm.checkpoints.manifest import digest
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
    """One bucket's prefix over many trials: each continues where the one before stopped."""

    def __init__(self, server: ForkServer, proxy: FaultProxy, address: str, folder: Path) -> None:
        self._server, self._proxy, self._address = server, proxy, address
        self._folder, self._count = folder, itertools.count()
        self._renew()

    def _renew(self) -> None:
        """Begin a new prefix with two steps in it: a trial has left the old one broken."""
        self._home = self._folder / f"run{next(self._count)}"
        self._home.mkdir(parents=True)
        self.url, self._step = f"s3://{BUCKET}/{self._home.name}", 0
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
        arguments = {"folder": self._home, "url": self.url, "address": self._proxy.address}
        arguments["request_s"] = LOST_S if plan.fault == "timeout" else DEADLINE_S
        self._server.run(mirrored.save_and_mirror, self._home / "log", **arguments, step=self._step, wiped=wiped)
        return (self._home / mirrored.ACKNOWLEDGED).exists()

    def strike(self, strike: Strike) -> Outcome:
        """One trial, and whether the next process can resume."""
        plan = Plan(strike.fault, strike.at, strike.times)
        saved = self._save(plan, wiped=strike.wiped)
        harms = set(self.harms(self._step if saved else self._step - 1))
        if not self._save(Plan(), wiped=True) or set(self.harms(self._step)):
            harms.add("stuck")
        outcome = Outcome(strike, bool(plan.struck), frozenset(harms), saved, self.log if harms else "")
        if harms:
            self._renew()
        return outcome

    def harms(self, promised: int) -> Iterator[str]:
        """What is wrong with the bucket, in which every step up to `promised` must be."""
        mirrored.speak_to(self._address)
        reader = MirrorReader(open_objects(self.url))
        head = reader.head()
        assert head is not None
        opened, damage = reader.newest(head)
        if opened is None or damage:
            yield "newest broken"
        if opened is None or opened.manifest.step < promised:
            yield "committed lost"
        if opened is not None:
            found = {name: digest([data]) for name, data in opened.files.items()}
            if found != {name: record.digest for name, record in mirrored.records(opened.manifest.step).items()}:
                yield "wrong bytes"


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


def campaign(wanted: Iterable[Strike], folder: Path) -> list[Outcome]:
    """Run the strikes; those that found no request to strike are left out."""
    with s3_server() as address, FaultProxy(address) as proxy, ForkServer("tests.mirror.mirrored") as server:
        history = History(server, proxy, address, folder)
        return [outcome for outcome in map(history.strike, wanted) if outcome.fired]
