"""The table of decisions, row by row, and as the documentation shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ci_llm.supervisor.policy import Decision, Kind, Outcome, Policy, decide
from tools.decide_table import CASES, render_table

KINDS: Sequence[Kind] = ("nonfinite", "out_of_memory", "disk_full", "hang", "killed", "crashed")


def ran(kind: Kind, *, progress: bool = False, stopping: bool = False, good_step: int | None = None) -> Outcome:
    return Outcome(kind, "", stopping, progress, 2e-4, 32, good_step)


def after(*kinds: Kind, policy: Policy | None = None) -> Decision:
    """The decision after attempts that ended like this without progress."""
    *history, last = (ran(kind) for kind in kinds)
    return decide(history, last, policy or Policy())


@pytest.mark.parametrize("kind", KINDS)
def test_retries_are_limited_for_every_kind(kind: Kind) -> None:
    last = ran(kind, progress=True)
    assert decide([ran("killed", progress=True)] * 9, last, Policy()).exit_code is None
    exhausted = decide([ran("killed", progress=True)] * 10, last, Policy())
    assert (exhausted.action, exhausted.exit_code) == ("give up", 1)
    assert "all 10 retries are used up" in exhausted.why


def test_the_batch_never_falls_below_the_smallest() -> None:
    policy = Policy(min_batch_size=30)
    assert after("out_of_memory", policy=policy).batch_size == 30


def test_a_change_between_two_crashes_resets_the_pause() -> None:
    assert after("crashed", "nonfinite", "crashed").wait_s == 5


def test_progress_resets_the_count() -> None:
    history = [ran("killed"), ran("killed", progress=True), ran("killed")]
    assert decide(history, ran("killed"), Policy()).exit_code is None
    assert decide(history, ran("killed", progress=True), Policy()).wait_s == 0
    assert decide([*history, ran("killed")], ran("killed"), Policy()).exit_code == 1


def test_attempts_that_change_a_setting_need_no_progress() -> None:
    assert after(*["nonfinite"] * 8).action == "relaunch"
    assert after(*["out_of_memory"] * 8).action == "relaunch"


def test_every_case_is_decided_as_in_the_table_beside_this_file() -> None:
    """`python -m tools.decide_table > tests/supervisor/decisions.md` writes it; read its diff."""
    assert render_table().strip() == Path(__file__).with_name("decisions.md").read_text(encoding="utf-8").strip()


def test_the_table_has_a_row_for_every_kind() -> None:
    assert {outcome.kind for _, _, _, outcome in CASES} == {"completed", "interrupted", "refused", *KINDS}
