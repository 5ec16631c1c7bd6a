"""A mirror behind a run: what it sends, what a fresh disk gets back, who may write, and what is said when it lags."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manifest import Opened, verify_folder
from ci_llm.errors import CheckpointError, MirrorUnreachable, WriterBusy
from ci_llm.mirror import filling, reader, sender, writer
from ci_llm.mirror.filling import local_copy
from ci_llm.mirror.head import HEAD, Found, Head, Token, read_token, write_token
from ci_llm.mirror.sender import MirrorState
from tests.checkpoints.test_store import flip
from tests.mirror.conftest import Node, Refusing, entry, keys_of, resealed, stored
from tests.mirror.mirrored import records
from tools.testbed.events import DEADLINE_S

Nodes = Callable[..., Node]


def test_an_empty_disk_gets_the_newest_step_its_logs_and_its_count_of_attempts(node: Nodes, tmp_path: Path) -> None:
    first = node("first")
    assert first.begin() is None
    (first.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    first.save(1, 2, 3)
    assert first.line == ["checkpoint_step_3", "checkpoint_step_2"]
    first.close()
    shutil.rmtree(first.folder)
    again = node("first")
    assert again.begin() == 3
    assert dict(again.manager.metadata(3).files) == records(3)
    assert (again.folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert again.manager.store.acquire_lease() == 2
    again.save(4)
    assert again.line == ["checkpoint_step_4", "checkpoint_step_3"]  # the limit counts what the mirror has


def test_a_step_is_sent_as_it_is_its_manifest_last_and_a_log_only_when_it_has_changed(
    node: Nodes, refusing: list[Refusing]
) -> None:
    one = node("disk", keep=None)
    one.begin()
    (one.folder / "metrics.jsonl").write_text("a line\n")
    one.save(1)
    [store] = refusing
    store.puts.clear()
    one.save(2)
    sent = [key.split("/", 2)[2] for key in store.puts if key.count("/") > 1]
    assert sent == [f"checkpoint_step_2/{name}" for name in (*records(2), "manifest.json")]
    newest = entry(one, "checkpoint_step_2")
    assert verify_folder(stored(one, newest.key("")).resolve()).step == 2, "a folder like any other"
    one.close()
    again = node("disk", keep=None)
    again.begin()
    (one.folder / "draft").write_text("a line\nmore\n")
    (one.folder / "draft").replace(one.folder / "metrics.jsonl")  # at once: what is sent is never half of it
    again.save(3)
    assert [key for key in refusing[1].puts if "step_2" in key] == []
    assert [key for key in refusing[1].puts if "metrics" in key] == [
        f"{again.head.files['metrics.jsonl'].place}/metrics.jsonl"
    ]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_file_that_is_larger_than_one_request_comes_back(
    kind: str, node: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PART_BYTES", 700)
    monkeypatch.setattr(writer, "PART_BYTES", 700)
    one = node("one", 1, url=f"{kind}://{tmp_path}/mirror")
    fresh = node("fresh", url=one.url)
    assert fresh.begin() == 1
    assert dict(fresh.manager.metadata(1).files) == records(1)


def test_a_pruned_step_takes_its_files_with_it_and_no_others(node: Nodes) -> None:
    one = node("disk")
    one.begin()
    (one.folder / "metrics.jsonl").write_text("a line\n")
    one.save(*range(1, 7))
    assert one.line == ["checkpoint_step_6", "checkpoint_step_5"]
    one.close()  # a step that the folder lost while it was sent leaves files, which the next writer removes
    again = node("disk")
    again.begin()
    assert again.mirror.flush(DEADLINE_S)
    head = again.head
    needed = {each.key(name) for each in head.line for name in (*records(each.step), "manifest.json")}
    needed |= {f"{file.place}/{name}" for name, file in head.files.items()}
    assert keys_of(again) == needed | {HEAD, f"{head.writer}/{HEAD}"}


def test_the_last_of_two_writers_to_claim_wins_and_steps_are_not_mixed(node: Nodes, said: list[str]) -> None:
    one = node("one", 1, 2)
    other = node("other")
    assert other.begin() == 2
    other.save(3)
    before = other.head
    one.save(3, flush=False)
    assert not one.mirror.flush(DEADLINE_S)
    assert "another writer has claimed this mirror" in str(one.mirror.state.error)
    assert any("another writer has claimed" in line for line in said)
    assert other.head == before
    other.save(4)
    assert other.line == ["checkpoint_step_4", "checkpoint_step_3"]
    assert not other.mirror.reader.damage(other.head)
    assert {each.place.partition("/")[0] for each in other.head.line} == {other.head.writer}


def test_a_claim_that_comes_late_puts_no_step_aside_that_it_has_not_seen(node: Nodes) -> None:
    node("one", 1)
    late, other = node("late"), node("other")
    late.fill()
    other.begin()
    other.save(2)
    with pytest.raises(WriterBusy, match="another attempt has claimed this mirror since this one read it"):
        late.claim()
    assert (other.line, other.head.aside) == (["checkpoint_step_2", "checkpoint_step_1"], ())
    other.close()
    assert late.begin() == 2, "called again it continues from there"


def test_a_start_while_the_store_is_away_claims_nothing_that_others_have_claimed_meanwhile(
    node: Nodes, refusing: list[Refusing], said: list[str]
) -> None:
    """The disk has a record of the last generation that it belonged to."""
    one = node("one", 1)
    one.close()
    other = node("other", 2)
    again = node("one")
    refusing[2].refuses = lambda verb, key: True
    assert again.begin() == 1
    refusing[2].refuses = lambda verb, key: False
    assert not again.mirror.flush(DEADLINE_S)
    assert any("another attempt has claimed this mirror since" in line for line in said), said
    assert (other.line, other.head.aside) == (["checkpoint_step_2", "checkpoint_step_1"], ())


def test_the_mirror_of_another_run_is_refused(node: Nodes) -> None:
    one = node("one", 1)
    stranger = node("stranger")
    stranger.manager.save(7, {"w": 1})
    stranger.manager.wait_until_finished()
    with pytest.raises(WriterBusy, match="another run"):
        stranger.begin()
    assert one.line == ["checkpoint_step_1"]


def test_a_damaged_newest_step_is_passed_over_set_aside_and_sent_again(node: Nodes) -> None:
    one = node("one", 1, 2)
    flip(stored(one, entry(one, "checkpoint_step_2").key("optimizer.safetensors")), bit=100)
    fresh = node("fresh")
    assert fresh.begin() == 1
    assert [each.name for each in fresh.head.aside] == ["checkpoint_step_2"]
    fresh.save(2)
    assert fresh.line == ["checkpoint_step_2", "checkpoint_step_1"]
    assert not fresh.mirror.reader.damage(fresh.head)


def test_a_mirror_that_is_half_there_is_healed_from_the_disk(node: Nodes) -> None:
    one = node("one")
    one.begin()
    (one.folder / "metrics.jsonl").write_text("a line\n")
    one.save(1, 2)
    one.close()
    for key in keys_of(one):
        if "optimizer" in key or "metrics" in key:
            stored(one, key).unlink()
    again = node("one")
    assert again.begin() == 2
    assert again.mirror.flush(DEADLINE_S), again.mirror.state
    assert again.line == ["checkpoint_step_2", "checkpoint_step_1"]
    assert not again.mirror.reader.damage(again.head)
    assert again.head.aside == (), "what was left of the steps is gone"
    assert again.mirror.reader.file("metrics.jsonl", again.head.files["metrics.jsonl"]) == b"a line\n"


def test_going_back_takes_newer_steps_out_of_the_line_and_keeps_them(node: Nodes) -> None:
    one = node("one", 1, 2, 3, keep=None)
    one.close()
    back = node("one", keep=None)
    back.manager.read(1)
    back.manager.store.supersede(1)
    back.mirror.begin(1, back.manager.store.acquire_lease(), Found())
    assert back.mirror.flush(DEADLINE_S), back.mirror.state
    assert back.line == ["checkpoint_step_1"]
    assert [each.name for each in back.head.aside] == ["checkpoint_step_3", "checkpoint_step_2"]
    assert all(back.mirror.reader.open(each) for each in back.head.aside)


@pytest.mark.parametrize("damage", ["flipped", "emptied"])
def test_the_copy_takes_the_place_of_a_damaged_head(node: Nodes, damage: str) -> None:
    one = node("one", 1, 2, 3)
    before, path = one.head, stored(one, HEAD)
    flip(path, bit=1000) if damage == "flipped" else path.write_bytes(b"")
    assert one.head == before
    fresh = node("fresh")
    assert fresh.begin() == 3
    fresh.save(4)
    assert fresh.line == ["checkpoint_step_4", "checkpoint_step_3"]
    assert Head.parse(path.read_bytes()).writer.startswith("000002-")


# The disk of the reader is safe


def test_no_name_of_a_mirror_leaves_its_folder(node: Nodes, tmp_path: Path) -> None:
    one = node("one")
    one.begin()
    (one.folder / "metrics.jsonl").write_text("a line\n")
    one.save(1)
    path = stored(one, HEAD)
    body = json.loads(path.read_text())
    log = body["files"]["metrics.jsonl"]
    for name in ("../escaped", "/tmp/escaped", "a/../../escaped"):
        with pytest.raises(ValueError, match="must not hold a file"):
            Head.parse(resealed({**body, "files": {name: log}}))
    with pytest.raises(ValueError, match="cannot be"):
        Head.parse(resealed({**body, "files": {"metrics.jsonl": {**log, "place": "../x"}}}))
    # A name that stays inside, but is of no file that follows a run, is not written.
    path.write_bytes(resealed({**body, "files": {"quarantine/metrics.jsonl": log}}))
    fresh = node("fresh")
    assert fresh.begin() == 1
    assert not (fresh.folder / "quarantine").exists()
    assert not (tmp_path / "escaped").exists()


# What is said, and when


def test_a_store_that_is_away_delays_and_loses_nothing(node: Nodes, refusing: list[Refusing], said: list[str]) -> None:
    states: list[MirrorState] = []
    refused, away = threading.Event(), threading.Event()

    def watch(state: MirrorState) -> None:
        states.append(state)
        if state.error:
            refused.set()
            if state.behind_s >= 60:
                away.set()

    one = node("one", on_change=watch)
    one.mirror.wake()
    assert one.mirror.flush(0), "without a claim there is nothing to wait for"
    assert one.mirror.metrics() == {}
    one.begin()
    one.save(1)
    refusing[0].refuses = lambda verb, key: True
    one.manager.save(2, {"w": 2})
    one.manager.wait_until_finished()
    one.mirror.wake()
    assert refused.wait(DEADLINE_S)
    assert one.mirror._behind_since is not None
    one.mirror._behind_since -= 61.0
    assert away.wait(DEADLINE_S), states[-1]
    assert any("behind (503 Service Unavailable): the newest step here is 2, there 1" in line for line in said), said
    refusing[0].refuses = lambda verb, key: False
    assert one.mirror.flush(DEADLINE_S)
    assert one.mirror.state.step == 2
    assert one.mirror.state.error is None
    assert one.mirror.metrics()["mirror/behind_s"] == 0


def test_a_disk_that_is_full_at_the_claim_delays_the_mirror_and_ends_no_run(
    node: Nodes, refusing: list[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def full_at_first(folder: Path, token: Token) -> None:
        for refusal in refusals:
            raise refusal
        write_token(folder, token)

    monkeypatch.setattr(sender, "write_token", full_at_first)
    one = node("one")
    assert one.begin() is None
    one.save(1)
    assert one.line == ["checkpoint_step_1"]
    token = read_token(one.folder)
    assert token == Token(one.head.run, one.head.writer)


def test_before_the_end_the_newest_step_goes_first(node: Nodes, refusing: list[Refusing]) -> None:
    """An older step is still being sent when the grace begins; the newest one is committed first."""
    committed: list[int | None] = []
    one = node("one", keep=None, on_change=lambda state: committed.append(state.step))
    one.begin()
    one.save(1)
    entered, released = threading.Event(), threading.Event()

    def hold(verb: str, key: str) -> bool:
        if verb == "put" and not released.is_set():
            entered.set()
            released.wait(DEADLINE_S)
        return False

    refusing[0].refuses = hold
    one.save(2, flush=False)
    assert entered.wait(DEADLINE_S)
    assert one.mirror.sending == {2}, "the folder must not prune it meanwhile"
    one.save(3, flush=False)
    one.mirror._limiter.hurry.set()
    released.set()
    assert one.mirror.flush(DEADLINE_S)
    assert 2 not in committed
    assert one.mirror.sending == frozenset()
    assert one.line == ["checkpoint_step_3", "checkpoint_step_2", "checkpoint_step_1"]


def test_an_empty_disk_does_not_start_from_scratch_while_the_mirror_cannot_be_read(
    node: Nodes, refusing: list[Refusing], said: list[str]
) -> None:
    one = node("one")
    refusing[0].refuses = lambda verb, key: True
    with pytest.raises(MirrorUnreachable) as refused:
        one.begin()
    assert "nobody knows from which step this run resumes" in str(refused.value)
    one.manager.save(1, {"w": 1})
    one.manager.wait_until_finished()
    assert one.begin() == 1  # a disk with checkpoints does not wait for its mirror
    assert any("resumes from what this disk holds" in line for line in said)
    refusing[0].refuses = lambda verb, key: False
    assert one.mirror.flush(DEADLINE_S)


@pytest.mark.parametrize("refused", ["count_on_from", "_download_files", "write_token"])
def test_a_disk_that_takes_nothing_of_the_mirror_is_one_error(
    refused: str, node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node("one", 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    other = node("other")
    with monkeypatch.context() as full:
        full.setattr(filling, refused, refuse)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as told:
            other.fill()
    assert told.value.where == str(other.folder)
    assert other.begin() == 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("is_empty", [True, False], ids=["an empty disk", "a disk with an older step"])
def test_a_disk_that_was_filled_in_part_is_filled_by_the_next_start(
    is_empty: bool, node: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filling is interrupted at each of its reads from the mirror and at each of its commits on the disk."""
    old = node("old", 1, keep=None)
    old.close()
    one = node("one", 2, 3, keep=None)
    one.manager.saver.make_final({"README.md": b"a card"})
    assert one.mirror.flush(DEADLINE_S)
    monkeypatch.setattr(filling, "pinned_steps", lambda folder: frozenset({2}))  # the best one by validation
    for moment in range(6):
        if not is_empty:
            shutil.copytree(old.folder, tmp_path / f"disk{moment}")
        other = node(f"disk{moment}", keep=None)
        moments = iter(range(7))

        def ends(act: Callable[[Any], Any], moment: int = moment, moments: Iterator[int] = moments) -> Any:
            def unless_over(subject: Any) -> Any:
                if next(moments) == moment:
                    raise MirrorUnreachable("503 Service Unavailable")
                return act(subject)

            return unless_over

        with monkeypatch.context() as over:
            over.setattr(other.mirror.reader, "open", ends(other.mirror.reader.open))
            over.setattr(other.manager.store, "adopt", ends(other.manager.store.adopt))
            with pytest.raises(MirrorUnreachable):
                other.fill()
        other.close()
        again = node(f"disk{moment}", keep=None)
        again.fill()
        assert {2, 3} <= {*again.manager.all_steps()}, f"moment {moment}"
        assert verify_folder(again.folder / "final_checkpoint").step == 3


@pytest.mark.parametrize(("text", "steps"), [(None, [3]), ("{", [1, 2, 3])])
def test_all_steps_are_pulled_where_the_best_one_is_unknown(text: str | None, steps: list[int], node: Nodes) -> None:
    node("one", 1, 2, 3, keep=None)
    fresh = node("fresh", keep=None)
    if text is not None:
        fresh.folder.mkdir()
        (fresh.folder / "status.json").write_text(text)
    fresh.fill()
    assert fresh.manager.all_steps() == steps


def test_a_disk_that_lost_a_step_keeps_what_it_has_decided_since(node: Nodes) -> None:
    one = node("one")
    one.begin()
    (one.folder / "metrics.jsonl").write_text("sent\n")
    one.save(1, 2)
    (one.folder / "metrics.jsonl").write_text("sent\nand decided since\n")
    one.close()
    shutil.rmtree(one.folder / "checkpoint_step_2")
    again = node("one")
    assert again.begin() == 2
    assert (again.folder / "metrics.jsonl").read_text() == "sent\nand decided since\n"


def test_a_disk_gets_what_another_one_has_written_since(node: Nodes) -> None:
    one = node("one", 1)
    one.close()
    other = node("other")
    other.begin()
    (one.folder / "metrics.jsonl").write_text("of the older attempt\n")
    (other.folder / "metrics.jsonl").write_text("of the newer attempt\n")
    other.save(2)
    other.close()
    again = node("one")
    assert again.begin() == 2
    assert (again.folder / "metrics.jsonl").read_text() == "of the newer attempt\n"


def test_a_disk_that_was_filled_in_part_does_not_resume_without_the_mirror(
    node: Nodes, refusing: list[Refusing], monkeypatch: pytest.MonkeyPatch
) -> None:
    node("one", 1, 2, keep=None)
    monkeypatch.setattr(filling, "pinned_steps", lambda folder: frozenset({1}))
    other = node("other", keep=None)
    adopt = other.manager.store.adopt

    def best_alone(opened: Opened) -> None:
        if opened.manifest.step == 2:
            raise MirrorUnreachable("503 Service Unavailable")
        adopt(opened)

    monkeypatch.setattr(other.manager.store, "adopt", best_alone)
    with pytest.raises(MirrorUnreachable):
        other.fill()
    refusing[1].refuses = lambda verb, key: True
    with pytest.raises(MirrorUnreachable, match="nobody knows from which step this run resumes"):
        other.fill()


def test_an_error_of_this_machine_is_tried_again_and_damage_is_not(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(sender, "backoff_s", lambda failures, hurry: 0.0)
    one = node("one", 1)
    send, refusals = one.mirror._writer.send_step, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def refuse(folder: Path) -> Any:
        for cause in [refusals.pop() for _ in refusals[:1]]:
            raise CheckpointError("the manifest cannot be read") from cause
        return send(folder)

    monkeypatch.setattr(one.mirror._writer, "send_step", refuse)
    one.save(2)
    assert one.line[0] == "checkpoint_step_2"
    assert any("the manifest cannot be read; it is tried again" in line for line in said), said
    refusals.append(ValueError("of no file"))
    one.save(3, flush=False)
    assert not one.mirror.flush(DEADLINE_S)
    assert one.line[0] == "checkpoint_step_2"


def test_a_disk_that_fails_while_the_mirror_is_behind_does_not_end_its_thread(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(sender, "backoff_s", lambda failures, hurry: 0.0)
    one = node("one", 1)
    failed = threading.Event()

    def refuse(folder: Path) -> Any:
        failed.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as failing:
        failing.setattr(sender, "committed", refuse)
        one.mirror._warn_at_s = 0.0
        one.save(2, flush=False)
        assert failed.wait(DEADLINE_S)
        assert one.mirror._thread is not None
        one.mirror._thread.join(0.2)
        assert one.mirror._thread.is_alive()
    assert one.mirror.flush(DEADLINE_S)
    assert one.line[0] == "checkpoint_step_2"
    assert any("behind" in line and "the newest step here is 1" in line for line in said), said


def test_a_step_that_is_damaged_here_is_named_and_not_sent(node: Nodes, said: list[str]) -> None:
    one = node("one", 1)
    one.manager.save(2, {"w": 2})
    one.manager.wait_until_finished()
    assert one.mirror.flush(DEADLINE_S)
    hurt = one.folder / "checkpoint_step_3"
    shutil.copytree(one.folder / "checkpoint_step_2", hurt)
    (hurt / "w.json").write_text("3\n")
    assert one.mirror.flush(DEADLINE_S), "the mirror has all that can be sent"
    assert one.line == ["checkpoint_step_2", "checkpoint_step_1"]
    assert [line for line in said if "checkpoint_step_3 is not sent" in line] != []


def test_a_bug_of_the_mirror_is_reported_and_does_not_end_the_run(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    one = node("one", 1)
    monkeypatch.setattr(one.mirror._writer, "send_step", lambda folder: 1 / 0)
    one.save(2, flush=False)
    assert not one.mirror.flush(DEADLINE_S)
    assert any("the mirror has failed: ZeroDivisionError" in line for line in said)
    one.save(3, flush=False)
    assert one.manager.all_steps() == [2, 3]


# A copy for readers


def test_a_local_copy_is_verified_and_written_again_where_it_is_damaged(
    node: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    one = node("one", 1, 2)
    copy = local_copy(one.url, "RUN")
    assert copy.name == "checkpoint_step_2"
    assert dict(verify_folder(copy).files) == records(2)
    flip(copy / "optimizer.safetensors", bit=100)
    assert local_copy(f"{one.url}/checkpoint_step_2", "RUN") == copy
    verify_folder(copy)
    with pytest.raises(CheckpointError, match="there is no checkpoint_step_9 in this mirror"):
        local_copy(f"{one.url}/checkpoint_step_9", "RUN")
    with pytest.raises(CheckpointError, match="no mirror of a run"):
        local_copy(f"{one.url}2", "RUN")
