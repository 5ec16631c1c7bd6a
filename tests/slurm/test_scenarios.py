"""A job on a real SLURM: whatever happens to it, nothing is lost, the run comes back by itself, nothing stays behind.

The scenarios run side by side on one cluster: the first test that asks for one starts all, and every test waits for its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from tests.slurm import scenarios
from tests.slurm.cluster import GRACE_S, KILL_WAIT_S, Cluster, until
from tests.slurm.scenarios import CAUGHT_AT, STEPS, Scenario

pytestmark = pytest.mark.slow

AT_ONCE = 6  # that many scenarios; more would only wait for the two cores of a small machine
#: After `out_of_time`, whose clock runs. Who waits for SLURM to miss a node comes early.
SCENARIOS = (
    scenarios.split_brain,
    scenarios.node_died,
    scenarios.two_nodes,
    scenarios.preempted,
    scenarios.supervised,
    scenarios.cancelled,
    scenarios.put_back,
    scenarios.two_processes,
    scenarios.undisturbed,
    scenarios.foreign,
    scenarios.deaf,
    scenarios.signalled_at_start,
    scenarios.signalled_in_training,
    scenarios.signalled_in_evaluation,
)

Stories = Callable[[Callable[[Scenario], Any]], Any]


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Starts every scenario; called with one, waits for its story."""
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Any]] = {}

        def start(scenario: Callable[[Scenario], Any]) -> Future[Any]:
            name = scenario.__name__
            futures[name] = pool.submit(scenario, Scenario(cluster, folder / name))
            return futures[name]

        first = start(scenarios.out_of_time)
        until("it trains", lambda: first.done() or any(folder.glob("out_of_time/**/metrics.jsonl")))
        for scenario in SCENARIOS:
            start(scenario)
        yield lambda scenario: futures[scenario.__name__].result()


@pytest.fixture(scope="module")
def reference(story: Stories) -> dict[str, str]:
    """The weights of the undisturbed run."""
    weights: dict[str, str] = story(scenarios.undisturbed)["weights"]
    return weights


def resumed_at(log: str) -> list[int]:
    """The steps from which all attempts but the first resumed."""
    lines = [line.split("resume    step ")[1] for line in log.splitlines() if "resume    step " in line]
    return [int(line.split()[0]) for line in lines]


def how_it_ended(told: dict[str, Any]) -> tuple[str, str, str]:
    return told["shown"]["JobState"], told["shown"]["Restarts"], told["status"].status


def test_an_undisturbed_job_is_completed_and_published_once(story: Stories) -> None:
    told = story(scenarios.undisturbed)
    assert how_it_ended(told) == ("COMPLETED", "0", "completed")
    assert told["published"] == 1
    assert {(line["attempt"], line["slurm_restarts"]) for line in told["metrics"]} == {(1, 0)}


def test_a_preempted_job_saves_comes_back_and_ends_with_the_same_bits(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(scenarios.preempted)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert f"interrupted (signal:SIGTERM): step {step} is saved" in told["log"]
    assert "is put back into the queue (requeue 1)" in told["log"]
    assert "SLURM restart 1" in told["log"]
    assert "exactness: bitwise" in told["log"]
    assert "Traceback" not in told["output"]
    assert told["weights"] == reference
    assert told["published"] == [0, 1]
    origins = [(line["attempt"], line["slurm_restarts"]) for line in told["metrics"]]
    assert origins == [(1, 0)] * step + [(2, 1)] * (len(origins) - step)


def test_a_job_that_runs_out_of_time_saves_before_the_limit_and_resumes(story: Stories) -> None:
    told = story(scenarios.out_of_time)
    first = told["first"]
    assert first.reason == "walltime"
    assert first.heartbeat < datetime.fromisoformat(told["limit"]).timestamp()
    assert resumed_at(told["log"])[0] == first.step > 0
    assert (told["shown"]["JobState"], told["status"].status) == ("COMPLETED", "completed")
    assert told["status"].step == resumed_at(told["log"])[-1] + 5


def test_a_job_that_is_requeued_by_hand_resumes_with_the_same_bits(story: Stories, reference: dict[str, str]) -> None:
    told = story(scenarios.put_back)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    assert "somebody has cancelled it or put it back already" in told["log"]
    assert told["weights"] == reference


def test_a_cancelled_job_saves_leaves_nothing_behind_and_resumes_when_submitted_again(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(scenarios.cancelled)
    assert how_it_ended(told) == ("CANCELLED", "0", "interrupted")
    assert told["status"].reason == "signal:SIGTERM"
    assert f"step {told['status'].step} is saved" in told["log"]
    assert "is not put back into the queue" in told["log"]
    assert how_it_ended(told["again"]) == ("COMPLETED", "0", "completed")
    assert resumed_at(told["again"]["log"]) == [told["status"].step]
    assert told["weights"] == reference


def test_two_nodes_under_torchrun_stop_together_and_end_with_the_same_bits(story: Stories) -> None:
    told = story(scenarios.two_nodes)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert "4 rows per step: 2 process(es)" in told["log"]
    assert "exactness: bitwise" in told["log"]
    undisturbed = story(scenarios.two_processes)
    assert how_it_ended(undisturbed) == ("COMPLETED", "0", "completed")
    assert told["weights"] == undisturbed["weights"]


def test_after_a_node_has_died_the_run_resumes_from_the_last_checkpoint(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(scenarios.node_died)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    assert resumed_at(told["log"]) == [told["newest"]]
    assert 0 < told["newest"] <= CAUGHT_AT
    assert told["weights"] == reference


def test_an_attempt_that_slept_through_its_own_replacement_damages_nothing(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(scenarios.split_brain)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    assert told["slept"]
    assert [failure.reason for failure in told["failures"]] == ["error:WriterBusy"]
    assert told["after"] == told["before"]
    assert told["weights"] == reference


@pytest.mark.parametrize(
    ("scenario", "step", "said"),
    [
        (scenarios.signalled_at_start, 0, "not put back into the queue: no progress in 3 attempts"),
        (scenarios.signalled_in_training, None, "is saved; resume with"),
        (scenarios.signalled_in_evaluation, 2, "step 2 is saved"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_signal_to_the_step_is_heard_at_any_time(
    scenario: Callable[[Scenario], Any], step: int | None, said: str, story: Stories
) -> None:
    told = story(scenario)
    assert how_it_ended(told) == ("COMPLETED", "0", "interrupted"), told["output"]
    assert told["status"].reason == "signal:SIGTERM"
    assert told["status"].step == (step if step is not None else told["status"].step)
    assert said in told["log"]
    assert "Traceback" not in told["output"]


def test_how_long_slurm_gives_a_job_is_read_from_its_answers(story: Stories) -> None:
    told = story(scenarios.deaf)
    assert 2 * GRACE_S < told["unasked"][0] < math.inf, told
    assert 0 < told["preempted"][0] <= GRACE_S, told
    assert 0 < told["cancelled"][0] <= KILL_WAIT_S, told


# Under the supervisor


def test_a_preempted_supervisor_puts_its_job_back_once_and_the_run_ends_with_the_same_bits(
    story: Stories, reference: dict[str, str]
) -> None:
    told = story(scenarios.supervised)
    assert how_it_ended(told) == ("COMPLETED", "1", "completed")
    (step,) = resumed_at(told["log"])
    assert CAUGHT_AT <= step < STEPS
    assert "the queue" not in told["log"]  # the trainer leaves that to the outermost of ours
    assert told["story"].count("is put back into the queue (requeue 1)") == 1
    assert told["weights"] == reference
    assert told["published"] == 1


def test_a_users_script_is_supervised_too(story: Stories) -> None:
    told = story(scenarios.foreign)
    assert (told["shown"]["JobState"], told["published"]) == ("COMPLETED", 1), told["output"]
    assert "lr: 0.15 -> 0.1" in told["story"]
