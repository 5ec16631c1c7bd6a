"""The distributed backend: every process writes its part, one commits it, and any number of them reads it."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from benchmarks.crash_parts import sweep
from ci_llm.checkpoints.backends.distributed import GAVE_UP, _Followers, deal, outline
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.state_files import entries_of, files_of, read_state
from ci_llm.core.typed_json import dump_json
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint
from tests.support.bit_flips import noticed, write_in_parts
from tests.support.campaign import sampled_cases, size
from tools.testbed import crews
from tools.testbed.forkserver import ForkServer

POINTS = size(12, 48)
pytestmark = pytest.mark.slow


class World:
    """Runs a trial of `crews` in a number of processes; all of them must end well."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self._server, self._log = server, folder / "log"
        self.directory = folder / "run"

    def run(self, trial: Any, ranks: int, codes: list[int] | None = None, **arguments: Any) -> None:
        found = self._server.run(trial, self._log, ranks=ranks, directory=self.directory, **arguments)
        wanted = codes or [0] * ranks
        assert found == wanted, f"{trial.__name__} {arguments}: {found}, not {wanted}\n{self._log.read_text()}"


@pytest.fixture
def world(server: ForkServer, tmp_path: Path) -> World:
    return World(server, tmp_path)


# Any number of processes, any backend


@pytest.mark.parametrize(("ranks", "behind"), [(2, False), (3, True), (4, True)])
def test_a_checkpoint_is_restored_on_any_number_of_processes(world: World, ranks: int, behind: bool) -> None:
    world.run(crews.saving, ranks, steps=[1, 2], backend="distributed", behind=behind)
    for readers in (1, 2, 3, 4):
        world.run(crews.restoring, readers, step=2)


def test_both_backends_and_any_number_of_processes_continue_one_run(world: World) -> None:
    for step, (ranks, backend) in enumerate([(2, "vanilla"), (3, "distributed"), (1, "vanilla"), (1, "distributed")]):
        world.run(crews.saving, ranks, steps=[step], backend=backend, behind=False)
        world.run(crews.restoring, 2, step=step)
    assert CheckpointManager(world.directory).all_steps() == [0, 1, 2, 3]


def test_each_process_writes_its_share_and_agents_stay_whole_files(world: World) -> None:
    world.run(crews.saving, 3, steps=[1], backend="distributed", behind=False)
    folder = world.directory / "checkpoint_step_1"
    shards = [f"optimizer-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "agent0/adapter_model.safetensors",
        "agent1/adapter_model.safetensors",
        "config.yaml",
        "counts.safetensors",
        "manifest.json",
        *shards,
        "optimizer.json",
        "optimizer.safetensors.index.json",
        "progress.json",
    ]
    index = json.loads((folder / "optimizer.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == 4 * 43 * 4 + 2 * 4


# One fails, nobody commits, everybody hears


FAILING = [(victim, fault, behind) for fault in ("disk", "bug") for victim in (1, 0) for behind in (False, True)]


@pytest.mark.parametrize(("victim", "fault", "behind"), sampled_cases(FAILING, [FAILING[n] for n in (0, 3, 5, 6)]))
def test_a_save_that_fails_in_one_process_is_not_committed(world: World, victim: int, fault: str, behind: bool) -> None:
    world.run(crews.failing, 3, victim=victim, fault=fault, behind=behind)


KILLED = [(ranks, victim, behind) for ranks, victim in ((2, 1), (2, 0), (4, 2)) for behind in (False, True)]


@pytest.mark.parametrize(("ranks", "victim", "behind"), sampled_cases(KILLED, [KILLED[n] for n in (0, 3, 5)]))
def test_a_process_killed_while_writing_commits_nothing_and_leaves_no_peer_waiting(
    world: World, ranks: int, victim: int, behind: bool
) -> None:
    codes = [-signal.SIGKILL if rank == victim else 0 for rank in range(ranks)]
    world.run(crews.killed_while_writing, ranks, codes, victim=victim, behind=behind)
    assert CheckpointManager(world.directory).all_steps() == [1]
    world.run(crews.restoring, 2, step=1)
    world.run(crews.saving, 2, steps=[2], backend="distributed", behind=behind)
    world.run(crews.restoring, 3, step=2)


def test_a_state_that_differs_between_processes_is_refused(world: World) -> None:
    world.run(crews.not_one_state, 2)


def test_a_save_that_one_process_cannot_hand_off_fails_on_all(world: World) -> None:
    world.run(crews.hopeless, 3)


def test_no_process_waits_for_a_save_that_one_cannot_start(world: World) -> None:
    world.run(crews.without_thread, 3)


def test_a_peer_that_gave_up_is_reported_before_a_full_disk_here() -> None:
    channel = SimpleNamespace(exchange=lambda message: [message, dump_json(GAVE_UP)])
    received = [{"records": {}}, {"records": {}}]
    followers = _Followers(channel, Path("run"), received)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="process 1 could not write"), followers.writing(Path("run/draft")):
        raise OSError(errno.ENOSPC, "full")


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no 'dcp'") as refused:
        CheckpointManager(tmp_path, checkpoint_backend="dcp")
    assert refused.value.hint == "use one of vanilla, distributed"


# Who writes what


keys = st.sampled_from("abcde")
shapes = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(st.dictionaries(keys, shapes, max_size=4), st.sets(keys), st.integers(1, 5))
def test_every_byte_is_written_once_and_comes_back(sizes: dict[str, list[int]], trees: set[str], count: int) -> None:
    draw = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {}
    for key, lengths in sizes.items():
        flat = {f"t{n}": torch.rand(length, generator=draw) for n, length in enumerate(lengths)}
        state[key] = {"tree": flat, "number": 1.5} if key in trees else flat
    entries = entries_of(state)
    parts = deal(entries, count)
    assert len(parts) == count
    assert outline(parts) == outline(deal(list(reversed(entries_of(state))), count))
    pieces = [tensor.nbytes for entry in entries for tensor in entry.tensors if entry.form == "tree"]
    pieces += [entry.nbytes for entry in entries if entry.form == "tensors"]
    total = sum(entry.nbytes for entry in entries)
    loads = [sum(entry.nbytes for entry in part) for part in parts]
    assert sum(loads) == total
    whole = max([*pieces, *(entry.nbytes for entry in entries if entry.nbytes <= total / count)], default=0)
    assert max(loads) <= total / count + whole
    files: dict[str, bytes] = {}
    for part in parts:
        for name, image in files_of(part).items():
            assert name not in files
            files[name] = b"".join(image.parts)
    assert crews.same(read_state({entry.key: entry.form for entry in entries}, files), state)


def test_a_key_that_looks_like_a_shard_is_refused() -> None:
    tree = {"w": torch.ones(30), "v": torch.ones(30), "lr": 0.1}
    state = {"optimizer": tree, "optimizer-00001-of-00002": {"w": torch.ones(3)}}
    assert len(deal(entries_of(state), 1)) == 1
    with pytest.raises(CheckpointError, match="both written as optimizer-00001-of-00002"):
        deal(entries_of(state), 2)


def spread(directory: str) -> int:
    """A DTensor is refused by either backend, with the way to the whole tensor; that is saved."""
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.tensor import Shard, distribute_tensor

    crews.enter()
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for backend in ("vanilla", "distributed"):
        with (
            CheckpointManager(directory, async_save=False, checkpoint_backend=backend) as manager,
            pytest.raises(CheckpointError, match=r"one shard of a distributed tensor|another process"),
        ):
            manager.save(1, {"m": {"w": weight}})
    with CheckpointManager(directory, checkpoint_backend="distributed") as manager:
        assert manager.save(1, {"m": {"w": weight.full_tensor()}})
    assert CheckpointManager(directory).restore(1)["m"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    return 0


def test_a_sharded_tensor_is_refused(world: World) -> None:
    world.run(spread, 2)


# Damage


def test_flips_and_losses_of_any_part_are_noticed(tmp_path: Path) -> None:
    """Over every file of a checkpoint that three processes wrote."""
    assert noticed(write_in_parts, 30, 0, tmp_path / "run") == 30


@pytest.mark.parametrize("fate", ["missing", "of another step"])
def test_a_shard_that_is_missing_or_of_another_checkpoint_is_named(
    world: World, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.run(crews.saving, 2, steps=[1, 2], backend="distributed", behind=False)
    shard = "optimizer-00002-of-00002.safetensors"
    hurt = world.directory / "checkpoint_step_2" / shard
    if fate == "missing":
        hurt.unlink()
    else:
        shutil.copy(world.directory / "checkpoint_step_1" / shard, hurt)
    with pytest.raises(
        DamagedCheckpoint, match=f"missing: {shard}" if fate == "missing" else f"{shard} has another digest"
    ):
        load_checkpoint(hurt.parent)
    with CheckpointManager(world.directory) as manager:
        assert manager.latest_step() == 1
    assert "quarantine" in caplog.text


def test_an_index_that_does_not_fit_its_shards_is_an_error() -> None:
    state = {"optimizer": {"w": torch.ones(30), "v": torch.zeros(30), "lr": 0.1}}
    files = {
        name: b"".join(image.parts) for part in deal(entries_of(state), 2) for name, image in files_of(part).items()
    }
    index = "optimizer.safetensors.index.json"
    for hurt in (
        {index: b"[]"},
        {index: b'{"weight_map": {"w": "../../etc/passwd", "v": "optimizer-00001-of-00002.safetensors"}}'},
        {index: b'{"weight_map": {"w": "optimizer-00001-of-00002.safetensors"}}'},
    ):
        with pytest.raises(DamagedCheckpoint, match="'optimizer' cannot be read"):
            read_state({"optimizer": "tree"}, files | hurt)


# A seeded tenth of benchmarks/crash_parts.py


def test_a_crash_of_a_writer_at_a_sampled_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    struck, violations = sweep(POINTS, 0, tmp_path)
    assert violations == []
    assert sum(struck.values()) == POINTS
