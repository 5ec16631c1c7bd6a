"""The reader of a mirror refuses records, heads and tokens that were changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.core.typed_json import Json
from ci_llm.errors import CheckpointError, DamagedCheckpoint
from ci_llm.mirror import head as head_module
from ci_llm.mirror.filling import local_copy
from ci_llm.mirror.head import HEAD, TOKEN_FILE, Head, Record, Token, read_token, write_token
from ci_llm.mirror.reader import list_mirror
from tests.checkpoints.test_store import flip
from tests.mirror.conftest import Node, entry

Nodes = Callable[..., Node]


@pytest.fixture
def one(node: Nodes) -> Node:
    """A node whose mirror has the steps 1 and 2."""
    made = node("one")
    made.begin()
    made.save(1, 2)
    return made


def stored(node: Node, key: str) -> Path:
    return Path(node.url.removeprefix("file://")) / key


def sealed(body: dict[str, Json]) -> bytes:
    return head_module._sealed({key: value for key, value in body.items() if key not in ("digest", "format_version")})


@pytest.mark.parametrize(("harm", "told"), [("flipped", "is damaged: another digest"), ("gone", "has no record")])
def test_a_step_without_its_record_is_passed_over(
    harm: str, told: str, one: Node, node: Nodes, said: list[str]
) -> None:
    newest = entry(one, "checkpoint_step_2")
    if harm == "flipped":
        flip(stored(one, newest.record), bit=900)
    else:
        stored(one, newest.record).unlink()
    with pytest.raises(DamagedCheckpoint, match=told) as damage:
        one.mirror.reader.open(newest)
    assert damage.value.where == one.mirror.reader.url
    assert one.mirror.reader.damage(one.head) == {newest.record: damage.value.what}
    assert node("fresh").begin() == 1
    assert any(told in line and "passed over in the mirror" in line for line in said), said


def test_a_head_is_rebuilt_without_the_records_that_are_damaged(one: Node, said: list[str]) -> None:
    flip(stored(one, entry(one, "checkpoint_step_2").record), bit=900)
    flip(stored(one, HEAD), bit=1000)
    assert one.line == ["checkpoint_step_1"]
    assert any("passed over: records/" in line and "is damaged" in line for line in said), said


def test_the_record_of_another_step_is_damage(one: Node) -> None:
    """Each record matches its name, but the head names the wrong one."""
    first, second = (entry(one, f"checkpoint_step_{step}") for step in (1, 2))
    for swapped in (replace(second, record=first.record), replace(first, name="final_checkpoint")):
        with pytest.raises(DamagedCheckpoint, match=f"the record of {swapped.name} is that of another step"):
            one.mirror.reader.open(swapped)


def test_blocks_of_another_file_are_damage_of_the_step(one: Node) -> None:
    """The sizes fit and each block matches its name, but they belong to another file."""
    newest = entry(one, "checkpoint_step_2")
    record, manifest = one.mirror.reader.record(newest)
    name = "agent0/adapter_model.safetensors"
    other = one.mirror.reader.record(entry(one, "checkpoint_step_1"))[0].blocks[name]
    forged = Record(record.generation, record.name, record.manifest, {**record.blocks, name: other})
    assert [block.size for block in other] == [manifest.files[name].size]
    key, data = forged.dump()
    one.mirror.reader.objects.put(key, data)
    with pytest.raises(DamagedCheckpoint, match=f"checkpoint_step_2 is damaged: {name} has another digest"):
        one.mirror.reader.open(replace(newest, record=key))


def test_a_block_that_is_gone_is_named(one: Node) -> None:
    newest = entry(one, "checkpoint_step_2")
    [block, *_] = one.mirror.reader.record(newest)[0].blocks["optimizer.safetensors"]
    stored(one, block.key).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"checkpoint_step_2 is damaged: .*{block.key} is missing"):
        one.mirror.reader.open(newest)


def test_a_mirror_of_which_nothing_verifies_gives_nothing(
    one: Node, node: Nodes, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    for each in one.head.line:
        flip(stored(one, each.record), bit=900)
    with pytest.raises(CheckpointError, match="no checkpoint in this mirror verifies"):
        local_copy(one.url, "RUN")
    fresh = node("fresh")
    assert fresh.begin() is None
    assert any("no step in" in line and "verifies" in line for line in said), said
    assert {each.name for each, _ in fresh.head.quarantine} == {"checkpoint_step_1", "checkpoint_step_2"}


@pytest.mark.parametrize("read_all", [True, False])
def test_a_list_shows_the_steps_and_those_set_aside(read_all: bool, one: Node) -> None:
    first, second = one.head.line[::-1]
    flip(stored(one, one.mirror.reader.record(first)[0].blocks["optimizer.safetensors"][0].key), bit=900)
    stored(one, second.record).unlink()
    head = replace(one.head, line=(second, first), superseded=(first,), quarantine=((first, "a flip"),))
    listed = list_mirror(one.mirror.reader, head, read_all=read_all)
    assert [(each.name, each.line, each.step) for each in listed] == [
        ("checkpoint_step_2", "current", 2),
        ("checkpoint_step_1", "current", 1),
        ("superseded/checkpoint_step_1", "superseded", 1),
        ("quarantine/checkpoint_step_1", "quarantine", 1),
    ]
    assert listed[0].nbytes == second.nbytes
    assert [each.damage is None for each in listed] == [False, *[not read_all] * 3]


# Documents


def body_of(one: Node, key: str) -> dict[str, Any]:
    return dict(json.loads(stored(one, key).read_text()))


def test_a_head_without_one_of_its_fields_is_none(one: Node) -> None:
    body = body_of(one, HEAD)
    assert Head.parse(sealed(body)) == one.head
    for field in body.keys() - {"digest", "format_version"}:
        with pytest.raises(ValueError, match="the head lacks a field"):
            Head.parse(sealed({name: value for name, value in body.items() if name != field}))


def test_an_impossible_step_is_not_listed(one: Node) -> None:
    body = body_of(one, HEAD)
    for change in ({"name": "checkpoint_step_01"}, {"record": "records/g1/a.json"}, {"step": "2"}):
        with pytest.raises(ValueError, match="the head names a step that cannot be"):
            Head.parse(sealed({**body, "line": [{**body["line"][0], **change}]}))


def test_a_record_without_one_of_its_fields_is_none(one: Node) -> None:
    body = body_of(one, one.head.line[0].record)
    Record.parse(sealed(body))
    for field in body.keys() - {"digest", "format_version"}:
        with pytest.raises(ValueError, match="the record lacks a field"):
            Record.parse(sealed({name: value for name, value in body.items() if name != field}))


def test_a_rebuilt_head_takes_the_later_of_two_generations(node: Nodes) -> None:
    """Steps of the earlier generation are superseded from the first step of the later one on."""
    one = node("one", keep=None)
    one.begin()
    one.save(1, 2, 3)
    one.close()
    back = node("one", keep=None)
    back.manager.supersede(1)
    back.mirror.begin(1, back.manager.acquire_lease(), back.found)
    back.save(2, 4)
    before = back.head
    generations = {each.name: each.record.split("/")[1] for each in before.line}
    assert generations == {"checkpoint_step_4": "g2", "checkpoint_step_2": "g2", "checkpoint_step_1": "g1"}
    stored(back, HEAD).write_bytes(b"")
    rebuilt = back.head
    assert rebuilt.line == before.line
    assert {*rebuilt.superseded} == {*before.superseded} != set()
    assert (rebuilt.generation, rebuilt.attempt) == (before.generation, before.attempt) == (2, 2)


def test_the_token_of_a_disk_comes_back(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    write_token(tmp_path, Token("run", 3))
    assert read_token(tmp_path) == Token("run", 3)
    (tmp_path / TOKEN_FILE).write_text('{"run": "of an earlier version"}')
    assert read_token(tmp_path) == Token("of an earlier version", None)
    for text in ("{", '{"generation": 3}', '{"run": 3, "generation": 3}'):
        (tmp_path / TOKEN_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read") as refused:
            read_token(tmp_path)
        assert refused.value.where == str(tmp_path / TOKEN_FILE)
