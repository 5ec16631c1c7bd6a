"""Settings of external scripts: on their command lines, and whether a cut of the learning rate arrives."""

from __future__ import annotations

import pytest

from ci_llm.supervisor.script_settings import CutCheck, overrides, rewritten, value_of

LINE = ["model=gnn", "+a.b=1", "++c=x=y", "--lr", "1e-3", "--batch-size=8", "--flag", "--verbose", "pos", "a.b=2"]


def test_keys_on_a_command_line() -> None:
    assert [(one.key, one.value) for one in overrides(LINE)] == [
        ("model", "gnn"),
        ("a.b", "1"),
        ("c", "x=y"),
        ("lr", "1e-3"),
        ("batch-size", "8"),
        ("verbose", "pos"),
        ("a.b", "2"),
    ]
    assert value_of(LINE, "a.b") == "2"
    assert value_of(LINE, "batch_size") == "8"
    assert value_of(LINE, "a") is None


def test_a_command_line_is_rewritten_in_place() -> None:
    new = rewritten(LINE, {"a.b": "9", "lr": "0.5", "batch_size": "4", "unknown": "1"})
    assert new == [
        *["model=gnn", "+a.b=9", "++c=x=y", "--lr", "0.5", "--batch-size=4"],
        *["--flag", "--verbose", "pos", "a.b=9"],
    ]
    assert LINE[4] == "1e-3"


@pytest.mark.parametrize(
    ("first", "later", "believed"),
    [
        ("1e-3", "6.67e-4", True),
        ("1.00e-03", "7e-04", True),  # rounded
        ("1e-3", "1e-3", False),
        ("5e-4", "3e-4", True),  # a schedule, at another step
        ("5e-4", "9e-4", False),
        ("0.0", "0.0", True),  # too few digits to see anything
        ("8e-3", "5.3e-3", True),  # times eight processes
        ("8e-3", "8e-3", False),
        ("8e-3", "7e-3", True),  # the same, in a schedule
        (None, None, True),
        ("1e-3", None, True),
        (None, "1e-3", False),
    ],
)
def test_a_cut_is_doubted_only_where_the_output_speaks_against_it(
    first: str | None, later: str | None, believed: bool
) -> None:
    check = CutCheck(1e-3)
    assert check.doubt(1e-3, first) is None
    assert (check.doubt(1e-3 / 1.5, later) is None) == believed
