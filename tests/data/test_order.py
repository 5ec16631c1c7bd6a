"""The order of the data: a bijection per epoch, the same everywhere, split without loss."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci_llm.data import order
from ci_llm.data.agent_rows import OrderedRows, TrainingRows
from ci_llm.data.order import Plan, permute, share

steady = settings(derandomize=True)
SEEDS = st.integers(min_value=-(2**63), max_value=2**64)


@steady
@given(num_rows=st.integers(1, 400), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_any_seed_and_epoch_is_a_bijection(num_rows: int, seed: int, epoch: int) -> None:
    assert {permute(at, num_rows, seed=seed, epoch=epoch) for at in range(num_rows)} == set(range(num_rows))


@steady
@given(num_rows=st.integers(1, 2**48), seed=SEEDS, share_of_rows=st.floats(0, 1, exclude_max=True))
def test_huge_data_sets_stay_inside(num_rows: int, seed: int, share_of_rows: float) -> None:
    assert 0 <= permute(int(num_rows * share_of_rows), num_rows, seed=seed, epoch=3) < num_rows


def test_the_order_is_pinned() -> None:
    """Other numbers would change the data order of every run that resumes."""
    assert [permute(at, 10, seed=42, epoch=0) for at in range(10)] == [0, 4, 9, 3, 6, 2, 8, 7, 5, 1]
    assert [permute(at, 10, seed=42, epoch=1) for at in range(10)] == [6, 7, 2, 5, 8, 0, 4, 1, 3, 9]
    assert [permute(at, 8, seed=42, epoch=0) for at in range(8)] == [3, 5, 6, 4, 7, 0, 1, 2]
    assert Plan(7473, 8, seed=42).rows(10**6) == PINNED


PINNED = [5426, 4734, 1480, 6030, 830, 2345, 2922, 1963]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [[permute(at, 50, seed=s, epoch=e) for at in range(50)] for s in (0, 1) for e in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(50)) not in orders


def test_every_row_comes_to_every_place() -> None:
    """Chi-square over (place, row) of 3000 epochs; 5 standard deviations, and the seed is fixed."""
    num_rows, epochs = 12, 3000
    seen = [[0] * num_rows for _ in range(num_rows)]
    for epoch in range(epochs):
        for at in range(num_rows):
            seen[at][permute(at, num_rows, seed=8, epoch=epoch)] += 1
    expected = epochs / num_rows
    chi_square = sum((count - expected) ** 2 / expected for count in chain.from_iterable(seen))
    freedom = (num_rows - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0\.\.4"):
        permute(position, 5, seed=0, epoch=0)


@steady
@given(num_rows=st.integers(1, 80), global_batch_size=st.integers(1, 90), seed=SEEDS)
def test_an_epoch_holds_every_row_once_and_its_last_step_the_rest(
    num_rows: int, global_batch_size: int, seed: int
) -> None:
    plan = Plan(num_rows, global_batch_size, seed)
    for epoch in range(2):
        first = epoch * plan.steps_per_epoch
        steps = [plan.rows(step) for step in range(first, first + plan.steps_per_epoch)]
        assert all(len(rows) == global_batch_size for rows in steps[:-1])
        assert len(steps[-1]) == (num_rows - 1) % global_batch_size + 1
        assert sorted(chain.from_iterable(steps)) == list(range(num_rows))


@pytest.mark.slow
@steady
@given(num_rows=st.integers(1, 80), global_batch_size=st.integers(1, 90), step=st.integers(0, 60))
def test_an_epoch_is_done_as_far_as_its_rows_were_in_steps(num_rows: int, global_batch_size: int, step: int) -> None:
    plan = Plan(num_rows, global_batch_size, seed=1)
    assert plan.epoch(step) == sum(len(plan.rows(before)) for before in range(step)) / num_rows


def test_epochs_start_at_whole_numbers() -> None:
    plan = Plan(10, 4, seed=0)
    assert [plan.epoch(step) for step in range(5)] == [0.0, 0.4, 0.8, 1.0, 1.4]


@steady
@given(num_rows=st.integers(0, 40), num_processes=st.integers(1, 9), micro_batch_size=st.integers(1, 12))
def test_shares_add_up_to_the_step(num_rows: int, num_processes: int, micro_batch_size: int) -> None:
    rows = [7 * row for row in range(num_rows)]
    shares = [share(rows, index, num_processes, micro_batch_size) for index in range(num_processes)]
    for index, micro_batches in enumerate(shares):
        assert list(chain.from_iterable(micro_batches)) == rows[index::num_processes]
        assert all(len(micro_batch) == micro_batch_size for micro_batch in micro_batches[:-1])
        assert all(0 < len(micro_batch) <= micro_batch_size for micro_batch in micro_batches)
    assert sorted(chain.from_iterable(chain.from_iterable(shares))) == rows


# Cost


def test_a_process_finds_only_its_own_rows_and_counting_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ten thousand processes does as much work as a single process."""
    found: list[int] = []

    def counted(position: int, num_rows: int, *, seed: int, epoch: int) -> int:
        found.append(position)
        return permute(position, num_rows, seed=seed, epoch=epoch)

    monkeypatch.setattr(order, "permute", counted)
    for num_processes in (1, 100, 10_000):
        plan = Plan(10**6, 8 * num_processes, seed=42)
        both = of_plans(plan, Plan(10**5, 8 * num_processes, seed=1))
        for step in (0, 3, plan.steps_per_epoch - 1):
            assert plan.num_rows_of(step) == min(8 * num_processes, 10**6 - step * 8 * num_processes)
            assert both.num_rows_of(step) == sum(own.num_rows_of(step) for own in both.plans)
            assert found == []
            index = num_processes // 2
            dealt = [plan.dealt(step, micro_step, index, num_processes, 4) for micro_step in range(3)]
            assert sum(map(len, dealt)) == len(found) <= 8
            assert all(len(part) <= 4 for part in dealt)
            found.clear()


# Agents


def test_agents_take_steps_together_and_have_epochs_of_their_own() -> None:
    rows = of_plans(Plan(10, 4, seed=1), Plan(7, 4, seed=1), Plan(10, 4, seed=2))
    for step in range(12):
        assert rows.rows_of_step(step) == [row for plan in rows.plans for row in plan.rows(step)]
        assert rows.num_rows_of(step) == len(rows.rows_of_step(step))
    assert rows.steps_per_epoch == 3
    assert rows.epochs(4) == [1.4, 2.0, 1.4]
    assert rows.epoch(4) == 1.4
    assert rows.plans[0].rows(0) != rows.plans[2].rows(0)


def of_plans(*plans: Plan) -> TrainingRows:
    rows: Any = None
    return TrainingRows(tuple(OrderedRows(rows, plan) for plan in plans))
