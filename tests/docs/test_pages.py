"""The pages hold together: links lead somewhere, every page is in the menu, quoted messages are real ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.markdown import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/README.md",
    *sorted(ROOT.glob("tools/*/README.md")),
]
FENCES = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINKS = re.compile(r"\]\(([^)\s:]*?)(?:#([^)\s]*))?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page as a code host and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCES.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_relative_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor in LINKS.findall(FENCES.sub("", page.read_text(encoding="utf-8"))):
        there = page.parent / target if target else page
        assert there.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_every_page_is_in_the_menu() -> None:
    def leaves(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]

    named = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages <= {*named}, "give it a place in mkdocs.yml"
    assert {*named} - pages == {"index.md", "contributing.md"}, "these are made by a hook"


def messages() -> str:
    """Every text that the program can print, with {} for what is filled in; one per line."""
    texts = []
    for path in sorted((ROOT / "ci_llm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.slow
def test_the_symptoms_of_the_page_of_messages_are_messages_of_the_program() -> None:
    page = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| you see \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    symptoms = [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)]
    assert len(symptoms) > 12
    known = messages()
    assert not [one for one in symptoms if one.removeprefix("warning: ") not in known]


#: What a run calls and sets of its Accelerator, and the word that both pages have for it.
OF_ACCELERATE = {
    **dict.fromkeys(("prepare", "prepare_model", "unwrap_model", "free_memory", "model_has_dtensor"), "prepare"),
    **{name: f"`{name}`" for name in ("skip_first_batches", "autocast", "no_sync", "backward", "reduce")},
    **dict.fromkeys(("log_with", "trackers", "init_trackers", "project_configuration"), "`log`"),
    **dict.fromkeys(("gather_object", "broadcast_object_list", "process_index"), "processes"),
}


def test_a_run_takes_from_accelerate_what_the_pages_say() -> None:
    """Loops of users, which `ci_llm/integrations` and a manager serve, call what they like."""
    used = set[str]()
    for room in ("distributed", "logs", "run"):
        for path in sorted((ROOT / "ci_llm" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("accelerator", "self.accelerator"):
                    used.add(node.attr)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accelerate.utils"):
                    used |= {each.name for each in node.names if each.name[0].islower()}
    assert used == {*OF_ACCELERATE}
    for page in ("README.md", "docs/architecture.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert not [named for named in OF_ACCELERATE.values() if named not in text], page


# How much there is to read

#: Behind this line the site writes the signatures of the public names.
SIGNATURES = "<!-- signatures -->"
MOST_PAGES, MOST_WORDS, MOST_OF_CHANGELOG = 26, 25_000, 150
#: For whom a page is, in its first two lines of text.
READERS = re.compile(r"^For (?:\w+ )?(?:users|readers|people|everyone|a reader) ")
WRITTEN = sorted(ROOT.glob("docs/**/*.md"))
#: All that a reader is offered; the records of benchmarks/README.md are looked up.
OFFERED = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")), *WRITTEN]


def words(text: str) -> int:
    """Words with a letter or a digit in them: lines of tables hold others."""
    return len([word for word in text.partition(SIGNATURES)[0].split() if re.search(r"\w", word)])


def test_the_pages_are_few_and_can_be_read_in_a_day() -> None:
    counted = {name_of(page): words(page.read_text(encoding="utf-8")) for page in OFFERED}
    assert len(WRITTEN) <= MOST_PAGES, counted
    assert sum(counted.values()) <= MOST_WORDS, counted
    assert counted["CHANGELOG.md"] <= MOST_OF_CHANGELOG, "entries begin with the first tag"


def test_the_first_screen_of_the_readme_is_one_screen() -> None:
    """What it is, for whom, what is not here, what to type, and when it pays."""
    screen, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")
    lines = screen.strip().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 130
    for said in ("make train", "make test", "ci-llm check", "ci-llm train", "ci-llm sweep", "ci-llm export", "No GPU"):
        assert said in screen


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_a_page_says_first_for_whom_it_is(page: Path) -> None:
    title, *lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
    assert title.startswith("# ")
    assert READERS.search(" ".join(lines[:2])), lines[:2]
