"""The command line: own options, what is passed on, which target it means; and --help answers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci_llm.cli.supervise import is_own_script, own_call
from ci_llm.errors import ConfigError
from ci_llm.supervisor.options import parse_options
from tests.supervisor.terminal import DEADLINE_S, ROOT


def test_words_that_are_not_options_are_passed_on_in_order() -> None:
    call = parse_options(
        ["a.b=1", "--max-retries", "3", "--num_agents", "8", "+c=2", "--flag", "--min-lr=1e-5", "-m", "~d"]
    )
    assert call.words == ("a.b=1", "--num_agents", "8", "+c=2", "--flag", "-m", "~d")
    assert (call.policy.max_retries, call.policy.min_learning_rate) == (3, 1e-5)


def test_the_command_stays_as_it_is() -> None:
    call = parse_options(["--lr-key", "lr", "x=1", "--", "python", "fit.py", "--max-retries", "7", "--", "y"])
    assert call.command == ("python", "fit.py", "--max-retries", "7", "--", "y")
    assert (call.words, call.policy.max_retries) == (("x=1",), 10)


@pytest.mark.parametrize(
    ("words", "on_retry", "command"),
    [
        (["--on-retry", "--init_from=resume", "--", "fit"], "--init_from=resume", ("fit",)),
        (["--on-retry=--resume", "--", "fit", "--on-retry", "-x"], "--resume", ("fit", "--on-retry", "-x")),
        (["--on-retry", "--resume last", "--", "fit"], "--resume last", ("fit",)),
        (["--on-retry", "ckpt=last", "--", "fit"], "ckpt=last", ("fit",)),
    ],
)
def test_words_for_the_retry_may_look_like_options(words: list[str], on_retry: str, command: tuple[str, ...]) -> None:
    call = parse_options(words)
    assert (call.on_retry, call.command, call.words) == (on_retry, command, ())


@pytest.mark.parametrize(
    "words",
    [
        ["--max-retries", "-1"],
        ["--min-lr", "nan"],
        ["--min-batch-size", "0"],
        ["--grace", "-3"],
        ["--grace", "inf"],
        ["--config"],
        ["--on-retry"],
        ["--on-retry", "--", "fit"],
        ["--no-delete-wandb-run"],
        ["--train-scripts", "x"],
        ["--config", "a.yaml", "--config-name", "b"],
    ],
)
def test_a_wrong_option_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_options(words)


def test_an_own_script_is_known_by_what_it_imports(tmp_path: Path) -> None:
    assert is_own_script(ROOT / "train.py")
    other = tmp_path / "train.py"
    other.write_text("from ci_llm import CheckpointManager  # a plain loop of somebody's own\n")
    assert not is_own_script(other)
    assert not is_own_script(tmp_path / "missing.py")


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (["torchrun", "--nproc-per-node", "4", "{train}", "a=1"], ("train", ["a=1"])),
        (["accelerate", "launch", "--num_processes=4", "{train}"], ("train", [])),
        (["ci-llm", "train", "a=1"], ("train", ["a=1"])),
        (["python", "-m", "ci_llm", "sweep", "a=1"], ("sweep", ["a=1"])),
        (["python", "-m", "ci_llm", "status", "a=1"], None),
        (["python", "fit.py", "a=1"], None),
        (["srun", "bash", "-c", "python train.py"], None),
    ],
)
def test_the_own_trainer_is_found_behind_any_launcher(command: list[str], call: tuple[str, list[str]] | None) -> None:
    assert own_call([word.format(train=ROOT / "train.py") for word in command]) == call


def test_help_takes_the_standard_library_and_a_few_files_of_this_package() -> None:
    """The test counts modules, because seconds depend on the machine."""
    code = (
        "import sys, runpy; sys.argv = ['safe_train.py', '--help']; before = {*sys.modules}\n"
        "try: runpy.run_path('safe_train.py', run_name='__main__')\n"
        "except SystemExit: print(*{*sys.modules} - before, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    loaded = done.stderr.split()
    own = [name for name in loaded if name.partition(".")[0] == "ci_llm"]
    assert {name.partition(".")[0] for name in loaded} - {*sys.stdlib_module_names} - {"__mp_main__"} == {"ci_llm"}
    assert len(own) <= 20, own
    assert len(loaded) <= 100, sorted(loaded)


@pytest.mark.slow
def test_an_external_script_starts_without_the_configuration_of_this_project() -> None:
    """Its strict reader needs a library that takes longer to load than all other modules together."""
    code = "import sys\nfrom ci_llm.supervisor import external_script, loop, shim, wandb_cleanup\n"
    code += "print(*({'pydantic', 'ci_llm.config'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
