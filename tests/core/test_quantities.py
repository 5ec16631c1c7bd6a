"""Durations, sizes, counts and losses as people say them."""

from __future__ import annotations

import pytest

from ci_llm.core.quantities import count, countdown, duration, size


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


def test_one_of_a_thing_has_no_s() -> None:
    assert [count(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
