"""An elastic job on one machine: agents of torchrun that come, die and are taken away, and a ledger of every row.

Each agent is torchrun's own, with its c10d rendezvous, and stands for a machine with one process. It is forked, and
forks its process, so that a round costs no start of Python. A ledger says which rows each process computed in which
step and round. A gate holds the processes at appointed steps, so that events come in the order of their seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.modules.module import register_module_forward_pre_hook

import ci_llm.run.job  # noqa: F401  the fork server imports all the rooms through this file
from ci_llm import interrupts
from ci_llm.agents.storage import AgentStorage
from ci_llm.cli.main import main
from ci_llm.core.run_status import is_alive
from ci_llm.crowd.crowd import Crowd
from tools.testbed import worlds
from tools.testbed.events import new_rows, wait_until
from tools.testbed.forkserver import ForkServer, end_with, free_port
from tools.testbed.moments import train_signalled

GATES: Final = [4, 11, 18, 25]
SAVE_STEPS: Final = 9  # no event comes right after a save that was due anyway
LEDGER, GATE, EVENTS = "ledger", "gate", "events.json"
MOST_MACHINES: Final = 4
DIES, LOST, PREEMPTED, JOINS = "a process dies", "a machine is lost", "a machine is preempted", "a machine joins"
#: torchrun's --rdzv-conf: a lost machine is missed after 6 s, and a round begins 3 s after the last one has come.
RENDEZVOUS: Final = {"last_call_timeout": 3, "keep_alive_interval": 2, "keep_alive_max_attempt": 3}
#: An event comes so long after the gate has opened, at most.
_LONGEST_DELAY_S: Final = 0.4
_OPEN: Final = 10**9


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: rows that a process was about to compute.

    Attributes:
        round: a name of the round; `rank` of `world` processes.
        step: 0-based optimizer step.
        time: unix seconds.
    """

    round: str
    rank: int
    world: int
    pid: int
    step: int
    rows: list[int]
    time: float


@dataclass(frozen=True)
class Event:
    """What happened to the job.

    Attributes:
        step: 0-based, the newest that any process had begun.
        world: processes before and after it.
    """

    kind: str
    step: int
    world: tuple[int, int]


def read_ledger(folder: Path) -> list[Entry]:
    """All lines of all processes, in the order of time. A line that a kill cut off is left out."""
    entries = []
    for file in (folder / LEDGER).glob("*.jsonl"):
        whole, _, _ = file.read_text().rpartition("\n")
        entries += [Entry(**json.loads(line)) for line in whole.splitlines()]
    return sorted(entries, key=lambda entry: entry.time)


def rows_that_count(entries: Sequence[Entry]) -> dict[int, list[int]]:
    """By step, the rows of its last round, as often as they were computed: a step of an earlier round was lost."""
    last = {entry.step: entry.round for entry in entries}
    found: dict[int, list[int]] = {step: [] for step in last}
    for entry in entries:
        if entry.round == last[entry.step]:
            found[entry.step] += entry.rows
    return {step: sorted(rows) for step, rows in sorted(found.items())}


# ------------------------------------------------------------------------------------- in a process that trains


def _train(folder: str, words: list[str]) -> None:
    """What an agent starts: `train.py`, which keeps the ledger and waits at the gate."""
    torch.set_num_threads(1)
    os.chdir(folder)
    _keep_ledger(Path(folder))
    code = main(["train", "--config", os.devnull, *words])
    sys.stdout.flush()
    if code:
        os._exit(code)


def _keep_ledger(folder: Path) -> None:
    place = {"round": os.environ["MASTER_PORT"], "rank": int(os.environ["RANK"]), "pid": os.getpid()}
    place["world"] = int(os.environ["WORLD_SIZE"])
    file = (folder / LEDGER / f"{os.getpid()}.jsonl").open("a", buffering=1)
    begin_step, present = AgentStorage.begin_step, -1

    def write(rows: list[int]) -> None:
        file.write(json.dumps(place | {"step": present, "rows": rows, "time": time.time()}) + "\n")

    def begin_and_wait(agents: AgentStorage, step: int) -> None:
        nonlocal present
        present = step
        if step >= 0:
            write([])
        while step >= int((folder / GATE).read_text() or 0) and not _asked_to_stop():
            time.sleep(0.005)
        begin_step(agents, step)

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, Crowd) or not module.training:
            return
        if rows := new_rows(inputs[0]):
            write(rows)

    AgentStorage.begin_step = begin_and_wait  # type: ignore[method-assign]
    register_module_forward_pre_hook(look)


def _asked_to_stop() -> bool:
    return any(one.stop_reason for one in interrupts._installed)


# ---------------------------------------------------------------------------------- in the process that conducts


def conduct(folder: str, words: list[str], seed: int, gates: list[int]) -> int:
    """A trial for the fork server: a job of two machines; leaves `events.json`.

    Args:
        gates: 0-based steps at which the job stands; an event comes after each but the last, on the way to the next.
    """
    place = Path(folder)
    (place / LEDGER).mkdir()
    job = _Job(place, words, random.Random(seed))
    try:
        job.open_gate(gates[0])
        for _ in range(2):
            job.start_machine()
        events = [job.strike(now, then) for now, then in itertools.pairwise(gates)]
        job.open_gate(_OPEN)
        codes = job.wait_for_end()
    finally:
        job.kill()
    (place / EVENTS).write_text(json.dumps([asdict(event) for event in events]))
    return max(codes)


class _Job:
    """The machines of a job, and what is done to them.

    Args:
        draw: decides what happens, to whom, and when.
    """

    def __init__(self, folder: Path, words: list[str], draw: random.Random) -> None:
        self._folder, self._words, self._draw = folder, words, draw
        self._endpoint = f"localhost:{free_port()}"
        self._store = _forked(lambda: _keep_store(self._endpoint))  # the rendezvous outlives every machine
        self._agents: list[int] = []

    def start_machine(self) -> None:
        self._agents.append(_forked(lambda: _run_agent(self._endpoint, str(self._folder), self._words)))

    def open_gate(self, step: int) -> None:
        """Let the processes come to `step` (0-based), and no further."""
        draft = self._folder / f"{GATE}.next"
        draft.write_text(str(step))
        draft.rename(self._folder / GATE)

    def strike(self, now: int, then: int) -> Event:
        """Once the job stands at step `now`, let it train to `then`, and let something happen on the way."""
        wait_until(f"step {now} is reached by all", lambda: self._stands_at(now))
        before = len(self._agents)
        kinds = [DIES, *([LOST, PREEMPTED] if before > 1 else []), *([JOINS] if before < MOST_MACHINES else [])]
        kind, agent = self._draw.choice(kinds), self._draw.choice(self._agents)
        self.open_gate(then)
        time.sleep(self._draw.uniform(0, _LONGEST_DELAY_S))
        done = read_ledger(self._folder)
        self._do(kind, agent)
        self.open_gate(then + 1)  # whoever stands at the gate votes once more, and learns that a peer is gone
        step, rounds = max(entry.step for entry in done), {entry.round for entry in done}

        def goes_on(one: Entry) -> bool:
            return one.round not in rounds and one.world == self._size and one.step >= step

        wait_until(f"a round of {self._size}", lambda: any(map(goes_on, read_ledger(self._folder))))
        return Event(kind, step, (before, self._size))

    @property
    def _size(self) -> int:
        return len(self._agents)

    def _stands_at(self, step: int) -> bool:
        entries = read_ledger(self._folder)
        here = [one for one in entries if one.step >= step and one.round == entries[-1].round]
        return len({one.rank for one in here}) == self._size

    def _do(self, kind: str, agent: int) -> None:
        if kind == JOINS:
            self.start_machine()
            return
        if kind == DIES:
            self._kill_process_of(agent)
            return
        self._agents.remove(agent)
        if kind == LOST:
            os.kill(agent, signal.SIGSTOP)  # it must not see its process die, and begin a new round
            self._kill_process_of(agent)
        os.kill(agent, signal.SIGKILL if kind == LOST else signal.SIGTERM)

    def _kill_process_of(self, agent: int) -> None:
        for child in psutil.Process(agent).children():
            if (self._folder / LEDGER / f"{child.pid}.jsonl").exists():
                child.kill()

    def wait_for_end(self) -> list[int]:
        """The exit codes of the machines that are there at the end."""
        return [os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) for agent in self._agents]

    def kill(self) -> None:
        """End whatever is left."""
        for one in psutil.Process().children(recursive=True):
            if is_alive(one.pid):
                one.kill()


def _forked(act: Callable[[], object]) -> int:
    """The pid of a new process that does it and ends."""

    def alone() -> int:
        os.setsid()
        act()
        return 0

    pid = os.fork()
    if not pid:
        end_with(alone)
    return pid


def _keep_store(endpoint: str) -> None:
    host, _, port = endpoint.partition(":")
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def _run_agent(endpoint: str, folder: str, words: list[str]) -> None:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # It looks through every module that is loaded, for seconds in a fork of this server: the others are faster then.
    dynamic_rendezvous.get_method_name = lambda depth=2: "a method"
    _miss_only_the_lost()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=MOST_MACHINES,
        nproc_per_node=1,
        run_id="elastic",
        rdzv_endpoint=endpoint,
        rdzv_backend="c10d",
        rdzv_configs={**RENDEZVOUS, "is_host": False},
        max_restarts=1000,
        start_method="fork",
    )
    elastic_launch(config, _train)(folder, words)


def _miss_only_the_lost() -> None:
    """A machine that lives is not missed, however long this one lets it wait for its turn to say so."""
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    sanitize = holder._sanitize

    def sanitize_the_lost(one: Any) -> None:
        heartbeats = one.state.last_heartbeats
        heartbeats.update({node: datetime.now(UTC) for node in heartbeats if _runs(node.pid)})
        sanitize(one)

    holder._sanitize = sanitize_the_lost


def _runs(pid: int) -> bool:
    """True if the process is there and has not been stopped."""
    try:
        return is_alive(pid) and psutil.Process(pid).status() != psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


# ----------------------------------------------------------------------------------------- in whoever judges


@dataclass(frozen=True)
class Trial:
    """A job through its events.

    Attributes:
        faults: what is wrong with its ledger; none is right.
        difference: of its final weights from those of the same run on one process that nobody disturbed.
    """

    events: list[Event]
    faults: list[str]
    difference: float


class ElasticTrials:
    """Jobs with events drawn from a seed, beside the same run on one process."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._base = worlds.toy_base(folder / "base")
        self._alone = self._weights_alone()

    def run(self, seed: int) -> Trial:
        """A job with an event after each of `GATES` but the last."""
        folder = self._new_folder(f"seed{seed}")
        words = worlds.arguments(model_name=self._base, save_steps=SAVE_STEPS, **worlds.DOUBLE)
        codes = self._server.run(conduct, folder / "log", folder=str(folder), words=words, seed=seed, gates=GATES)
        assert codes == [0], (folder / "log").read_text()
        events = [Event(**one) for one in json.loads((folder / EVENTS).read_text())]
        plan = worlds.planned(worlds.ODD, worlds.DOUBLE["max_train_steps"])
        wrong = [*faults(dict(enumerate(plan)), read_ledger(folder))]
        return Trial(events, wrong, worlds.difference(worlds.weights(folder), self._alone))

    def _weights_alone(self) -> Tensor:
        folder = self._new_folder("alone")
        words = worlds.arguments(model_name=self._base, **worlds.DOUBLE)
        codes = self._server.run(train_signalled, folder / "log", folder=str(folder), words=words)
        assert codes == [0], (folder / "log").read_text()
        return worlds.weights(folder)

    def _new_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder


def faults(planned: Mapping[int, Sequence[int]], entries: Sequence[Entry]) -> Iterator[str]:
    """What is wrong with a ledger: rows that a step has lost or repeated, steps that were left out or are too many."""
    counted = rows_that_count(entries)
    for step in sorted({*planned, *counted}):
        ours, due = Counter(counted.get(step, ())), Counter(planned.get(step, ()))
        if ours != due:
            yield f"step {step}: lost {sorted((due - ours).elements())}, repeated {sorted((ours - due).elements())}"
