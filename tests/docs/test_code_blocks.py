"""Every block of code in README and docs runs, or a comment before it says why not.

A page's blocks run in their order, in one folder that holds a small finished run. Command lines that train are read by
the real parsers, and the cheap verbs are executed; on the tutorial everything is, with a tenth of its steps.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ci_llm
from ci_llm.cli import supervise
from ci_llm.cli.main import COMMANDS, main
from ci_llm.cli.train import read_configuration
from ci_llm.config import default_file, load_config
from ci_llm.config.sweep import read_sweep
from tests.cli.test_documented_lines import words_of_the_job
from tests.support import campaign
from tests.support.markdown import ROOT, Block, blocks_of

PAGES = [
    ROOT / "README.md",
    ROOT / "slurm/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("tools/*/README.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
#: What a program says or writes, a tree of files, a drawing.
NO_CODE = {"text", "json"}
LANGUAGES = {"python", "bash", "console", "yaml", *NO_CODE}
TRAINS = {"train", "check", "sweep"}
#: Pages on which commands that train are executed as well.
IN_FULL = {"docs/tutorial.md"}
#: Programs of others that a page names, and why their lines are not run here.
OF_OTHERS = {
    "hf": "needs an account on the hub",
    "jupyter": "serves until it is stopped",
    "lm_eval": "needs the hub",
    "tensorboard": "serves until it is stopped",
    "vllm": "needs a GPU",
}
SHELL = re.compile(r"[|<>;&]|\$\(")  # anything that only a shell can do
STEPS = re.compile(r"(?<=_steps)(: |=)(\d+)0\b")


def ident(block: Block) -> str:
    return str(block)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# What every block is


@pytest.mark.fast_cases(59)
@pytest.mark.parametrize("block", BLOCKS, ids=ident)
def test_a_block_says_what_it_is_and_can_be_read(block: Block) -> None:
    assert block.language in LANGUAGES, "give it a language; `text` if it is no code"
    assert {*block.marks} <= {"not run", "file", "given", "floors"}
    if "not run" in block.marks:
        assert len(block.marks["not run"].split()) >= 3, "the reason is missing"
    elif block.language == "python":
        ast.parse(block.text)
    elif block.language == "console":
        assert block.commands, "a transcript without a line that begins with `$ `: it is `text`"


def test_no_block_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = Counter("not run, with a reason" if "not run" in block.marks else block.language for block in BLOCKS)
    commands = sum(len(block.commands) for block in BLOCKS if block.language in ("bash", "console"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(BLOCKS), "a block that this test cannot read"
    with capsys.disabled():
        print(f"\nblocks of code: {dict(kinds)}; {commands} command lines")


# Running them


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout in which a few short runs have ended: what the pages speak of."""
    stage = tmp_path_factory.mktemp("stage")
    for name in ("configs.yaml", "train.py", "safe_train.py", "dry_run_sanity_check.py", "Makefile"):
        shutil.copy(ROOT / name, stage)
    for name in ("configs", "slurm", "examples"):
        shutil.copytree(ROOT / name, stage / name)
    keys: dict[str, Any] = {
        "max_train_samples": 9,
        "max_train_steps": 4,
        "batch_size": 2,
        "save_steps": 2,
        "eval_samples": 12,
        "num_workers": 0,
        "max_seq_length": 256,
        "report_to": "none",
        "generation_eval_samples": 4,
        "max_new_tokens_eval": 8,
        "logging_steps": 1,
        "write_report": False,
    }
    run = ci_llm.train(keys, output_dir=stage / "ci_llm_output").folder
    for name in ("ci_llm_output/a", "ci_llm_output/b", "ci_llm_output/mine", "straight", "resumed"):
        shutil.copytree(run, stage / name, ignore=shutil.ignore_patterns("a", "b", "mine"))
    for k, name in enumerate(("my_adapter", "other_adapter")):
        shutil.copytree(run / f"final_checkpoint/agent{k}", stage / name)
    (stage / "fit.py").write_text("print('loss 0.1')\n")
    (stage / "my.yaml").write_text("optim:\n  lr: 1e-3\n")
    (stage / "my.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 20)
    (stage / "questions.jsonl").write_text('{"prompt": "Ann has 7 pens. Ann breaks 6. How many pens are left?"}\n')
    (stage / "my_test.jsonl").write_text('{"question": "2+1?", "answer": "3"}\n' * 4)
    (stage / "test.jsonl").write_text('{"question": "2+1?", "answer": "3"}\n' * 4)
    return stage


@pytest.fixture
def stage(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder."""
    shutil.copytree(finished, tmp_path / "stage", symlinks=True)
    monkeypatch.chdir(tmp_path / "stage")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return tmp_path / "stage"


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if "not run" not in block.marks and block.language not in NO_CODE]


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_blocks_of_a_page_run_in_their_order(page: Path, stage: Path) -> None:
    torch.set_num_threads(1)
    for block in runnable(page):
        try:
            run(block, stage, in_full=name_of(page) in IN_FULL)
        except BaseException as error:
            error.add_note(f"in the block {block}") if hasattr(error, "add_note") else None
            raise


def run(block: Block, stage: Path, *, in_full: bool) -> None:
    if "file" in block.marks:
        (stage / block.marks["file"]).write_text(shorter(block.text))
    match block.language:
        case "python":
            given = GIVEN[block.marks["given"]]() if "given" in block.marks else {}
            names = {"__name__": "__main__", **given}
            with contextlib.suppress(SystemExit) if "sys.exit" in block.text else contextlib.nullcontext():
                exec(compile(block.text, str(block), "exec"), names)
            for value in names.values():
                if isinstance(value, ci_llm.CheckpointManager):
                    value.close()  # as the end of the process does
        case "yaml":
            (stage / "block.yaml").write_text(block.text)
            load_config(stage / "block.yaml")
        case _:
            for line in block.commands:
                run_line(line, stage, in_full=in_full)


def shorter(text: str) -> str:
    """A tenth of the steps, outside of a campaign."""
    return text if campaign.in_full else STEPS.sub(r"\1\2", text)


def run_line(line: str, stage: Path, *, in_full: bool) -> None:
    """Execute a line that is cheap, and let the real parsers read one that trains."""
    line = re.sub(r" > [\w./-]+$", "", line.partition("  #")[0].partition(" # ")[0].strip())
    if line.split()[0] in OF_OTHERS:
        return
    assert not SHELL.search(line), f"{line}: only a shell can run this; say why it is not run"
    program, *words = shlex.split(line)
    match program, *words:
        case "ci-llm", "evaluate", *rest if "--split" in rest and not campaign.in_full:
            execute(["evaluate", *rest, "--max-samples", "20"])
        case "ci-llm", verb, *rest if verb in COMMANDS and verb not in TRAINS | {"supervise"}:
            execute([verb, *rest])
        case ("ci-llm", "train", *rest) | ("python", "train.py", *rest):
            execute(["train", *map(shorter, rest)]) if in_full else read_configuration(rest)
        case ("ci-llm", "sweep", *rest):
            read_sweep(default_file(), [word for word in rest if word != "--dry-run"])
        case ("ci-llm", "check", *rest) | ("python", "dry_run_sanity_check.py", *rest):
            read_configuration(rest)
        case ("ci-llm", "supervise", *rest) | ("python", "safe_train.py", *rest):
            supervise.parse_options(rest)
        case ("accelerate", "launch", *rest) | ("torchrun", *rest):
            script = next(n for n, word in enumerate(rest) if word.endswith(".py"))
            assert (stage / rest[script]).is_file()
            read_configuration(rest[script + 1 :])
        case "sbatch", *rest:
            script = next(n for n, word in enumerate(rest) if word.endswith(".sbatch"))
            assert (stage / rest[script]).is_file()
            if rest[script].endswith("/train.sbatch"):
                shutil.rmtree(stage / "commands", ignore_errors=True)
                words = words_of_the_job(rest[script:], stage)
                read_configuration([word for word in words if word != "--continue"])
        case "make", target:
            assert f"\n{target}:" in (stage / "Makefile").read_text()
        case "pip", "install", what:
            extra = re.fullmatch(r"(?:ci-llm|\.)\[([\w-]+)\]|ci-llm|[\w-]+", what)
            assert extra
            assert extra[1] is None or f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
        case ("source", ".venv/bin/activate") | ("cd", _):
            pass
        case "python", "-m", module, *_:
            assert importlib.util.find_spec(module), f"there is no module {module}"
        case _:
            raise AssertionError(f"{line}: nothing here knows how to run this; say why it is not run")


def execute(words: list[str]) -> None:
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(words)
    assert code == 0, f"{shlex.join(words)}: {code}\n{said.getvalue()}{complained.getvalue()}"


@pytest.mark.slow
@pytest.mark.campaign  # a minute of training on two cores
@pytest.mark.usefixtures("threads_as_they_were")
def test_the_first_answer_of_the_readme_is_what_its_first_command_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(ROOT / "configs.yaml"), "generation_eval_samples=0"]) == 0
    _, asked, answered, *_ = blocks_of(ROOT / "README.md")
    capsys.readouterr()
    exec(compile(asked.text, str(asked), "exec"), {})
    assert capsys.readouterr().out == answered.text


# What the fragments of loops are given


def a_loop() -> dict[str, Any]:
    """A model that learns nothing much, its optimizer, and rows."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(objects: dict[str, Any], batch: torch.Tensor) -> None:
        objects["optimizer"].zero_grad()
        objects["model"](batch).sum().backward()
        objects["optimizer"].step()

    names = {"StatefulSampler": ci_llm.StatefulSampler, "DataLoader": DataLoader, "sys": sys}
    return {**names, "model": model, "optimizer": optimizer, "train_step": train_step, "num_steps": 3} | {
        "rows": torch.randn(64, 2)
    }


def an_orbax_loop() -> dict[str, Any]:
    """A state, and a step that makes the next one."""
    state = {"weights": {"w": torch.zeros(2)}, "n": 0}
    return {"directory": "runs/orbax", "state": state, "start": 0, "num_steps": 5, "train_step": lambda old: old}


GIVEN = {"a loop": a_loop, "an Orbax loop": an_orbax_loop}


# A line that the checks above must not let through


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "ci-llm statu ci_llm_output",
        "ci-llm status nowhere",
        "python train.py learning_rat=1",
        "make trian",
        "pip install 'ci-llm[nothing]'",
        "rm -rf ci_llm_output",
        "ci-llm status ci_llm_output | head -1",
        "torchrun --nproc-per-node 4 trian.py",
    ],
)
def test_a_line_that_is_wrong_is_noticed(line: str, stage: Path) -> None:
    with pytest.raises((AssertionError, ci_llm.CiLlmError, StopIteration)):
        run_line(line, stage, in_full=False)


def test_a_mark_belongs_to_the_block_behind_it() -> None:
    page = ROOT / "docs/tutorial.md"
    marked = [block for block in blocks_of(page) if block.marks]
    assert [[*block.marks] for block in marked] == [["file"], ["not run"]]
    assert marked[1].commands == ["ci-llm train --config shop.yaml"] * 2
