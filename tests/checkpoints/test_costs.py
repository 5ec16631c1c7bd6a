"""What a save and a resume cost: collectives beyond the ballot, and how often a byte of a checkpoint is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import load_config
from ci_llm.run.start.beginning import find_start, read_beginning, record_start
from tests.support import costs
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell

STATE: dict[str, Any] = {
    **{key: {"w": torch.ones(500)} for key in ("ci_llm_meta_config", "optimizer", "rng")},
    "train_state": {"step": 1},
    "config.yaml": b"seed: 42\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with the steps 1 and 2."""
    with CheckpointManager(tmp_path / "run", async_save=False) as manager:
        assert manager.save(1, STATE)
        assert manager.save(2, STATE)
    return tmp_path / "run"


def times_read(read: dict[str, int], folder: Path) -> set[float]:
    """How often each file of a checkpoint was read, the manifest apart."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"}
    assert sizes
    return {read.get(str(path), 0) / size for path, size in sizes.items()}


def test_a_resumed_run_reads_every_byte_once(run: Path) -> None:
    config = load_config(None, [f"output_dir={run}"])
    with CheckpointManager(run, async_save=False) as manager, costs.bytes_read() as read:
        start = find_start(manager, config, read_beginning(run))
        manager.store.acquire_lease()
        record_start(manager, start)
        assert start.source is not None
        assert start.source.manifest.step == 2
        assert manager.save(3, STATE)
    assert times_read(read, run / "checkpoint_step_2") == {1}
    assert times_read(read, run / "checkpoint_step_1") == {0}


def test_a_final_checkpoint_reads_its_step_once(run: Path) -> None:
    with CheckpointManager(run) as manager, costs.bytes_read() as read:
        assert manager.saver.make_final()
    assert times_read(read, run / "checkpoint_step_2") == {1}


def test_a_restore_returns_what_was_verified_and_a_newer_step_is_seen(run: Path) -> None:
    with CheckpointManager(run) as reader:
        assert reader.latest_step() == 2
        with CheckpointManager(run, async_save=False) as writer:
            writer.save(3, {"n": 3})
        assert reader.latest_step() == 3
        (run / "checkpoint_step_3" / "n.json").write_text("4")
        assert reader.restore(3) == {"n": 3}


@pytest.mark.parametrize("backend", ["vanilla", "distributed"])
def test_a_save_costs_one_collective_more_than_the_vote(backend: str, server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server.run(costs.saving, log, ranks=2, directory=tmp_path / "run", backend=backend) == [0, 0], (
        log.read_text()
    )
    for rank in range(2):
        counts = json.loads((tmp_path / "run" / f"costs{rank}.json").read_text())
        assert {name: len(entered) for name, entered in counts.items()} == {"decided": 1, "due": 2, "not due": 1}


@pytest.mark.slow
def test_a_save_of_the_trainer_costs_one_collective(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    keys = {"max_train_steps": 4, "save_steps": 1, "output_dir": tmp_path / "run", "eval_steps": "null"}
    codes = server.run(costs.training, log, ranks=2, directory=tmp_path, arguments=Cell(ranks=2).arguments(**keys))
    assert codes == [0, 0], log.read_text()
    for rank in range(2):
        assert json.loads((tmp_path / f"costs{rank}.json").read_text()) == [["all_gather"]] * 3
