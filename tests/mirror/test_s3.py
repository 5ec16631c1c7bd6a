"""A mirror on a real S3 server on this machine: its conditional put, and a sample of the strikes of `strikes.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.cluster.launch import read_launch
from ci_llm.config import load_config
from ci_llm.dry_run import inputs
from ci_llm.dry_run.context import CheckContext
from ci_llm.errors import MirrorUnreachable
from ci_llm.interrupts import Interrupts
from ci_llm.mirror import objects, sender
from ci_llm.mirror.objects import open_objects
from tests.mirror import mirrored
from tests.mirror.conftest import swaps_decide
from tests.mirror.strikes import History, campaign, strikes
from tests.support import campaign as size
from tools.testbed.forkserver import ForkServer
from tools.testbed.object_store import BUCKET, CREDENTIALS, FAULTS, FaultProxy, s3_server

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `mirrored.speak_to` changes in the process that reads is undone after each test."""
    for owner, name in ((objects, "REQUEST_S"), (objects, "RETRIES"), (objects, "FIRST_TRY_S"), (sender, "_POLL_S")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": ""}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


def test_the_conditional_put_of_s3_decides(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    swaps_decide(open_objects(f"s3://{BUCKET}/put_if_match"))


def test_a_large_object_is_sent_and_read_in_parts(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    store, chunk = open_objects(f"s3://{BUCKET}/large"), bytes(range(256)) * (1 << 13)
    store.put("a", iter([chunk] * 5))
    assert dict(store.list("")) == {"a": 5 * len(chunk)}
    middle = store.get("a", len(chunk) - 1, objects.PART_BYTES)
    assert middle == chunk[-1:] + chunk * 3 + (chunk[: objects.PART_BYTES - 1 - 3 * len(chunk)])
    assert store.get("a") == chunk * 5


def test_a_bucket_that_does_not_exist_is_refused_before_the_run_begins(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    words = ["mirror=s3://bucket-that-does-not-exist/x", f"output_dir={tmp_path / 'run'}", "max_train_steps=1"]
    assert main(["train", *words]) == 1
    told = capsys.readouterr().err
    assert "the store does not let us write probe-" in told
    assert "404" in told
    assert not (tmp_path / "run/status.json").exists()
    with pytest.raises(MirrorUnreachable, match="404"):
        inputs.mirror(context := check_context(words))
    context.config = context.config.model_copy(update={"mirror": f"s3://{BUCKET}/x"})
    assert inputs.mirror(context) == f"s3://{BUCKET}/x can be written"
    assert not list(open_objects(f"s3://{BUCKET}/x").list(""))


def check_context(words: list[str]) -> CheckContext:
    return CheckContext(load_config(None, words), read_launch(), Interrupts())


def test_no_fault_in_a_save_loses_breaks_or_changes_a_step(tmp_path: Path) -> None:
    wanted = strikes(FAULTS, random.Random(20261122), None if size.in_full else 12, most=45)
    outcomes = campaign(wanted, tmp_path)
    assert len(outcomes) >= 4
    for outcome in outcomes:
        assert outcome.harms == frozenset(), f"{outcome.strike}: {sorted(outcome.harms)}\n{outcome.log}"


def test_the_campaign_notices_what_is_broken_and_what_is_lost(tmp_path: Path, address: str) -> None:
    with FaultProxy(address) as proxy, ForkServer("tests.mirror.mirrored") as server:
        history = History(server, proxy, address, tmp_path)
        mirrored.speak_to(address)
        store = open_objects(history.url)
        [hurt] = [key for key, _ in store.list("") if "checkpoint_step_2/optimizer.safetensors" in key]
        assert [*history.harms(2)] == []
        assert [*history.harms(3)] == ["committed lost"]
        store.put(hurt, store.get(hurt)[:-1] + b"?")
        assert [*history.harms(1)] == ["newest broken"]
