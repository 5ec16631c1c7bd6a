"""Processes under real launchers: one group, one verdict, one sum; wrong launches are refused or noted."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from ci_llm.cluster.launch import Launch, read_launch
from ci_llm.distributed import processes as process_group
from ci_llm.distributed import processes as processes_module
from ci_llm.distributed.ballot import Ballot, Verdict, decode, encode
from ci_llm.distributed.processes import Processes
from ci_llm.errors import LaunchError, ModelError, PeerLost
from tests.support import world
from tests.support.children import ROOT, SCRIPTS, Child, run_all
from tools.testbed.forkserver import ForkServer, free_port

WORLD = ROOT / "tests" / "support" / "world.py"
ALONE = Launch("python", 1, 0, 1, None, {})


@pytest.fixture
def _own_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment and Accelerate's singletons, as they were."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def alone(**config: Any) -> Processes:
    rows = {"global_batch_size": None, "batch_size": 1, "gradient_accumulation_steps": 1}
    wanted = SimpleNamespace(**{"mixed_precision": "no", "model_dtype": None, **rows, **config})
    return Processes(wanted, launch=ALONE)  # type: ignore[arg-type]


def told(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"process_{index}.json").read_text()) for index in range(count)]


def assert_one_world_of_two(folder: Path, launcher: str) -> None:
    zero, one = told(folder, 2)
    assert [(each["index"], each["count"], each["launcher"]) for each in (zero, one)] == [
        (0, 2, launcher),
        (1, 2, launcher),
    ]
    assert zero["quiet"] == {
        "num_targets": 2**41 + 1,
        "nonfinite": [False, False],
        "sums": [],
        "out_of_memory": False,
        "failed": False,
        "stop": None,
        "save": False,
        "request": False,
    }
    assert zero["sick"] == str(Verdict(0, (False, True, False), (0.5, float("nan")), True, "signal:SIGTERM", True))
    for key in ("quiet", "sick", "reduced", "gathered", "broadcast", "done", "refused", "own folder"):
        assert zero[key] == one[key], key
    assert len(set(zero["reduced"])) == 1
    assert zero["gathered"] == [{"index": 0}, {"index": 1}]
    assert (zero["broadcast"], zero["done"]) == ("from 0", "by 0")
    assert zero["refused"] == "2 process 0 is busy\n  where: here\n  hint:  wait"
    assert (zero["saw main"], one["saw main"]) == (False, True)
    for each in (zero, one):
        assert (each["device"], each["dtype"], each["num_threads"]) == ("cpu", "torch.bfloat16", 1)
        assert each["same folder"] is None
        assert "not the folder of process 1" in each["own folder"]
        assert each["left"]


def test_two_processes_with_the_variables_of_torchrun(server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    folder.mkdir()
    assert server.run(world.trial, log := tmp_path / "log", ranks=2, folder=str(folder)) == [0, 0], log.read_text()
    assert_one_world_of_two(folder, "torchrun")
    assert list(folder.rglob(".launch-*")) == []


@pytest.mark.slow
def test_srun_s_variables_are_enough_and_a_dead_peer_is_an_error_at_once(server: ForkServer, tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [{**step, "SLURM_PROCID": index, "SLURM_LOCALID": index} for index in "01"]
    with (
        Child.forked(server, world.trial, tasks[0], folder=str(tmp_path), then="die") as survivor,
        Child.forked(server, world.trial, tasks[1], folder=str(tmp_path), then="die") as dead,
    ):
        assert dead.wait() == 9
        run_all([survivor])
    (one,) = told(tmp_path, 1)
    assert (one["count"], one["launcher"], one["notes"]) == (2, "srun", [])
    assert one["lost"] == "a process of this run is gone or silent"
    assert one["left"]


@pytest.mark.slow
def test_accelerate_that_starts_one_process_for_four_and_dies_of_a_signal(tmp_path: Path) -> None:
    """The requested number of processes is in Accelerate's own file."""
    settings = tmp_path / "accelerate.yaml"
    settings.write_text("distributed_type: 'NO'\nnum_processes: 4\nnum_machines: 1\ndynamo_backend: INDUCTOR\n")
    command = ("launch", "--config_file", settings, WORLD, tmp_path, "wait")
    with Child(SCRIPTS / "accelerate", *command) as launcher:
        launcher.read_until("waiting")
        launcher.signal(signal.SIGTERM)
        launcher.read_until("told")
        assert launcher.wait() == -signal.SIGTERM
    (one,) = told(tmp_path, 1)
    assert (one["count"], one["launcher"], one["heard"]) == (1, "accelerate", "signal:SIGTERM")
    compiler, asked_for, *_ = one["notes"]
    assert "ACCELERATE_DYNAMO_BACKEND is not used" in compiler
    assert "asked for 4 processes, running 1" in asked_for


# In this process


@pytest.mark.usefixtures("_own_world")
class TestAlone:
    def test_a_single_process_communicates_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a single process has nobody to talk to")

        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier"):
            monkeypatch.setattr(torch.distributed, name, refuse)
        processes = alone()
        assert (processes.process_index, processes.num_processes, processes.is_main_process) == (0, 1, True)
        ballot = Ballot(5, nonfinite=[True, False], sums=[1.5], stop="walltime")
        assert processes.agree(ballot) == Verdict(5, (True, False), (1.5,), False, "walltime", False)
        flat = torch.tensor([1.0, 2.0])
        assert processes.reduce_flat_(flat) is flat
        assert (processes.gather_object("x"), processes.broadcast_object("x")) == (["x"], "x")
        with processes.main_process_first():
            processes.wait_for_everyone()
        processes.require_same_folder(tmp_path / "run")
        processes.require_same_folder(tmp_path / "run")
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").write_text("no folder: the tokens cannot be removed")
        assert processes.shutdown()

    @pytest.mark.parametrize("key", ["mixed_precision", "model_dtype"])
    def test_fp16_on_a_cpu_is_refused(self, key: str) -> None:
        with pytest.raises(ModelError, match="without a warning") as caught:
            alone(**{key: "fp16"})
        assert caught.value.where == f"{key}: fp16"

    def test_a_port_in_use(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            launch = Launch("srun", 2, 0, 2, None, {**place, **where})
            with pytest.raises(LaunchError, match="cannot meet") as caught:
                Processes(SimpleNamespace(mixed_precision="no", model_dtype=None), launch=launch)  # type: ignore[arg-type]
        assert caught.value.where == f"127.0.0.1:{port}"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("cards", [["GPU-1", "GPU-2"], ["GPU-1", "GPU-1"]])
@pytest.mark.parametrize("here", [1, 2], ids=lambda here: f"{here} on this machine")
def test_srun_may_show_each_process_its_own_gpu(cards: list[str], here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--gpus-per-task=1` does; without it, all processes of the machine see the same one. All processes of the run
    take the same collectives, however many are on a machine."""
    launch, met = Launch("srun", 2, 0, 2, None, {}), list[str]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=cards[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: met.append("waited"))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: met.append(str(device)))
    monkeypatch.setattr(processes_module.dist, "all_reduce", lambda tensor: met.append("summed"))
    processes_module._check_gpus(launch, on_cpu=False)
    with pytest.raises(LaunchError, match="2 processes on this machine, but 1 GPU"):
        processes_module._check_gpus(replace(launch, launcher="torchrun"), on_cpu=False)
    one: Any = SimpleNamespace(
        num_processes=2,
        device=torch.device("cuda:0"),
        launch=launch,
        gather_object=lambda mine: met.append("told") or [("one machine", card, True) for card in cards],
    )
    one.launch = replace(launch, num_local_processes=here)
    if len({*cards}) == 2:
        Processes._meet_on_devices(one)
        assert met == ["told", "cuda:0", "summed", "waited"]
    else:
        with pytest.raises(LaunchError, match="on this machine, but 1 GPU"):
            Processes._meet_on_devices(one)
        assert met == ["told"]


def test_a_ballot_is_a_sum_of_votes() -> None:
    ballots = [
        Ballot(3, nonfinite=(False, True), sums=(1.0,)),
        Ballot(4, nonfinite=torch.tensor([False, True]), sums=torch.tensor([2.5]), save=True),
        Ballot(0, nonfinite=(False, False), sums=(0.0,), out_of_memory=True, failed=True),
    ]
    votes = sum((encode(ballot) for ballot in ballots), torch.zeros(()))
    assert votes.dtype == torch.float64
    assert decode(votes, 2, []) == Verdict(7, (False, True), (3.5,), True, None, True, failed=True)
    assert decode(votes, 2, [None, "walltime", "signal:SIGTERM"]).stop == "walltime"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_memory_of_a_gpu_grows_in_segments_unless_its_user_says_how(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    processes_module._set_environment(read_launch({}, []), on_cpu=False)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == after


def test_a_sum_on_gpus_that_never_ends_means_that_a_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    # NCCL's call returns at once; the kernel of a process whose peer died after the ballot waits for it for ever.
    looks = iter([False, False, True])
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: next(looks, False)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    gradient: Any = SimpleNamespace(is_cuda=True, device="cuda:0", numel=lambda: 8)
    process_group.wait_within_bound(gradient)
    monkeypatch.setattr(process_group, "REDUCE_BOUND_S", 0.01)
    with pytest.raises(PeerLost, match="gone or silent"), process_group.peer_errors():
        process_group.wait_within_bound(gradient)
