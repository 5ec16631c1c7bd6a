"""External scripts, unchanged, through a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ci_llm.core.run_status import is_alive
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.external_script import ExternalScript, Resumption
from ci_llm.supervisor.options import parse_options
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision
from tests.supervisor.terminal import DEADLINE_S, SCRIPTS, Terminal, assert_gone, ran
from tests.support.campaign import first_fast

CONFIG = """\
# The learning rate is the important one.
training:
  learning_rate: 2e-4     # per agent
  meta_batch_size: 32
  message_steps_schedule: {type: constant, constant_product: 500}  # flow style
  epochs: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text(CONFIG)
    return tmp_path


def log_of(folder: Path) -> str:
    return (folder / "safe_train.log").read_text()


def assert_clean(folder: Path) -> None:
    """The original is byte-identical, and no temporary file is left."""
    assert (folder / "configs" / "config.yaml").read_bytes() == CONFIG.encode()
    assert os.listdir(folder / "configs") == ["config.yaml"]
    assert "configuration: configs/config.yaml, which stays as it is" in log_of(folder)


@pytest.mark.slow
def test_nan_in_a_bar_divides_the_learning_rate_although_the_script_exits_0(folder: Path) -> None:
    terminal = ran(folder, "--train-script", SCRIPTS / "diverges.py")
    told = log_of(folder)
    assert "attempt 1 of 11" in told
    assert "nonfinite: Training GNN: 1/3 [00:00<00:00, 9.80it/s, Loss=nan, Accuracy=0.8456]" in told
    assert "training.learning_rate: 0.0002 -> 0.00013333333" in told
    assert "training.learning_rate: 0.00013333333 -> 8.8888887e-05" in told
    assert terminal.output.count(b"\rTraining GNN: 3/3") >= 1  # redrawn in place
    assert_clean(folder)


@pytest.mark.slow
def test_out_of_memory_divides_the_batch_and_what_scales_with_it(folder: Path) -> None:
    terminal = ran(folder, "--train-script", SCRIPTS / "too_big.py")
    assert "fits 14.0 222.0" in terminal.text
    told = log_of(folder)
    assert "training.meta_batch_size: 32 -> 21" in told
    assert "training.message_steps_schedule.constant_product: 500 -> 333" in told
    assert_clean(folder)


@pytest.mark.parametrize(
    "hidden",
    ["constant_product: 500\n", "a: {constant_product: 500}\n", "a:\n  b:\n    c: {constant_product: 500}\n", "a.b"],
)
def test_every_constant_product_scales_with_the_batch_wherever_it_stands(
    hidden: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the original. A value over which Hydra would sweep is none of them, and the second one scales as well."""
    monkeypatch.chdir(folder)
    config, words = folder / "configs/config.yaml", ["--train-script", str(SCRIPTS / "too_big.py")]
    on_line = hidden.startswith("a.b")
    config.write_text(CONFIG + ("" if on_line else hidden) + "hydra: {sweeper: {params: {constant_product: 7}}}\n")
    script = ExternalScript(parse_options([*words, *(["--a.b.constant_product=500"] if on_line else [])]))
    before = config.read_bytes()
    lines = script.adjust(Decision("relaunch", "out of memory", batch_size=21), retry=1)
    scaled = [line for line in lines if "constant_product" in line]
    assert len(scaled) == 2
    assert all(line.endswith("constant_product: 500 -> 333") for line in scaled)
    command = " ".join(script.begin_attempt()[0])
    [copy] = folder.glob("configs/config_retry_1_*.yaml")
    assert f"{copy.read_text()} {command}".count("333") == 2
    assert "params: {constant_product: 7}" in copy.read_text()
    script.clean_up()
    assert config.read_bytes() == before


@pytest.mark.slow
def test_secrets_on_the_command_line_arrive_and_are_written_nowhere(folder: Path) -> None:
    peek = folder / "peek.py"
    peek.write_text(
        "import sys\nassert sys.argv[-4:] == ['--api-key', 'hunter2', '--hub.token=hunter3', 'n=1'], sys.argv\n"
    )
    words = ["--api-key", "hunter2", "--hub.token=hunter3", "n=1"]
    command = ["--goes-on-from", "*.pt", "--on-retry", "--token hunter4", "--", sys.executable, "peek.py", *words]
    terminal = ran(folder, *command)
    for told in (log_of(folder), terminal.text):
        assert "peek.py --api-key '***' '--hub.token=***' n=1" in told
        assert "hunter" not in told


@pytest.mark.slow
def test_an_unknown_crash_is_tried_three_times(folder: Path) -> None:
    (folder / "crash.py").write_text("print('half way')\nraise SystemExit('no such luck')\n")
    ran(folder, "--train-script", "crash.py", code=1, hasty=True)
    told = log_of(folder)
    assert told.count("crashed: exit code 1: no such luck") == 6  # as they ended, and in the analysis
    assert "giving up: 3 attempts in a row without progress" in told
    assert "    half way" in told


@pytest.mark.slow
def test_bytes_pass_unchanged_and_both_streams_are_terminals(folder: Path) -> None:
    terminal = ran(folder, "--train-script", SCRIPTS / "bar.py")
    said = terminal.output
    assert b"True True\n" in said
    assert said.count(b"\r  0%|") == 1
    assert re.search(rb"\r100%\|#+\| 3/3 \[", said)
    assert b"\xff\x00 \x1b[31mred\x1b[0m caf\xc3\xa9 no newline\nsafe_train: attempt 1 ended" in said


@pytest.mark.slow
def test_without_a_terminal_streams_stay_apart_and_nothing_waits_in_a_buffer(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS.parents[2] / "safe_train.py", "--train-script", SCRIPTS / "bar.py"],
        cwd=folder,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert done.stdout == b"False False\n\xff\x00 \x1b[31mred\x1b[0m caf\xc3\xa9 no newline"
    assert b"100%|##########| 3/3" in done.stderr


@pytest.mark.slow
def test_a_new_window_size_reaches_the_script(folder: Path) -> None:
    with Terminal("--train-script", SCRIPTS / "columns.py", cwd=folder) as terminal:
        terminal.read_until("columns: 90")
        terminal.resize(120)
        terminal.read_until("columns: 120")
        assert terminal.wait() == 0


# Any command, and configurations that are no Hydra's


@pytest.mark.slow
def test_a_command_gets_its_keys_rewritten_or_appended(folder: Path) -> None:
    (folder / "fit.py").write_text(
        "import sys\nwords = sys.argv[1:]\nprint(words)\n"
        "lr = float(words[words.index('--lr') + 1])\n"
        "print('Loss=nan' if lr > 1e-4 else 'fine')\n"
    )
    command = ["--lr-key", "lr", "--", sys.executable, "fit.py", "--lr", "2e-4", "--name", "x"]
    terminal = ran(folder, *command)
    assert "['--lr', '2e-4', '--name', 'x']" in terminal.text
    assert "['--lr', '0.00013333333', '--name', 'x']" in terminal.text


@pytest.mark.slow
def test_a_file_behind_a_flag(folder: Path) -> None:
    (folder / "my.yaml").write_text("optim:\n  lr: 2e-4\nbatch_size: 8\n")
    (folder / "fit.py").write_text(
        "import sys\nprint(sys.argv[1:])\ntext = open(sys.argv[2]).read()\n"
        "print('Loss=nan' if '2e-4' in text else text)\n"
    )
    words = ["--train-script", "fit.py", "--config-flag=--conf", "--config", "my.yaml", "--lr-key", "optim.lr", "x=1"]
    terminal = ran(folder, *words)
    assert "['--conf', 'my.yaml', 'x=1']" in terminal.text
    assert re.search(r"\['--conf', 'my_retry_1_\w+\.yaml', 'x=1'\]", terminal.text)
    assert "optim:\n  lr: 0.00013333333\nbatch_size: 8\n" in terminal.text
    assert sorted(path.name for path in folder.glob("*.yaml")) == ["my.yaml"]


# Hydra itself


@pytest.fixture
def hydra_folder(tmp_path: Path) -> Path:
    conf = tmp_path / "conf"
    for name, text in {
        "config.yaml": "# @package _global_\ndefaults:\n  - training: usual\n  - model: mlp\n  - _self_\n\n"
        "hydra: {run: {dir: .}, output_subdir: null}  # nothing but what we print\n",
        "training/usual.yaml": "learning_rate: 2e-4\nmeta_batch_size: 32\nschedule:\n  constant_product: 500\n",
        "model/mlp.yaml": "name: mlp\nstable_below: 1.0\nfits: 100\n",
        "model/gnn.yaml": "name: gnn\nstable_below: 1.5e-4\nfits: 25\n",
    }.items():
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(text)
    return tmp_path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.yaml")}


@pytest.mark.slow
def test_hydra_with_values_in_groups(hydra_folder: Path) -> None:
    before = files_of(hydra_folder)
    words = ["--train-script", SCRIPTS / "hydra_fit.py", "--config-path", "conf", "model=gnn"]
    terminal = ran(hydra_folder, *words)
    said = [line for line in terminal.text.splitlines() if line.startswith("model=")]
    assert said == [
        "model=gnn lr=0.0002 batch=32 product=500",
        "model=gnn lr=0.000133 batch=32 product=500",
        "model=gnn lr=0.000133 batch=21 product=333",
    ]
    assert "trained" in terminal.text
    assert files_of(hydra_folder) == before


# No process left


@contextmanager
def stubborn(folder: Path, *words: str) -> Iterator[tuple[Terminal, list[psutil.Process]]]:
    """A script that ignores signals, and its processes, once all of them are there."""
    with Terminal("--train-script", SCRIPTS / "stubborn.py", *words, cwd=folder) as terminal:
        terminal.read_until("ready")
        yield terminal, terminal.descendants()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_script_that_ignores_it_and_its_children(folder: Path, number: int) -> None:
    with stubborn(folder, "--grace", "0.3") as (terminal, processes):
        assert len(processes) == 6  # shim, script, two children, grandchild, orphan
        terminal.signal(number)
        assert terminal.wait() == 75, terminal.text
        assert not [process for process in processes if is_alive(process.pid)]
    told = log_of(folder)
    assert f"interrupted: signal:{signal.Signals(number).name}" in told
    assert "had to be killed: " in told
    assert_clean(folder)


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(folder: Path) -> None:
    with stubborn(folder, "--grace", "600") as (terminal, processes):
        terminal.signal(signal.SIGINT)
        terminal.read_until("again to abort now")
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == 130, terminal.text  # as train.py: nobody gave up
        assert not [process for process in processes if is_alive(process.pid)]
    assert "aborted" in log_of(folder)
    assert_clean(folder)


@pytest.mark.slow
def test_a_request_to_save_is_not_mistaken_for_one_to_stop(folder: Path) -> None:
    with stubborn(folder, "--grace", "0") as (terminal, _):
        terminal.signal(signal.SIGUSR1)
        terminal.read_until("SIGUSR1 is for the training")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 75
    assert "interrupted: signal:SIGTERM" in log_of(folder)


@pytest.mark.slow
def test_told_to_stop_between_two_attempts_it_launches_nothing_more(folder: Path) -> None:
    (folder / "fills.py").write_text("raise SystemExit('No space left on device')\n")
    with Terminal("--train-script", "fills.py", cwd=folder) as terminal:
        terminal.read_until("waiting 60 s")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 75, terminal.text
    assert "SIGTERM: launching nothing more" in terminal.text
    told = log_of(folder)
    assert "interrupted: the script begins again next time, unless it resumes by itself" in told
    assert "attempt 2" not in told


@pytest.mark.slow
def test_orphans_that_have_ended_do_not_pile_up(folder: Path) -> None:
    (folder / "leaves.py").write_text(
        "import os, psutil, subprocess, time\n"
        "for _ in range(3):\n    subprocess.run(['sh', '-c', 'sleep 0.1 &'])\n"
        f"shim, until = psutil.Process().parent(), time.monotonic() + {DEADLINE_S}\n"
        "while len(shim.children()) > 1 and time.monotonic() < until:\n    time.sleep(0.01)\n"
        "print('children of the shim:', len(shim.children()))\n"
    )
    terminal = ran(folder, "--train-script", "leaves.py")
    assert "children of the shim: 1" in terminal.text


@pytest.mark.slow
def test_processes_that_a_script_leaves_behind_are_ended(folder: Path) -> None:
    words = ["--train-script", SCRIPTS / "stubborn.py", "--grace", "0", "end"]
    ran(folder, *words)
    assert "completed" in log_of(folder)
    assert "had to be killed: python" in log_of(folder)


@pytest.mark.slow
def test_nothing_survives_a_kill_of_the_supervisor(folder: Path) -> None:
    with stubborn(folder, "--grace", "0.3") as (terminal, processes):
        terminal.signal(signal.SIGKILL)
        terminal.wait()
        assert_gone(processes)


@pytest.mark.slow
def test_nothing_survives_a_kill_of_the_shim(folder: Path) -> None:
    with stubborn(folder, "--max-retries", "0") as (terminal, processes):
        psutil.Process(terminal.process.pid).children()[0].kill()
        assert terminal.wait() == 1
        assert_gone(processes)
    assert "killed" in log_of(folder)


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_stop_the_training(folder: Path) -> None:
    (folder / "long.py").write_text("for step in range(20000): print('step', step)\nopen('done', 'w').close()\n")
    command = f"{sys.executable} {SCRIPTS.parents[2] / 'safe_train.py'} --train-script long.py | head -n 1"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, timeout=DEADLINE_S)
    assert done.stdout == b"step 0\n"
    assert (folder / "done").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is always full; run on Linux")
def test_a_full_disk_under_our_output_does_not_stop_the_training(folder: Path) -> None:
    (folder / "long.py").write_text("for step in range(2000): print('step', step)\nopen('done', 'w').close()\n")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, SCRIPTS.parents[2] / "safe_train.py", "--train-script", "long.py"]
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=full, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert (folder / "done").exists()


# Bad calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    first_fast(
        [
            (["--train-script", "nothing.py"], ["there is no such training script", "nothing.py"]),
            (["--train-script", "fit.py", "--config-name", "other"], ["cannot be found", "configs/other.yaml"]),
            (["--max-retires", "3"], ["there is no option --max-retires", "did you mean --max-retries?"]),
            (["--", "no-such-program"], ["it cannot be started: No such file"]),
            (["--train-script", "fit.py", "--lr-key", "a.b"], ["a.b has no value that is a number"]),
            (["--train-script", "fit.py", "--scale-with-batch", "a"], ["--scale-with-batch a", "no value"]),
        ],
        3,
    ),
)
def test_a_bad_call_is_explained_with_exit_code_2(folder: Path, words: list[str], told: list[str]) -> None:
    (folder / "fit.py").write_text("")
    terminal = ran(folder, *words, code=2)
    assert "Traceback" not in terminal.text
    for part in told:
        assert part in terminal.text


def test_a_script_that_ran_for_long_has_made_progress() -> None:
    script = ExternalScript(parse_options(["--lr-key", "lr", "--batch-size-key", "n", "--", "fit", "lr=0.1", "n=3"]))
    for duration_s in (599.0, 600.0):
        outcome = script.classify(AttemptResult(Evidence(), returncode=1, duration_s=duration_s))
        assert (outcome.kind, outcome.progress) == ("crashed", duration_s >= 600)
        assert (outcome.learning_rate, outcome.batch_size) == (0.1, 3)


def test_a_checkpoint_may_be_removed_while_it_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(folder: object) -> object:
        if Path(str(folder)).name == "shards":
            shutil.rmtree(str(folder))
        return real(folder)  # type: ignore[call-overload]

    for name in ("checkpoint-1/shards", "checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "checkpoint-1/shards/weights").touch()
    (tmp_path / "checkpoint-2/weights").touch()
    (tmp_path / "checkpoint-3").touch()
    os.utime(tmp_path / "checkpoint-2/weights", ns=(1 << 62, 1 << 62))
    real = os.scandir
    monkeypatch.setattr(os, "scandir", look)
    found = Resumption(None, str(tmp_path / "checkpoint-*"), {}).newest()
    assert found == (str(tmp_path / "checkpoint-2"), 1 << 62)
    assert not (tmp_path / "checkpoint-1/shards").exists(), "it was looked at"
