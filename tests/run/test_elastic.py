"""Machines join, die and are preempted: every row counts once, and the weights equal those of a fixed world."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ci_llm.distributed import processes as process_group
from ci_llm.interrupts import Interrupts
from tests.support.campaign import sampled
from tests.support.elastic import ElasticTrials
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer

SEEDS = range(17)  # of three events each


@pytest.fixture(scope="module")
def trials(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> ElasticTrials:
    return ElasticTrials(server, tmp_path_factory.mktemp("elastic"))


@pytest.mark.parametrize("seed", sampled(SEEDS, [0]))
def test_no_row_is_lost_or_repeated_and_the_weights_are_the_same(trials: ElasticTrials, seed: int) -> None:
    trial = trials.run(seed)
    assert len(trial.events) == 3
    assert trial.faults == []
    assert trial.difference < 1e-6


def meet(peers: int) -> int:
    """A trial for the fork server: a process that is asked to stop while it waits for a peer."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"
    process_group.MEETING_GRACE_S = DEADLINE_S if peers else 0.2  # type: ignore[misc]
    interrupts, patience, heard = Interrupts(), process_group.Patience(), threading.Event()
    until = patience.until
    patience.until = lambda: (until(), heard.set())[0]  # type: ignore[method-assign]
    interrupts.request_stop("signal:SIGTERM")
    with process_group.ends_if_stopped(interrupts, patience), process_group.peer_errors():
        assert heard.wait(DEADLINE_S)  # from here on the time of grace runs
        if not peers:
            threading.Event().wait()
    return 7


@pytest.mark.parametrize(("peers", "code"), [(0, 75), (1, 7)])
def test_a_process_that_is_asked_to_stop_does_not_wait_for_a_peer_that_never_comes(
    peers: int, code: int, server: ForkServer, tmp_path: Path
) -> None:
    assert server.run(meet, tmp_path / "log", peers=peers) == [code]
    assert ("the other processes have not come" in (tmp_path / "log").read_text()) == (peers == 0)
