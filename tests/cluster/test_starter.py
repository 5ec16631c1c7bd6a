"""How many processes a command starts by itself, and what these know and report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.cli import command
from ci_llm.cluster import starter
from ci_llm.cluster.launch import (
    STARTED,
    SUPERVISED,
    Launch,
    accelerate_option,
    accelerate_settings,
    read_launch,
    started_by,
)
from ci_llm.cluster.starter import processes_to_start, tell
from ci_llm.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
ACCELERATE = ["/venv/bin/accelerate", "launch"]
ASKED: dict[str, str] = {"MASTER_ADDR": "127.0.0.1"}  # by Accelerate, where it was asked for several


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))


def asked(
    options: list[str],
    words: list[str],
    num_gpus: int,
    monkeypatch: pytest.MonkeyPatch,
    environ: Mapping[str, str] = ASKED,
) -> int:
    monkeypatch.setattr(starter, "_num_gpus", lambda _environ: num_gpus)
    return processes_to_start(read_launch(environ, [*ACCELERATE, *options, "train.py"], words), words, environ)


@pytest.mark.parametrize(
    ("options", "words", "num_gpus", "number"),
    [
        (["--num_processes=4"], [], 0, 4),
        (["--cpu", "--num-processes", "4"], [], 0, 4),
        (["--num_processes=4"], ["--distributed"], 0, 4),
        (["--num_processes=4"], [], 1, 1),  # one takes the GPU, as Accelerate has it
        (["--num_processes=4"], ["--distributed=false"], 0, 1),
        (["--num_processes=4", "--num_machines=2"], [], 0, 1),  # each machine would start all of them
        ([], [], 0, 1),  # a number in a file that is gone
        (["--num_processes=1"], [], 0, 1),
        (["--num_processes=1"], ["--distributed"], 0, 1),
        (["--num_processes=1"], ["--distributed"], 2, 2),
        (["--num_processes=1"], ["seed=1", "distributed=true"], 2, 2),
        (["--num_processes=1"], ["--distributed=3"], 0, 3),
        (["--num_processes=1"], ["--distributed", "--distributed=3"], 2, 3),  # the last wins
    ],
)
def test_the_number_of_processes_is_the_last_that_was_given(
    options: list[str], words: list[str], num_gpus: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(options, words, num_gpus, monkeypatch) == number


@pytest.mark.parametrize("rank", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}, {STARTED: "/f"}])
def test_a_process_that_was_started_starts_none(rank: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--num_processes=4"]
    assert asked(words, ["--distributed=4"], 0, monkeypatch, {**ASKED, "MASTER_PORT": "1", **rank}) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("default_config.yaml", "distributed_type: 'NO'\nnum_machines: 1\nnum_processes: 4\n"),
        ("default_config.json", '{\n  "num_machines": 1,\n  "num_processes": 4\n}'),
    ],
)
def test_a_number_in_the_file_of_accelerate(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / name).write_text(text)
    home = {"HF_HOME": str(tmp_path)}
    assert accelerate_option(ACCELERATE, "num_processes", home) == "4"
    assert accelerate_option([*ACCELERATE, "--num_processes=2"], "num_processes", home) == "2"
    other = [*ACCELERATE, "--config_file", str(tmp_path / "other.yaml")]
    assert accelerate_option(other, "num_processes", home) == ""
    assert read_launch({**ASKED, **home}, ACCELERATE).requested_processes == 4


def test_a_started_process_knows_the_launchers_command(tmp_path: Path) -> None:
    """Its own parent is torchrun's agent, which is not the command that was typed."""
    typed = [*ACCELERATE, "--num_processes=2", "--gradient_accumulation_steps=3", "train.py", "a b=1"]
    mark = {STARTED: started_by(str(tmp_path), read_launch({}, typed))}
    rank = {"RANK": "1", "WORLD_SIZE": "2", **ASKED, "MASTER_PORT": "1", **mark}
    assert read_launch(rank).launcher_command == tuple(typed)
    assert accelerate_settings(rank) == {"gradient_accumulation_steps": "3"}


def test_a_started_process_reports_its_start_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(environ={})
    assert command._STARTED == STARTED
    monkeypatch.setenv(STARTED, started_by(str(tmp_path), Launch("torchrun", 2, 1, 2, None, {})))
    monkeypatch.setenv("RANK", "10")
    tell()
    assert command.run_guarded(lambda: 75, debug=False) == 0, "for torchrun, which prints a table of errors otherwise"
    (tmp_path / "000002.5.up").touch()
    assert starter._told(tmp_path) == [(5, "up"), (os.getpid(), "75"), (os.getpid(), "up")]
    late = {STARTED: str(tmp_path / "gone")}
    tell("0", late)
    with pytest.raises(SystemExit):  # it came up too late: the other one runs the command
        tell(environ=late)
    monkeypatch.setenv(STARTED, late[STARTED])
    assert command.run_guarded(lambda: 2, debug=False) == 2, "torchrun ends the others"


@pytest.mark.parametrize(
    ("codes", "interrupts", "code"),
    [
        (["0", "0"], 1, 0),
        (["75", "75"], 1, 75),
        (["2", "1"], 0, 2),
        (["0", "2"], 0, 2),
        (["0", None], 0, 1),  # one was killed
        ([None, None], 0, 1),
        ([None, None], 2, 130),
    ],
)
def test_the_exit_code(
    codes: list[str | None], interrupts: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agent ends with 1 in every case."""
    heeded = Interrupts()

    def wait(_agent: Any, folder: Path, number: int, _interrupts: Any) -> list[int]:
        for index, one in enumerate(codes):
            for word in ["up", one] if one else ["up"]:
                (folder / f"{index:06}.{-index - 1}.{word}").touch()
        return [-index - 1 for index in range(number)]

    def end() -> int:
        for _ in range(interrupts):
            assert heeded.pass_on
            heeded.pass_on("SIGINT")
        return 1

    agent = SimpleNamespace(pid=1, poll=lambda: None, wait=end)
    monkeypatch.setattr(starter, "_agent", lambda *_: nullcontext(agent))
    monkeypatch.setattr(starter, "_wait_until_up", wait)
    monkeypatch.setattr(starter, "send", lambda _pid, _name: True)
    monkeypatch.setattr(starter, "is_alive", lambda _pid: False)
    assert starter._run_again(len(codes), read_launch({}, []), heeded) == code


def test_the_time_counts_once_nothing_is_computed_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look moves the clock by 10 s; for 100 s the processes still use processor time."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(starter, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _seconds: None))
    used = iter([*range(10), *[9] * 90])
    monkeypatch.setattr(starter, "_processor_seconds", lambda _pid: next(used))
    agent: Any = SimpleNamespace(pid=1, poll=lambda: None)
    assert starter._wait_until_up(agent, tmp_path, 2, Interrupts()) == []
    assert 85 <= len([*used]) <= 89, "it was given up a few looks after the last sign"


BATCH = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node3"}


@pytest.fixture
def srun(tmp_path: Path) -> Path:
    """A folder for PATH, whose srun runs what it is given on this machine, and in which nothing else is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "srun"
    script.write_text(
        '#!/bin/sh\nwhile case $1 in -*) true;; *) false;; esac; do shift; done\nSLURM_STEP_ID=0 exec "$@"\n'
    )
    script.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("changes", "is_step"),
    [
        ({}, True),
        ({"SLURM_STEP_ID": "0"}, False),
        ({STARTED: "/f"}, False),  # by this package, which it does once
        ({SUPERVISED: "60"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"SLURMD_NODENAME": ""}, False),  # a shell of salloc, on a machine that has no slurmd
        ({"SLURM_JOB_ID": None}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # of torchrun: each of its processes
        ({"PATH": "/none"}, False),
    ],
)
def test_only_a_process_of_a_batch_script_outside_any_step_becomes_a_step(
    changes: dict[str, str | None], is_step: bool, srun: Path
) -> None:
    environ = {"PATH": str(srun), **BATCH, **changes}
    words = starter.step_command({name: value for name, value in environ.items() if value is not None})
    assert words[:1] == ([str(srun / "srun")] if is_step else [])
    assert {"--overlap", "--ntasks=1", "--nodelist=node3"} <= {*words} or not is_step


CHILD = """\
import os, subprocess, sys
from ci_llm.cluster import starter
from ci_llm.cluster.launch import read_launch
from ci_llm.interrupts import Interrupts
starter.COME_UP_S = float(sys.argv[1])
def wait(self, timeout=None, wait=subprocess.Popen.wait):
    print("waits for it", flush=True)  # it passes signals on from here
    return wait(self, timeout)
if sys.argv[2] == "wait":
    subprocess.Popen.wait = wait
with Interrupts() as interrupts:
    code = starter.start_again(1, read_launch(), interrupts, print)
    if code is not None:
        print("it ended with", code, flush=True)
        sys.exit(code)
    if sys.argv[2] == "mute" and "CI_LLM_STARTED" in os.environ:
        interrupts.wait()
        sys.exit(1)
    starter.tell()
    place = "step" if "SLURM_STEP_ID" in os.environ else "batch script"
    print("runs in the", place, *sys.argv[3:], flush=True)
    if sys.argv[2] == "wait":
        interrupts.wait()
    print("leaves", interrupts.stop_reason, flush=True)
    starter.tell("75")
    sys.exit(75)
"""


def as_batch_script(srun: Path, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **BATCH, "PATH": f"{srun}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in ("SLURM_STEP_ID", STARTED, SUPERVISED):
        environ.pop(name, None)
    command = [sys.executable, "-c", CHILD, *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_step_has_the_options_the_signals_and_the_exit_code(srun: Path) -> None:
    with as_batch_script(srun, "60", "wait", "key=a b") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("launch    starting again as a step of SLURM job 7, by srun")
        begun = {process.stdout.readline() for _ in range(2)}
        assert begun == {"runs in the step key=a b\n", "waits for it\n"}
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.read() == "leaves signal:SIGUSR2\nit ended with 75\n"
    assert process.returncode == 75


@pytest.mark.slow
@pytest.mark.parametrize("broken", [pytest.param("mute", marks=pytest.mark.slow), "refused"])
def test_without_a_step_it_continues_in_the_batch_script(broken: str, srun: Path) -> None:
    if broken == "refused":
        (srun / "srun").write_text("#!/bin/sh\nexit 1\n")
    with as_batch_script(srun, "1" if broken == "mute" else "60", broken) as process:
        out, _ = process.communicate()
    said = out.splitlines()
    assert said[1].startswith("launch    the step does not come up ")
    assert said[1].endswith("a preemption, scancel or the limit may lose what was done since the last save")
    assert said[2:] == ["runs in the batch script", "leaves None"]
    assert process.returncode == 75
