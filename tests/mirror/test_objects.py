"""The stores of a mirror: what a conditional put decides, what a URL may say, and how fast things may go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.core.remote import without_secrets
from ci_llm.errors import CheckpointError, ConfigError, MirrorUnreachable
from ci_llm.mirror.objects import LONGEST_S, Missing, RateLimiter, backoff_s, open_objects, require_writable
from tests.mirror.conftest import swaps_decide


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_swap_replaces_only_the_version_that_it_read(kind: str, tmp_path: Path) -> None:
    swaps_decide(open_objects(f"{kind}://{tmp_path}/prefix"))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_objects_are_put_listed_and_deleted(kind: str, tmp_path: Path) -> None:
    store = open_objects(f"{kind}://{tmp_path}/other")
    store.put("some/where/a", b"abc")
    store.put("some/where/b", iter([b"de", b"f"]))
    store.put("some/c", b"")
    assert dict(store.list("some")) == {"some/where/a": 3, "some/where/b": 3, "some/c": 0}
    assert (store.get("some/where/b"), store.get("some/where/b", 1, 9), store.get("some/c")) == (b"def", b"ef", b"")
    store.delete(["some/where/a", "some/where/b"])
    assert dict(store.list("some/where")) == {}
    with pytest.raises(Missing):
        store.get("some/where/a")


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_put_that_ends_in_the_middle_leaves_nothing(kind: str, tmp_path: Path) -> None:
    def breaks_off() -> Iterator[bytes]:
        yield b"abc"
        raise ZeroDivisionError

    store = open_objects(f"{kind}://{tmp_path}/broken")
    with pytest.raises(ZeroDivisionError):
        store.put("a", breaks_off())
    assert dict(store.list("")) == {}


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_objects(f"memory://{tmp_path}/careless")
    monkeypatch.setattr(store, "put_if_match", lambda key, data, version: store.put(key, data))
    with pytest.raises(CheckpointError, match="ignores the condition of a put"):
        require_writable(store)
    assert dict(store.list("")) == {}


@pytest.mark.parametrize("url", ["s3://key:very-secret@bucket/run", "s3://bucket/run?sig=very-secret"])
def test_a_url_with_credentials_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_objects(url, "mirror")
    assert "very-secret" not in str(refused.value)
    assert "very-secret" not in without_secrets(url)


@pytest.mark.parametrize("text", ["runs/one", "ftp://host/run", "hf://user/name", "https://host/run"])
def test_a_value_that_is_not_a_url_of_a_mirror_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a mirror"):
        open_objects(text)


@pytest.mark.parametrize("url", ["file://scratch/mirror", "file://scratch"])
def test_a_relative_folder_is_refused_as_a_mirror(url: str) -> None:
    with pytest.raises(ConfigError, match="'scratch' stands where a file URL has a machine") as refused:
        open_objects(url)
    assert "file:///path" in str(refused.value)


def test_the_bound_spreads_bytes_over_time() -> None:
    now, waited = [0.0], []
    limiter = RateLimiter(2.0, clock=lambda: now[0])
    limiter.hurry.wait = lambda timeout=None: bool(waited.append(timeout))  # type: ignore[method-assign]
    for _ in range(3):
        limiter(1_000_000)
    assert waited == [0.5, 1.0, 1.5]
    now[0] = 10.0
    limiter(1_000_000)
    assert waited[-1] == 0.5
    limiter.hurry.set()
    limiter(10**9)
    assert len(waited) == 4


def test_tries_come_later_and_later_but_not_before_a_kill() -> None:
    assert all(0.5 <= backoff_s(1, hurry=False) <= 1.0 for _ in range(20))
    assert all(LONGEST_S / 2 <= backoff_s(50, hurry=False) <= LONGEST_S for _ in range(20))
    assert all(backoff_s(50, hurry=True) <= 1.0 for _ in range(20))


ASKED = {
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", b"1"),
    "put_if_match": lambda store: store.put_if_match("key", b"1", None),
    "list": lambda store: list(store.list("key")),
    "delete": lambda store: store.delete(["key"]),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_store_that_does_not_answer_is_one_error_without_secrets(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ci_llm.mirror.objects.RETRIES", 0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(MirrorUnreachable, match="the store does not let us") as failed:
        ASKED[asked](open_objects("s3://bucket/run"))
    assert "very-secret" not in str(failed.value)
    assert "AWS_ENDPOINT_URL" in str(failed.value)


@pytest.mark.parametrize("asked", ["get", "put", "put_if_match", "delete"])
def test_a_folder_that_cannot_be_used_is_the_same_error(asked: str, tmp_path: Path) -> None:
    (tmp_path / "mirror" / "key" / "below").mkdir(parents=True)
    if asked in ("put", "put_if_match"):
        (tmp_path / "file").write_text("no folder")
        store = open_objects(f"file://{tmp_path}/file")
    else:
        store = open_objects(f"file://{tmp_path}/mirror")
    with pytest.raises(MirrorUnreachable, match="the folder does not let us"):
        ASKED[asked](store)
