"""`ci-llm checkpoints` with the URL of a mirror: list, verify, diff, pull and push, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci_llm.cli import answering
from ci_llm.cli.main import main
from ci_llm.errors import BadInput
from tests.cli.test_checkpoints import make_run, verb


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "metrics.jsonl").write_text('{"step": 2}\n')
    return folder


@pytest.fixture
def url(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    url = f"file://{tmp_path}/mirror"
    assert verb("push", run, url) == 0
    assert "step 2 is the newest" in capsys.readouterr().out
    return url


@pytest.mark.slow
def test_a_pushed_run_is_listed_verified_compared_and_pulled(
    run: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("list", url, "--json") == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    names = ["checkpoint_step_2", "final_checkpoint", "checkpoint_step_1"]
    assert [(each["name"], each["damage"], each["line"]) for each in listed] == [(n, None, "current") for n in names]
    assert verb("list", f"{url}/checkpoint_step_1", "--quick") == 0
    assert "checkpoint_step_2" not in capsys.readouterr().out
    assert verb("verify", url) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": verified, ")[0] for line in said] == names
    assert verb("diff", url, run) == 0
    assert "bit-identical" in capsys.readouterr().out
    assert verb("diff", f"{url}/checkpoint_step_1", run, "--json") == 1
    capsys.readouterr()
    assert verb("pull", url, "--to", tmp_path / "back") == 0
    assert verb("verify", tmp_path / "back") == 0
    assert (tmp_path / "back/metrics.jsonl").read_text() == '{"step": 2}\n'
    assert verb("pull", f"{url}/checkpoint_step_1", "--to", tmp_path / "one") == 0
    assert verb("verify", tmp_path / "one/checkpoint_step_1") == 0
    assert verb("pull", f"{url}/checkpoint_step_1", "--to", tmp_path / "one") == 2


def test_a_run_whose_steps_are_in_its_mirror_only_has_something_to_continue(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = SimpleNamespace(exit_code=lambda config: 0)
    monkeypatch.setitem(sys.modules, "ci_llm.run.job", SimpleNamespace(run_job=lambda *_, **__: trained))
    words = ["train", "--config", os.devnull, "--continue", f"output_dir={tmp_path / 'other'}"]
    assert main([*words, f"mirror={url}"]) == 0
    for mirror in ([], [f"mirror={url}_of_nothing"]):
        assert main([*words, *mirror]) == 2
        assert "there is no checkpoint to continue from" in capsys.readouterr().err


def test_a_crowd_in_a_mirror_is_asked_in_a_copy_of_its_final_checkpoint(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def noted(path: str, base_model: str | None) -> None:
        opened.append(Path(path))
        raise BadInput("it is not a crowd")

    monkeypatch.setattr(answering, "open_run", noted)
    assert main(["generate", url, "a"]) == 2
    assert [path.name for path in opened if path.is_dir()] == ["final_checkpoint"]


def test_a_folder_with_older_steps_does_not_remove_newer_ones_from_the_mirror(
    run: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoint_step_2", "final_checkpoint"):
        shutil.rmtree(run / name)
    assert verb("push", run, url) == 2
    assert "the mirror holds step 2, and this folder step 1" in capsys.readouterr().err
    assert verb("verify", url) == 0
    assert "checkpoint_step_2: verified" in capsys.readouterr().out


@pytest.mark.slow
def test_a_push_heals_what_is_missing_or_damaged_in_the_mirror(
    run: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (next((tmp_path / "mirror").glob(f"*/*/checkpoint_step_{step}/config.yaml")) for step in (1, 2))
    first.unlink()
    second.write_bytes(b"?" * second.stat().st_size)
    assert verb("verify", url, "--json") == 1
    assert json.loads(capsys.readouterr().out)["verified"] == ["final_checkpoint"]
    assert verb("push", run, url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["healed"] == [
        "checkpoint_step_1/config.yaml is missing",
        "checkpoint_step_2/config.yaml has another digest",
    ]
    assert verb("verify", url) == 0
    capsys.readouterr()
    assert verb("list", url, "--json") == 0
    shelves = {each["name"]: each["line"] for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert "superseded/checkpoint_step_2" not in shelves, "what was left of it leaves when it is there again"


def test_calls_that_cannot_work_are_refused_with_advice(
    run: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = make_run(tmp_path / "stranger", steps=1)
    assert verb("push", stranger, url) == 2
    assert "another run" in capsys.readouterr().err
    assert verb("verify", f"{url}/checkpoint_step_9") == 1
    assert "it holds checkpoint_step_2, final_checkpoint, checkpoint_step_1" in capsys.readouterr().err
    assert verb("list", f"file://{tmp_path}/nothing") == 1
    assert "no mirror of a run" in capsys.readouterr().err
    assert verb("push", tmp_path / "nothing", url) == 2
    assert main(["train", "mirror=s3://key:very-secret@bucket/run"]) == 2
    assert "very-secret" not in capsys.readouterr().err
