"""Workers of any DataLoader continue when the run is signalled, through every door that knows the loader."""

from __future__ import annotations

import os
import signal
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ci_llm import CheckpointManager, StatefulSampler
from ci_llm.interrupts import shield_workers
from tests.support.loader_workers import batches_despite_signals

ROWS = range(64)

begun: list[int] = []


pytestmark = pytest.mark.usefixtures("pool_of_threads")


@pytest.mark.slow
def test_the_batches_of_a_sampler_come_whoever_is_signalled() -> None:
    sampler = StatefulSampler(ROWS, seed=1)
    loader = DataLoader(ROWS, 2, sampler=sampler, num_workers=2)
    batches = batches_despite_signals(sampler.batches(loader, epochs=1), workers=2)
    assert sorted(row for batch in batches for row in batch.tolist()) == [*ROWS]


@pytest.mark.slow
def test_a_worker_that_is_signalled_before_its_first_line_keeps_working(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ForkProcess._bootstrap  # what a forked process calls first

    def signalled(process: ForkProcess, *args: object, **named: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return int(begin(process, *args, **named))

    monkeypatch.setattr(ForkProcess, "_bootstrap", signalled)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    sampler = StatefulSampler(ROWS, seed=1)
    batches = sampler.batches(DataLoader(ROWS, 2, sampler=sampler, num_workers=2), epochs=1)
    assert sorted(row for batch in batches for row in batch.tolist()) == [*ROWS]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_a_manager_knows_the_loaders_that_accelerate_has_prepared(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(ROWS, 2, num_workers=2))
    with CheckpointManager(tmp_path, accelerator=accelerator):
        assert len(batches_despite_signals(loader, workers=2)) == len(ROWS) // 2
        rest = accelerator.skip_first_batches(loader, 4)
        assert len(batches_despite_signals(rest, workers=2)) == len(ROWS) // 2 - 4


class Marked:
    """Rows that say whether the `worker_init_fn` of the loader has run where they are made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        return len(begun)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_loader_keeps_its_worker_init_fn(passes: int) -> None:
    sampler = StatefulSampler(Marked())
    loader: DataLoader[int] = DataLoader(
        Marked(), sampler=sampler, num_workers=1, worker_init_fn=begun.append, batch_size=1
    )
    for _ in range(passes):
        assert [int(batch) for batch in StatefulSampler.batches(sampler, loader, epochs=sampler.epoch + 1)] == [1] * 4


def test_a_loader_is_shielded_once_and_one_without_workers_is_left_alone() -> None:
    loader: DataLoader[int] = DataLoader(ROWS, num_workers=1)
    alone: DataLoader[int] = DataLoader(ROWS)
    batches = [[1], [2]]
    shield_workers(loader, alone, batches)
    init, context = loader.worker_init_fn, loader.multiprocessing_context
    shield_workers(loader, alone, batches)
    assert loader.worker_init_fn is init
    assert loader.multiprocessing_context is context
    assert alone.multiprocessing_context is None
    assert batches == [[1], [2]]
