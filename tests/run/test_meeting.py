"""Processes that wait for one that does not come: a line says which, and a signal ends them at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ci_llm.core.run_status import read_status
from tests.support.campaign import sampled_cases
from tests.support.children import Child
from tests.support.small_run import WORDS
from tools.testbed.forkserver import free_port

pytestmark = pytest.mark.slow

STOPS = (signal.SIGTERM, signal.SIGINT)
#: A trainer that says what it waits for at once, and what is given as the first word before it begins.
TRAINER = """
import sys, threading
from torch import distributed as dist
from ci_llm.distributed import processes
from ci_llm.cli.main import main
processes.MISSING_S, processes.MEETING_GRACE_S = 0.0, 0.2
exec(sys.argv[1])
sys.exit(main(["train", *sys.argv[2:]]))
"""
#: A peer that comes to the store and joins no group.
PEER = """
import sys
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60), wait_for_workers=False)
PrefixStore("ci_llm run 0", store).set("here 1", "")
print("come", flush=True)
sys.stdin.read()
"""
JOINING = """
join = dist.init_process_group
def joining(*arguments, **named):
    print("joining", flush=True)
    join(*arguments, **named)
dist.init_process_group = joining
"""
#: Both say that they come to a place; one of them never does more.
PLACE = """
from {module} import {owner} as owner
before = owner.{name}
def at(*arguments, **named):
    print("comes", flush=True)
    if {held}:
        threading.Event().wait()
    return before(*arguments, **named)
owner.{name} = at
"""


def trainer(rank: int, port: int, folder: Path, before: str = "", *words: str) -> Child:
    left_over = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    environ = {**left_over, "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    return Child.python(TRAINER, before, *WORDS, f"output_dir={folder}", "max_train_steps=2", *words, env=environ)


@pytest.mark.parametrize(
    ("rank", "sent"),
    sampled_cases([(rank, sent) for rank in (0, 1) for sent in STOPS], [(0, signal.SIGTERM), (1, signal.SIGINT)]),
)
def test_left_over_variables_are_named_and_a_signal_ends_the_wait(
    rank: int, sent: signal.Signals, tmp_path: Path
) -> None:
    port = free_port()
    with trainer(rank, port, tmp_path) as child:
        line = child.read_until("waiting ")
        assert (
            f"process {1 - rank} of 2 not yet at 127.0.0.1:{port}, by WORLD_SIZE=2 RANK={rank} LOCAL_RANK={rank}"
            in line
        )
        assert "`unset WORLD_SIZE RANK LOCAL_RANK`" in line
        child.signal(sent)
        assert child.wait() == 0, child.seen
    if rank == 0:
        status = read_status(tmp_path)
        assert (status.status, status.reason, status.step) == ("interrupted", f"signal:{sent.name}", 0)
    else:
        assert not (tmp_path / "status.json").exists(), "the main process writes it"


def test_what_is_complete_stays_complete(tmp_path: Path) -> None:
    with Child.python(TRAINER, "", *WORDS, f"output_dir={tmp_path}", "max_train_steps=2") as child:
        assert child.wait() == 0, child.seen
    with trainer(0, free_port(), tmp_path) as child:
        child.read_until("waiting ")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
    assert read_status(tmp_path).status == "completed"


def test_a_peer_that_has_come_and_does_not_join(tmp_path: Path) -> None:
    """torch waits for it in a call that no signal interrupts."""
    port = free_port()
    with trainer(0, port, tmp_path, JOINING) as child:
        child.read_until("waiting ")
        with Child.python(PEER, str(port)) as peer:
            peer.read_until("come")
            child.read_until("joining")
            child.signal(signal.SIGTERM)
            assert child.wait() == 0, child.seen
    assert any("the other processes have not come: leaving" in line for line in child.seen)


#: A place where processes meet, by what it is: its module, its owner, its name, and the step that is saved.
MEETINGS = {
    "before the first step": ("ci_llm.distributed.processes", "Processes", "require_same_folder", 0),
    "the first ballot": ("ci_llm.distributed.processes", "Processes", "agree", 0),
    "an evaluation": ("ci_llm.run.step.evaluation", "Evaluator", "scores", 2),
}
SILENT = [(meeting, held) for meeting in MEETINGS for held in (0, 1)]


@pytest.mark.parametrize(("meeting", "held"), sampled_cases(SILENT, [("the first ballot", 0), ("an evaluation", 1)]))
def test_a_silent_peer_at_a_later_meeting(meeting: str, held: int, tmp_path: Path) -> None:
    """It lives, so that no connection is closed."""
    module, owner, name, step = MEETINGS[meeting]
    port, words = free_port(), ("grace_s=0.5", "save_steps=1")
    place = {"module": module, "owner": owner, "name": name}
    with (
        trainer(held, port, tmp_path, PLACE.format(held=True, **place), *words) as silent,
        trainer(1 - held, port, tmp_path, PLACE.format(held=False, **place), *words) as child,
    ):
        silent.read_until("comes")
        child.read_until("comes")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
        if held == 1:
            status = read_status(tmp_path)
            assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM")
            assert status.step == step
