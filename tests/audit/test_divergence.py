"""How a divergence is named from the probe's records: every name, and no false alarm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tools.audit.audit import moment
from tools.audit.divergence import cause, compare, place, restored, resumed_from
from tools.audit.runs import Step, Trace

EPOCH = 6  # steps


def step(number: int, rows: Sequence[str] | None = None, **changes: Any) -> Step:
    """The n-th step of a run, from 1 on: two rows, in an order of their own in every epoch."""
    epoch, place = divmod(number - 1, EPOCH)
    order = [f"row{n}" for n in random.Random(epoch).sample(range(2 * EPOCH), 2 * EPOCH)]
    known: dict[str, Any] = {
        "rows": order[2 * place : 2 * place + 2] if rows is None else rows,
        "losses": [1 / number],
        "generators": {"torch": f"g{number}", "numpy": "n"},
        "mode": "training",
        "lr": [1e-3 / number],
        "settings": [{"weight_decay": "0.01"}],
        "moments": {"exp_avg": f"m{number}"},
        "grads": f"d{number}",
        "state": {"frozen": "f", "weight": f"w{number}", "mean": f"b{number}"},
    }
    return Step(**{**known, **changes})


def trace(first: int, last: int, saves: Sequence[int] = (), **changes: Any) -> Trace:
    """A process that took steps `first` to `last`, and saved after some of them."""
    steps = [replace(step(number), saved_before=number - 1 in saves) for number in range(first, last + 1)]
    before = step(first - 1) if first > 1 else step(1, state={"frozen": "f", "weight": "w0", "mean": "b0"}, moments={})
    known: dict[str, Any] = {
        "steps": steps,
        "state": before.state,
        "moments": before.moments,
        "buffers": ["mean"],
        "rounded": (),
    }
    return Trace(**{**known, "framework": "torch", "places": {}, "enough": True, **changes})


STRAIGHT = trace(1, 20, saves=[4, 8, 12, 16])
KILLED = trace(1, 10, saves=[4, 8])


def changed(number: int, **changes: Any) -> Trace:
    """A process resumed after step 8 that differs from `number` on."""
    resumed = trace(9, 20)
    steps = [replace(one, **changes) if at >= number else one for at, one in enumerate(resumed.steps, 9)]
    return replace(resumed, steps=steps)


def test_an_exact_resume_is_not_a_divergence() -> None:
    resumed = trace(9, 20)
    assert resumed_from(KILLED, resumed) == 8
    assert list(restored(KILLED, resumed, 8)) == []
    assert compare(STRAIGHT, resumed, 8) == []
    assert compare(STRAIGHT, STRAIGHT) == []


def test_a_generator_that_is_not_used_may_differ() -> None:
    assert compare(STRAIGHT, changed(9, generators={"torch": "other", "numpy": "other"}), 8) == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"mode": "evaluating", "losses": [9.0]}, "dropout"),
        ({"losses": [9.0], "generators": {"torch": "x", "numpy": "n"}, "dropout": True}, "dropout"),
        ({"losses": [9.0], "generators": {"torch": "x", "numpy": "n"}}, "generator"),
        ({"losses": [9.0], "generators": {"torch": "g12", "numpy": "x"}, "dropout": True}, "generator"),
        ({"scale": [[8.0, 1]]}, "scaler"),
        ({"lr": [5.0], "moments": {"exp_avg": "x"}, "state": {}}, "scheduler"),
        ({"settings": [{"weight_decay": "0.1"}], "state": {}}, "settings"),
        ({"grads": "x", "moments": {"exp_avg": "x"}}, "gradients"),
        ({"moments": {"exp_avg": "x"}, "state": {}}, "moments"),
        ({"state": {}}, "unexplained"),
    ],
)
def test_every_difference_has_its_name(changes: dict[str, Any], kind: str) -> None:
    straight = replace(STRAIGHT, steps=[replace(one, dropout=bool(changes.get("dropout"))) for one in STRAIGHT.steps])
    first, *_ = compare(straight, changed(12, **changes), 8)
    assert (first.kind, first.step) == (kind, 12)
    assert cause(first.kind, "torch")


def with_rows(*numbers: int) -> Trace:
    """A process resumed after step 8 that sees the rows of these steps."""
    return replace(trace(9, 20), steps=[replace(step(at), rows=step(seen).rows) for at, seen in enumerate(numbers, 9)])


def test_rows_are_repeated_skipped_or_in_another_order() -> None:
    [repeated] = compare(STRAIGHT, with_rows(7, 8, 9, 10), 8)
    assert (repeated.kind, repeated.step) == ("repeated rows", 9)
    assert "4 rows are seen again: the rows of step 7 come in step 9" in repeated.detail
    [skipped] = compare(STRAIGHT, with_rows(9, 12, 13), 8)
    assert (skipped.kind, skipped.step) == ("skipped rows", 10)
    [once] = compare(STRAIGHT, with_rows(7, 10, 11), 8)  # what Lightning does in the middle of an epoch
    assert (once.kind, once.step) == ("repeated rows", 9)
    mixed = changed(9, rows=[step(9).rows[0], step(11).rows[1]])
    assert compare(STRAIGHT, mixed, 8)[0].kind == "data order"
    [swapped] = compare(STRAIGHT, changed(9, rows=list(reversed(step(9).rows))), 8)
    assert swapped.kind == "data order"


def test_rows_that_random_numbers_have_changed_are_a_matter_of_the_generator() -> None:
    other = changed(9, rows=["x", "y"], generators={"torch": "g9", "numpy": "x"})
    assert compare(STRAIGHT, other, 8)[0].kind == "generator"
    assert compare(STRAIGHT, changed(9, rows=["x", "y"]), 8)[0].kind == "data order"


def test_weights_and_moments_are_held_against_the_process_that_was_killed() -> None:
    begun = {"frozen": "f", "weight": "w8", "mean": "b0"}
    resumed = trace(9, 20, state=begun, moments={})
    assert resumed_from(KILLED, resumed) == 8
    weights, moments = restored(KILLED, resumed, 8)
    assert (weights.kind, weights.step) == ("weights", 9)
    assert "1 of 3 tensors are not those of the checkpoint: mean" in weights.detail
    assert (moments.kind, moments.detail) == ("moments", "exp_avg are missing: the optimizer starts without them")


def test_rounded_weights_are_distinguished_from_other_weights() -> None:
    rounded = trace(9, 20, state={"frozen": "x", "weight": "x", "mean": "x"}, rounded=("frozen", "weight"))
    assert resumed_from(KILLED, rounded) == 8  # by the checkpoint that had appeared
    [weights] = restored(KILLED, rounded, 8)
    assert "rounded to half precision" in weights.detail


def test_a_process_that_starts_from_scratch_is_recognised() -> None:
    assert resumed_from(KILLED, trace(1, 20)) == 0
    assert list(restored(KILLED, trace(1, 20), 0)) == []


def test_differences_between_straight_runs_are_left_out() -> None:
    assert compare(STRAIGHT, changed(9, losses=[3.0], grads="x"), 8, frozenset({"losses", "grads"})) == []


def test_a_run_is_struck_between_two_saves() -> None:
    assert moment(STRAIGHT) == 10
    assert moment(trace(1, 20)) == 10
    assert moment(trace(1, 20, saves=range(1, 20))) == 11
    assert moment(trace(1, 4, saves=[3])) == 3


def test_causes_are_those_of_the_framework_and_point_at_a_line() -> None:
    assert "skip_first_batches" in cause("repeated rows", "accelerate")
    assert "ignore_data_skip" in cause("repeated rows", "trainer")
    assert cause("settings", "lightning") == cause("settings", "torch")
    assert place("moments", {"optimizer": "train.py:7"}) == "train.py:7"
    assert place("unexplained", {"optimizer": "train.py:7"}) is None
