"""The hub: one request shows whether it is reachable; if not, a name of the hub is one clear error at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.core.remote import OFFLINE, may_be_on_hub, offline_note, why_unreachable
from tests.support.asking_http import JsonHandler, answering
from tests.support.campaign import sampled
from tests.support.children import ROOT, python
from tools.testbed.forkserver import free_port


class Grumpy(JsonHandler):
    """A hub that answers every request with an error, and so is reachable."""

    def do_HEAD(self) -> None:  # noqa: N802 - the name of the standard library
        self.send_response(503)
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(OFFLINE, raising=False)
    with answering(Grumpy) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv(OFFLINE, "")
    monkeypatch.delenv(OFFLINE)
    return endpoint


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        ("openai/gsm8k", True),
        ("gpt2", True),
        ("embedded", False),
        ("/nowhere/model", False),
        ("data/*.jsonl", False),
        ("rows.ndjson", False),
        ("a/b/c", False),
        (str(ROOT), False),
    ],
)
def test_which_names_may_be_on_the_hub(name: str, may_be: bool) -> None:
    assert may_be_on_hub(name) is may_be


def test_a_hub_that_answers_is_there_whatever_it_says(hub: None) -> None:
    assert why_unreachable() is None
    assert offline_note(["openai/gsm8k"]) is None
    assert OFFLINE not in os.environ


def test_one_that_does_not_is_not_asked_again(no_hub: str) -> None:
    reason = offline_note(["embedded", "openai/gsm8k"])
    assert reason is not None
    assert no_hub in reason
    assert os.environ[OFFLINE] == "1"
    assert offline_note(["embedded", "openai/gsm8k"]) is None


def test_nobody_is_asked_where_nothing_is_wanted_of_it(no_hub: str) -> None:
    assert offline_note(["embedded", "/data/mine.jsonl"]) is None
    assert OFFLINE not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", sampled(["model_name=nobody/nothing", "dataset_name=nobody/nothing"], ["model_name=nobody/nothing"])
)
def test_a_name_of_the_hub_without_network_is_one_error(word: str, no_hub: str, tmp_path: Path) -> None:
    done = python(ROOT / "train.py", word, "output_dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "hub       unreachable" in done.stdout
    assert "nobody/nothing" in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Retry" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
