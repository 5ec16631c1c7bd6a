"""The loader of a run, prepared by Accelerate: which rows come when and on which process, and what workers survive."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from dataclasses import fields
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch import Tensor

from ci_llm.data.agent_rows import OrderedRows, TrainingRows
from ci_llm.data.batches import Batch, MicroBatch, num_units
from ci_llm.data.loader import any_number_of_workers, loader_of
from ci_llm.data.order import Plan
from tests.data.test_batches import Rows
from tools.testbed.events import DEADLINE_S


def start(
    first: int,
    last: int,
    *plans: Plan,
    process_index: int = 0,
    num_processes: int = 1,
    micro_batch_size: int = 3,
    num_workers: int = 0,
) -> Generator[tuple[int, list[Any]], None, None]:
    """(step, micro-batches) from step `first` on, of a loader that begins at step 0, as a run takes them."""
    rows: Any = Rows()
    training_rows = TrainingRows(tuple(OrderedRows(rows, plan) for plan in plans or [Plan(50, 8, seed=3)]))
    how = {"num_processes": num_processes, "micro_batch_size": micro_batch_size, "num_workers": num_workers}
    with any_number_of_workers():
        loader, sampler = loader_of(training_rows, range(last), **how)
        mine: Any = prepare_data_loader(
            loader, torch.device("cpu"), num_processes, process_index, put_on_device=True, even_batches=False,
            rng_types=[],
        )  # fmt: skip
        batches = iter(skip_first_batches(mine, sampler.before(first)))
        head = [*islice(batches, 1)] if num_workers else []

    def by_step() -> Generator[tuple[int, list[Any]], None, None]:
        for step in range(first, last):
            count = sampler.micro_steps(step) - len(head)
            found = [*head, *islice(batches, count)]
            head.clear()
            yield step, [batch if plans[1:] else batch[0].batch for batch in found if batch]

    return by_step()


def steps(first: int, last: int, **changes: Any) -> list[tuple[int, list[Batch]]]:
    return list(start(first, last, **changes))


def assert_same(ours: list[tuple[int, list[Batch]]], theirs: list[tuple[int, list[Batch]]]) -> None:
    assert [(step, len(batches)) for step, batches in ours] == [(step, len(b)) for step, b in theirs]
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        for a, b in zip(left, right, strict=True):
            for field in fields(Batch):
                x, y = getattr(a, field.name), getattr(b, field.name)
                assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, field.name


def test_the_batches_follow_the_plan() -> None:
    plan = Plan(50, 8, seed=3)
    for step, batches in steps(0, 15):
        assert [number for batch in batches for number in batch.sample_ids] == plan.rows(step)
        assert all(batch.num_rows == 3 for batch in batches[:-1])


def test_every_start_is_the_tail_of_the_whole() -> None:
    whole = steps(0, 12)
    for start in (1, 6, 7, 11, 12):
        assert_same(steps(start, 12), whole[start:])


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    assert_same(steps(2, 12, num_workers=2), steps(2, 12))
    cores = len(os.sched_getaffinity(0))
    assert_same(steps(2, 4, num_workers=cores + 1), steps(2, 4))  # torch would warn, and a warning is an error here


def test_a_process_without_rows_still_hears_of_the_step() -> None:
    """The last step of an epoch has 2 rows; processes 2 and 3 of 4 get none and must vote all the same."""
    last = [steps(6, 7, process_index=index, num_processes=4) for index in range(4)]
    assert [[len(batches) for _, batches in one] for one in last] == [[1], [1], [0], [0]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_never_drawn_from(num_workers: int) -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1]
    assert steps(0, 4, num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


@pytest.mark.usefixtures("pool_of_threads")
def test_workers_ignore_the_signals_of_the_run_and_end_with_it() -> None:
    before = set(psutil.Process().children())
    running = start(0, 12, num_workers=2)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    taken = [next(running), next(running)]  # one from each worker: both have begun
    for name in ("TERM", "INT", "USR1", "USR2"):  # from somebody else: a worker obeys its own parent
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True, timeout=DEADLINE_S)
    taken.extend(running)
    assert_same(taken, steps(0, 12))
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []


def test_workers_go_when_the_pass_is_left_early() -> None:
    before = set(psutil.Process().children())
    running = start(0, 10**9, num_workers=1)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 1
    next(running)
    running.close()
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []


# Agents with rows of their own

PLANS = Plan(50, 8, seed=3), Plan(11, 8, seed=3), Plan(50, 8, seed=4)


def steps_of_agents(first: int, last: int, **changes: Any) -> list[tuple[int, list[MicroBatch]]]:
    return list(start(first, last, *PLANS, **changes))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_agent_gets_the_batches_that_it_gets_alone(num_workers: int) -> None:
    found = steps_of_agents(1, 9, num_workers=num_workers)
    assert [step for step, _ in found] == list(range(1, 9))
    for k, plan in enumerate(PLANS):
        alone = start(1, 9, plan)
        mine = [(step, [own.batch for b in batches for own in b if own.agents == (k,)]) for step, batches in found]
        assert_same(mine, list(alone))


def test_agents_whose_epoch_ends_have_fewer_micro_batches() -> None:
    ((_, batches),) = steps_of_agents(1, 2)  # the second agent has three of its eleven rows left
    found = [{own.agents: own.batch.num_rows for own in batch} for batch in batches]
    assert found == [{(0,): 3, (1,): 3, (2,): 3}, {(0,): 3, (2,): 3}, {(0,): 2, (2,): 2}]
    assert [num_units(batch) for batch in batches] == [3, 3, 2]
    assert [own.to("meta").batch.input_ids.device.type for own in batches[1]] == ["meta", "meta"]


def test_agents_that_train_on_the_same_rows_read_one_batch() -> None:
    rows: Any = Rows()
    common, other = OrderedRows(rows, Plan(50, 8, seed=3)), OrderedRows(rows, Plan(50, 8, seed=4))
    loader, _ = loader_of(TrainingRows((common, other, common)), range(1), 1, 8)
    (micro_batch,) = [unpacked.to("cpu") for unpacked in loader]
    assert [own.agents for own in micro_batch] == [(0, 2), (1,)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_agents_take_the_same_rows_on_any_number_of_processes(num_processes: int) -> None:
    taken: dict[tuple[int, int], list[int]] = {}
    for index in range(num_processes):
        how = {"process_index": index, "num_processes": num_processes, "micro_batch_size": 2}
        for step, batches in steps_of_agents(0, 7, **how):
            for batch in batches:
                for (k,), own in batch:
                    taken.setdefault((k, step), []).extend(own.sample_ids)
    assert {place: sorted(rows) for place, rows in taken.items()} == {
        (k, step): sorted(plan.rows(step)) for k, plan in enumerate(PLANS) for step in range(7)
    }
