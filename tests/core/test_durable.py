"""Files survive crashes, and typed JSON keeps its types."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ci_llm.core.durable import (
    append,
    cut,
    make_folders,
    new_folder,
    read_chunks,
    read_exactly,
    read_json,
    remove_tree,
    write_bytes,
    write_json,
    write_new,
)
from ci_llm.core.typed_json import dump_json, load_json, parse_json
from tools.testbed.disks import Crash, MortalDisk, MuteDisk, StutteringDisk

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=9)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(values)
def test_typed_json_restores_values_and_types(value: object) -> None:
    text = dump_json(value)
    assert repr(load_json(text)) == repr(value)
    parse_json(text)


def test_no_file_ever_holds_nan_or_infinity() -> None:
    text = dump_json([float("inf"), float("-inf"), float("nan")])
    assert b"NaN" not in text
    assert b"Infinity" not in text
    back = load_json(text)
    assert isinstance(back, list)
    assert back[:2] == [float("inf"), float("-inf")]
    assert back[2] != back[2]


@pytest.mark.parametrize(
    "text", ['{"$code": "x"}', '{"$tuple": 3}', '{"$dict": [[1]]}', '{"$dict": [[[1], 2]]}', "[NaN]", "{", "[" * 99999]
)
def test_json_that_it_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the message is the parser's)
        load_json(text)


def test_a_crash_before_any_change_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"old": True})
    for lives in range(20):
        disk = MortalDisk(lives)
        try:
            write_json(path, {"new": True}, disk=disk)
        except Crash:
            assert read_json(path) in ({"old": True}, {"new": True})
            write_json(path, {"old": True})
        else:
            assert lives == disk.changes == 6  # create, write, sync, close, rename, sync of the folder
            break
    assert read_json(path) == {"new": True}


def test_short_writes_are_continued_and_no_write_is_an_error(tmp_path: Path) -> None:
    assert write_new(tmp_path / "a", [b"hello ", b"", b"durable world"], disk=StutteringDisk()) == 19
    assert (tmp_path / "a").read_bytes() == b"hello durable world"
    with pytest.raises(OSError, match="no byte"):
        write_new(tmp_path / "b", [b"x"], disk=MuteDisk())


def test_a_writer_whose_staging_folder_was_renamed_away_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write_bytes(tmp_path / "status.json", b"old", staging=tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "taken")
    with pytest.raises(FileNotFoundError):
        write_bytes(tmp_path / "status.json", b"new", staging=tmp_path / "mine")
    assert (tmp_path / "status.json").read_bytes() == b"old"


def test_reading_follows_no_link_and_no_growing_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic"):
        list(read_chunks(tmp_path / "link"))
    assert read_exactly(tmp_path / "real", 5) == b"12345"
    with pytest.raises(ValueError, match="4 bytes"):
        read_exactly(tmp_path / "real", 4)


def test_removing_a_tree_leaves_what_its_links_point_to(tmp_path: Path) -> None:
    make_folders(tmp_path / "a" / "b")
    make_folders(tmp_path / "a" / "b")
    (tmp_path / "treasure").mkdir()
    (tmp_path / "treasure" / "gold").write_bytes(b"1")
    (tmp_path / "a" / "b" / "link").symlink_to(tmp_path / "treasure")
    remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "treasure" / "gold").read_bytes() == b"1"


def test_appending_keeps_what_is_there_whatever_happens(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    write_bytes(file, b"one\n")
    append(file, b"two\n", disk=StutteringDisk())
    assert file.read_bytes() == b"one\ntwo\n"
    for lives in range(2):  # the write, the sync
        with pytest.raises(Crash):
            append(file, b"three\n", disk=MortalDisk(lives))
        assert file.read_bytes().startswith(b"one\ntwo\n")
        cut(file, 8)
        assert file.read_bytes() == b"one\ntwo\n"
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "missing", b"")
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "link", b"")


def test_a_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    for lives in range(40):
        disk = MortalDisk(lives)
        try:
            with new_folder(target, disk=disk) as draft:  # anybody may fill it: the files are synced at the end
                (draft / "sub").mkdir()
                (draft / "sub" / "a").write_text("a")
                (draft / "b").write_text("b")
        except Crash:
            assert lives < 39, "it never ends"
            if not target.exists():
                continue
        assert {str(path.relative_to(target)) for path in target.rglob("*")} == {"sub", "sub/a", "b"}
        break
    assert lives >= 8, "the parent, the draft, two files, two folders, the rename, the parent again"


def test_a_new_folder_replaces_no_other_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("")
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "mine") as draft:
        (draft / "a").write_text("a")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other") as draft:
        (draft / "a").write_text(str(1 / 0))
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious"]
