"""Samplers are pure functions of what is known, so that a sweep that was killed asks for the same trials."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ci_llm.config.sweep import Choices, Range
from ci_llm.sweep.samplers import new_settings
from ci_llm.sweep.successive_halving import Trial

SPACES = {
    "learning_rate": Range(5e-4, 1.6e-2, log=True, whole=False),
    "lora_rank": Choices((4, 8, 16)),
    "lora_target_modules": Choices(("all-linear", ("q_proj", "v_proj"))),
}


def known(settings: list[dict[str, Any]], score: Any = lambda s: s["learning_rate"]) -> list[Trial]:
    return [Trial(id, each, (score(each),)) for id, each in enumerate(settings)]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_same_question_has_the_same_answer(sampler: str) -> None:
    first = new_settings(SPACES, sampler, 42, [], 5, "nll")
    assert first == new_settings(SPACES, sampler, 42, [], 5, "nll")
    assert first != new_settings(SPACES, sampler, 43, [], 5, "nll")
    later = new_settings(SPACES, sampler, 42, known(first), 4, "nll")
    assert later == new_settings(SPACES, sampler, 42, known(first), 4, "nll")
    assert len({str(each) for each in first + later}) == 9
    for settings in first + later:
        assert [*settings] == [*SPACES]
        assert 5e-4 <= settings["learning_rate"] <= 1.6e-2
        assert settings["lora_rank"] in (4, 8, 16)
        assert settings["lora_target_modules"] in ("all-linear", ("q_proj", "v_proj"))


def test_tpe_learns_from_scores_and_from_failures() -> None:
    far = known(new_settings(SPACES, "random", 1, [], 24, "nll"), lambda s: abs(math.log(s["learning_rate"] / 2e-3)))
    near = new_settings(SPACES, "tpe", 1, far, 8, "nll")
    blind = new_settings(SPACES, "random", 1, far, 8, "nll")

    def distance(found: list[dict[str, Any]]) -> float:
        return sum(abs(math.log(each["learning_rate"] / 2e-3)) for each in found)

    assert distance(near) < 0.7 * distance(blind)
    failed = [*far, Trial(len(far), near[0], (math.nan,))]
    assert len(new_settings(SPACES, "tpe", 1, failed, 3, "nll")) == 3


def test_a_grid_is_every_combination_once() -> None:
    spaces = {"lora_rank": Choices((4, 8)), "learning_rate": Choices((1e-3, 2e-3, 4e-3))}
    first = new_settings(spaces, "grid", 0, [], 4, "nll")
    rest = new_settings(spaces, "grid", 0, known(first), 4, "nll")
    assert [(s["lora_rank"], s["learning_rate"]) for s in first + rest] == [
        (rank, rate) for rank in (4, 8) for rate in (1e-3, 2e-3, 4e-3)
    ]
    assert new_settings(spaces, "grid", 0, known(first + rest), 4, "nll") == []


def test_a_finite_space_is_exhausted_and_repeats_nothing() -> None:
    spaces = {"lora_rank": Choices((4, 8, 16))}
    found = new_settings(spaces, "random", 0, [], 5, "nll")
    assert sorted(each["lora_rank"] for each in found) == [4, 8, 16]
    assert new_settings(spaces, "random", 0, known(found, lambda s: 1.0), 2, "nll") == []
