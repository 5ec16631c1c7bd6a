"""The reader of a mirror refuses manifests, heads and tokens that were changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ci_llm.errors import CheckpointError, DamagedCheckpoint
from ci_llm.mirror.filling import local_copy
from ci_llm.mirror.head import HEAD, TOKEN_FILE, Token, read_token, write_token
from ci_llm.mirror.reader import list_mirror
from tests.checkpoints.test_store import flip
from tests.mirror.conftest import Node, entry, resealed, stored

Nodes = Callable[..., Node]


@pytest.fixture
def one(node: Nodes) -> Node:
    """A node whose mirror has the steps 1 and 2."""
    return node("one", 1, 2)


@pytest.mark.parametrize("file", ["manifest.json", "optimizer.safetensors"])
@pytest.mark.parametrize(("harm", "told"), [("flipped", "has another digest"), ("gone", "is missing")])
def test_a_step_that_is_not_whole_is_passed_over(
    file: str, harm: str, told: str, one: Node, node: Nodes, said: list[str]
) -> None:
    newest = entry(one, "checkpoint_step_2")
    path = stored(one, newest.key(file))
    flip(path, bit=900) if harm == "flipped" else path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"checkpoint_step_2/{file} {told}") as damage:
        one.mirror.reader.open(newest)
    assert damage.value.where == one.mirror.reader.url
    assert one.mirror.reader.damage(one.head) == {newest.place: damage.value.what}
    assert node("fresh").begin() == 1
    assert any(told in line and "passed over in the mirror" in line for line in said), said


def test_a_mirror_of_which_nothing_verifies_gives_nothing(
    one: Node, node: Nodes, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    for each in one.head.line:
        flip(stored(one, each.key("manifest.json")), bit=900)
    with pytest.raises(CheckpointError, match="no checkpoint in this mirror verifies"):
        local_copy(one.url, "RUN")
    fresh = node("fresh")
    assert fresh.begin() is None
    assert any("no step in" in line and "verifies" in line for line in said), said
    assert {each.name for each in fresh.head.aside} == {"checkpoint_step_1", "checkpoint_step_2"}


@pytest.mark.parametrize("read_all", [True, False])
def test_a_list_shows_the_steps_and_those_set_aside(read_all: bool, one: Node) -> None:
    first, second = one.head.line[::-1]
    flip(stored(one, first.key("optimizer.safetensors")), bit=900)
    stored(one, second.key("manifest.json")).unlink()
    head = replace(one.head, line=(second, first), aside=(first,))
    listed = list_mirror(one.mirror.reader, head, read_all=read_all)
    assert [(each.name, each.line, each.step) for each in listed] == [
        ("checkpoint_step_2", "current", 2),
        ("checkpoint_step_1", "current", 1),
        ("superseded/checkpoint_step_1", "superseded", 1),
    ]
    assert listed[0].nbytes == second.nbytes
    assert [each.damage is None for each in listed] == [False, *[not read_all] * 2]


# Documents


def test_a_head_without_a_whole_copy_is_refused_and_left(one: Node, node: Nodes) -> None:
    keys = (HEAD, f"{one.head.writer}/{HEAD}")
    for key in keys:
        flip(stored(one, key), bit=1000)
    before = [stored(one, key).read_bytes() for key in keys]
    with pytest.raises(CheckpointError, match="the head of this mirror and its copy are damaged"):
        node("fresh").begin()
    assert [stored(one, key).read_bytes() for key in keys] == before


@pytest.mark.parametrize("version", [3, 5])
def test_a_mirror_of_another_version_is_refused_and_left(version: int, one: Node, node: Nodes) -> None:
    path = stored(one, HEAD)
    path.write_bytes(resealed({**json.loads(path.read_text()), "format_version": version}))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="another version of ci-llm wrote this mirror"):
        node("fresh").begin()
    assert path.read_bytes() == before


def test_the_token_of_a_disk_comes_back(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    write_token(tmp_path, Token("run", "000003-01234567"))
    assert read_token(tmp_path) == Token("run", "000003-01234567")
    for text in ("{", '{"run": "of an earlier version", "generation": 3}', '{"run": 3, "writer": ""}'):
        (tmp_path / TOKEN_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="damaged, or of another version") as refused:
            read_token(tmp_path)
        assert refused.value.where == str(tmp_path / TOKEN_FILE)
    (tmp_path / TOKEN_FILE).unlink()
    (tmp_path / TOKEN_FILE).mkdir()
    with pytest.raises(CheckpointError, match="it cannot be read: Is a directory"):
        read_token(tmp_path)
