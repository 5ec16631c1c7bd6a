"""Nothing heavy is imported before the first line is printed. The tests count modules, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci_llm.cli.main import COMMANDS
from tests.report.folders import leave_run
from tests.support.campaign import sampled
from tests.support.small_run import WORDS
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]
#: Each takes longer to import than a person waits for a line without noticing.
HEAVY = {
    *("torch", "transformers", "accelerate", "datasets", "peft", "numpy", "pandas", "pyarrow", "rich"),
    *("huggingface_hub", "safetensors", "requests", "httpx", "asyncio", "tensorboard", "wandb", "IPython"),
}
#: Python itself has about 30; pydantic, which checks the configuration, and what it needs about 140;
#: the page of a run its template engine.
MOST_MODULES = {"help": 250, "first line": 350, "page": 420}

HELP = """
import contextlib, io, json, sys
from ci_llm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    for command in sys.argv[1:]:
        main([command, "--help"])
print(json.dumps([*sys.modules]))
"""
FIRST_LINE = """
import json, sys
from ci_llm.cli import train as starting
from ci_llm.cli.main import main
def end(line):
    assert line.startswith("ci_llm ") and line.endswith("loading..."), line
    print(json.dumps([*sys.modules]))
    raise SystemExit(0)
starting.print_line = end
main(["train", "num_agents=2", "output_dir=" + sys.argv[1]])
"""
REPORT = """
import contextlib, io, json, sys
from ci_llm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["report", sys.argv[1]]) == 0
print(json.dumps([*sys.modules]))
"""
#: What the first step of a run on the embedded base and rows does without. PEFT comes with Transformers' schedules.
NOT_NEEDED = {"datasets", "pandas", "wandb", "optuna", "ci_llm.supervisor"}
FIRST_STEP = """
import json, os, sys
from ci_llm.cli.main import main
from ci_llm.core.imports import importing
with importing():
    from ci_llm.run import loop
def end(*_):
    print(json.dumps([*sys.modules]), file=sys.__stdout__, flush=True)
    os._exit(0)
loop.report = end
main(["train", "max_train_steps=1", "output_dir=" + sys.argv[1], *sys.argv[2:]])
"""
#: Ends where torch is about to be imported, and tells whether the collector of garbage is on.
AT_TORCH = """
import gc, importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(gc.isenabled(), file=sys.__stdout__, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
from ci_llm.cli.main import main
sys.exit(main(sys.argv[1:]) or "torch was not imported")
"""


def modules_after(code: str, *words: str | Path) -> set[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return set(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("["))))


@pytest.mark.slow
def test_help_imports_little() -> None:
    read_keys = {"train", "sweep"}  # their help lists them
    assert len(modules_after(HELP, *sorted({*COMMANDS} - read_keys))) <= MOST_MODULES["help"]
    found = modules_after(HELP, *sorted(COMMANDS))
    assert not HEAVY & found
    assert len(found) <= MOST_MODULES["first line"]


@pytest.mark.slow
def test_a_report_imports_little(tmp_path: Path) -> None:
    found = modules_after(REPORT, leave_run(tmp_path / "run"))
    assert not HEAVY & found
    assert len(found) <= MOST_MODULES["page"]


@pytest.mark.slow
def test_the_first_step_of_a_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    found = modules_after(FIRST_STEP, tmp_path, *WORDS)
    assert "torch" in found
    assert sorted(NOT_NEEDED & found) == []


@pytest.mark.slow
def test_the_first_line_of_a_run_comes_before_anything_heavy(tmp_path: Path) -> None:
    found = modules_after(FIRST_LINE, tmp_path)
    assert not HEAVY & found
    assert len(found) <= MOST_MODULES["first line"]


#: Each imports torch at a place of its own.
ONE_OF_A_KIND = ("train", "generate", "score")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    sampled(["train", "check", "sweep", "generate", "chat", "score", "serve", "evaluate", "export"], ONE_OF_A_KIND),
)
def test_no_garbage_is_collected_while_libraries_are_imported(command: str, tmp_path: Path) -> None:
    """It is a quarter of what their import takes, and finds nothing."""
    checkpoint = tmp_path / "checkpoint_step_1"  # found by its name alone
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    words = {
        "train": ["max_train_steps=1", f"output_dir={tmp_path / 'run'}"],
        "check": ["max_train_steps=1", f"output_dir={tmp_path / 'run'}"],
        "sweep": ["learning_rate=[1e-3,1e-2]", f"output_dir={tmp_path / 'run'}"],
        "evaluate": ["embedded", "--data", str(rows), "--output", str(tmp_path / "answers.jsonl")],
        "generate": ["embedded", "1+1="],
        "score": [str(checkpoint), "1+1="],
        "export": [str(checkpoint), "--to", str(tmp_path / "exported")],
    }.get(command, ["embedded"])
    call = [sys.executable, "-c", AT_TORCH, command, *words]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
