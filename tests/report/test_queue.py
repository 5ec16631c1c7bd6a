"""squeue is called in a thread, seldom, and only where it is installed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ci_llm.cluster.slurm import QueuedJob, query_queue
from ci_llm.report import watch
from ci_llm.report.watch import JobQueue
from tools.testbed.events import DEADLINE_S, wait_until

RUNNING = QueuedJob("RUNNING", "None", "1:20:00")


class Controller:
    """A squeue that answers when the test allows it, and counts its calls."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, ids: Sequence[str]) -> dict[str, QueuedJob]:
        self.asked.append(tuple(ids))
        assert self.may_answer.wait(DEADLINE_S)
        return {"1": RUNNING}


def test_a_slow_answer_is_not_waited_for() -> None:
    controller = Controller()
    jobs = JobQueue(controller, is_there=True)
    assert jobs.look(["1", "2"]) == {}
    assert jobs.look(["1", "2"]) == {}
    assert not jobs.has_left("1")
    assert not jobs.has_left("2")
    controller.may_answer.set()
    wait_until("squeue has answered", lambda: jobs.look(["1", "2"]) == {"1": RUNNING})
    assert not jobs.has_left("1")
    assert jobs.has_left("2")
    assert controller.asked == [("1", "2")]


def test_squeue_is_asked_again_after_a_while_and_for_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    controller.may_answer.set()
    jobs = JobQueue(controller, is_there=True)
    assert jobs.look(["1"], wait=True) == {"1": RUNNING}
    jobs.look(["1"], wait=True)
    assert len(controller.asked) == 1
    jobs.look(["1", "2"], wait=True)
    assert len(controller.asked) == 2
    monkeypatch.setattr(watch, "_INTERVAL_S", 0.0)
    jobs.look(["1", "2"], wait=True)
    assert len(controller.asked) == 3


def test_without_squeue_and_without_jobs_nothing_is_asked() -> None:
    controller = Controller()
    absent, idle = JobQueue(controller, is_there=False), JobQueue(controller, is_there=True)
    assert (absent.look(["1"]), idle.look([]), controller.asked) == ({}, {}, [])
    assert absent.has_left("1")
    assert idle.has_left(None)


def test_the_output_of_squeue_is_read() -> None:
    asked: list[list[str]] = []

    def squeue(command: Sequence[str]) -> str:
        asked.append(list(command))
        return "1|RUNNING|None|1:20:00\n2_7|PENDING|Resources|1-00:00:00\nodd line"

    found = query_queue(["1", "2_7"], squeue)
    assert found == {"1": RUNNING, "2_7": QueuedJob("PENDING", "Resources", "1-00:00:00")}
    assert asked == [["squeue", "-h", "-r", "-j", "1,2_7,1,2_7", "-o", "%i|%T|%r|%L"]]
    assert query_queue(["1"], lambda _: None) is None
    assert query_queue(["1"], lambda _: "") == {}


def test_while_the_controller_does_not_answer_no_job_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_INTERVAL_S", 0.0)
    answers: list[dict[str, QueuedJob] | None] = [None, {"1": RUNNING}, None, None, None, None, {}]
    jobs = JobQueue(lambda _: answers.pop(0), is_there=True)
    left = [(jobs.look(["1"], wait=True), jobs.has_left("1"))[1] for _ in range(7)]
    assert left == [False] * 6 + [True]
