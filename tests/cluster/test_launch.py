"""How a process was started, read from the variables and the command line of each launcher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.cluster.launch import (
    Launch,
    accelerate_settings,
    disable_unsupported,
    launch_notes,
    read_launch,
    step_notes,
)
from ci_llm.config import read_config
from ci_llm.errors import LaunchError
from tests.support.accelerate_variables import NO, Row, cases

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[03-04,9]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}
ACCELERATE = ["/venv/bin/python", "/venv/bin/accelerate", "launch"]


def read(environ: Mapping[str, str], parent: list[str] | None = None, words: list[str] | None = None) -> Launch:
    return read_launch(environ, parent or [], words or [])


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_plain_python_is_alone() -> None:
    launch = read({})
    assert launch == Launch("python", 1, 0, 1, None, {})
    assert launch.is_main_process
    assert launch.forwards_sigterm


def test_the_variables_of_torchrun() -> None:
    launch = read(TORCHRUN)
    assert launch == Launch("torchrun", 4, 3, 2, None, TORCHRUN, kill_delay_s=30)
    assert not launch.is_main_process


def test_the_variables_of_srun_are_translated_into_those_of_torchrun() -> None:
    launch = read(STEP)
    assert (launch.launcher, launch.process_index, launch.num_local_processes) == ("srun", 4, 1)
    assert launch.variables == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node03",
        "MASTER_PORT": read({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).variables["MASTER_PORT"],
    }
    assert 1024 < int(launch.variables["MASTER_PORT"]) < 32768
    assert launch.variables["MASTER_PORT"] != read({**STEP, "SLURM_STEP_ID": "3"}).variables["MASTER_PORT"]


@pytest.mark.parametrize(
    ("nodes", "first"), [("login2", "login2"), ("a,b", "a"), ("gpu-[007-009]", "gpu-007"), ("n[1,5]", "n1")]
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert read({**STEP, "SLURM_STEP_NODELIST": nodes}).variables["MASTER_ADDR"] == first


def test_tasks_on_one_machine_use_the_loopback_address() -> None:
    """Node names need not resolve there."""
    one_node = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    assert read(one_node).variables["MASTER_ADDR"] == "127.0.0.1"


def test_a_batch_script_is_not_a_task() -> None:
    """SLURM sets the job's variables in the batch script too, which is a single process."""
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read(batch).num_processes == 1


def test_how_long_a_launcher_waits_before_it_kills() -> None:
    assert read(TORCHRUN).kill_delay_s == 30
    assert read({**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}).kill_delay_s == 600
    assert read({**STEP, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}).kill_delay_s == math.inf
    assert read({}).kill_delay_s == math.inf
    assert read({"CI_LLM_SUPERVISED": "0.5"}).kill_delay_s == 0.5
    assert read({**TORCHRUN, "CI_LLM_SUPERVISED": "120"}).kill_delay_s == 30
    assert read({**TORCHRUN, "CI_LLM_SUPERVISED": "10"}).kill_delay_s == 10


def test_mpirun() -> None:
    names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "2112", strict=True)}
    launch = read(environ)
    assert (launch.launcher, launch.num_processes, launch.process_index) == ("mpirun", 2, 1)
    assert launch.variables["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (without(TORCHRUN, "RANK"), "RANK is not set"),
        ({**TORCHRUN, "RANK": "4"}, "process 4 of 4"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "process 3 of 0"),
        (without(STEP, "SLURM_STEP_NODELIST"), "no address"),
    ],
)
def test_contradicting_variables_are_refused(environ: Mapping[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        read(environ)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("words", "environ", "asked_for"),
    [
        (["--num_processes=4", "train.py"], {"MASTER_ADDR": "127.0.0.1"}, 4),
        (["--num-processes", "16", "train.py"], {"MASTER_ADDR": "127.0.0.1"}, 16),
        (["train.py"], {"MASTER_ADDR": "127.0.0.1"}, 0),
        (["--num_processes=1", "train.py"], {}, None),
        (["--num_processes=1", "train.py"], {"MASTER_ADDR": "of my own"}, None),
    ],
)
def test_accelerate_with_one_process_and_the_number_that_was_requested(
    words: list[str], environ: dict[str, str], asked_for: int | None
) -> None:
    launch = read(environ, ACCELERATE + words)
    assert (launch.launcher, launch.requested_processes, launch.forwards_sigterm) == ("accelerate", asked_for, False)


@pytest.mark.parametrize(
    ("environ", "parent"),
    [
        (TORCHRUN, ["/usr/bin/python3", "/venv/bin/torchrun", "--nnodes=1", "train.py"]),
        (TORCHRUN, ["python", "-m", "torch.distributed.run", "train.py"]),
        (TORCHRUN, [*ACCELERATE, "--multi_gpu", "train.py"]),
        ({}, [*ACCELERATE, "train.py"]),
        (without(STEP, "SLURM_STEP_NUM_TASKS") | {"OMPI_COMM_WORLD_SIZE": "1"}, []),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, ["/usr/bin/mpirun", "-n", "2", "train.py"]),
    ],
)
def test_the_command_of_the_launcher_is_kept(environ: Mapping[str, str], parent: list[str]) -> None:
    """It is read at the start, because the launcher may be dead when it is needed."""
    assert read(environ, parent).launcher_command == tuple(parent)


@pytest.mark.parametrize("environ", [{}, TORCHRUN, STEP, {"MASTER_ADDR": "here"}], ids=len)
@pytest.mark.parametrize(
    "stranger", [["/sbin/init"], ["make", "train"], ["ray", "--password=x"], ["bash", "-c", "torchrun train.py"]]
)
def test_the_command_of_another_parent_is_not_kept(environ: Mapping[str, str], stranger: list[str]) -> None:
    assert read(environ, stranger).launcher_command == ()


# Remarks


def remarked(launch: Launch, num_gpus: int = 0, **environ: str) -> list[str]:
    return launch_notes(launch, environ, num_gpus=num_gpus)


def test_more_processes_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ci_llm.cluster.launch._num_cores", lambda: 1)
    assert remarked(read(TORCHRUN))[0].startswith("2 processes share 1 CPU core(s): ")
    assert remarked(read(TORCHRUN), num_gpus=2) == []
    monkeypatch.setattr("ci_llm.cluster.launch._num_cores", lambda: 2)
    assert remarked(read(TORCHRUN)) == []


def test_fewer_processes_than_asked_for() -> None:
    launch = read({"MASTER_ADDR": "here"}, [*ACCELERATE, "--num_processes=4"])
    assert remarked(launch) == ["asked for 4 processes, running 1: --distributed=N starts N here"]
    assert "1 GPU(s), and each takes one" in remarked(launch, num_gpus=1)[0]
    unknown = read({"MASTER_ADDR": "here"}, ACCELERATE)
    assert "asked for several processes" in remarked(unknown)[0]


def test_a_process_in_a_job_but_outside_of_its_steps_is_warned() -> None:
    """SLURM signals the beginning of a preemption's grace only to steps."""
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    (line,) = remarked(read(batch), **batch)
    assert [line] == step_notes(batch)
    assert line.startswith("SLURM job 77, but no step of it")
    assert "`srun`" in line
    assert step_notes(STEP) == step_notes({}) == []


@pytest.mark.parametrize(
    ("threads", "launched", "cores", "noted"),
    [
        ("1", True, 16, 8),
        ("2", True, 16, 0),
        ("1", False, 16, 0),
        ("3", True, 4, 2),
        ("2", True, 4, 0),
        ("", True, 4, 0),
    ],
)
def test_threads_that_leave_cores_idle_or_share_one_are_noted(
    threads: str, launched: bool, cores: int, noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci_llm.cluster.launch._num_cores", lambda: cores)
    launch = read(TORCHRUN if launched else {})
    told = [f"OMP_NUM_THREADS={threads} per process: `export OMP_NUM_THREADS={noted}` uses each core once"]
    assert remarked(launch, OMP_NUM_THREADS=threads) == (told if noted else [])
    assert remarked(launch, 2, OMP_NUM_THREADS=threads) == ([] if launched else remarked(launch, 2))


# What `accelerate launch` may ask for


@pytest.mark.parametrize(("name", "value", "row"), cases(), ids=lambda part: part if isinstance(part, str) else "")
def test_each_variable_of_accelerate_launch_is_taken_or_said_or_refused(name: str, value: str, row: Row) -> None:
    """With a compiler Accelerate's state allows TF32 on a GPU, which gives other bits."""
    environ = {**row.beside, name: value}
    if row.refused:
        for refused in (accelerate_settings, disable_unsupported):
            with pytest.raises(LaunchError) as caught:
                refused(dict(environ), []) if refused is accelerate_settings else refused(dict(environ))
            assert caught.value.exit_code == 2
            assert f"{name}={value}" in str(caught.value.where)
            assert str(caught.value.hint).startswith("use ")
        return
    assert accelerate_settings(environ, []) == row.settings
    said = disable_unsupported(environ)
    assert [line.split()[0].partition("=")[0] for line in said] == ([row.hidden] if row.hidden else [])
    assert row.settings or row.hidden or row.read_by
    assert disable_unsupported(environ) == [], "said once"
    for key in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        assert environ.get(key, "false").lower() in NO


def test_a_launch_by_deepspeed_ends_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    for verb in ("train", "check", "sweep"):
        assert main([verb, "learning_rate=[1e-3,2e-3]", "output_dir=run"]) == 2
        told = capsys.readouterr()
        assert "DeepSpeed owns backward, step and checkpoint" in told.err
        assert "base_sharding=layers" in told.err
        assert "loading..." not in told.out
    assert not [*tmp_path.iterdir()]


def test_the_configuration_wins_over_fsdp_and_what_no_key_takes_is_refused() -> None:
    fsdp = accelerate_settings({"ACCELERATE_USE_FSDP": "true"}, [])
    assert read_config(None, [], fsdp).config.base_sharding == "layers"
    read = read_config(None, ["base_sharding=none"], fsdp)
    assert read.config.base_sharding == "none"
    assert any("base_sharding=layers (accelerate launch) has no effect" in line for line in read.lines)
    assert accelerate_settings({"ACCELERATE_MIXED_PRECISION": "fp8"}, []) == {"mixed_precision": "fp8"}
