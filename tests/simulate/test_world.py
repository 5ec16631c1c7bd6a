"""A simulated job against theory, against the real policies step by step, and against a campaign of real faults."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from benchmarks import campaign
from tools.simulate import model
from tools.simulate.model import Cluster, Planned
from tools.simulate.study import line
from tools.simulate.world import simulate

#: Failures are of nodes, nothing else takes time, and a save is durable when the training continues.
BARE: dict[str, Any] = {
    "process_share": 0.0,
    "silent_share": 0.0,
    "queue": 0.0,
    "slowdown": 0.0,
    "state_mb": 0.001,
    "max_requeues": 10**9,
}


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 30.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [1800.0, 86400.0])
def test_no_other_interval_is_noticeably_better(cost_s: float, mtbf_s: float) -> None:
    told = model.best_interval_s(cost_s, mtbf_s)
    goodput = model.daly_goodput(told, cost_s, 0.0, mtbf_s)
    best = max(model.daly_goodput(told * 1.02**power, cost_s, 0.0, mtbf_s) for power in range(-150, 151))
    assert goodput >= best * 0.9995
    if cost_s < mtbf_s / 1000:
        assert told == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.03)  # Young's
    assert model.best_interval_s(100.0, 50.0) == 50.0, "where a save costs more than the time between failures"


@pytest.mark.slow
def test_goodput_is_that_of_dalys_model() -> None:
    for interval_s, stall_s, restart_s in ((60.0, 2.0, 10.0), (20.0, 2.0, 40.0), (200.0, 0.5, 0.0)):
        cluster = Cluster(
            **BARE, job_mtbf=900.0, work=1e5, stall=stall_s, restart=restart_s, save_interval=interval_s, step=0.5
        )
        found = line(cluster, "")
        expected = model.daly_goodput(interval_s, stall_s, restart_s, 900.0)
        assert found.goodput == pytest.approx(expected, abs=0.02), (interval_s, stall_s, restart_s)


@pytest.mark.slow
def test_every_second_is_put_down_once_and_the_seed_decides() -> None:
    cluster = Cluster(job_mtbf=2000.0, preemption=5000.0, walltime=9000.0, work=50_000.0)
    one, again, other = simulate(cluster), simulate(cluster), simulate(cluster, 1)
    assert one == again
    assert one.elapsed_s != other.elapsed_s
    assert one.completed
    assert sum(one.seconds.values()) == pytest.approx(one.elapsed_s)
    assert one.goodput == pytest.approx(50_000.0 / one.elapsed_s)
    assert one.seconds["steps"] == pytest.approx(50_000.0 + one.lost_s)


def test_a_walltime_and_a_notice_cost_no_steps_and_a_notice_that_is_too_short_does() -> None:
    quiet: dict[str, Any] = {"job_mtbf": 1e9, "work": 40_000.0, "save_interval": 5000.0, "step": 10.0}
    walltime = simulate(Cluster(**quiet, walltime=3600.0))
    assert walltime.attempts > 10
    assert walltime.lost_s == 0
    noticed = simulate(Cluster(**quiet, preemption=3000.0))
    assert noticed.attempts > 5
    assert noticed.lost_s < 10.0 * noticed.attempts  # at most the start of a step at each
    too_short = simulate(Cluster(**quiet, preemption=3000.0, notice=5.0))
    assert too_short.lost_s > 100.0 * 10


@pytest.mark.slow
def test_the_supervisor_and_the_queue_have_their_limits_and_then_a_person_is_called() -> None:
    failing: dict[str, Any] = {"job_mtbf": 600.0, "work": 30_000.0, "silent_share": 0.0}
    processes = simulate(Cluster(**failing, process_share=1.0))
    assert processes.completed
    assert {*processes.endings} == {"all 10 retries are used up", "3 attempts in a row without progress"}
    preempted = simulate(Cluster(job_mtbf=1e9, work=60_000.0, preemption=300.0, max_requeues=20))
    assert "it was 20 times, the most of one job" in preempted.endings
    assert preempted.seconds["person"] == len(preempted.endings) * 4 * 3600


#: docs/results.md: 100 faults in one real run of 1,212 steps, 67 attempts. (times, median and most steps repeated)
MEASURED = {"kill": (19, 2, 3), "damage": (16, 4, 5), "hang": (14, 2, 2), "terminate": (17, 0, 0)}
TAKEN_AGAIN = 121  # of all faults together, by the ledger of such a campaign
KINDS = {"kill": "process", "damage": "damaged", "hang": "silent", "terminate": "preempted", "disk_full": "disk_full"}


def test_a_simulated_campaign_loses_as_many_steps_as_the_real_one() -> None:
    faults = [fault for fault in campaign.draw(0, 100) if fault.kind in KINDS]
    plan = [Planned(fault.step, KINDS[fault.kind]) for fault in faults]  # type: ignore[arg-type]
    cluster = Cluster(
        work=1212 * 0.35,
        step=0.35,
        save_steps=3,
        stall=0.01,
        slowdown=0.0,
        state_mb=1.0,
        storage_mb_per_s=5.0,
        max_retries=201,
        save_interval=1e9,
    )
    story = simulate(cluster, plan=plan)
    assert story.completed
    assert story.attempts == 1 + sum(times for times, _, _ in MEASURED.values()) == 67
    assert sum(steps for _, steps in story.lost) == pytest.approx(TAKEN_AGAIN, rel=0.1)
    assert sum(fault.kind == "terminate" for fault in faults) == MEASURED["terminate"][0]
    for kind, (times, median, most) in MEASURED.items():
        lost = [steps for struck, steps in story.lost if struck == KINDS[kind]]
        if kind == "terminate":  # after a notice nothing is lost; that it ends an attempt, the number of these says
            assert lost == []
        else:
            assert len(lost) == times, kind
            assert (statistics.median(lost), max(lost)) == (median, most), kind
