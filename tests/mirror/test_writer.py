"""The writer of a mirror on faulty stores: answers get lost, bytes change, conditions are ignored."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.core.durable import Filesystem
from ci_llm.errors import DamagedCheckpoint, MirrorUnreachable, WriterBusy
from ci_llm.mirror import writer as writer_module
from ci_llm.mirror.filling import fill
from ci_llm.mirror.head import HEAD, NOBODY, Found, Head
from ci_llm.mirror.objects import Conflict, open_objects
from ci_llm.mirror.reader import MirrorReader
from ci_llm.mirror.writer import MirrorWriter
from tests.checkpoints.test_store import flip
from tests.mirror.conftest import Node, stored
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


def claimed(lying: Lying) -> MirrorWriter:
    writer = MirrorWriter(lying)
    writer.claim("run", 1, -1, Found())
    return writer


def with_log(writer: MirrorWriter, text: bytes) -> Head:
    return replace(writer.head, files={"log": writer.send_file("log", text)})


def logs(lying: Lying) -> list[str]:
    return [key for key, _ in lying.store.list("") if key.endswith("/log")]


def test_a_sweep_keeps_objects_of_later_writers_and_of_other_programs(lying: Lying) -> None:
    early = claimed(lying)
    late = claimed(lying)
    late.commit(with_log(late, b"two"))
    lying.store.put("blocks/.nfs0001", b"of the file system")
    early.sweep()
    assert len(logs(lying)) == 1
    claimed(lying).sweep()
    assert len(logs(lying)) == 1
    assert lying.store.get("blocks/.nfs0001") == b"of the file system"


def test_a_listing_that_lacks_what_is_there_condemns_no_step(lying: Lying, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_step_3"
    write_checkpoint(folder, {"config.yaml": b"seed: 1\n"}, step=3)
    writer = claimed(lying)
    entry = writer.send_step(folder)
    writer.commit(writer.head.with_step(entry))
    lying.instead["list"] = lambda prefix: iter([])
    assert writer.sweep() == []
    lying.store.delete([entry.key("config.yaml")])
    assert writer.sweep() == [entry]
    assert writer.send_step(folder) == entry, "it is sent again"
    assert writer.sweep() == []
    lying.instead["list"] = refused
    assert writer.sweep() == [], "a store that does not list"


def test_a_bad_block_of_the_disk_is_damage_of_that_step(
    lying: Lying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint_step_3"
    write_checkpoint(folder, {"config.yaml": b"seed: 1\n"}, step=3)

    def bad(path: Path) -> Iterator[bytes]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    monkeypatch.setattr(writer_module, "read_chunks", bad)
    with pytest.raises(DamagedCheckpoint, match="Input/output error"):
        claimed(lying).send_step(folder)


def refused(*_: Any) -> Any:
    raise MirrorUnreachable("403 AccessDenied", where="the store")


def test_the_store_says_why_it_refuses_a_claim(lying: Lying) -> None:
    claimed(lying)
    lying.instead["put_if_match"] = refused
    with pytest.raises(MirrorUnreachable, match="403 AccessDenied"):
        claimed(lying)


def test_a_claim_that_another_writer_was_faster_with_is_refused(lying: Lying) -> None:
    def faster(key: str, data: bytes, version: Any) -> None:
        lying.instead.clear()
        claimed(lying)
        raise Conflict(key)

    seen = Found(writer=claimed(lying).head.writer)
    lying.instead["put_if_match"] = faster
    with pytest.raises(WriterBusy, match="another attempt has claimed this mirror"):
        MirrorWriter(lying).claim("run", 2, -1, seen)


def test_a_writer_that_lost_its_claim_leaves_the_copy_of_the_head_alone(lying: Lying, tmp_path: Path) -> None:
    """Its last commit arrives, and its copy only after the claim of the next one."""
    early = claimed(lying)
    new, put = with_log(early, b"one"), lying.store.put

    def put_late(key: str, data: Any) -> None:
        lying.instead.clear()
        late.append(claimed(lying))
        put(key, data)

    late: list[MirrorWriter] = []
    lying.instead["put"] = put_late
    early.commit(new)
    flip(tmp_path / "mirror" / HEAD, bit=9)
    assert MirrorReader(lying.store).head() == late[0].head
    with pytest.raises(WriterBusy, match="claimed this mirror"):
        early.commit(with_log(early, b"two"))


def test_a_commit_whose_answer_is_lost_counts(lying: Lying) -> None:
    writer = claimed(lying)

    def put_if_match(key: str, data: bytes, version: Any) -> None:
        lying.store.put_if_match(key, data, version)
        raise MirrorUnreachable("the answer is lost")

    lying.instead["put_if_match"] = put_if_match
    writer.commit(with_log(writer, b"one"))
    assert MirrorReader(lying.store).head() == writer.head
    lying.instead["put_if_match"] = lambda *_: (_ for _ in ()).throw(Conflict(HEAD))  # of a repetition by the library
    with pytest.raises(MirrorUnreachable, match="does not hold the head"):
        writer.commit(with_log(writer, b"two"))
    lying.instead.clear()
    writer.commit(with_log(writer, b"two"))
    assert MirrorReader(lying.store).head() == writer.head


def test_a_claim_whose_answer_is_lost_is_known_again(lying: Lying) -> None:
    writer = MirrorWriter(lying)

    def put_if_match(key: str, data: bytes, version: Any) -> None:
        lying.store.put_if_match(key, data, version)
        lying.instead["get_version"] = refuse
        raise MirrorUnreachable("the answer is lost")

    def refuse(*_: Any) -> None:
        raise MirrorUnreachable("503")

    lying.instead["put_if_match"] = put_if_match
    with pytest.raises(MirrorUnreachable):
        writer.claim("run", 1, -1, Found(NOBODY))
    lying.instead.clear()
    writer.claim("run", 1, -1, Found(NOBODY))
    assert writer.head.writer.startswith("000002-")
    with pytest.raises(WriterBusy, match="claimed this mirror"):
        MirrorWriter(lying).claim("run", 1, -1, Found(NOBODY))


def test_a_store_that_holds_other_bytes_than_were_sent_is_not_believed(lying: Lying) -> None:
    writer = claimed(lying)
    lying.instead["put"] = lambda key, data: lying.store.put(key, data[:-1])
    with pytest.raises(MirrorUnreachable, match="does not hold what was written"):
        writer.send_file("log", b"some bytes")
    with pytest.raises(MirrorUnreachable, match="does not hold what was written"):
        writer.commit(replace(writer.head, attempt=7))  # its copy
    lying.instead.clear()
    with pytest.raises(MirrorUnreachable, match="does not hold the head"):
        writer.commit(replace(writer.head, attempt=8))
    file = writer.send_file("log", b"some bytes")
    assert lying.store.get(f"{file.place}/log") == b"some bytes"
    writer.commit(replace(writer.head, attempt=8))
    assert MirrorReader(lying.store).head() == writer.head


def test_leftovers_that_the_store_does_not_remove_go_at_the_next_claim(lying: Lying) -> None:
    writer = claimed(lying)

    def refuse(*_: Any) -> None:
        raise MirrorUnreachable("503")

    lying.instead["delete"] = refuse
    writer.commit(with_log(writer, b"one"))
    writer.commit(with_log(writer, b"two"))
    assert len(logs(lying)) == 2
    lying.instead.clear()
    claimed(lying).sweep()
    assert len(logs(lying)) == 1


def test_leftovers_of_a_killed_put_are_removed_at_the_next_claim(
    lying: Lying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Filesystem, source: Path, target: Path) -> None:
        raise Crash

    writer = claimed(lying)
    with monkeypatch.context() as killed:
        killed.setattr(Filesystem, "rename", die)
        with pytest.raises(Crash):
            writer.send_file("log", b"two")

    def unfinished() -> list[Path]:
        return [*(tmp_path / "mirror").rglob("*.partial")]

    assert len(unfinished()) == 1
    writer.sweep()
    assert len(unfinished()) == 1, "it may be sending it"
    claimed(lying).sweep()
    assert unfinished() == []


def test_a_damaged_log_is_left_out_and_the_others_come_back(node: Callable[..., Node], said: list[str]) -> None:
    one = node("one")
    one.mirror.files = patterns = ("*.log", "logs/*")
    one.begin()
    (one.folder / "logs").mkdir()
    for name in ("a.log", "b.log", "logs/c"):
        (one.folder / name).write_text(f"{name}\n")
    (one.folder / "d.log").symlink_to(one.folder / "a.log")
    one.save(1)
    assert sorted(one.head.files) == ["a.log", "b.log", "logs/c"]
    flip(stored(one, f"{one.head.files['a.log'].place}/a.log"), bit=9)
    fresh = node("fresh")
    fill(fresh.mirror.reader, fresh.manager, patterns)
    assert [name for name in one.head.files if (fresh.folder / name).exists()] == ["b.log", "logs/c"]
    assert any("a.log does not come back" in line for line in said)
