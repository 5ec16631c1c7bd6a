"""One, two, three or four processes: the same samples in the same optimizer steps, and the same weights.

Real processes, gloo, the real job. The witness of `tools.testbed.trials` tells which rows each process saw.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.campaign import sampled
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Fate, train_watched
from tools.testbed.worlds import AGENTS, DOUBLE, ODD, arguments, difference, planned, toy_base, weights

pytestmark = pytest.mark.slow

SINGLE: dict[str, Any] = {"model_dtype": "fp32", "max_train_samples": ODD, "max_train_steps": 24}


class Worlds:
    """Runs by the number of their processes and their keys; one that was made is not made again."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._base = toy_base(folder / "base")
        self._made: dict[tuple[Any, ...], Path] = {}

    def run(self, processes: int, **keys: Any) -> Path:
        """The folder of a complete run."""
        name = (processes, *sorted(keys.items()))
        if name not in self._made:
            self._made[name] = self.new_folder()
            self.attempt(self._made[name], processes, **keys)
        return self._made[name]

    def new_folder(self) -> Path:
        folder = self._folder / f"world{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        return folder

    def attempt(self, folder: Path, processes: int, fate: Fate | None = None, **keys: Any) -> None:
        """One call of train.py in a world of `processes`."""
        codes = self._server.run(
            train_watched,
            folder / "log",
            ranks=processes,
            folder=str(folder),
            arguments=arguments(model_name=self._base, **keys),
            fate=asdict(fate) if fate else None,
        )
        assert codes == [0] * processes, (folder / "log").read_text()


@pytest.fixture(scope="module")
def worlds(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(server, tmp_path_factory.mktemp("worlds"))


# What a run tells


def samples(folder: Path) -> list[list[int]]:
    """The rows of every optimizer step in the order in which they were dealt to its processes, one at a time."""
    shares: dict[int, list[list[int]]] = defaultdict(list)
    for file in sorted(folder.glob("process*.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            shares[record["step"]].append(list(chain.from_iterable(record["rows"])))
    hands = (zip_longest(*shares[step]) for step in sorted(shares))
    return [[row for hand in step for row in hand if row is not None] for step in hands]


def losses(folder: Path) -> Tensor:
    """[steps, K], as logged at every step."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return torch.tensor([[line[f"train/agent{k}/loss"] for k in range(AGENTS)] for line in lines], dtype=torch.float64)


# Tests


@pytest.mark.parametrize("processes", sampled([2, 3, 4], [3]))
def test_in_double_precision_any_world_trains_the_same_weights(worlds: Worlds, processes: int) -> None:
    alone, together = worlds.run(1, **DOUBLE), worlds.run(processes, **DOUBLE)
    assert samples(together) == samples(alone) == planned(ODD, 30)
    assert difference(losses(together), losses(alone)) < 1e-8
    assert difference(weights(together), weights(alone)) < 1e-6


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_in_single_precision_the_losses_agree(worlds: Worlds, processes: int) -> None:
    alone, together = worlds.run(1, **SINGLE), worlds.run(processes, **SINGLE)
    assert samples(together) == samples(alone) == planned(ODD, 24)
    assert difference(losses(together), losses(alone)) < 1e-5


@pytest.mark.parametrize("of", sampled([(1, 2), (1, 4), (3, 4)], [(3, 4)]), ids=str)
def test_processes_without_a_row_take_part_in_the_step(worlds: Worlds, of: tuple[int, int]) -> None:
    rows, processes = of
    keys = {**DOUBLE, "max_train_samples": rows, "max_train_steps": 6}
    alone, together = worlds.run(1, **keys), worlds.run(processes, **keys)
    assert samples(together) == samples(alone) == planned(rows, 6)
    assert all(len(step) == rows for step in samples(together))
    assert difference(losses(together), losses(alone)) < 1e-8
    assert difference(weights(together), weights(alone)) < 1e-6


def test_a_run_resumes_on_any_other_number_of_processes(worlds: Worlds) -> None:
    """4 -> 2 -> 3 -> 1, each attempt but the last being asked to stop after some steps, on one of its processes."""
    folder = worlds.new_folder()
    for processes, steps in ((4, 8), (2, 7), (3, 9)):
        worlds.attempt(folder, processes, Fate("SIGTERM", steps - 1, rank=processes - 1), **DOUBLE)
    worlds.attempt(folder, 1, **DOUBLE)
    alone = worlds.run(1, **DOUBLE)
    assert samples(folder) == samples(alone)
    assert difference(losses(folder), losses(alone)) < 1e-8
    assert difference(weights(folder), weights(alone)) < 1e-6
    log = (folder / "run/training.log").read_text()
    assert [f"step {step} of 30" in log for step in (8, 15, 24)] == [True] * 3
    assert all(f"sample-exact (processes {change}" in log for change in ("4 -> 2", "2 -> 3", "3 -> 1"))
