"""Scripts in the shape that public ones have: how they take a configuration, resume, print their rate and save."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ci_llm.errors import ConfigError
from ci_llm.supervisor.external_script import ExternalScript, Resumption
from ci_llm.supervisor.options import parse_options
from ci_llm.supervisor.script_settings import with_file
from tests.supervisor.terminal import SCRIPTS, Terminal, assert_gone, ran


def run(folder: Path, *words: str | Path) -> str:
    """The whole output of a supervision."""
    return ran(folder, *words, hasty=True).text


def commands(told: str) -> list[str]:
    """The commands of the attempts, without the interpreter."""
    return [line.replace(f"{sys.executable} {SCRIPTS}/", "") for line in re.findall(r"attempt \d+ of \d+: (.*)", told)]


# How they take a configuration


@pytest.mark.slow
def test_a_positional_configuration_is_exchanged_and_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("optim: {lr: 2e-4}\n")
    line = [f"{tmp_path}/my.yaml", "--config", "my.yaml"]
    told = run(
        tmp_path,
        *["--config", "my.yaml", "--lr-key", "optim.lr", "--", sys.executable, SCRIPTS / "positional_config.py", *line],
    )
    first, second, third = commands(told)
    assert first == " ".join(["positional_config.py", *line])
    for retry, command in enumerate((second, third), 1):
        plain = re.sub(rf"my_retry_{retry}_\w+\.yaml", "my.yaml", command)
        assert plain == first
        assert command.count("_retry_") == len([word for word in line if "my.yaml" in word])
    assert "step 1 lr 8.89e-05 loss 0.5" in told
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["my.yaml"]


@pytest.mark.slow
def test_a_command_that_names_its_configuration_as_hydra_does(tmp_path: Path) -> None:
    hydra_folder(tmp_path)
    named = ["--config-path", str(tmp_path / "conf"), "--config-name", "config"]
    told = run(tmp_path, *named, "--", sys.executable, SCRIPTS / "hydra_fit.py", *named)
    assert re.findall(r"model=mlp lr=(\S+)", told) == ["0.0003", "0.0002", "0.000133"]
    assert commands(told)[2].endswith("--config-name config training.learning_rate=0.00013333333")


@pytest.mark.parametrize("word", ["{}", "./c/../{}", "x={}", "--x={}"])
def test_a_word_that_is_the_file_is_exchanged(word: str) -> None:
    assert with_file([word.format("c/a.yaml")], Path("c/a.yaml"), Path("c/b.yaml")) == [word.format("c/b.yaml")]


@pytest.mark.parametrize("word", ["a.yaml", "c/a.yaml.bak", "x=y=c/a.yaml", "c", "x=", ""])
def test_any_other_word_stays(word: str) -> None:
    assert with_file([word], Path("c/a.yaml"), Path("c/b.yaml")) == [word]


def hydra_folder(folder: Path) -> Path:
    for name, text in {
        "config.yaml": PLAIN,
        "model/mlp.yaml": "name: mlp\nstable_below: 1.5e-4\nfits: 100\n",
    }.items():
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / name).write_text(text)
    return folder


PLAIN = (
    "defaults: [{model: mlp}, _self_]\nhydra: {sweep: {dir: out}, output_subdir: null}\n"
    "training: {learning_rate: 3e-4, meta_batch_size: 32, schedule: {constant_product: 500}}\n"
)
# How they resume


GPT = (sys.executable, SCRIPTS / "resumes_if_told.py")


def begins(told: str) -> list[str]:
    return re.findall(r"(?:scratch|resume) at step \d+", told)


@pytest.mark.slow
def test_words_for_the_second_attempt_let_a_script_resume_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("25 33")
    (tmp_path / "gpt.py").write_text("max_iters = 50\n")
    told = run(tmp_path, "--on-retry", "--init_from=resume", "--", *GPT, "gpt.py")
    assert begins(told) == ["scratch at step 0", "resume at step 20", "resume at step 30"]
    assert [line.removeprefix("resumes_if_told.py ") for line in commands(told)] == [
        "gpt.py",
        *["gpt.py --init_from=resume"] * 2,
    ]


@pytest.mark.slow
def test_before_there_is_a_checkpoint_a_script_is_not_told_to_resume_from_it(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("0 25")
    words = ["--on-retry", "--init_from=resume", "--goes-on-from", "out/ck*"]
    told = run(tmp_path, *words, "--", *GPT)
    assert begins(told) == ["scratch at step 0", "scratch at step 0", "resume at step 20"]


@pytest.mark.slow
def test_a_checkpoint_that_an_earlier_call_left_is_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ckpt").write_text("30")
    told = run(tmp_path, "--on-retry", "--init_from=resume", "--goes-on-from", "out/ckpt", "--", *GPT)
    assert "the script resumes: --init_from=resume (to begin again, move its checkpoints away)" in told
    assert begins(told) == ["resume at step 30"]


@pytest.mark.slow
def test_new_checkpoints_are_progress(tmp_path: Path) -> None:
    """Five crashes in a row, and each attempt came further than the one before."""
    (tmp_path / "faults").write_text("11 21 31 41 51")
    words = ["--on-retry", "--init_from=resume", "--goes-on-from", "out/ckpt", "--", *GPT, "--max_iters=60"]
    assert "resume at step 50" in run(tmp_path, *words)


def test_the_newest_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    resumption = Resumption("--resume_from_checkpoint '{checkpoint}' ckpt_path={checkpoint}", "out/checkpoint-*", {})
    assert resumption.words() == []
    assert resumption.rerun_effect.startswith("the same command begins again; with --resume_from_checkpoint")
    for step, written in ((500, 3), (1000, 5), (1500, 4)):
        path = tmp_path / "out" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "weights").touch()
        for one in (path / "weights", path):
            os.utime(one, (written, written))
    newest = "out/checkpoint-1000"
    assert resumption.words() == ["--resume_from_checkpoint", newest, f"ckpt_path={newest}"]
    assert resumption.rerun_effect.startswith("the same command resumes, with --resume_from_checkpoint")
    os.utime(tmp_path / "out" / "checkpoint-500" / "weights", (9, 9))  # written again in place
    assert resumption.words()[1] == "out/checkpoint-500"


def test_a_job_that_slurm_has_requeued_is_at_its_second_attempt() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert Resumption("--resume last", None, job).words() == ["--resume", "last"]
    assert Resumption("--resume last", None, job | {"SLURM_RESTART_COUNT": "0"}).words() == []


def test_wandb_runs_of_attempts_that_are_resumed_stay() -> None:
    assert ExternalScript(parse_options(["--", "true"])).restarts_from_scratch
    assert not ExternalScript(parse_options(["--on-retry", "--resume", "--", "true"])).restarts_from_scratch


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--on-retry", "ckpt={checkpoint}"], "{checkpoint} stands for nothing"),
        (["--on-retry", "--name 'x"], "the words cannot be told apart"),
        (["--stop-signal", "INT"], "there is no signal 'INT'"),
    ],
)
def test_impossible_words_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ExternalScript(parse_options([*words, "--", "true"]))


# How they are stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["launcher"]])
def test_ctrl_c_reaches_a_script_that_saves_at_it(tmp_path: Path, kind: list[str]) -> None:
    command = [sys.executable, SCRIPTS / "saves_at_ctrl_c.py", *kind]
    with Terminal("--grace", "120", "--", *command, cwd=tmp_path) as terminal:
        terminal.read_until("ready")
        processes = terminal.descendants()
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == 75, terminal.text
        assert_gone(processes)
    assert (tmp_path / "saved").exists()
    assert "interrupted: signal:SIGINT" in terminal.text


@pytest.mark.slow
def test_a_script_can_be_stopped_by_the_signal_that_it_knows(tmp_path: Path) -> None:
    command = ["--stop-signal", "SIGINT", "--grace", "120", "--", sys.executable, SCRIPTS / "saves_at_ctrl_c.py"]
    with Terminal(*command, cwd=tmp_path) as terminal:
        terminal.read_until("ready")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait() == 75, terminal.text
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_script_that_ignores_ctrl_c_gets_term_before_it_is_killed(tmp_path: Path) -> None:
    """A background job of a shell ignores SIGINT, as POSIX requires."""
    (tmp_path / "saves.py").write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), sys.exit()))\n"
        "print('ready', flush=True)\nwhile True:\n    signal.pause()\n"
    )
    (tmp_path / "run.sh").write_text(f"{sys.executable} saves.py &\nwait\n")
    with Terminal("--grace", "2", "--", "sh", "run.sh", cwd=tmp_path) as terminal:
        terminal.read_until("ready")
        terminal.signal(signal.SIGINT)
        assert terminal.wait() == 75, terminal.text
    assert (tmp_path / "saved").exists()
