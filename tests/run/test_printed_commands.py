"""Commands and keys that a run prints to be typed stay whole where a path has a space."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.errors import ConfigError, DamagedCheckpoint
from ci_llm.run.mirroring import RunMirror
from ci_llm.run.start.beginning import open_source
from tests.run.test_beginning import Folder
from tests.support.log_lines import log_lines


def typed(text: str, command: str) -> list[str]:
    """The words that a shell makes of what is printed from `command` on."""
    return shlex.split(text[text.index(command) :])


def test_the_command_that_sends_the_rest_to_a_mirror(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    config: Any = SimpleNamespace(run_folder=folder, mirror=None)
    other: Any = SimpleNamespace(is_main_process=True)
    mirror = RunMirror(config, other, other, other, lambda state: None)
    state = SimpleNamespace(step=3, url="file:///a disk", error=None)
    mirror._mirror = SimpleNamespace(state=state, flush=lambda seconds: False)  # type: ignore[assignment]
    with log_lines() as lines:
        mirror.flush(1.0)
    words = typed(lines[0], "ci-llm checkpoints push")
    assert words[:5] == ["ci-llm", "checkpoints", "push", str(folder), "file:///a disk"]


def test_the_command_that_lists_whole_checkpoints(tmp_path: Path) -> None:
    source = Folder(tmp_path / "my runs")
    source.begin(saves=(4,))
    (source.path / "checkpoint_step_4/optimizer.json").write_text("changed")
    with pytest.raises(DamagedCheckpoint) as caught:
        open_source(str(source.path), "restart_from")
    words = typed(str(caught.value.hint), "ci-llm checkpoints list")
    assert words[:5] == ["ci-llm", "checkpoints", "list", str(source.path), "says"]


def test_the_key_that_goes_to_another_checkpoint(tmp_path: Path) -> None:
    source, run = Folder(tmp_path / "my source"), Folder(tmp_path / "run")
    source.begin(saves=(4,))
    run.begin(saves=(2,))
    with pytest.raises(ConfigError) as caught:
        run.begin(f"resume_from_checkpoint={source.path}")
    assert f"restart_from={source.path}" in shlex.split(str(caught.value.hint).replace(";", " "))
