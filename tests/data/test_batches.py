"""Packed batches and their stream: right shift, right order, and an unchanged global generator."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from ci_llm.data.batches import AgentBatches, Batch, pack, padded, stream
from ci_llm.data.order import AgentPlans, Plan
from tools.testbed.events import DEADLINE_S


@dataclass(frozen=True)
class Row:
    input_ids: np.ndarray[Any, Any]
    supervised: np.ndarray[Any, Any]


def row(input_ids: list[int], supervised: list[int]) -> Row:
    return Row(np.array(input_ids, np.int32), np.array(supervised, bool))


class Rows:
    """Fifty rows of random length and content, the same for the same number."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Row:
        generator = np.random.default_rng(number)
        length = int(generator.integers(2, 30))
        supervised = generator.random(length) < 0.5
        supervised[0] = False
        return Row(generator.integers(0, 99, length).astype(np.int32), supervised)


def start(first: int, last: int, **changes: Any) -> Generator[tuple[int, list[Batch]], None, None]:
    how = {"process_index": 0, "num_processes": 1, "micro_batch_size": 3, "num_workers": 0} | changes
    return stream(Rows(), Plan(len(Rows()), 8, seed=3), first, last, pin_memory=False, **how)


def steps(first: int, last: int, **changes: Any) -> list[tuple[int, list[Batch]]]:
    return list(start(first, last, **changes))


def assert_same(ours: list[tuple[int, list[Batch]]], theirs: list[tuple[int, list[Batch]]]) -> None:
    assert [(step, len(batches)) for step, batches in ours] == [(step, len(b)) for step, b in theirs]
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        for a, b in zip(left, right, strict=True):
            for field in fields(Batch):
                x, y = getattr(a, field.name), getattr(b, field.name)
                assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, field.name


def test_packing_by_hand() -> None:
    batch = pack([row([5, 6, 7], [0, 0, 1]), row([8], [0]), row([9, 4], [0, 1])], [30, 10, 20])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.bounds == (0, 3, 4, 6)
    assert batch.predict_from.tolist() == [1, 4]
    assert batch.targets.tolist() == [7, 4]
    assert batch.target_rows.tolist() == [0, 2]
    assert batch.last_tokens.tolist() == [2, 3, 5]
    assert batch.sample_ids == (30, 10, 20)
    assert (batch.num_rows, batch.num_tokens, batch.num_targets) == (3, 6, 2)
    assert all(tensor.dtype == torch.int64 for _, tensor in batch._tensors())


def test_targets_are_the_tokens_after_their_positions() -> None:
    rows = [Rows()[number] for number in range(20)]
    batch = pack(rows, range(20))
    assert torch.equal(batch.input_ids[batch.predict_from + 1], batch.targets)
    for number, one in enumerate(rows):
        assert batch.targets[batch.target_rows == number].tolist() == one.input_ids[one.supervised].tolist()
        assert batch.input_ids[slice(*batch.bounds[number : number + 2])].tolist() == one.input_ids.tolist()


@pytest.mark.parametrize("rows", [[], [row([], [])], [row([1, 2], [1, 0])]])
def test_rows_that_cannot_be_packed_are_refused(rows: list[Row]) -> None:
    with pytest.raises(ValueError, match="first token is not a target"):
        pack(rows, range(len(rows)))


def test_padding_by_hand() -> None:
    inputs, index = padded(pack([row([5, 6, 7], [0, 0, 1]), row([8, 9], [0, 1])], [0, 1]), pad_id=77)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 77]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert inputs["input_ids"][index].tolist() == [5, 6, 7, 8, 9]


def test_moving_a_batch_moves_every_tensor() -> None:
    moved = pack([row([5, 6], [0, 1])], [0]).to("meta")
    assert {tensor.device.type for _, tensor in moved._tensors()} == {"meta"}
    assert moved.sample_ids == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA; a machine with a GPU")
def test_pinned_batches_are_the_same_batches() -> None:
    pinned = list(stream(Rows(), Plan(50, 8, 3), 0, 3, process_index=0, num_processes=1, micro_batch_size=3,
                         num_workers=0, pin_memory=True))  # fmt: skip
    assert_same(pinned, steps(0, 3))
    assert all(tensor.is_pinned() for _, batches in pinned for b in batches for _, tensor in b._tensors())


def test_the_stream_follows_the_plan() -> None:
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


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_the_samples_of_a_step_do_not_depend_on_processes_or_micro_batches(num_processes: int) -> None:
    plan = Plan(50, 8, seed=3)
    taken: dict[int, list[int]] = {}
    for index in range(num_processes):
        for step, batches in steps(0, 7, process_index=index, num_processes=num_processes, micro_batch_size=2):
            taken.setdefault(step, []).extend(number for batch in batches for number in batch.sample_ids)
    assert {step: sorted(rows) for step, rows in taken.items()} == {step: sorted(plan.rows(step)) for step in range(7)}


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


def test_workers_go_when_the_stream_is_closed_early() -> None:
    before = set(psutil.Process().children())
    running = start(0, 10**9, num_workers=1)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 1
    next(running)
    running.close()
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []


# Agents with rows of their own

PLANS = AgentPlans((Plan(50, 8, seed=3), Plan(11, 8, seed=3), Plan(50, 8, seed=4)))


def steps_of_agents(first: int, last: int, **changes: Any) -> list[tuple[int, list[AgentBatches]]]:
    how = {"process_index": 0, "num_processes": 1, "micro_batch_size": 3, "num_workers": 0} | changes
    dataset = SimpleNamespace(each=[Rows()] * 3)
    return list(stream(dataset, PLANS, first, last, pin_memory=False, **how))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_agent_gets_the_batches_that_it_gets_alone(num_workers: int) -> None:
    found = steps_of_agents(1, 9, num_workers=num_workers)
    assert [step for step, _ in found] == list(range(1, 9))
    for k, plan in enumerate(PLANS.each):
        alone = stream(
            Rows(), plan, 1, 9, process_index=0, num_processes=1, micro_batch_size=3, num_workers=0, pin_memory=False
        )
        mine = [(step, [own for b in batches if (own := b.each[k]) is not None]) for step, batches in found]
        assert_same(mine, list(alone))


def test_agents_whose_epoch_ends_have_fewer_micro_batches() -> None:
    ((_, batches),) = steps_of_agents(1, 2)  # the second agent has three of its eleven rows left
    assert [[own and own.num_rows for own in batch.each] for batch in batches] == [
        [3, 3, 3],
        [3, None, 3],
        [2, None, 2],
    ]
    assert [batch.num_units for batch in batches] == [3, 3, 2]
    first = batches[0]
    assert first.num_tokens == sum(own.num_tokens for own in first.present)
    assert first.num_targets == sum(own.num_targets for own in first.present)
    assert first.sample_ids == tuple(row for own in first.present for row in own.sample_ids)
    assert [own and own.input_ids.device.type for own in batches[1].to("meta").each] == ["meta", None, "meta"]


def test_agents_take_the_same_rows_on_any_number_of_processes() -> None:
    taken: dict[tuple[int, int], list[int]] = {}
    for index in range(3):
        for step, batches in steps_of_agents(0, 4, process_index=index, num_processes=3, micro_batch_size=2):
            for batch in batches:
                for k, own in enumerate(batch.each):
                    taken.setdefault((k, step), []).extend(own.sample_ids if own else [])
    assert {place: sorted(rows) for place, rows in taken.items()} == {
        (k, step): sorted(plan.rows(step)) for k, plan in enumerate(PLANS.each) for step in range(4)
    }
