"""Processes that wait for one that does not come: a line says which, and a signal ends them at once."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from ci_llm.cli.main import main
from ci_llm.core.run_status import read_status
from ci_llm.distributed import processes
from tests.support.campaign import sampled_cases
from tests.support.children import Child
from tests.support.small_run import WORDS
from tools.testbed.forkserver import ForkServer, free_port
from tools.testbed.moments import interfere

pytestmark = pytest.mark.slow

STOPS = (signal.SIGTERM, signal.SIGINT)


def train(
    words: list[str], place: str | None = None, says: str = "", held: bool | str = False, command: str = "train"
) -> int:
    """A trial for the fork server: a trainer that says at once what it waits for, and that it comes to a place.

    Args:
        held: it does no more from there, or not until there is this file.
    """

    def come() -> None:
        print(says, flush=True)
        while held and not (isinstance(held, str) and Path(held).exists()):
            time.sleep(0.05)

    processes.MISSING_S, processes.MEETING_GRACE_S = 0.0, 0.2  # type: ignore[misc]
    if place is not None:
        interfere(place, 1, come)
    small = [word for word in WORDS if command == "train" or not word.startswith("num_agents")]  # trials are agents
    return main([command, *small, "max_train_steps=2", *words])


def come_to_the_store(port: int) -> int:
    """A trial for the fork server: a peer that joins no group."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    PrefixStore("ci_llm run 0", store).set("here 1", "")
    print("come", flush=True)
    threading.Event().wait()
    return 0


def trainer(server: ForkServer, rank: int, port: int, folder: Path, *words: str, **at: Any) -> Child:
    left_over = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    environment = {**left_over, "MASTER_PORT": str(port)}
    return Child.forked(server, train, environment, words=[f"output_dir={folder}", *words], **at)


@pytest.mark.parametrize(
    ("rank", "sent"),
    sampled_cases([(rank, sent) for rank in (0, 1) for sent in STOPS], [(0, signal.SIGTERM), (1, signal.SIGINT)]),
)
def test_left_over_variables_are_named_and_a_signal_ends_the_wait(
    rank: int, sent: signal.Signals, server: ForkServer, tmp_path: Path
) -> None:
    port = free_port()
    with trainer(server, rank, port, tmp_path) as child:
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


def test_what_is_complete_stays_complete(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server.run(train, log, words=[f"output_dir={tmp_path}"]) == [0], log.read_text()
    with trainer(server, 0, free_port(), tmp_path) as child:
        child.read_until("waiting ")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
    assert read_status(tmp_path).status == "completed"
    with trainer(server, 0, free_port(), tmp_path, "max_train_steps=3") as child:
        child.read_until("waiting ")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
    assert read_status(tmp_path).status == "interrupted", "it is not complete by this call"


def test_a_sweep_is_interrupted_as_a_run_is(server: ForkServer, tmp_path: Path) -> None:
    with trainer(server, 0, free_port(), tmp_path, "learning_rate=[1e-3,2e-3]", command="sweep") as child:
        child.read_until("waiting ")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
    status = read_status(tmp_path)
    assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM")


def test_a_peer_that_has_come_and_does_not_join(server: ForkServer, tmp_path: Path) -> None:
    """torch waits for it in a call that no signal interrupts."""
    port = free_port()
    joining = {"place": "torch.distributed.init_process_group", "says": "joining"}
    with trainer(server, 0, port, tmp_path, **joining) as child:
        child.read_until("waiting ")
        with Child.forked(server, come_to_the_store, port=port) as peer:
            peer.read_until("come")
            child.read_until("joining")
            child.signal(signal.SIGTERM)
            assert child.wait() == 0, child.seen
    assert any("the other processes have not come: leaving" in line for line in child.seen)


def test_a_peer_that_has_left_because_all_were_asked_to_stop(server: ForkServer, tmp_path: Path) -> None:
    """It waits for the main process, which loads, and leaves after the grace."""
    port, loaded = free_port(), tmp_path / "loaded"
    loads = {"place": "ci_llm.run.start.beginning.agree_on_start", "says": "loads"}
    run = tmp_path / "run"
    with (
        trainer(server, 0, port, run, **loads, held=str(loaded)) as child,
        trainer(server, 1, port, run, **loads) as peer,
    ):
        child.read_until("loads")
        peer.read_until("loads")
        child.signal(signal.SIGTERM)
        peer.signal(signal.SIGTERM)
        assert peer.wait() == 0, peer.seen
        loaded.touch()
        assert child.wait() == 0, child.seen
    status = read_status(run)
    assert (status.status, status.reason, status.step) == ("interrupted", "signal:SIGTERM", 0)


#: A place where processes meet, by what it is, and the step that is saved.
MEETINGS = {
    "before the first step": ("ci_llm.distributed.processes.Processes.require_same_folder", 0),
    "the first ballot": ("ci_llm.distributed.processes.Processes.agree", 0),
    "an evaluation": ("ci_llm.evaluation.evaluator.Evaluator.scores", 2),
}
SILENT = [(meeting, held) for meeting in MEETINGS for held in (0, 1)]


@pytest.mark.parametrize(("meeting", "held"), sampled_cases(SILENT, [("the first ballot", 0), ("an evaluation", 1)]))
def test_a_silent_peer_at_a_later_meeting(meeting: str, held: int, server: ForkServer, tmp_path: Path) -> None:
    """It lives, so that no connection is closed."""
    place, step = MEETINGS[meeting]
    port, words, at = free_port(), ("grace_s=0.5", "save_steps=1"), {"place": place, "says": "comes"}
    with (
        trainer(server, held, port, tmp_path, *words, held=True, **at) as silent,
        trainer(server, 1 - held, port, tmp_path, *words, **at) as child,
    ):
        silent.read_until("comes")
        child.read_until("comes")
        child.signal(signal.SIGTERM)
        assert child.wait() == 0, child.seen
        if held == 1:
            status = read_status(tmp_path)
            assert (status.status, status.reason) == ("interrupted", "signal:SIGTERM")
            assert status.step == step
