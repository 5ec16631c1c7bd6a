"""How sure the crowd is: the decomposition of its entropy, whole texts, agreement; all on numbers known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.uncertainty import agreement, decompose, token_uncertainty


def test_equal_agents_have_no_disagreement() -> None:
    alike = torch.tensor([0.7, 0.2, 0.1]).log().repeat(4, 2, 1)
    total, expected, mutual = decompose(alike)
    own = -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1))
    assert total.tolist() == pytest.approx([own, own])
    assert expected.tolist() == pytest.approx([own, own])
    assert mutual.tolist() == pytest.approx([0, 0], abs=1e-6)
    assert (mutual >= 0).all()


def test_agents_that_are_certain_of_different_tokens_disagree_by_log_k() -> None:
    certain = torch.eye(4).log()[:, None]  # [4, 1, 4], with log 0
    total, expected, mutual = decompose(certain)
    assert total.item() == pytest.approx(math.log(4))
    assert expected.item() == 0
    assert mutual.item() == pytest.approx(math.log(4))


def test_a_token_has_its_probability_in_the_distribution_it_was_chosen_from() -> None:
    log_probs = torch.tensor([[[0.1, 0.9], [0.5, 0.5]], [[0.3, 0.7], [0.5, 0.5]]]).log()
    for how in ("probability", "logit"):
        crowd = aggregate(log_probs, how)
        found = token_uncertainty(log_probs, crowd, torch.tensor([1, 0]))
        assert found.shape == (4, 2)
        assert found[0].tolist() == [float(crowd[0, 1]), float(crowd[1, 0])]
    assert found[0, 0].exp().item() != pytest.approx(0.8), "the mean of logits is another distribution"
    assert found[1, 0].item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8))), "of the mean, always"


@pytest.mark.parametrize(
    ("answer", "agents", "share"),
    [
        ("3*4=12\n#### 12", ["12\n#### 12.0", "#### $12", "12", "#### 21"], 0.75),
        ("Paris  in\nFrance", ["Paris in France", "in Paris in France"], 0.5),
        ("in 1990", ["She died in 1990"], 0.0),
        ("", ["", "a"], 0.5),
    ],
)
def test_agreement_compares_what_follows_the_mark_or_else_the_whole_text(
    answer: str, agents: list[str], share: float
) -> None:
    assert agreement(answer, agents) == share
