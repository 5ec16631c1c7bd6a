"""The sampler's place in an epoch: a killed loop ends with the same bits, or an error says why it cannot resume."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.determinism import seed_everything
from ci_llm.data.stateful_sampler import StatefulSampler
from ci_llm.errors import ConfigError, DataError, ForeignCheckpoint
from tests.support.campaign import sampled_cases
from tools.testbed.forkserver import ForkServer

STEPS, ROWS, BATCH = 16, 50, 8  # seven batches an epoch, the last of two rows


class Rows(Dataset[Any]):
    def __init__(self, count: int = ROWS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, torch.sin(torch.arange(4.0) * (number + 1))


def loader_of(sampler: StatefulSampler, workers: int = 0, **how: Any) -> DataLoader[Any]:
    return DataLoader(Rows(sampler.num_rows), BATCH, sampler=sampler, num_workers=workers, **how)


def rows_of(batches: Any, count: int | None = None) -> list[list[int]]:
    return [numbers.tolist() for numbers, _ in islice(batches, count)]


def loop(folder: str, workers: int, counted: bool = True, kill_at: int | None = None, epochs: int | None = None) -> int:
    """In a process of its own: a plain loop, which kills itself when the save of step `kill_at` is durable."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = StatefulSampler(Rows(), seed=1)
    objects = {"model": model, "optimizer": optimizer, "sampler": sampler}
    manager = CheckpointManager(Path(folder, "run"), optimizers=[optimizer])
    start = 0
    if (latest := manager.latest_step()) is not None:
        manager.restore(latest, into=objects)
        start = latest + 1
    loader = loader_of(sampler, workers)
    batches = sampler.batches(loader, epochs=epochs) if counted else iter(loader)
    trace = Path(folder, "rows.jsonl").open("a", buffering=1)  # noqa: SIM115  it ends with the process
    for step, (numbers, x) in zip(range(start, STEPS), batches, strict=False):
        trace.write(json.dumps([step, numbers.tolist()]) + "\n")
        seed_everything(1, step)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, objects)
        if step == kill_at:
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
    manager.close()
    return 0


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert server.run(loop, folder / "log", folder=str(folder), workers=0) == [0], (folder / "log").read_text()
    return folder


def trace(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


#: The last but one and the last batch of an epoch among them.
KILLED = [(workers, kill_at) for workers in (0, 2) for kill_at in (2, 5, 6, 9)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kill_at"), sampled_cases(KILLED, [(0, 5), (2, 6), (2, 9)]))
def test_killed_inside_an_epoch_a_plain_loop_ends_with_the_same_bits(
    workers: int, kill_at: int, server: ForkServer, straight: Path, tmp_path: Path
) -> None:
    how = {"folder": str(tmp_path), "workers": workers}
    assert server.run(loop, tmp_path / "log", kill_at=kill_at, **how) == [-signal.SIGKILL]
    assert server.run(loop, tmp_path / "log", **how) == [0], (tmp_path / "log").read_text()
    assert trace(tmp_path) == trace(straight), "no row twice, none left out"
    last = [load_checkpoint(folder / "run" / f"checkpoint_step_{STEPS - 1}") for folder in (tmp_path, straight)]
    assert compare(*last).identical


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_was_not_counted_is_not_guessed(workers: int, server: ForkServer, tmp_path: Path) -> None:
    how = {"folder": str(tmp_path), "workers": workers, "counted": False}
    assert server.run(loop, tmp_path / "log", kill_at=2, **how) == [-signal.SIGKILL]
    assert server.run(loop, tmp_path / "log", **how) == [1]
    said = (tmp_path / "log").read_text()
    assert "made inside epoch 0, and does not say how many of its rows were used" in said
    assert "iterate over sampler.batches(loader)" in said
    if workers == 0:  # with workers the sampler is at the end of this small epoch already
        assert "the rows used are not counted" in said, "said when it was saved, too"
    assert len(trace(tmp_path)) == 3


def test_epochs_end_where_they_would_have_ended() -> None:
    whole = StatefulSampler(Rows(), seed=1)
    everything = rows_of(whole.batches(loader_of(whole), epochs=2))
    assert sorted(chain(*everything[:7])) == sorted(chain(*everything[7:])) == list(range(ROWS))
    for taken in (0, 3, 7, 10, 14):
        first, second = StatefulSampler(Rows(), seed=1), StatefulSampler(Rows(), seed=1)
        assert rows_of(first.batches(loader_of(first), epochs=2), taken) == everything[:taken]
        second.load_state_dict(first.state_dict())
        assert rows_of(second.batches(loader_of(second), epochs=2)) == everything[taken:]
        assert rows_of(first.batches(loader_of(first), epochs=2)) == everything[taken:], "as in the same process"


def test_a_loop_over_epochs_resumes_inside_an_epoch() -> None:
    def taken(sampler: StatefulSampler) -> Iterator[list[int]]:
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for numbers, _ in sampler.batches(loader_of(sampler, drop_last=True), epochs=epoch + 1):
                yield numbers.tolist()

    everything = list(taken(StatefulSampler(Rows(), seed=1)))
    assert len(everything) == 18
    for count in range(18):
        first, second = StatefulSampler(Rows(), seed=1), StatefulSampler(Rows(), seed=1)
        assert list(islice(taken(first), count)) == everything[:count]
        second.load_state_dict(first.state_dict())
        assert list(taken(second)) == everything[count:]


def test_a_start_that_was_said_is_kept_until_the_pass_has_ended() -> None:
    sampler = StatefulSampler(range(50))
    whole = list(sampler)
    sampler.set_epoch(0, start=20)
    sampler.set_epoch(0)  # as Accelerate's loaders say before each pass
    assert list(sampler) == whole[20:]
    sampler.set_epoch(0)
    assert list(sampler) == whole
    sampler.set_epoch(4, start=20)
    sampler.set_epoch(0)
    assert list(sampler) == whole


@pytest.mark.parametrize("state", [{"position": None}, {}])
def test_the_loop_may_say_where_a_pass_starts(state: dict[str, Any]) -> None:
    saved = {"seed": 42, "num_rows": 50, "epoch": 0, **state}
    sampler = StatefulSampler(range(50))
    whole = list(sampler)
    for start in (0, 20):
        sampler.load_state_dict(saved)
        with pytest.raises(ForeignCheckpoint, match="does not say how many"):
            list(sampler)
        sampler.set_epoch(0, start=start)
        assert list(sampler) == whole[start:]
    sampler.load_state_dict(saved)
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(50)), "another epoch begins at its beginning"


def test_loaders_that_cannot_be_counted_are_refused() -> None:
    sampler = StatefulSampler(Rows(), seed=1)
    prepared: Any = Accelerator(cpu=True).prepare(loader_of(sampler))
    another = loader_of(StatefulSampler(Rows()))
    odd = DataLoader(Rows(), batch_sampler=[[1, 2], [3]])  # type: ignore[arg-type]
    for loader in (prepared, another, odd):
        with pytest.raises(ConfigError, match="does not say which rows"):
            next(sampler.batches(loader))
    small = StatefulSampler(Rows(4))
    with pytest.raises(DataError, match="no batch"):
        next(small.batches(loader_of(small, drop_last=True)))


def test_other_ways_to_batch_are_counted_as_well() -> None:
    for batching in ({"batch_size": None}, {"batch_size": 1}):
        sampler = StatefulSampler(Rows())
        list(islice(sampler.batches(DataLoader(Rows(), sampler=sampler, **batching)), 5))  # type: ignore[arg-type]
        assert sampler.state_dict()["position"] == 5
    sampler = StatefulSampler(Rows())
    mine = DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 6, drop_last=False))
    list(islice(sampler.batches(mine), 2))
    assert sampler.state_dict()["position"] == 12
