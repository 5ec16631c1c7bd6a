"""Figures of classes and numbers: by hand, on rows that are few."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ci_llm.core.evaluation_file import Difference
from ci_llm.crowd.judging import Classes, Numbers, Ranking, calibration_error, macro_f1


def probabilities(*rows: float) -> Tensor:
    """[n, 2] of two classes, from those of the second one."""
    second = torch.tensor(rows, dtype=torch.float64)
    return torch.stack([1 - second, second], -1)


def classes() -> Classes:
    agents = torch.stack([probabilities(0.9, 0.8, 0.4), probabilities(0.2, 0.9, 0.1)])
    return Classes(agents, torch.tensor([0, 1, 0]))


def test_the_crowd_is_the_mean_of_probabilities() -> None:
    found = classes()
    assert found.everyone[2, :, 1].tolist() == pytest.approx([0.55, 0.85, 0.25])
    assert found.figures["accuracy"] == pytest.approx([2 / 3, 1, 2 / 3])
    # Agent 0 says 1, 1, 0 where 0, 1, 0 is right: class 0 has 1 TP and 1 FN, class 1 has 1 TP and 1 FP.
    assert found.figures["f1"] == pytest.approx([2 / 3, 1, 2 / 3])
    assert found.figures["auroc"] == pytest.approx([0.5, 1, 1])
    assert found.figures["calibration_error"][1] == pytest.approx((0.2 + 2 * 0.1) / 3)
    assert found.metrics(["near", "far"])["eval/crowd/accuracy"] == pytest.approx(2 / 3)
    f1 = found.judgement().f1
    assert f1 is not None
    assert (f1.agents, f1.crowd) == (pytest.approx((2 / 3, 1)), pytest.approx(2 / 3))
    assert f1.crowd_minus_mean == Difference(pytest.approx(-1 / 6), None)
    assert str(found) == "accuracy of 2 classes: crowd 0.667; agents 0.667, 1.000"


def test_intervals_of_figures_are_those_of_drawn_units() -> None:
    """Of a mean they are the normal ones; the same in every call, and none of few units or of what is not defined."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.randn(200, generator=draw, dtype=torch.float64)
    errors = torch.randn(2, 200, generator=draw, dtype=torch.float64)
    found = Numbers(labels + errors, labels)
    judged = found.judgement()
    assert judged == found.judgement()
    assert judged.mse
    assert judged.mse.intervals95
    for who, wanted in ((0, errors[0] ** 2), (1, errors[1] ** 2)):
        low, high = judged.mse.intervals95.agents[who]
        half = 1.96 * float(wanted.std()) / 200**0.5
        assert low == pytest.approx(float(wanted.mean()) - half, abs=0.2 * half)
        assert high == pytest.approx(float(wanted.mean()) + half, abs=0.2 * half)
    apart = (errors.mean(0) ** 2) - (errors**2).mean(0)
    gain = judged.mse.crowd_minus_mean
    assert gain
    assert gain.value == pytest.approx(float(apart.mean()))
    assert gain.interval95 == pytest.approx(1.96 * float(apart.std()) / 200**0.5, rel=0.25)
    assert judged.r2
    assert judged.r2.intervals95
    low, high = judged.r2.intervals95.crowd
    assert low < (judged.r2.crowd or math.nan) < high
    few = Numbers(found.found[:, :29], labels[:29]).judgement().mse
    assert few
    assert few.intervals95 is None
    assert few.crowd_minus_mean
    assert few.crowd_minus_mean.interval95 is None
    one = Ranking(errors[:, :40, None], torch.arange(40) == 0).judgement().auroc  # few draws have two kinds of ratings
    assert one
    assert one.intervals95
    none = Ranking(errors[:, :40, None], torch.zeros(40).bool()).judgement().auroc
    assert none
    assert none.intervals95 is None


def test_a_temperature_changes_how_sure_the_crowd_is_and_nothing_else() -> None:
    plain, sharper = classes(), replace(classes(), temperature=0.5)
    second = torch.tensor([0.55, 0.85, 0.25], dtype=torch.float64) ** 2
    assert sharper.everyone[2, :, 1].tolist() == pytest.approx((second / (second + (1 - second.sqrt()) ** 2)).tolist())
    assert torch.equal(sharper.everyone[:2], plain.everyone[:2])
    assert torch.equal(sharper.outcome[0], plain.outcome[0])
    assert sharper.outcome[1][2].tolist() != pytest.approx(plain.outcome[1][2].tolist())
    assert sharper.judgement().temperature == 0.5
    assert Classes.joined([sharper, sharper]).temperature == 0.5


def test_a_figure_that_is_not_defined_is_left_out() -> None:
    found = Classes(probabilities(0.9, 0.8)[None], torch.tensor([1, 1]))
    assert "auroc" not in found.figures
    assert found.figures["accuracy"] == [1, 1]
    assert math.isnan(macro_f1(torch.zeros(0).long(), torch.zeros(0).long()))
    assert math.isnan(calibration_error([], []))
