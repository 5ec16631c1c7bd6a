"""How the commands that train start: processes, launchers, signals, and those of a dry run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.base import fits
from ci_llm.cli import supervise, train
from ci_llm.cli.main import main
from ci_llm.cluster import starter
from ci_llm.cluster.launch import STARTED, read_launch
from ci_llm.errors import LaunchError
from ci_llm.interrupts import Interrupts
from ci_llm.run.job import Result
from ci_llm.supervisor import child, loop
from ci_llm.supervisor.options import parse_options
from tools.testbed.events import DEADLINE_S


@pytest.fixture
def harmless() -> Iterator[None]:
    """Ignores SIGUSR2, so that it does not end this process where the command has no handler."""
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize(("command", "module"), [("train", "run.job"), ("check", "dry_run.plan")])
def test_a_dry_run_stops_by_the_signals_of_the_run(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def job(config: Any, interrupts: Interrupts, *_: Any, **named: Any) -> Any:
        assert told == ["SIGTERM"]  # of the end of the launcher
        os.kill(os.getpid(), signal.SIGUSR2)
        interrupts.wait(DEADLINE_S)
        told.append(interrupts.stop_reason)
        return 0 if command == "check" else Result("completed", 0, tmp_path)

    def launch(read: Any = train.read_launch, **named: Any) -> Any:
        return replace(read(**named), launcher="accelerate")

    monkeypatch.setitem(sys.modules, f"ci_llm.{module}", SimpleNamespace(run_job=job, dry_run=job))
    monkeypatch.setattr(train, "read_launch", launch)
    monkeypatch.setattr(train, "die_with_parent", told.append)
    assert main([command, "--config", os.devnull, f"output_dir={tmp_path / 'run'}"]) == 0
    assert told == ["SIGTERM", "signal:SIGUSR2"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """(launch, why it is to stop) of each run that this process makes; each heeds its own signals, and ends at once."""
    made: list[Any] = []

    def job(_config: Any, interrupts: Interrupts, launch: Any, **_named: Any) -> Any:
        assert interrupts.pass_on is None
        made.append((launch.num_processes, interrupts.stop_reason))
        return Result("completed", 0, tmp_path)

    monkeypatch.setitem(sys.modules, "ci_llm.run.job", SimpleNamespace(run_job=job))
    monkeypatch.setattr(starter, "_num_gpus", lambda _environ: 0)
    return made


def command(tmp_path: Path, *words: str) -> list[str]:
    return ["train", "--config", os.devnull, f"output_dir={tmp_path / 'run'}", *words]


def test_processes_that_do_not_come_up_are_ended_and_this_one_runs_alone(
    alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agents: list[Any] = []

    def popen(*of: Any, popen: Any = starter.subprocess.Popen, **named: Any) -> Any:
        agents.append(popen(*of, **named))
        return agents[-1]

    monkeypatch.setattr(starter, "COME_UP_S", 0.0)
    monkeypatch.setattr(starter.subprocess, "Popen", popen)
    assert main(command(tmp_path, "--distributed=3")) == 0
    assert alone == [(1, None)]
    assert [agent.poll() for agent in agents] == [-signal.SIGKILL]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "launch    starting 3 processes, by torch.distributed.run --nproc-per-node=3"
    assert said[1].startswith("launch    the 3 processes do not come up (")


def test_a_stop_before_they_are_up_ends_them_and_leaves_a_status(
    alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process leaves before the first step, and the status in the run's folder says so."""

    def interrupted(*of: Any, wait: Any = starter._wait_until_up) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(*of)

    monkeypatch.setattr(starter, "_wait_until_up", interrupted)
    assert main(command(tmp_path, "--distributed=3")) == 0
    assert alone == [(1, "signal:SIGTERM")]
    assert "do not come up" not in capsys.readouterr().out


def test_distributed_without_several_gpus_is_one_process(
    alone: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "--distributed")) == 0
    assert alone == [(1, None)]
    assert capsys.readouterr().out.startswith("launch    --distributed: one process, ")


def test_bases_that_do_not_fit_are_refused(
    alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fits, "_count_parameters", lambda _name: 10**15)
    assert main(command(tmp_path, "--distributed=3")) == 2
    assert alone == []
    assert "3 processes need 12,000.0 TB of memory" in capsys.readouterr().err


def supervised(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *words: str, num_gpus: int = 0) -> list[str]:
    """The command of the supervisor behind `accelerate launch --num_processes=4`."""
    parent = ["accelerate", "launch", "--num_processes=4", "safe_train.py", *words]
    read = read_launch(environ, parent)
    monkeypatch.setattr("ci_llm.cluster.launch.read_launch", lambda: read)
    monkeypatch.setattr(starter, "_num_gpus", lambda _environ: num_gpus)
    made: Any = supervise._target(parse_options(words))
    return list(made._command)


def test_a_supervisor_under_accelerate_lets_its_trainer_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"MASTER_ADDR": "127.0.0.1"}
    assert supervised(monkeypatch, asked, "seed=1")[-2:] == ["seed=1", "--distributed=4"]
    assert supervised(monkeypatch, asked, "seed=1", num_gpus=1)[-1] == "seed=1", "that one takes the GPU"
    assert supervised(monkeypatch, {}, "seed=1")[-1] == "seed=1"
    own = ["seed=1", "--", "torchrun", "train.py"]
    assert supervised(monkeypatch, asked, *own)[-1] == "seed=1", "a command of its own has its launcher"


def test_supervisors_side_by_side_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with pytest.raises(LaunchError, match="4 supervisors were started"):
        supervised(monkeypatch, world)


@pytest.mark.usefixtures("harmless")
def test_a_supervisor_becomes_a_step_unless_its_command_makes_steps_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a step, `srun` would take the size of the step for that of the job."""
    asked: list[int] = []

    def start_again(number: int, *_: Any) -> int:
        asked.append(number)
        return 75

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "start_again", start_again)
    monkeypatch.setattr(supervise, "_target", lambda _options: SimpleNamespace(restarts_from_scratch=False))
    monkeypatch.setattr(loop.Supervisor, "run", lambda _self: 0)
    assert supervise.supervise(["--", "python", "fit.py"]) == 75
    assert not [*tmp_path.iterdir()], "only the step has a log"
    assert supervise.supervise(["--", "/usr/bin/srun", "python", "fit.py"]) == 0
    assert asked == [1]


def test_processes_of_a_supervisor_are_not_taken_for_those_of_the_batch_script() -> None:
    given = {STARTED: "/folder", "HOME": "/home"}
    assert child._environment(given, unbuffered=False) == {"HOME": "/home"}
