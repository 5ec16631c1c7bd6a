"""What all commands share: help, errors, output that fails, the environment and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm import interrupts
from ci_llm.cli import command as guard
from ci_llm.cli import main, supervise
from ci_llm.core.run_status import Status
from ci_llm.errors import ConfigError
from ci_llm.run.job import Result
from ci_llm.supervisor.options import parse_options
from ci_llm.sweep.sweep import Sweep
from tests.support.children import python
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]
COMPLETED = Status("completed", None, 7, 1, 1, "here", "space", 0.0, 0.0)


@pytest.fixture
def nobody_reads() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_the_pipe_is_not_a_failure(unbuffered: str, nobody_reads: int) -> None:
    done = python("-m", "ci_llm", "train", "--help", stdout=nobody_reads, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (guard.BROKEN_PIPE_EXIT_CODE, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(["-m", "ci_llm", "checkpoints", "list", "--help"], ""), ([ROOT / "safe_train.py", "--help"], "1")],
)
def test_an_output_that_cannot_be_written_is_one_message(words: list[str | Path], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = python(*words, stdout=full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output could not be written: No space left on device\n")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_status_that_cannot_be_printed_has_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(asdict(COMPLETED)))
    assert python("-m", "ci_llm", "status", tmp_path).returncode == 0
    with open("/dev/full", "w") as full:
        done = python("-m", "ci_llm", "status", tmp_path, stdout=full.fileno())
    assert (done.returncode, done.stderr.count("\n")) == (2, 3)


VERBS = [[verb] for verb in main.COMMANDS]
VERBS += [["agents", "stop"]]
OF_CHECKPOINTS = ("list", "verify", "diff", "prune", "import", "pull", "push")
VERBS += [["checkpoints"], *(["checkpoints", verb] for verb in OF_CHECKPOINTS)]


@pytest.mark.fast_cases(17)
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_shows_one_example_and_at_most_five_options_and_the_rest_on_demand(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` itself is not counted; for train the options are keys."""
    said = {}
    for which in ((), ("all",)):
        assert main.main([*words, "--help", *which]) == 0
        said[which] = capsys.readouterr().out
    short, full = said.values()
    assert short != main.USAGE + "\n"
    options = re.findall(r"^  (?:--)?[a-z][\w-]+[= ].*", short.partition("options:\n")[2], re.MULTILINE)
    keys = re.findall(r"^  \w+=", short, re.MULTILINE) if words == ["train"] else []
    assert len(options) + len(keys) <= 5, short
    assert len(re.findall(r"^examples?:", short, re.MULTILINE)) == 1
    [example] = re.findall(r"^example: +(.+)", short, re.MULTILINE)
    assert example in full
    assert {*re.findall(r"--[a-z][\w-]+", short)} <= {*re.findall(r"--[a-z][\w-]+", full), "--help"}


def test_the_first_page_has_every_verb_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    groups = dict(re.findall(r"^(start here|after the run|around the run)\n((?:  .*\n)+)", main.USAGE, re.MULTILINE))
    verbs = [verb for lines in groups.values() for verb in re.findall(r"^  (\w+) ", lines, re.MULTILINE)]
    assert sorted(verbs) == sorted(main.COMMANDS)
    assert list(groups) == ["start here", "after the run", "around the run"]
    assert main.main(["--help"]) == 0
    assert capsys.readouterr().out == main.USAGE + "\n"


@pytest.mark.slow
def test_debug_prints_debug_lines(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(asdict(COMPLETED)))
    done = python("-m", "ci_llm", "status", "--debug", tmp_path)
    assert f"ci_llm.cli.runs: reads {tmp_path / 'status.json'}" in done.stderr
    assert "debug" not in python("-m", "ci_llm", "status", tmp_path).stderr
    bad = python("-m", "ci_llm", "train", "--debug", "num_agent=3").stderr
    assert "debug" in bad.splitlines()[0]
    assert "Traceback" in bad


def test_a_run_survives_the_loss_of_its_output(nobody_reads: int) -> None:
    command = "lambda: guard.print_line('loading') or print('stray') or 0"
    code = f"from ci_llm.cli import command as guard; guard.run_guarded({command}, debug=False)"
    assert python("-c", code, stdout=nobody_reads).stderr == ""


def test_descriptors_of_closed_standard_files_are_not_reused(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "import os, sys; from ci_llm.cli import command as guard\n"
        "def command():\n"
        "    print('out'); print('err', file=sys.stderr); assert not sys.stdout.isatty()\n"
        "    return os.open(os.devnull, os.O_RDONLY)\n"
        "sys.exit(guard.run_guarded(command, debug=False))\n"
    )
    closed = f"{sys.executable} {tmp_path / 'command.py'} <&- >&- 2>&-"
    done = subprocess.run(closed, shell=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S)
    assert done.returncode > 2


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "error: num_agent is not a key\n  where: command line\n  hint:  did you mean num_agents?\n"),
        ({"RANK": "1"}, "error: num_agent is not a key\n  where: "),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "error: num_agent is not a key\n  where: "),
        ({"WORLD_SIZE": "4", "RANK": "3"}, "process 3: error: num_agent is not a key\n"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "process 1: error: num_agent is not a key\n"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "process 1: error: num_agent is not a key\n"),
        ({"SLURM_PROCID": "1"}, "error: num_agent is not a key\n  where: "),
    ],
    ids=str,
)
def test_one_process_prints_the_error_in_full_and_the_others_one_line(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main.main(["train", "num_agent=3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(told)
    assert told.endswith("where: ") or said == told


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("script", ["train.py", "safe_train.py", "dry_run_sanity_check.py"])
def test_outside_of_the_environment_the_cure_is_one_line(script: str) -> None:
    bare = [sys.executable, "-S", ROOT / script]  # -S: no package that was installed is found
    done = subprocess.run(bare, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "is not installed for" in done.stderr
    assert f"make install, then .venv/bin/python {script}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_import_error_in_other_code_is_a_failure_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(_: list[str]) -> int:
        import package_of_somebody_else  # type: ignore[import-not-found]

        return int(package_of_somebody_else.answer)

    monkeypatch.setattr(main, "main", job)
    monkeypatch.setattr(interrupts, "_process_ends", False)  # to be put back: this process does not end with it
    with pytest.raises(ModuleNotFoundError, match="package_of_somebody_else"):
        main.run_script([])


# From another folder


@pytest.mark.parametrize(("command", "module"), [("train", "run.job"), ("check", "dry_run.plan")])
@pytest.mark.parametrize("own", [False, True], ids=["no configs.yaml there", "a configs.yaml there"])
def test_from_another_folder_the_configuration_is_that_folder_s_else_the_project_s_and_named(
    command: str, module: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python /path/train.py` silently trained without any configuration file."""
    seen: list[Any] = []

    def job(config: Any, *_: Any, **named: Any) -> Any:
        seen.append((config, *named.get("sources", ())))
        return 0 if command == "check" else Result("completed", 0, tmp_path)

    monkeypatch.setitem(sys.modules, f"ci_llm.{module}", SimpleNamespace(run_job=job, dry_run=job))
    monkeypatch.chdir(tmp_path)
    if own:
        (tmp_path / "configs.yaml").write_text("max_train_steps: 7\n")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main.main([command, "experiment_name=a"]) == 0
    [(config, *said)] = seen
    assert config.max_train_steps == (7 if own else 260)
    said = said or [line.removeprefix("config    ") for line in told.getvalue().splitlines() if "config  " in line]
    file = "configs.yaml" if own else str(ROOT / "configs.yaml")
    assert said == [f"{file}; command line: experiment_name=a; defaults for all other keys"]


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run"])
def test_train_with_dry_run_is_the_check(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    plan = SimpleNamespace(dry_run=lambda config, *_, debug: seen.append((config.batch_size, debug)) or 0)
    monkeypatch.setitem(sys.modules, "ci_llm.dry_run.plan", plan)
    monkeypatch.setitem(sys.modules, "ci_llm.run.job", None)  # importing it fails
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", option, "batch_size=3", "--debug"]) == 0
    assert seen == [(3, True)]
    assert main.main(["train", option, "--continue", f"output_dir={tmp_path / 'nothing'}"]) == 2
    assert len(seen) == 1, "what the run refuses"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_sweep_is_continued_only_where_there_is_one(
    dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ci_llm.cli.train._train_sweep", lambda *_: 0)
    monkeypatch.setattr("ci_llm.cli.train._dry_run_sweep", lambda *_, **__: 0)
    words = ["learning_rate=[1e-3,2e-3]", "max_train_steps=4", f"output_dir={tmp_path / 'sweep'}"]
    assert main.main(["sweep", "--config", os.devnull, *dry, *words, "--continue"]) == 2
    assert "there is no sweep to continue" in capsys.readouterr().err
    Sweep(None, learning_rate=[1e-3, 2e-3], max_train_steps=4, output_dir=str(tmp_path / "sweep")).ask()
    assert main.main(["sweep", "--config", os.devnull, *dry, *words, "--continue"]) == 0


def test_from_another_folder_the_supervisor_starts_the_project_s_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = supervise._target(parse_options(["experiment_name=a"]))
    assert training.begin_attempt()[0] == [sys.executable, "-m", "ci_llm", "train", "experiment_name=a"]
    with pytest.raises(ConfigError, match="no such training script"):
        supervise._target(parse_options(["--lr-key", "lr"]))  # meant for another script, which is not there
    (tmp_path / "train.py").write_text("from ci_llm.cli.main import run_script")
    assert supervise._target(parse_options([])).begin_attempt()[0] == [sys.executable, "train.py"]
