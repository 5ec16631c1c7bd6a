"""The pages hold together: links lead somewhere, every page is in the menu, quoted messages are real ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.config.defaults import get_schema
from mkdocs.utils.yaml import yaml_load

from tests.support.markdown import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "slurm/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
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
    assert {*named} - pages == {"index.md", "slurm.md", "contributing.md", "reference.md"}, "these are made by a hook"


def test_the_site_asks_for_nothing_from_outside() -> None:
    settings = yaml_load((ROOT / "mkdocs.yml").read_text())
    assert {*settings} <= {name for name, _ in get_schema()}
    assert settings["theme"]["font"] is False, "fonts would come from another server"
    assert "repo_url" not in settings, "numbers of stars would be asked for"


def test_the_pages_say_ensemble_where_people_search_for_it() -> None:
    for name in ("README.md", "docs/crowd.md", "docs/faq.md", "docs/tutorial.md", "mkdocs.yml"):
        assert "ensemble" in (ROOT / name).read_text(encoding="utf-8").lower(), name


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
def test_the_symptoms_of_the_troubleshooting_page_are_messages_of_the_program() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and "you see" not in line]
    symptoms = [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)]
    assert len(symptoms) > 30
    known = messages()
    assert not [one for one in symptoms if one.removeprefix("warning: ") not in known]
