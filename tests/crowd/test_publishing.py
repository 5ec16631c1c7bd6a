"""A run published on the hub: against a double of its interface on this machine; the hub itself is not reached here."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.base.load import fingerprint_of
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cli.main import main
from ci_llm.config import Config, parse_config
from ci_llm.config.parsing import kinds_of
from ci_llm.config.schema import AllKeys
from ci_llm.crowd import publishing
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.exporting import prepare
from ci_llm.errors import CheckpointError
from ci_llm.run.result import push_result
from tests.crowd.hub_server import TOKEN, HubServer
from tests.report.folders import leave_status
from tests.support.crowds import K, disturbed_crowd, save_crowd

STEP = 7


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with HubServer().serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    saved = save_crowd(disturbed_crowd(), folder / "saved", STEP)
    prepare(str(saved)).write(folder / "run" / "final_checkpoint", None)
    return folder / "run"


@pytest.mark.slow
def test_agents_and_card_are_pushed_to_a_private_repository_and_open_from_it(
    run: Path, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "--to", "hub:user/crowd", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["repository"], told["private"]) == ("user/crowd", True)
    files = hub.files["user/crowd"]
    assert told["files"] == len(files)
    card = files["README.md"].decode()
    assert f"--enable-lora --max-loras {K} --max-lora-rank 8" in card
    assert not [name for name in files if "optimizer" in name or "rng" in name]
    for name, data in files.items():
        path = tmp_path / "fetched" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert Crowd.from_pretrained(tmp_path / "fetched").num_agents == K


def test_what_is_sent_names_no_place_of_this_machine(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of paths, mirrors and addresses with passwords nothing is sent, and what is sent verifies and opens."""
    crowd, home, store = disturbed_crowd(), "/home/ann", "s3://ann:hunter2@store.example"
    places = {
        "output_dir": f"{home}/run",
        "mirror": f"{store}/run",
        "init_from": f"{home}/adapters",
        "resume_from_checkpoint": f"{home}/checkpoint_step_3",
        "restart_from": f"{home}/checkpoint_step_2",
        "chat_template": f"{home}/chat.jinja",
        "dataset_name": f"{home}/rows.jsonl,{store}/more.jsonl?key=hunter2,user/public",
        "eval_dataset_name": "https://hunter2@example.org/eval.jsonl",
        "agents": ({"dataset_name": f"{home}/own.jsonl"}, {"seed": 3}, {}),
    }
    meta = {**crowd.meta(fingerprint_of(crowd.model)), "agents": [{"name": "a", "dataset_name": f"{home}/own.jsonl"}]}
    assert {key for key in AllKeys.model_fields if takes_path(key)} <= (publishing.NAMES | publishing.PLACES)
    plain = Config(num_agents=K)
    written = plain.model_copy(update=places).dump()
    state = {**crowd.adapter_files(), "ci_llm_meta_config": meta, "config.yaml": written.encode(), "README.md": b"#"}
    optimizer = {"optimizer": {"agent0": 1}}
    write_checkpoint(
        tmp_path / "run/final_checkpoint", {**state, **optimizer}, step=3, info={"imported_from": [f"{home}/old"]}
    )
    assert main(["push", str(tmp_path / "run"), "--to", "hub:user/quiet"]) == 0
    told, sent = capsys.readouterr().out, hub.files["user/quiet"]
    assert f"sent: {', '.join(sorted(sent))}\n" in told
    changed = ["agent0/adapter_config.json", "agent1/adapter_config.json", "agent2/adapter_config.json"]
    assert f"without paths and addresses: {', '.join([*changed, 'ci_llm_meta_config.json', 'config.yaml'])}\n" in told
    for name, data in sent.items():
        assert not [
            word for word in (b"ann", b"hunter2", b"store.example", str(Path.cwd()).encode()) if word in data
        ], name
        path = tmp_path / "fetched" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    verify_folder(tmp_path / "fetched")
    opened = Crowd.from_pretrained(tmp_path / "fetched")
    assert opened.num_agents == K
    config = parse_config(sent["config.yaml"].decode(), "config.yaml")
    assert config.dataset_name == "rows.jsonl,more.jsonl,user/public"
    assert (config.mirror, config.output_dir, config.init_from) == (None, Config().output_dir, None)
    assert config.model_copy(update=places) == plain.model_copy(update=places), "all other keys are as they were"


def takes_path(key: str) -> bool:
    marks = [mark for kind in kinds_of(AllKeys.model_fields[key]) for mark in kind.metadata]
    return any(getattr(mark, "func", None) is os.path.expanduser for mark in marks)


@pytest.mark.slow
def test_a_push_that_the_hub_refused_can_be_called_again(run: Path, hub: HubServer) -> None:
    hub.refuse = 409
    with pytest.raises(CheckpointError, match="does not take it") as failed:
        publishing.publish(run, "hub:user/again")
    assert "call it again later" in str(failed.value)
    assert TOKEN not in str(failed.value)
    hub.refuse = None
    done = publishing.publish(run, "hub:user/again")
    assert hub.commits == [f"run, step {STEP}"]
    assert (len(hub.files["user/again"]), done.private) == (done.files, True)


@pytest.mark.slow
def test_a_later_push_deletes_only_files_that_this_crowd_no_longer_has(run: Path, hub: HubServer) -> None:
    publishing.publish(run, "hub:user/twice")
    files = hub.files["user/twice"]
    own = {"LICENSE": b"mine", "agent0/notes.md": b"mine", "docs/README.md": b"mine"}
    former = {f"agent{K}/adapter_model.safetensors": b"of a larger crowd", "calibration.json": b"of another one"}
    files |= own | former
    publishing.publish(run, "hub:user/twice")
    assert not [name for name in files if name in former]
    assert own.items() <= files.items()
    assert f"agent{K - 1}/adapter_model.safetensors" in files
    assert len(hub.commits) == 2, "what goes and what comes is one commit"


def test_push_to_hub_never_fails_the_run(
    run: Path, hub: HubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(output_dir=str(run), push_to_hub=True)
    main_process: Any = SimpleNamespace(is_main_process=True)
    other = config.model_copy(update={"hub_model_id": "user/other"})
    with caplog.at_level(logging.INFO, "ci_llm"):
        push_result(config.model_copy(update={"push_to_hub": False}), main_process)
        push_result(config, SimpleNamespace(is_main_process=False))  # type: ignore[arg-type]
        assert not hub.files
        push_result(config, main_process)
        hub.refuse = 403
        push_result(other, main_process)
    hub.refuse = None
    assert [*hub.files] == ["me/run"]
    assert "ci-llm push" in caplog.text
    assert "hub:user/other tries it again" in caplog.text
    monkeypatch.setattr(publishing, "publish", lambda *_: [][0])
    push_result(config, main_process)
    assert "not published: IndexError: list index out of range; the same call or ci-llm push" in caplog.text


@pytest.mark.slow
def test_a_push_that_failed_is_tried_again_and_one_that_arrived_is_not(
    run: Path, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("hub.json"))
    leave_status(folder, "completed", STEP)
    config = Config(output_dir=str(folder), push_to_hub=True)
    main_process: Any = SimpleNamespace(is_main_process=True)
    hub.refuse = 403
    push_result(config, main_process)
    main(["status", str(folder)])
    assert "hub: not published: the hub refuses (403)" in capsys.readouterr().out
    hub.refuse = None
    push_result(config, main_process)
    push_result(config, main_process)
    assert hub.commits == [f"again, step {STEP}"]
    main(["status", str(folder)])
    assert f"hub: step {STEP} is published in {hub.address}/me/again" in capsys.readouterr().out
    publishing.publish(folder, "hub:user/byhand")
    push_result(config.model_copy(update={"hub_model_id": "user/byhand"}), main_process)
    assert len(hub.commits) == 2, "what was pushed by hand is not pushed again"
