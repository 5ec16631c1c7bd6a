"""A line of metrics reports means since the line before it, and a resume in between does not change them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ci_llm.checkpoints.manifest import copy_info
from ci_llm.run.step.step_metrics import StepMetrics

CPU = torch.device("cpu")
STEPS = [  # targets; summed losses of two agents and of the diversity; gradient norms
    (10, [10.0, 30.0, 1.0], [1.0, 3.0]),
    (30, [60.0, 33.3, 0.1], [2.0, 0.1]),
    (7, [7.7, 9.1, 0.3], [0.7, 0.3]),
]


def after(*steps: tuple[int, list[float], list[float]], into: StepMetrics | None = None) -> StepMetrics:
    counted = into or StepMetrics(["agent0", "agent1"], CPU)
    for targets, sums, norms in steps:
        counted.add([targets] * 3, sums, torch.tensor(norms))
    return counted


def test_losses_are_means_over_tokens_and_norms_over_steps() -> None:
    assert after(*STEPS[:2]).means() == {
        "train/task_loss": ((10 + 60) / 40 + (30 + 33.3) / 40) / 2,
        "train/diversity": 1.1 / 40,
        "train/agent0/loss": 70 / 40,
        "train/agent0/grad_norm": 1.5,
        "train/agent1/loss": 63.3 / 40,
        "train/agent1/grad_norm": pytest.approx(1.55),
    }


def test_a_step_that_is_not_finite_for_an_agent_does_not_count_for_it() -> None:
    means = after(STEPS[0], (30, [math.nan, 60.0, math.nan], [math.inf, 5.0])).means()
    assert (means["train/agent0/loss"], means["train/agent0/grad_norm"], means["train/diversity"]) == (1.0, 1.0, 0.1)
    assert (means["train/agent1/loss"], means["train/agent1/grad_norm"]) == (90 / 40, 4.0)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_checkpoint_in_the_middle_carries_the_sums_to_the_last_bit(cut: int) -> None:
    saved = json.loads(json.dumps(copy_info(after(*STEPS[:cut]).record())))
    resumed = StepMetrics(["agent0", "agent1"], CPU)
    resumed.load(saved)
    assert after(*STEPS[cut:], into=resumed).means() == after(*STEPS).means()


def test_a_step_that_left_an_agent_out_does_not_count_for_it() -> None:
    """A loss can be finite where the gradient is not, and so can a huge norm; neither may enter the means."""
    interval = StepMetrics(["agent0", "agent1"], torch.device("cpu"))
    interval.add([10] * 3, [10.0, 20.0, 0.0], torch.tensor([1.0, 2.0]))
    interval.add([10] * 3, [30.0, 90.0, 0.0], torch.tensor([3.0, 1e16]), left_out=(1,))
    means = interval.means()
    assert (means["train/agent0/loss"], means["train/agent1/loss"]) == (2.0, 2.0)
    assert (means["train/agent0/grad_norm"], means["train/agent1/grad_norm"]) == (2.0, 2.0)


def test_agents_with_rows_of_their_own_have_means_over_their_own_tokens() -> None:
    interval = StepMetrics(["agent0", "agent1"], CPU)
    interval.add([10, 30, 40], [10.0, 60.0, 0.0], torch.tensor([1.0, 2.0]))
    interval.add([20, 10, 30], [10.0, 20.0, 0.0], torch.tensor([1.0, 2.0]))
    means = interval.means()
    assert (means["train/agent0/loss"], means["train/agent1/loss"]) == (20 / 30, 80 / 40)


NAMED = ("rewards/chosen", "rewards/rejected")


def test_a_checkpoint_between_two_lines_holds_the_metrics_of_an_objective() -> None:
    metrics = after(*STEPS[:1])
    metrics.add_named(NAMED, [(6.0, 2.0, -1.0, 1.0), (4.0, 2.0, 0.0, 1.0)])
    loaded = StepMetrics(["agent0", "agent1"], CPU)
    loaded.load(json.loads(json.dumps(copy_info(metrics.record()))))
    for each in (metrics, loaded):
        each.add_named(NAMED, [(0.0, 1.0, -2.0, 2.0), (1.0, 1.0, 9.0, 1.0)])
    assert loaded.means() == metrics.means()


def test_a_resume_that_names_other_metrics_goes_on() -> None:
    metrics = after(*STEPS[:1])
    metrics.add_named(("rewards/length/mean",), [(6.0, 2.0), (4.0, 2.0)])
    loaded = StepMetrics(["agent0", "agent1"], CPU)
    loaded.load(json.loads(json.dumps(copy_info(metrics.record()))))
    loaded.add_named(("rewards/regex/mean",), [(1.0, 2.0), (3.0, 2.0)])
    means = loaded.means()
    assert (means["train/agent0/rewards/length/mean"], means["train/agent1/rewards/regex/mean"]) == (3.0, 1.5)
