"""A checkpoint of another format is refused by every verb, in words that say what reads it, and stays as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ci_llm import train
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import FORMAT_VERSION, read_manifest, read_step
from ci_llm.cli.main import main
from ci_llm.errors import DamagedCheckpoint, OtherFormat
from tests.checkpoints.test_store import forge
from tests.support import small_run
from tools.format_fixture import FIXTURE, KEYS

LAST = "commit aff619e9 of ci-llm is the last that reads it"


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Steps 1 and 2, and the final checkpoint, in the format of the parameter: by default 1."""
    folder = tmp_path / "run"
    with CheckpointManager(folder, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, {"config.yaml": b"seed: 1\n"})
        manager.saver.make_final({"README.md": b"a card"})
    for checkpoint in folder.glob("*/manifest.json"):
        forge(checkpoint.parent, lambda body: body.update(format_version=getattr(request, "param", 1)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".attempt" not in str(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "checkpoint" in path.parent.name}


@pytest.mark.parametrize(
    ("run", "what", "hint"),
    [
        (1, "has format 1, and", LAST),
        (2, "has format 2, and", "commit d83c017a of ci-llm is the last that reads it"),
        (None, "has format none, and", LAST),
        ("1", "has format 1, and", LAST),
        (FORMAT_VERSION + 1, f"has format {FORMAT_VERSION + 1}, and", "use a newer ci-llm"),
    ],
    indirect=["run"],
)
def test_another_format_is_named_and_is_no_damage(run: Path, what: str, hint: str) -> None:
    before = contents(run)
    with CheckpointManager(run, async_save=False) as manager, pytest.raises(OtherFormat) as refusal:
        manager.latest_step()
    assert what in refusal.value.what
    assert f"this program reads format {FORMAT_VERSION}" in refusal.value.what
    assert hint in str(refusal.value.hint)
    assert refusal.value.where == str(run / "final_checkpoint")
    assert not isinstance(refusal.value, DamagedCheckpoint)
    assert contents(run) == before
    assert not (run / "quarantine").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", *small_run.WORDS, "output_dir=RUN"],
        ["train", *small_run.WORDS, "output_dir=NEW", "resume_from_checkpoint=RUN"],
        ["train", *small_run.WORDS, "output_dir=RUN", "restart_from=1"],
        ["evaluate", "RUN"],
        ["generate", "RUN", "a prompt"],
        ["chat", "RUN"],
        ["score", "RUN", "a text"],
        ["serve", "RUN"],
        ["export", "RUN", "--to", "NEW"],
        ["checkpoints", "verify", "RUN"],
        ["checkpoints", "verify", "RUN/checkpoint_step_1"],
        ["checkpoints", "diff", "RUN/checkpoint_step_1", "RUN/checkpoint_step_2"],
        ["checkpoints", "prune", "RUN", "--keep", "1"],
        ["checkpoints", "push", "RUN", "memory://bucket/run"],
    ],
    ids=" ".join,
)
def test_every_verb_refuses_it_and_changes_nothing(
    words: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    call = [word.replace("RUN", str(run)).replace("NEW", str(tmp_path / "new")) for word in words]
    assert main(call) == 2
    said = capsys.readouterr()
    assert LAST in said.out + said.err
    assert str(run) in said.out + said.err
    assert contents(run) == before
    assert not (run / "quarantine").exists()


def test_a_new_run_takes_its_place_where_that_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*small_run.WORDS, f"output_dir={run}", "overwrite_output_dir=true", "max_train_steps=1"]
    assert main(["train", *words]) == 0
    assert read_manifest(run / "final_checkpoint").step == 1
    assert read_step(run / "overwritten/1/final_checkpoint") == 2


@pytest.mark.slow
def test_a_checkpoint_that_was_written_with_this_format_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / FIXTURE.name)
    assert read_manifest(FIXTURE).step == 2
    result = train(**KEYS, max_train_steps=4, output_dir=str(tmp_path))
    assert (result.status, result.step) == ("completed", 4)
    log = (tmp_path / "training.log").read_text()
    assert "resume    step 2 of 4, verified" in log
    assert "another run from here on (max_train_steps" in log, "all other settings are those of the checkpoint"
