"""The manager: when it saves, what comes back, who stops when, and that nothing in it can be executed."""

from __future__ import annotations

import errno
import inspect
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor

from ci_llm.checkpoints.async_saver import Arena, Copy
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.layout import numbered_steps, open_step
from ci_llm.checkpoints.lease import HEARTBEATS_PER_TIMEOUT, Owner
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.restoring import load_into
from ci_llm.checkpoints.state_files import DTYPES, entries_of, files_of, read_state, write_safetensors
from ci_llm.checkpoints.store import SURVIVOR_TIMEOUT_S, WRITER_TIMEOUT_S
from ci_llm.core.typed_json import load_json
from ci_llm.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint, WriterBusy
from tests.support import campaign, loops
from tools.testbed.disks import CachedDisk, FailingDisk
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[Any]:
    """Makes managers on one folder and closes them; they save at once unless told otherwise."""
    made: list[CheckpointManager] = []

    def make(disk: Any = None, **options: Any) -> CheckpointManager:
        options.setdefault("async_save", False)
        manager = CheckpointManager(tmp_path / "run", **options)
        manager.store._disk = disk or CachedDisk()
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


Together: TypeAlias = Callable[..., Path]


@pytest.fixture
def together(server: ForkServer, tmp_path: Path) -> Together:
    """Runs a loop of `loops` in two processes, which must end well; returns their folder."""

    def run(loop: Callable[..., int], *, ranks: int = 2, **arguments: Any) -> Path:
        log, directory = tmp_path / "log", tmp_path / "run"
        codes = server.run(loop, log, ranks=ranks, directory=directory, **arguments)
        assert codes == [0] * ranks, log.read_text()
        return directory

    return run


# When


def test_saves_are_due_by_steps_by_time_and_on_request(managers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(CheckpointManager, "clock", lambda _: now[0])
    manager = managers(save_interval_steps=4, save_interval_seconds=60.0)
    saved = []
    for step in range(12):
        now[0] += 20.0  # the clock asks for one after each third step
        if manager.save(step, {"step": step}, force=step == 10):
            saved.append(step)
    assert saved == [0, 3, 4, 7, 8, 10]
    assert manager.all_steps() == saved
    assert not manager.should_save(10)
    assert manager.should_save(12)


def test_training_continues_after_a_failed_save_which_is_tried_again_when_next_due(
    managers: Any, said: list[str]
) -> None:
    disk = FailingDisk(10**9, 28)
    manager = managers(disk=disk, save_interval_steps=2)
    assert manager.save(0, {"step": 0})
    disk.lives = disk.changes + 3
    assert [manager.save(step, {"step": step}) for step in range(1, 6)] == [False, False, False, True, False]
    assert said == ["checkpoint_step_2 is dropped: [Errno 28] No space left on device"]
    assert manager.latest_step() == 4


def test_a_step_that_is_not_newer_is_not_saved(managers: Any, said: list[str]) -> None:
    manager = managers()
    assert manager.save(5, {"step": 5})
    assert not manager.save(5, {"step": 5})
    assert said == ["step 5 is saved already"]
    assert not manager.save(4, {"step": 4}, force=True)
    assert manager.all_steps() == [5]


# What


def nested(draw: torch.Generator) -> dict[str, Any]:
    return {
        "agent0/adapter_model": {"layer.lora_A.weight": torch.rand(3, 4, generator=draw)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.rand(3, 4, generator=draw)}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "progress": {"step": 7, "skipped": (0, 1), "best": float("inf"), "names": {1: "one"}},
        "one": torch.rand(2, generator=draw),
        "numbers": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "config.yaml": b"seed: 42\n",
        "tokenizer/tokenizer.json": b'{"not": "ours"}',
    }


def test_a_checkpoint_is_plain_json_and_safetensors(managers: Any, tmp_path: Path) -> None:
    state = nested(torch.Generator().manual_seed(0))
    managers().save(1, state, info={"epoch": 0.5})
    folder = tmp_path / "run" / "checkpoint_step_1"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "agent0/adapter_model.safetensors",
        "config.yaml",
        "manifest.json",
        "numbers.json",
        "numbers.safetensors",
        "one.json",
        "one.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "progress.json",
        "tokenizer/tokenizer.json",
    ]
    adapter = safetensors.torch.load_file(folder / "agent0" / "adapter_model.safetensors")
    assert list(adapter) == ["layer.lora_A.weight"]
    with safetensors.safe_open(folder / "agent0" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (folder / "config.yaml").read_bytes() == state["config.yaml"]
    assert load_json((folder / "progress.json").read_bytes()) == state["progress"]


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_saved_values_are_restored_unchanged(managers: Any) -> None:
    state = nested(torch.Generator().manual_seed(1))
    manager = managers()
    manager.save(1, state)
    assert same(manager.restore(1), state)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_keeps_its_shape(managers: Any, shape: tuple[int, ...], async_save: bool) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape, order="F")
    manager = managers(async_save=async_save)
    manager.save(1, {"array": array, "list": [array]})
    assert same(manager.restore(1), {"array": array, "list": [array]})


shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda dtype, shape, seed, flip: random_tensor(dtype, shape, seed, flip),
    st.sampled_from(list(DTYPES)),
    shapes,
    st.integers(0, 2**31),
    st.booleans(),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["$tensor", "__metadata__", "a.b", "0"])
trees = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int, flip: bool) -> Tensor:
    """Any bits that the type allows, perhaps not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    return tensor.t() if flip and len(shape) == 2 else tensor


@pytest.mark.slow
@settings(max_examples=campaign.size(50, 500))
@given(st.dictionaries(st.sampled_from(["a", "b/c", "rng"]), trees, max_size=3))
def test_any_nested_state_comes_back_bit_for_bit(state: dict[str, Any]) -> None:
    entries = entries_of(state)
    forms = {entry.key: entry.form for entry in entries}
    for images in (files_of(entries), Copy(Arena(), entries_of(state)).finish()):
        files = {name: b"".join(image.parts) for name, image in images.items()}
        assert same(read_state(forms, files), state)


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1, max_size=4), tensors, min_size=1, max_size=5))
def test_the_library_reads_what_our_writer_writes(state: dict[str, Tensor]) -> None:
    state = {name: tensor for name, tensor in state.items() if name != "__metadata__"}
    image = write_safetensors(state)
    data = b"".join(image.parts)
    back = safetensors.torch.load(data)
    assert back.keys() == state.keys()
    assert all(same(back[name], state[name].contiguous()) for name in state)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": {"b": [1, {2}]}}, r"b\[1\]: a set has no plain form"),
        ({"a": torch.zeros(2).to_sparse()}, "no plain bytes"),
        ({"a": {"x": torch.zeros(2, device="meta")}}, "no plain bytes"),
        ({"model.pkl": b"x"}, "holds no pickle"),
        ({"../up": 1}, "must not hold a file named"),
        ({"a": 1, "a.json": b"{}"}, "both written as a.json"),
        ({"manifest": {"a": 1}}, "must not hold a file named"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_address(
    managers: Any, state: dict[str, Any], told: str
) -> None:
    manager = managers()
    with pytest.raises(CheckpointError, match=told) as refusal:
        manager.save(1, state)
    assert "key" in str(refusal.value)
    assert manager.all_steps() == []
    with pytest.raises(CheckpointError, match=r"info cannot be saved: .*a set"):
        manager.save(1, {"fine": True}, info={"rows": {1}})
    assert manager.save(1, {"fine": True})


@pytest.mark.parametrize("state", [{0: torch.ones(1)}, [torch.ones(1)], torch.ones(1)])
def test_a_state_is_a_dict_whose_keys_name_files(managers: Any, state: Any) -> None:
    with pytest.raises(CheckpointError, match="a state is a dict"):
        managers().save(1, state)


def test_info_is_in_the_manifest_and_may_not_use_its_keys(managers: Any) -> None:
    manager = managers()
    manager.save(1, {"a": 1}, info={"epoch": 0.5, "fingerprints": {"data": "abc", 3: (4, 5)}})
    assert manager.verify(1).info == {"epoch": 0.5, "fingerprints": {"data": "abc", 3: (4, 5)}}
    with pytest.raises(ValueError, match="own keys"):
        manager.save(2, {"a": 1}, info={"step": 3})


# Coming back


def training() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "history": []}


def advance(objects: dict[str, Any]) -> float:
    loss = objects["model"](torch.ones(4, 3)).square().sum()
    objects["optimizer"].zero_grad()
    loss.backward()
    objects["optimizer"].step()
    objects["scheduler"].step()
    objects["step"] += 1
    objects["history"].append(loss.item())
    return loss.item()


def test_a_plain_loop_resumes_bit_for_bit(managers: Any) -> None:
    torch.manual_seed(0)
    objects = training()
    manager = managers()
    for _ in range(3):
        advance(objects)
    manager.save(2, objects)
    expected = [advance(objects) for _ in range(3)]
    torch.manual_seed(1)
    fresh = training()
    assert manager.restore(2, into=fresh) is fresh
    assert fresh["step"] == 3
    assert [advance(fresh) for _ in range(3)] == expected
    assert bits(fresh["model"].weight.detach()) == bits(objects["model"].weight.detach())


@pytest.mark.parametrize(
    ("target", "saved", "told"),
    [
        ({"w": torch.zeros(3)}, {"w": torch.ones(4)}, r"here is a tensor \(3,\)"),
        ({"w": torch.zeros(3)}, {"w": torch.ones(3, dtype=torch.float64)}, "torch.float64"),
        ({"w": torch.zeros(3)}, {"w": 1}, "holds a int"),
        ({"w": torch.zeros(3)}, {"w": torch.ones(3), "more": 1}, r"\['more'\], which nothing here takes"),
        ({"w": torch.zeros(3), "more": 1}, {"w": torch.ones(3)}, r"does not hold \['more'\]"),
        ({"w": torch.zeros(3), "p": {"a": 1}}, {"w": torch.ones(3), "p": [1]}, "a list of 1"),
        ({"w": torch.zeros(3), "d": {"a": torch.ones(1)}}, {"w": torch.ones(3), "d": {"b": 1}}, r"keys \['b'\]"),
        ({"w": torch.zeros(3), "l": [torch.ones(1)]}, {"w": torch.ones(3), "l": [1, 2]}, "a list of 2"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(target: dict[str, Any], saved: dict[str, Any], told: str) -> None:
    with pytest.raises(ForeignCheckpoint, match=told):
        load_into(target, saved)
    assert bool((target["w"] == 0).all())


@pytest.mark.parametrize(
    ("key", "here", "told"),
    [
        ("models", [torch.nn.Linear(4, 2)], r"a Linear does not take its state: (?s:.*)size mismatch for weight"),
        ("optimizer", torch.optim.SGD([{"params": []}, {"params": []}]), "a SGD does not .* parameter groups"),
    ],
)
def test_an_object_that_refuses_its_state_is_a_foreign_checkpoint(
    managers: Any, key: str, here: Any, told: str
) -> None:
    manager = managers()
    manager.save(1, {"models": [torch.nn.Linear(3, 2)], "optimizer": torch.optim.SGD([torch.ones(1)])})
    into = {"models": [torch.nn.Linear(3, 2)], "optimizer": torch.optim.SGD([torch.ones(1)])} | {key: here}
    with pytest.raises(ForeignCheckpoint, match=told) as refused:
        manager.restore(1, into=into)
    assert refused.value.where in ("models[0]", "optimizer")


def test_lists_tuples_and_tensors_are_filled_in_place(managers: Any) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    weight = torch.ones(3, requires_grad=True)
    manager = managers()
    manager.save(1, {"models": [first, second], "pair": (weight, 4), "config.yaml": b"x"})
    others = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    mine = torch.zeros(3, requires_grad=True)
    into: dict[str, Any] = {"models": list(others), "pair": (mine, 0)}
    manager.restore(1, into=into)
    assert into["models"][1] is others[1]
    assert bits(others[1].weight.detach()) == bits(second.weight.detach())
    assert into["pair"][0] is mine
    assert into["pair"][1] == 4
    assert mine.tolist() == [1, 1, 1]


def test_a_path_that_is_missing_or_damaged_is_an_error(managers: Any, tmp_path: Path) -> None:
    managers().save(1, {"a": 1})
    assert load_checkpoint(tmp_path / "run" / "checkpoint_step_1").state == {"a": 1}
    with pytest.raises(DamagedCheckpoint, match="no such folder"):
        load_checkpoint(tmp_path / "run" / "checkpoint_step_2")
    with pytest.raises(CheckpointError, match="there is no step 2; committed: 1"):
        managers().restore(2)


def test_going_back_deleting_and_finishing(managers: Any) -> None:
    with managers(max_to_keep=3) as manager:
        for step in range(5):
            manager.save(step, {"step": step})
        assert manager.all_steps() == [2, 3, 4]
        assert manager.saver.make_final({"README.md": b"hello"})
        assert len(manager.store.supersede(3)) == 2
        assert manager.latest_step() == 3
        assert manager.save(4, {"step": 40})
        manager.delete(2)
        assert manager.all_steps() == [3, 4]
        assert manager.restore(4) == {"step": 40}


def test_no_pickle_is_read_or_written(managers: Any) -> None:
    manager, heard = managers(), []
    watching = [True]
    sys.addaudithook(lambda event, args: heard.append(event) if watching and event.startswith("pickle") else None)
    manager.save(1, training())
    manager.restore(1, into=training())
    watching.clear()
    assert heard == []


# AsyncSaver


def test_an_error_of_an_asynchronous_save_is_raised_at_the_next_call(managers: Any, tmp_path: Path) -> None:
    manager = managers(async_save=True, save_interval_steps=10)
    manager.save(0, {"a": 1})
    manager.wait_until_finished()
    (tmp_path / "run" / ".attempt-1").rename(tmp_path / "run" / ".attempt-9")
    assert manager.save(10, {"a": 2})
    manager.saver.behind._job.exception(60)
    with pytest.raises(WriterBusy, match="taken over"):
        manager.save(11, {"a": 3})


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_step_dropped_by_an_asynchronous_save_is_reported_and_may_be_saved_again(
    managers: Any, code: int, said: list[str]
) -> None:
    disk = FailingDisk(10**9, code)
    manager = managers(disk=disk, async_save=True)
    manager.store.acquire_lease()
    disk.lives = disk.changes + 2
    assert manager.save(1, {"a": 1})
    manager.wait_until_finished()
    assert said == [f"checkpoint_step_1 is dropped: [Errno {code}] {os.strerror(code)}"]
    assert manager.last_result is not None
    assert not manager.last_result.saved
    assert manager.save(1, {"a": 1}, force=True)
    assert manager.latest_step() == 1


def test_a_step_that_was_set_aside_may_be_saved_again(managers: Any, tmp_path: Path) -> None:
    manager = managers()
    manager.save(1, {"a": 1})
    assert manager.save(2, {"a": 2})
    (tmp_path / "run" / "checkpoint_step_2" / "a.json").write_text("{}")
    assert manager.latest_step() == 1
    assert manager.should_save(2)
    assert manager.save(2, {"a": 3})
    assert manager.restore() == {"a": 3}
    assert manager.save(2, {"a": 4}) is False


def test_a_process_that_lost_its_peer_takes_over_and_commits_its_last_step(managers: Any) -> None:
    """The dead writer has missed one heartbeat, which is too early for an attempt that lost no peer."""
    dead, survivor = managers(async_save=True), managers(async_save=True)
    for manager, number in ((dead, 1), (survivor, 2)):
        manager.store._owner = Owner(f"node{number}", 4711)
    dead.save(1, {"a": 1})
    dead.wait_until_finished()
    [work] = manager.directory.glob(".attempt-1/*/")
    os.utime(work, (time.time() - SURVIVOR_TIMEOUT_S - 1,) * 2)
    with pytest.raises(WriterBusy):
        survivor.store.acquire_lease()
    assert survivor.saver.save_last(2, {"a": 2}, info={"epoch": 0.5})
    assert survivor.all_steps() == [1, 2]
    assert survivor.verify(2).info["epoch"] == 0.5
    assert not dead.store.holds_lease()
    assert WRITER_TIMEOUT_S / HEARTBEATS_PER_TIMEOUT < SURVIVOR_TIMEOUT_S


def test_a_checkpoint_from_elsewhere_that_the_disk_refuses_is_an_error(managers: Any, tmp_path: Path) -> None:
    there = managers()
    there.save(1, {"a": 1})
    disk = FailingDisk(10**9, errno.ENOSPC)
    with CheckpointManager(tmp_path / "here") as manager:
        manager.store._disk = disk
        manager.store.acquire_lease()
        disk.lives = disk.changes + 3
        with pytest.raises(CheckpointError, match=r"checkpoint_step_1 is dropped: .*No space left"):
            manager.store.adopt(open_step(there.directory, 1))
        assert manager.all_steps() == []
        manager.store.adopt(open_step(there.directory, 1))
        assert manager.all_steps() == [1]


def test_a_closed_manager_reads_and_says_why_it_does_not_write(managers: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = managers(async_save=True)
    manager.save(1, {"a": 1})
    manager.close()
    for write in (
        lambda: manager.save(2, {"a": 2}),
        lambda: manager.saver.save_last(2, {"a": 2}, info={}),
        lambda: manager.delete(1),
        manager.saver.make_final,
    ):
        with pytest.raises(CheckpointError, match="this manager is closed"):
            write()
    assert not manager.reached_preemption(2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert manager.restore(manager.latest_step()) == {"a": 1}
    manager.close()


# Stopping


def test_save_and_reached_preemption_see_a_signal_at_the_same_step(managers: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = managers(save_interval_steps=100)
    stopped = []
    for step in range(10):
        saved = manager.save(step, {"step": step})
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # too late for this step's save: the next one acts
        if manager.reached_preemption(step):
            stopped.append((step, saved))
            break
    assert stopped == [(6, True)]
    assert manager.latest_step() == 6
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_two_processes_stop_at_the_same_step(together: Together, signalled: int) -> None:
    directory = together(loops.preempted_together, signalled=signalled)
    restored = load_checkpoint(directory / "checkpoint_step_7").state
    assert restored["weight"].tolist() == [7.0, 7.0]
    assert restored["rank"] == 0


def test_each_process_restores_its_own_state_and_saves_it_again(together: Together) -> None:
    directory = together(loops.restoring_their_own)
    own = load_checkpoint(directory / "checkpoint_step_1").state["own"]
    assert {name: part["draws"].tolist() for name, part in own.items()} == {"process0": [10, 10], "process1": [11, 11]}
    alone = CheckpointManager(directory)
    weight = torch.zeros(2)
    with pytest.raises(ForeignCheckpoint, match="and the checkpoint holds what 2 had"):
        alone.restore(1, into={"weight": weight, "own": CheckpointManager.EachProcess(None)})
    assert weight.tolist() == [0, 0], "nothing was touched"
    assert alone.restore(1)["own"].keys() == own.keys()


@pytest.mark.parametrize("hopeless", ["state", "info"])
def test_an_error_of_process_0_is_an_error_of_all(together: Together, hopeless: str) -> None:
    directory = together(loops.failing_together, hopeless=hopeless)
    assert CheckpointManager(directory).all_steps() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_every_process_can_wait_for_the_save_of_process_0(together: Together, full: bool) -> None:
    together(loops.waiting_together, full=full)


def test_a_checkpoint_that_only_some_processes_have_is_refused_on_all(together: Together) -> None:
    assert numbered_steps(together(loops.some_with_their_own)) == [2]


def test_the_last_save_outlasts_the_process_group(together: Together) -> None:
    together(loops.leaving_before_the_save_ends)


def test_a_busy_folder_is_refused_on_every_process(together: Together, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as holder:
        holder.store.acquire_lease()
        together(loops.busy_together)
    assert sorted((tmp_path / "log").read_text().split()) == ["CheckpointError", "WriterBusy"]


def test_a_failed_asynchronous_save_is_raised_on_all_processes_in_the_loop_of_a_library(
    together: Together, tmp_path: Path
) -> None:
    together(loops.failing_behind_together)
    assert sorted((tmp_path / "log").read_text().split()) == ["CheckpointError", "WriterBusy"]


def test_a_forked_child_does_not_wait_for_the_save_of_its_parent(together: Together) -> None:
    together(loops.forking, ranks=1)


@pytest.mark.slow
def test_the_documented_loop_of_orbax_stops_on_a_signal_and_resumes(tmp_path: Path) -> None:
    """The documented loop gets a real SIGTERM, exits with a save in flight, and is started again."""
    directory = tmp_path / "run"
    first = live_and_be_terminated(directory)
    assert load_checkpoint(directory / f"checkpoint_step_{first}").state["steps"] == first + 1
    second = live_and_be_terminated(directory)
    # It has repeated the restored step, as Orbax's loop does.
    assert second > first
    assert load_checkpoint(directory / f"checkpoint_step_{second}").state["steps"] == second + 2


def live_and_be_terminated(directory: Path) -> int:
    """Run the loop, terminate it after a few steps; the newest step."""
    command = [sys.executable, "-m", "tests.support.loops", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as loop:
        try:
            assert loop.stdout is not None
            for _ in range(7):
                assert loop.stdout.readline()
            loop.terminate()
            loop.communicate(timeout=DEADLINE_S)
            assert loop.returncode == 0
        finally:
            loop.kill()
    newest = CheckpointManager(directory).latest_step()
    assert newest is not None
    return newest


def test_the_manager_stays_small() -> None:
    """What has a name of its own is not a method of it: the folder, the way of a save, whether a step is due."""
    assert len(inspect.signature(CheckpointManager).parameters) <= 10
    methods = [name for name, each in vars(CheckpointManager).items() if isinstance(each, (FunctionType, property))]
    assert len(methods) <= 25, methods
