"""The writer of a mirror on faulty stores: answers get lost, bytes change, conditions are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.core.durable import Filesystem
from ci_llm.errors import CheckpointError, DamagedCheckpoint, MirrorUnreachable
from ci_llm.mirror import head
from ci_llm.mirror.head import HEAD, Block, Found, Head, Record
from ci_llm.mirror.objects import Conflict, open_objects
from ci_llm.mirror.reader import MirrorReader
from ci_llm.mirror.sender import restore_files, send_files
from ci_llm.mirror.writer import LostClaim, MirrorWriter
from tests.checkpoints.test_store import flip
from tools.testbed.disks import Crash


class Lying:
    """A store whose single operations can be replaced."""

    def __init__(self, url: str) -> None:
        self.store, self.url = open_objects(url), url
        self.instead: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, verb: str) -> Any:
        return self.instead.get(verb, getattr(self.store, verb))


@pytest.fixture
def lying(tmp_path: Path) -> Lying:
    return Lying(f"file://{tmp_path}/mirror")


def claimed(lying: Lying, run: str | None = "run") -> MirrorWriter:
    writer = MirrorWriter(lying)
    writer.claim(run, 1, -1, Found())
    return writer


def with_story(writer: MirrorWriter, text: bytes) -> Head:
    return replace(writer.head, files={"log": writer.send_blocks([text])})


def test_a_mirror_of_another_version_is_refused_and_not_rebuilt(lying: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(head, "VERSION", head.VERSION + 1)
        writer = claimed(lying)
        writer.commit(with_story(writer, b"one"))
    before = {key for prefix in ("blocks/", "records/") for key, _ in lying.store.list(prefix)}
    with pytest.raises(CheckpointError, match="another version of ci-llm"):
        claimed(lying)
    assert {key for prefix in ("blocks/", "records/") for key, _ in lying.store.list(prefix)} == before != set()


def test_a_mirror_of_the_version_before_is_read_and_written_on(lying: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(head, "VERSION", head.VERSION - 1)
        writer = claimed(lying)
        writer.commit(with_story(writer, b"one"))
    assert json.loads(lying.store.get("head.json"))["format_version"] == 1
    later = claimed(lying)
    assert (later.head.run, later.head.generation, later.head.files) == ("run", 2, writer.head.files)
    assert json.loads(lying.store.get("head.json"))["format_version"] == 2


def test_a_sweep_keeps_objects_of_later_writers_and_of_other_programs(lying: Lying) -> None:
    early = claimed(lying)
    late = claimed(lying)
    late.commit(with_story(late, b"two"))
    lying.store.put("blocks/.nfs0001", b"of the file system")
    early.sweep()
    assert len([*lying.store.list("blocks/")]) == 2
    assert claimed(lying).sweep() == {}
    assert lying.store.get("blocks/.nfs0001") == b"of the file system"


def test_after_a_claim_whose_head_was_rebuilt_nothing_is_removed(lying: Lying, tmp_path: Path) -> None:
    writer = claimed(lying)
    writer.commit(with_story(writer, b"one"))
    flip(tmp_path / "mirror" / HEAD, bit=9)
    late = claimed(lying)
    late.sweep()
    assert [*lying.store.list("blocks/")] != [], "no record refers to it, and yet"


def test_a_commit_whose_answer_is_lost_counts(lying: Lying) -> None:
    writer = claimed(lying)

    def swap(key: str, data: bytes, version: Any) -> None:
        lying.store.swap(key, data, version)
        raise MirrorUnreachable("the answer is lost")

    lying.instead["swap"] = swap
    writer.commit(with_story(writer, b"one"))
    assert MirrorReader(lying.store).head() == writer.head
    lying.instead["swap"] = lambda *_: (_ for _ in ()).throw(Conflict(HEAD))  # of a repetition by the library
    with pytest.raises(MirrorUnreachable, match="does not hold the head"):
        writer.commit(with_story(writer, b"two"))
    lying.instead.clear()
    writer.commit(with_story(writer, b"two"))
    assert MirrorReader(lying.store).head() == writer.head


def test_a_claim_whose_answer_is_lost_is_known_again(lying: Lying) -> None:
    writer = MirrorWriter(lying)

    def swap(key: str, data: bytes, version: Any) -> None:
        lying.store.swap(key, data, version)
        lying.instead["get_version"] = refuse
        raise MirrorUnreachable("the answer is lost")

    def refuse(*_: Any) -> None:
        raise MirrorUnreachable("503")

    lying.instead["swap"] = swap
    with pytest.raises(MirrorUnreachable):
        writer.claim("run", 1, -1, Found(0))
    lying.instead.clear()
    writer.claim("run", 1, -1, Found(0))
    assert writer.head.generation == 2
    with pytest.raises(LostClaim):
        MirrorWriter(lying).claim("run", 1, -1, Found(0))


def test_a_store_that_holds_other_bytes_than_were_sent_is_not_believed(lying: Lying) -> None:
    writer = claimed(lying)
    lying.instead["put"] = lambda key, data: lying.store.put(key, data[:-1])
    with pytest.raises(MirrorUnreachable, match="does not hold what was written"):
        writer.send_blocks([b"some bytes"])
    lying.instead.clear()
    [block] = writer.send_blocks([b"some bytes"])
    assert lying.store.get(block.key) == b"some bytes"


def test_a_store_that_ignores_conditions_is_refused(lying: Lying) -> None:
    lying.instead["swap"] = lambda key, data, version: lying.store.put(key, data)
    with pytest.raises(CheckpointError, match="ignores the condition"):
        claimed(lying)


def test_claims_that_are_overtaken_again_and_again_give_up(lying: Lying) -> None:
    def swap(*_: Any) -> None:
        raise Conflict(HEAD)

    lying.instead["swap"] = swap
    with pytest.raises(MirrorUnreachable, match="again and again"):
        claimed(lying)


def test_a_head_that_vanishes_is_a_lost_claim(lying: Lying) -> None:
    writer = claimed(lying)
    lying.store.delete([HEAD])
    with pytest.raises(LostClaim):
        writer.commit(with_story(writer, b"one"))


def test_a_head_that_arrives_damaged_is_written_again(lying: Lying) -> None:
    writer = claimed(lying)
    lying.instead["swap"] = lambda key, data, version: lying.store.put(key, data[:-9] + b"?" * 9)
    with pytest.raises(MirrorUnreachable, match="does not hold the head"):
        writer.commit(with_story(writer, b"one"))
    lying.instead.clear()
    writer.commit(with_story(writer, b"one"))
    assert MirrorReader(lying.store).head() == writer.head


def test_leftovers_that_the_store_does_not_remove_go_at_the_next_claim(lying: Lying, tmp_path: Path) -> None:
    writer = claimed(lying)

    def refuse(*_: Any) -> None:
        raise MirrorUnreachable("503")

    lying.instead["delete"] = refuse
    writer.commit(with_story(writer, b"one"))
    writer.commit(with_story(writer, b"two"))
    assert len(dict(lying.store.list("blocks/"))) == 2
    lying.instead.clear()
    next_one = claimed(lying)
    assert next_one.sweep() == {}
    assert len(dict(lying.store.list("blocks/"))) == 1


def test_leftovers_of_a_killed_put_are_removed_at_the_next_claim(
    lying: Lying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Filesystem, source: Path, target: Path) -> None:
        raise Crash

    folder = tmp_path / "checkpoint_step_3"
    write_checkpoint(folder, {"config.yaml": b"seed: 1\n"}, step=3)
    writer = claimed(lying)
    writer.commit(with_story(writer, b"one"))
    key = writer.send_step(folder).record
    record = lying.store.get(key)
    lying.store.delete([key])
    with monkeypatch.context() as killed:
        killed.setattr(Filesystem, "rename", die)
        for each, data in (("blocks/g1/" + "0" * 32 + "-3", b"two"), (key, record)):
            with pytest.raises(Crash):
                lying.store.put(each, data)

    def unfinished() -> list[Path]:
        return [*(tmp_path / "mirror").rglob("*.partial")]

    assert len(unfinished()) == 2
    writer.sweep()
    assert len(unfinished()) == 2, "it may be sending them"
    flip(tmp_path / "mirror" / HEAD, bit=9)
    assert claimed(lying).head.entries == (), "an unfinished record is none"
    assert claimed(lying).sweep() == {}
    assert unfinished() == []


def test_a_damaged_log_is_left_out_and_the_others_come_back(lying: Lying, tmp_path: Path, said: list[str]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "a.log").write_bytes(b"a" * 300_000)
    (there / "b.log").write_text("b\n")
    (there / "c.log").symlink_to(there / "a.log")
    writer = claimed(lying)
    writer.commit(replace(writer.head, files=send_files(writer, there, ("*.log",))))
    assert sorted(writer.head.files) == ["a.log", "b.log"]
    assert len(writer.head.files["a.log"]) == 2
    flip(tmp_path / "mirror" / writer.head.files["a.log"][1].key, bit=9)
    here = tmp_path / "here"
    restore_files(MirrorReader(lying.store), writer.head, here, ("*.log",))
    assert [path.name for path in here.iterdir()] == ["b.log"]
    assert any("a.log does not come back" in line for line in said)


@pytest.mark.parametrize(
    "key", ["blocks/g1/../../x-1", "blocks/gx/00-1", "records/g1/a.json", "", "blocks/g1/" + "0" * 32]
)
def test_a_name_that_is_not_a_block_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is not the key of a block"):
        Block.parse(key)


def test_a_record_that_does_not_fit_its_manifest_is_refused(lying: Lying, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_step_3"
    write_checkpoint(folder, {"config.yaml": b"seed: 1\n"}, step=3)
    writer = claimed(lying)
    entry = writer.send_step(folder)
    record, manifest = Record.parse(lying.store.get(entry.record))
    assert manifest.step == 3
    for odd in (Record(1, "elsewhere", record.manifest, record.blocks), Record(1, record.name, record.manifest, {})):
        with pytest.raises(ValueError, match="does not fit its manifest"):
            Record.parse(odd.dump()[1])
    flip(folder / "config.yaml", bit=3)
    with pytest.raises(DamagedCheckpoint, match="another digest"):
        writer.send_step(folder)
