"""What `module:name` means: an object of a module that a user named, which may lie in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci_llm.core import imports
from ci_llm.core.imports import allow_import, import_named
from ci_llm.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not on the path, as for a command that is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.setattr(imports, "_NAMED", set[str]())
    return tmp_path


def test_a_module_may_lie_in_the_current_folder(folder: Path) -> None:
    (folder / "lies_here.py").write_text("def f():\n    import its_neighbour\n    return its_neighbour.VALUE\n")
    (folder / "its_neighbour.py").write_text("VALUE = 3\n")
    with pytest.raises(ConfigError, match="no code is imported"):
        import_named("lies_here:f", "rewards")
    allow_import("lies_here:f")
    assert import_named("lies_here:f", "rewards")() == 3


def test_a_file_in_the_current_folder_hides_no_library(folder: Path) -> None:
    (folder / "colorsys.py").write_text("raise AssertionError\n")
    allow_import("colorsys:rgb_to_hsv")
    assert import_named("colorsys:rgb_to_hsv", "rewards").__module__ == "colorsys"
