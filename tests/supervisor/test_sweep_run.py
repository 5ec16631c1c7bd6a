"""A sweep under the supervisor: recognised behind any launcher, and its progress is that of all its segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cli import supervise
from ci_llm.errors import ConfigError
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.options import parse_options
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.own_run import OwnRun, SweepRun

SWEEP = ("learning_rate=[1e-3,2e-3]", "output_dir=run")


def target(*command: str) -> object:
    return supervise._target(parse_options(["--", *command]))


def save(folder: Path, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder)
    store.save(step, {"config.yaml": FileImage((b"",))}, forms={"config.yaml": "bytes"})
    store.close()


@pytest.mark.parametrize(
    "command",
    [
        ("ci-llm", "sweep"),
        ("python", "-m", "ci_llm", "sweep"),
        ("torchrun", "--nproc-per-node", "2", "-m", "ci_llm", "sweep"),
    ],
    ids=" ".join,
)
def test_a_sweep_is_recognised(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(target(*command, *SWEEP), SweepRun)
    assert type(target(*command[:-1], "train", "output_dir=run")) is OwnRun


def test_a_wrong_space_is_refused_before_anything_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="batch_size cannot differ between trials"):
        target("ci-llm", "sweep", "batch_size=[1,2]")


def test_steps_of_a_later_segment_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = target("ci-llm", "sweep", *SWEEP)
    assert isinstance(run, SweepRun)
    save(tmp_path / "run/segments/1", 8)
    killed = AttemptResult(returncode=-9, duration_s=1.0, evidence=Evidence())
    for step, progress in ((2, True), (None, False), (4, True)):
        run.begin_attempt()
        if step is not None:
            save(tmp_path / "run/segments/2", step)
        assert run.classify(killed).progress is progress
