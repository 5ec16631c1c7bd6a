"""Every skip is in the table, with why and what brings it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import ROOT
from tests.support.skips import table
from tools.testbed.events import DEADLINE_S

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="there is no bread; bake")
@pytest.mark.parametrize("number", [1, 2])
def test_eating(number): ...

def test_drinking():
    pytest.skip("there is no wine; wait")

def test_walking(): ...
"""
FILE = 'import pytest\npytest.importorskip("no_such_module", reason="there is no module; write it")\n'


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "side by side"])
def test_a_skip_is_noted_once_with_its_reason(workers: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_file.py").write_text(FILE)
    notes = tmp_path / "build" / "skipped.jsonl"
    options = ["-q", "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "tests.conftest", f"--note-skips={notes}"]
    command = [sys.executable, "-m", "pytest", *options, *workers, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    noted = sorted((one["test"], one["reason"]) for one in map(json.loads, notes.read_text().splitlines()))
    assert noted == [
        ("test_file.py", "there is no module; write it"),
        ("test_some.py::test_drinking", "there is no wine; wait"),
        ("test_some.py::test_eating[1]", "there is no bread; bake"),
        ("test_some.py::test_eating[2]", "there is no bread; bake"),
    ]


def test_the_table_has_the_number_of_skips_the_reason_and_the_remedy() -> None:
    notes = [{"test": f"test_{number}", "reason": "there is no bread; bake"} for number in (1, 2, 2)]
    assert [*table([*notes, {"test": "test_3", "reason": "no wine here; wait"}])] == [
        "skipped  why                what brings it",
        "      2  there is no bread  bake",
        "      1  no wine here       wait",
    ]
    assert [*table([])] == ["nothing was skipped"]


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
