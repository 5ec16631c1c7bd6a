"""Every skip says why, and what brings the test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import ROOT


def reasons(file: Path) -> Iterator[str]:
    """The texts of a file's reasons to skip, without what is filled in."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".skip", ".skipif", ".importorskip")):
            given = [word.value for word in node.keywords if word.arg == "reason"]
            given += node.args[:1] if ast.unparse(node.func) == "pytest.skip" else []
            assert given, f"{file.name}, line {node.lineno}: a skip without a reason"
            yield from (ast.unparse(one) for one in given if not isinstance(one, ast.Name))


@pytest.mark.slow
def test_every_reason_to_skip_has_a_remedy() -> None:
    found = {reason: file for file in (ROOT / "tests").rglob("test_*.py") for reason in reasons(file)}
    assert len(found) > 5
    assert {reason: file.name for reason, file in found.items() if "; " not in reason} == {}
