"""Durations, sizes, counts and losses as people say them."""

from __future__ import annotations

import math

import pytest

from ci_llm.core.quantities import count, countdown, describe_losses, duration, short, size


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 s"),
        (0.0234, "0.023 s"),
        (3.24, "3.2 s"),
        (42.4, "42 s"),
        (59.4, "59 s"),
        (59.9, "1 min"),
        (61, "1 min 1 s"),
        (3599.7, "1 h"),
        (3605, "1 h"),
        (7260, "2 h 1 min"),
        (3 * 86400 + 59, "3 d"),
        (1e6, "11 d 13 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_countdown_is_that_of_a_progress_bar() -> None:
    assert str(countdown(751.4)) == "0:12:31"


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (2.4e9, "2.4 GB"),
        (1.5e16, "15,000.0 TB"),
    ],
)
def test_sizes_are_decimal(nbytes: float, told: str) -> None:
    assert size(nbytes) == told


@pytest.mark.parametrize(
    ("number", "told"),
    [(0.5, "0.5"), (719, "719"), (999.6, "1k"), (12_400, "12.4k"), (999_600, "1M"), (1.2e6, "1.2M"), (8.03e9, "8.03B")],
)
def test_numbers_have_three_digits(number: float, told: str) -> None:
    assert short(number) == told


def test_one_of_a_thing_has_no_s() -> None:
    assert [count(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([], ""),
        ([1.5], "loss 1.5"),
        ([1.0, math.nan, 3.0], "loss 2 (1 nan 3)"),
        ([math.nan] * 2, "loss nan (nan nan)"),
        ([float(k) for k in range(9)], "loss 4 (0 to 8, 9 agents)"),
        ([math.inf, *map(float, range(9))], "loss 4 (0 to 8, 10 agents, 1 not finite)"),
    ],
)
def test_losses_are_listed_or_there_is_their_range(losses: list[float], told: str) -> None:
    assert describe_losses(losses) == told
