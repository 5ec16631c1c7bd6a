"""Every recipe is short and runs: alone, in a folder with a finished run, with a tenth of its steps.

What a recipe needs and this machine lacks (a GPU, SLURM, an account) stands in a comment before its block. The commands
of such a block are read by the real parsers; in a campaign the configuration of the large one passes what
`ci-llm check` proves without weights. The base that the recipes name is real: in a campaign in all of them, in `make
test` in `ON_THE_REAL_BASE`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from ci_llm.embedded import BASE_FOLDER
from tests.support import campaign
from tests.support.campaign import drawn
from tests.support.children import python
from tests.support.documented import NAMED_BASE, run, shorter
from tests.support.markdown import ROOT, Block, blocks_of
from tests.support.presets import KNOWN
from tools.real_base import FOLDER, NotFetchedError, real_base

#: Every section of these is a recipe.
PAGES = [*sorted(ROOT.glob("docs/recipes/*.md")), ROOT / "docs/agents.md"]
LINES, RECIPES, EXECUTED = 40, 32, 20
ON_THE_REAL_BASE = {"data: Chat data"}


@dataclass(frozen=True)
class Recipe:
    """One section of a page.

    Attributes:
        name: page and title.
        lines: without the title, and without empty ones at the end.
    """

    name: str
    lines: int
    blocks: tuple[Block, ...]

    @property
    def needs(self) -> bool:
        """Whether a block of it cannot be executed everywhere."""
        return any({"needs", "not run"} & {*block.marks} for block in self.blocks)


def recipes_of(page: Path) -> list[Recipe]:
    lines = page.read_text(encoding="utf-8").splitlines()
    fences = [n for n, line in enumerate(lines) if line.startswith("```")]
    titles = [n for n, line in enumerate(lines) if line.startswith("## ") and sum(f < n for f in fences) % 2 == 0]
    found = []
    for first, end in zip(titles, [*titles[1:], len(lines)], strict=True):
        text = "\n".join(lines[first + 1 : end]).strip("\n")
        blocks = tuple(block for block in blocks_of(page) if first + 1 < block.line <= end)
        found.append(Recipe(f"{page.stem}: {lines[first][3:]}", len(text.splitlines()), blocks))
    return found


COOKBOOK = [recipe for page in PAGES for recipe in recipes_of(page)]
#: The commonest jobs run in every `make test`, the others as a sample.
JOBS = [recipe for recipe in COOKBOOK if recipe.name.startswith("jobs: ")]


def name_of(recipe: Recipe) -> str:
    return recipe.name


@pytest.mark.parametrize("recipe", COOKBOOK, ids=name_of)
def test_a_recipe_is_short_and_trains_more_than_one_step(recipe: Recipe) -> None:
    assert 0 < recipe.lines <= LINES
    told = [block.marks["not run"] for block in recipe.blocks if "not run" in block.marks]
    assert not [reason for reason in told if "tests/" not in reason], "name the test that does it, or say what it needs"
    text = "\n".join(block.text for block in recipe.blocks)
    assert all(int(n) >= 2 for n in re.findall(r"max_train_steps[=:] ?(\d+)", shorter(text)))


def test_there_are_enough_recipes_and_most_are_executed() -> None:
    assert len(COOKBOOK) >= RECIPES
    assert len([recipe for recipe in COOKBOOK if not recipe.needs]) >= EXECUTED


@pytest.fixture
def base(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> str:
    """The base in the place of the named one: real where it can be had."""
    if not any(NAMED_BASE in block.text for block in recipe.blocks):
        return "embedded"
    if recipe.name not in ON_THE_REAL_BASE and not campaign.in_full:
        return "embedded"
    try:
        found = real_base()
    except NotFetchedError:
        return "embedded"
    monkeypatch.setenv("CI_LLM_CACHE", str(FOLDER / "cache"))
    return str(found)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
@pytest.mark.parametrize(
    "recipe", [*JOBS, *drawn([recipe for recipe in COOKBOOK if recipe not in JOBS], 9)], ids=name_of
)
def test_a_recipe_runs(recipe: Recipe, base: str, stage: Path) -> None:
    torch.set_num_threads(1)
    for block in (block for block in recipe.blocks if "not run" not in block.marks):
        try:
            run(block, stage, trains=True, base=base)
        except BaseException as error:
            error.add_note(f"in the block {block}") if hasattr(error, "add_note") else None
            raise


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
def test_the_first_screen_of_the_readme_runs(stage: Path) -> None:
    """In the folder of the other pages' runs, but for the one that it makes itself."""
    torch.set_num_threads(1)
    shutil.rmtree(stage / "ci_llm_output/mine")
    screen, *_ = blocks_of(ROOT / "README.md")
    run(screen, stage, trains=True)
    assert (stage / "adapter/adapter_model.safetensors").is_file()


# What this machine lacks

#: A run of the recipes that no machine of ours can make: its check needs the shape of the base alone.
LARGE = "configs/llama3.1_8b_nf4_gsm8k.yaml"


def checked_lines() -> list[list[str]]:
    """The words of each `ci-llm check` of a recipe that needs something."""
    blocks = [block for recipe in COOKBOOK for block in recipe.blocks if "needs" in block.marks]
    return [shlex.split(line) for block in blocks for line in block.commands if line.startswith("ci-llm check")]


@pytest.mark.slow
@pytest.mark.campaign  # the estimate alone traces 8 billion parameters for half a minute
@pytest.mark.usefixtures("stage")
def test_the_configuration_of_the_large_recipe_passes_every_check_that_this_machine_can_make(tmp_path: Path) -> None:
    [words] = [words for words in checked_lines() if LARGE in words]
    AutoConfig.for_model(**KNOWN["meta-llama/Llama-3.1-8B"]).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(tmp_path)
    own = [f"model_name={tmp_path}", "dataset_name=my.jsonl", "dataset_subset=null"]
    done = python("-m", "ci_llm", *words[1:], *own, HF_HUB_OFFLINE="1")
    assert re.findall(r"^FAILED +(.*?)  ", done.stdout, re.MULTILINE) == ["model"], done.stdout + done.stderr
    assert re.search(r"^ok +estimate .*8\.03B parameters", done.stdout, re.MULTILINE), done.stdout
