"""The descendants of a supervisor are all found, also the orphan of a launcher that ends during the listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.supervisor.terminal import SCRIPTS
from tests.support.children import python


def end_of(folder: Path, *words: str) -> str:
    """The output of a script that ends its own descendants."""
    done = python(SCRIPTS / words[0], *words[1:], cwd=folder)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("order", ["parent-first", "children-first"])
def test_an_orphan_whose_parent_ends_during_the_look_may_save(tmp_path: Path, order: str) -> None:
    assert end_of(tmp_path, "dying_launcher.py", order) == "killed [], saved True\n"


@pytest.mark.slow
def test_a_process_started_after_sigterm_may_save(tmp_path: Path) -> None:
    assert end_of(tmp_path, "saves_by_a_child.py") == "killed [], saved True\n"
