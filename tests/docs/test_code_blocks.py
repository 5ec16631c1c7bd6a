"""Every block of code in README and docs runs, or a comment before it says why not.

A page's blocks run in their order, in one folder that holds a small finished run. Command lines that train are read by
the real parsers, and the cheap verbs are executed. Recipes are run in full, by test_recipes.py.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import ci_llm
from ci_llm.cli.main import main
from tests.support.documented import NO_CODE, run, run_line
from tests.support.markdown import ROOT, Block, blocks_of

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("tools/*/README.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LANGUAGES = {"python", "bash", "console", "yaml", *NO_CODE}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.fast_cases(59)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language_and_can_be_parsed(block: Block) -> None:
    assert block.language in LANGUAGES, "give it a language; `text` if it is no code"
    assert {*block.marks} <= {"not run", "needs", "file", "given", "floors"}
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


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that this file runs."""
    if page.parent == ROOT / "docs/recipes" or page == ROOT / "docs/agents.md":
        return []
    blocks = [block for block in blocks_of(page) if "not run" not in block.marks]
    return [block for block in blocks if block.language not in NO_CODE or "file" in block.marks]


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_blocks_of_a_page_run_in_their_order(page: Path, stage: Path) -> None:
    torch.set_num_threads(1)
    for block in runnable(page):
        try:
            run(block, stage)
        except BaseException as error:
            error.add_note(f"in the block {block}") if hasattr(error, "add_note") else None
            raise


@pytest.mark.slow
@pytest.mark.campaign  # a minute of training on two cores
@pytest.mark.usefixtures("threads_as_they_were")
def test_the_first_command_of_the_readme_gives_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(ROOT / "configs.yaml"), "generation_eval_samples=0"]) == 0
    readme = [*blocks_of(ROOT / "README.md")]
    first = next(n for n, block in enumerate(readme) if block.language == "python")
    asked, answered = readme[first : first + 2]
    capsys.readouterr()
    exec(compile(asked.text, str(asked), "exec"), {})
    assert capsys.readouterr().out == answered.text


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
        run_line(line, stage)


def test_a_mark_belongs_to_the_block_behind_it() -> None:
    [marked] = [block for block in blocks_of(ROOT / "docs/agents.md") if "file" in block.marks]
    assert marked.marks == {"file": "agents.yaml"}
    assert marked.text.startswith("learning_rate: 4e-3")
