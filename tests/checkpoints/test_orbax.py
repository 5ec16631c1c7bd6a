"""The manager takes Orbax's calls: options, arguments, items, the best steps; others are refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.checkpoints import orbax as ocp
from ci_llm.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint


def saved(manager: ocp.CheckpointManager, steps: range, **how: Any) -> list[int]:
    return [step for step in steps if manager.save(step, {"step": step}, **how)]


@dataclasses.dataclass
class Options:
    """As Orbax's own are made: a dataclass, some of whose fields differ from their default."""

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    save_on_steps: Any = None
    step_prefix: str | None = None
    create: bool = True
    read_only: bool = False
    file_options: Any = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize("options", [ocp.CheckpointManagerOptions(save_interval_steps=4), Options(4)])
def test_the_options_of_orbax_decide_as_orbax_does(options: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "a", options=options) as manager:
        assert saved(manager, range(3, 9)) == [3, 4, 8], "the first save of an empty folder is due at any step"
    with ocp.CheckpointManager(tmp_path / "b", save_interval_steps=4) as manager:
        assert saved(manager, range(3, 9)) == [4, 8]


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True)),
        lambda folder: ocp.CheckpointManager(folder, None, Options(max_to_keep=2)),
        lambda folder: ocp.CheckpointManager(folder, Options(max_to_keep=2)),
        lambda folder: ocp.CheckpointManager(folder, ocp.PyTreeCheckpointer(), Options(max_to_keep=2)),
        lambda folder: ocp.CheckpointManager(
            folder, {"step": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())}, Options(max_to_keep=2)
        ),
    ],
)
def test_every_call_of_orbax_is_understood(call: Callable[[Path], ocp.CheckpointManager], tmp_path: Path) -> None:
    with call(tmp_path) as manager:
        saved(manager, range(4))
        assert manager.all_steps() == [2, 3]
        assert manager.directory == tmp_path


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ocp.CheckpointManagerOptions(step_prefix="ck"), "step_prefix of Orbax's options has no counterpart"),
        (lambda: ocp.CheckpointManagerOptions(todelete_subdir="x", max_to_keep=1), "todelete_subdir"),
        (lambda: ocp.CheckpointManager("run", options=Options(step_prefix="ck")), "step_prefix"),
        (lambda: ocp.CheckpointManager("run", 100), "a int is neither a checkpointer nor options"),
        (lambda: ocp.CheckpointManager("run", options=7), "a int holds no options"),
        (lambda: ocp.CheckpointManager("run", keep_period=0), "keep multiples of 1"),
        (lambda: ocp.CheckpointManager("run", best_mode="best"), "neither max nor min"),  # type: ignore[arg-type]
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        call()


def test_a_name_of_orbax_that_is_not_here_says_where_to_look() -> None:
    with pytest.raises(AttributeError, match=r"SingleReplicaArrayHandler .* docs/coming_from.md"):
        _ = ocp.SingleReplicaArrayHandler


def test_steps_that_are_named_are_saved_and_periods_are_kept(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "a", save_interval_steps=100, save_on_steps=[3, 5]) as manager:
        assert saved(manager, range(8)) == [0, 3, 5]
    with ocp.CheckpointManager(tmp_path / "b", max_to_keep=2, keep_period=3) as manager:
        saved(manager, range(8))
        assert manager.all_steps() == [0, 3, 6, 7]


@pytest.mark.parametrize("behind", [False, True])
def test_the_best_are_kept_and_the_newest(behind: bool, tmp_path: Path) -> None:
    losses = {0: 1.0, 1: 3.0, 2: 2.0, 3: 9.0, 4: math.nan}

    def open_manager() -> ocp.CheckpointManager:
        how: dict[str, Any] = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "async_save": behind}
        return ocp.CheckpointManager(tmp_path, max_to_keep=2, **how)

    with open_manager() as manager:
        for step, loss in losses.items():
            assert manager.save(step, {"step": step}, metrics={"loss": loss})
        assert manager.all_steps() == [0, 2, 4]
        assert (manager.best_step(), manager.latest_step()) == (0, 4)
        assert manager.metrics(2) == {"loss": 2.0}
    with open_manager() as manager:  # which has to read what the one before has written
        manager.save(5, {"step": 5}, metrics={"loss": 0.5}, info={"epoch": 1})
        assert manager.all_steps() == [0, 5]
        assert manager.best_step() == 5
        assert manager.metadata(5).info == {"epoch": 1, "metrics": {"loss": 0.5}}
        manager.save(6, {"step": 6})
        manager.save(7, {"step": 7}, metrics={"loss": 0.7})
        assert manager.all_steps() == [5, 6, 7], "one without metrics is not judged"
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.best_step() == 7, "the newest, without a measure"
        assert manager.metrics(6) is None
    assert ocp.CheckpointManager(tmp_path / "empty").best_step() is None


@pytest.mark.parametrize("said", [{"read_only": True}, {"options": Options(0, read_only=True, create=False)}])
def test_a_reader_changes_nothing(said: dict[str, Any], tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        saved(manager, range(2))
    (tmp_path / "checkpoint_step_1" / "step.json").write_text("7")
    before = sorted(tmp_path.rglob("*"))
    reader = ocp.CheckpointManager(tmp_path, **said)
    assert not reader.save(5, {"step": 5}, force=True)
    assert not reader.should_save(5)
    assert not reader.reached_preemption(5)
    assert (reader.latest_step(), reader.all_steps()) == (0, [0, 1])
    for change in (lambda: reader.delete(0), lambda: reader.supersede(0), lambda: reader.finish()):
        with pytest.raises(CheckpointError, match="read_only"):
            change()
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_state_may_be_given_as_an_argument_and_filled_in_place(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "step": 3}
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(3, args=ocp.args.StandardSave(state))
        target = {"w": torch.zeros(2), "step": 0}
        assert manager.restore(3, args=ocp.args.StandardRestore(target)) is target
        assert target == {"w": target["w"], "step": 3}
        assert target["w"].tolist() == [1, 1]
        assert manager.restore(None)["step"] == manager.restore()["step"] == 3
        assert manager.restore(3, args=ocp.args.StandardRestore())["w"].tolist() == [1, 1]
        with pytest.raises(CheckpointError, match="a state or args="):
            manager.save(4, state, args=ocp.args.StandardSave(state))
        with pytest.raises(CheckpointError, match="a state or args="):
            manager.save(4)
        with pytest.raises(CheckpointError, match="into= or args="):
            manager.restore(3, target, args=ocp.args.StandardRestore(target))
        with pytest.raises(CheckpointError, match="a int holds no item"):
            manager.save(4, args=7)


def test_items_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        state = {"w": torch.ones(2)}
        both = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave({"epoch": 1}))
        assert manager.save(0, args=both)
        assert sorted(manager.restore(0)) == ["notes", "state"]
        only = manager.restore(0, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))
        assert only == {"notes": {"epoch": 1}}
        assert only.notes == {"epoch": 1}  # type: ignore[attr-defined]
        target = {"w": torch.zeros(2)}
        found: Any = manager.restore(0, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        assert found.state is target
        assert target["w"].tolist() == [1, 1]
        with pytest.raises(AttributeError, match="no item 'nope'; items: state"):
            _ = found.nope
        with pytest.raises(ForeignCheckpoint, match=r"does not hold \['nope'\]"):
            manager.restore(0, args=ocp.args.Composite(nope=ocp.args.JsonRestore()))


def test_an_empty_folder_says_that_there_is_nothing_to_restore(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to restore"):
        ocp.CheckpointManager(tmp_path).restore(None)


def test_changes_by_other_processes_are_seen_after_reload(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        saved(manager, range(3))
        assert not manager.is_saving_in_progress() or manager.check_for_errors() is None
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()
        (tmp_path / "checkpoint_step_2" / "manifest.json").write_text("{}")
        assert not manager.save(2, {"step": 2})
        manager.reload()
        assert manager.save(2, {"step": 2})


def test_one_checkpoint_at_a_path(tmp_path: Path) -> None:
    state, path = {"w": torch.ones(2)}, tmp_path / "mine"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        with pytest.raises(CheckpointError, match="something is there already"):
            checkpointer.save(path, state)
        checkpointer.save(path, args=ocp.args.PyTreeSave({"w": torch.zeros(2)}), force=True)
        assert checkpointer.restore(path)["w"].tolist() == [0, 0]
        assert checkpointer.restore(path, state) is state
        assert state["w"].tolist() == [0, 0]
        with pytest.raises(DamagedCheckpoint):
            checkpointer.restore(tmp_path / "nothing")
