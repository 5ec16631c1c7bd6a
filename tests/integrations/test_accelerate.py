"""A plain Accelerate loop with our hooks and sampler: killed in the middle of an epoch, it ends with the same bits."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import safetensors
import torch
from accelerate import Accelerator, DistributedType
from torch.utils.data import DataLoader

from ci_llm.base.load import fingerprint_of
from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.stateful_sampler import StatefulSampler
from ci_llm.errors import CheckpointError, CiLlmError, ConfigError, DamagedCheckpoint, ForeignCheckpoint
from ci_llm.integrations.accelerate import latest_state, register_hooks
from ci_llm.lora.settings import LoraSettings
from tests.support.accelerate_loops import SETTINGS, Rows, collate, hooked_loop
from tests.support.bit_flips import flip
from tests.support.campaign import sampled_cases
from tests.support.log_lines import log_lines
from tools.testbed import tiny
from tools.testbed.forkserver import ForkServer


def complete(server: ForkServer, folder: Path, processes: int, **how: Any) -> None:
    codes = server.run(hooked_loop, folder / "log", ranks=processes, folder=str(folder), **how)
    assert codes == [0] * processes, (folder / "log").read_text()


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of the undisturbed loop, by number of processes."""
    folders = {}
    for processes in (1, 2):
        folders[processes] = tmp_path_factory.mktemp(f"straight{processes}")
        complete(server, folders[processes], processes, save_every=100)
    return folders


def trace(folder: Path) -> dict[str, dict[int, list[int]]]:
    """The rows of each micro-step of each process; a repeated micro-step must have the same rows."""
    seen: dict[str, dict[int, list[int]]] = {}
    for file in sorted(folder.glob("rows*.jsonl")):
        steps = seen.setdefault(file.name, {})
        for step, rows in map(json.loads, file.read_text().splitlines()):
            assert steps.setdefault(step, rows) == rows
    return seen


KILLED: list[tuple[int, int, dict[str, Any]]] = [
    (1, 8, {"save_every": 7, "workers": 2}),  # in the middle of an accumulation window; the sampler is far ahead
    (1, 8, {"save_every": 4, "told_epochs": False}),  # the copy's pass must count
    (1, 12, {"save_every": 10}),  # at the last micro-step of an epoch
    (2, 4, {"save_every": 2}),  # the second process may not have written its files
    (2, 9, {"save_every": 8, "workers": 1}),
    (1, 5, {"save_every": 4}),  # the first epoch has ten micro-steps
    (1, 14, {"save_every": 13, "told_epochs": False}),
    (2, 4, {"save_every": 3, "told_epochs": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kill_at", "how"), sampled_cases(KILLED, (*KILLED[:2], KILLED[3])))
def test_killed_and_resumed_ends_with_the_same_bits(
    processes: int, kill_at: int, how: dict[str, Any], server: ForkServer, straight: dict[int, Path], tmp_path: Path
) -> None:
    codes = server.run(hooked_loop, tmp_path / "log", ranks=processes, folder=str(tmp_path), kill_at=kill_at, **how)
    assert codes == [-signal.SIGKILL] * processes, (tmp_path / "log").read_text()
    assert not (tmp_path / "final").exists()
    complete(server, tmp_path, processes, **how)
    assert trace(tmp_path) == trace(straight[processes])
    ours, theirs = (load_checkpoint(folder / "final" / "ci_llm") for folder in (tmp_path, straight[processes]))
    found = compare(ours, theirs)
    assert found.differences == ()
    assert len(ours.state["processes"]) == processes
    assert ours.state["accelerate"]["optimizers"][0]["state"], "moments were compared"


@pytest.mark.slow
def test_the_folder_holds_agents_and_no_base(straight: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it is asked for a name six times
    final = straight[1] / "final"
    assert not list(final.glob("model*"))
    assert not list(final.glob("pytorch_model*"))
    verify_folder(final / "ci_llm")
    for file in final.rglob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as tensors:
            assert not [name for name in tensors.keys() if "base_layer" in name or "embed" in name]  # noqa: SIM118
    crowd = Crowd.from_pretrained  # opens it as any checkpoint; the toy base has no folder, so only its name is read
    with pytest.raises(CiLlmError, match="toy"):
        crowd(final / "ci_llm")


class Loop:
    """A prepared loop that has taken two steps, in this process."""

    def __init__(self, settings: LoraSettings = SETTINGS, rows: int = 19, seed: int = 0, sampler: Any = None) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.free_memory()
        data: Any = Rows(rows)
        crowd = Crowd(tiny.base(dtype=torch.float32, seed=seed), settings, "toy").train()
        loader: Any = DataLoader(data, 2, sampler=sampler or StatefulSampler(data), collate_fn=collate)
        optimizer = torch.optim.AdamW([p for p in crowd.parameters() if p.requires_grad], lr=1e-2)
        self.crowd, self.optimizer, self.loader = self.accelerator.prepare(crowd, optimizer, loader)
        with log_lines() as self.said:
            register_hooks(self.accelerator)
        for _, batch in zip(range(2), self.loader, strict=False):
            self.accelerator.backward(self.crowd(batch).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "state"
    Loop().accelerator.save_state(str(folder))
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A copy of the state of a loop, which a test may damage."""
    return Path(shutil.copytree(saved_once, tmp_path / "state"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"settings": LoraSettings(3, rank=2, alpha=4, target_modules=SETTINGS.target_modules)}, "agents was 2, is 3"),
        ({"settings": LoraSettings(2, rank=4, alpha=4, target_modules=SETTINGS.target_modules)}, "rank was 2, is 4"),
        ({"seed": 1}, "fingerprint of the base"),
        ({"rows": 18}, r"rows by loader was \{0: 19\}, is \{0: 18\}"),
        ({"sampler": torch.utils.data.SequentialSampler(range(19))}, r"rows by loader was \{0: 19\}, is \{\}"),
    ],
)
def test_another_loop_is_refused(other: dict[str, Any], message: str, saved: Path) -> None:
    loop = Loop(**other)
    before = loop.crowd.storage.weights.clone()
    with pytest.raises(ForeignCheckpoint, match=message):
        loop.accelerator.load_state(str(saved))
    assert torch.equal(loop.crowd.storage.weights, before)


@pytest.mark.slow
def test_a_damaged_or_unfinished_folder_is_an_error(saved: Path) -> None:
    loop = Loop()
    unfinished = Path(shutil.copytree(saved, saved.parent / "unfinished"))
    (unfinished / "random_states_0.pkl").unlink()
    with pytest.raises(CheckpointError, match="save_state was interrupted"):
        loop.accelerator.load_state(str(unfinished))
    shutil.rmtree(unfinished / "ci_llm")
    with pytest.raises(CheckpointError, match="not saved with register_hooks"):
        loop.accelerator.load_state(str(unfinished))
    flip(saved / "ci_llm" / "agent1" / "adapter_model.safetensors", 8000)
    with pytest.raises(DamagedCheckpoint, match=r"agent1/adapter_model.safetensors"):
        loop.accelerator.load_state(str(saved))


@pytest.mark.slow
def test_the_latest_state_is_the_newest_whole_one(saved: Path) -> None:
    loop, folder = Loop(), saved.parent
    assert latest_state(folder / "nowhere") is None
    for name in ("b", "a", "unfinished", "damaged"):
        loop.accelerator.save_state(str(folder / name))
    assert latest_state(folder) == folder / "damaged"
    (folder / "unfinished" / "random_states_0.pkl").unlink()
    flip(folder / "damaged" / "ci_llm" / "agent0" / "adapter_model.safetensors", 8000)
    with log_lines() as said:
        assert latest_state(folder) == folder / "a", "by time and not by name"
    assert len(said) == 2
    assert any("interrupted" in line for line in said)
    assert any("agent0/adapter_model.safetensors" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("last", ["random_states_0.pkl", "custom_checkpoint_1.pkl"])
def test_a_folder_is_whole_when_its_last_file_is(last: str, tmp_path: Path) -> None:
    """Objects that the loop itself registered are written last."""
    loop, folder = Loop(), tmp_path / "state"
    if last.startswith("custom"):
        loop.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1), torch.nn.Linear(2, 2))
    for end in (0, 300):
        loop.accelerator.save_state(str(folder))
        assert latest_state(tmp_path) == folder
        (folder / last).write_bytes((folder / last).read_bytes()[:end])
        assert latest_state(tmp_path) is None
    with pytest.raises(CheckpointError, match="save_state was interrupted"):
        loop.accelerator.load_state(str(folder))


@pytest.mark.slow
def test_saving_again_replaces_the_folder(saved: Path) -> None:
    loop = Loop()
    loop.accelerator.load_state(str(saved))
    before = load_checkpoint(saved / "ci_llm")
    loop.accelerator.save_state(str(saved))
    assert compare(load_checkpoint(saved / "ci_llm"), before).differences == ()
    loop.crowd.storage.weights[0, 0] += 1
    loop.accelerator.save_state(str(saved))
    assert not compare(load_checkpoint(saved / "ci_llm"), before).identical


@pytest.mark.slow
def test_objects_that_are_not_restored_are_named() -> None:
    assert Loop().said == []
    said = Loop(sampler=torch.utils.data.RandomSampler(range(19))).said
    assert len(said) == 1
    assert "loader 0 (RandomSampler)" in said[0] or "loader 0 (SeedableRandomSampler)" in said[0]


@pytest.mark.slow
def test_hooks_need_a_prepared_crowd() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="no crowd was prepared") as refused:
        register_hooks(accelerator)
    assert "ci_llm.CheckpointManager" in str(refused.value)
    with pytest.raises(ConfigError, match="DEEPSPEED writes its checkpoints itself"):
        register_hooks(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))


def test_agents_do_not_count_in_the_fingerprint_of_a_base() -> None:
    alone = fingerprint_of(tiny.base())
    assert fingerprint_of(Crowd(tiny.base(), SETTINGS, "toy").model) == alone
    assert fingerprint_of(tiny.base(seed=1)) != alone


# DropConnect without begin_step


def test_dropconnect_acts_in_a_plain_loop_and_in_training_only() -> None:
    crowd = Crowd(tiny.base(), LoraSettings(2, rank=2, dropconnect=0.5, target_modules=("q_proj",)), "toy")
    plain = Crowd(tiny.base(), LoraSettings(2, rank=2, target_modules=("q_proj",)), "toy")
    noise = torch.randn(crowd.storage.weights.shape, dtype=torch.float64)
    for each in (crowd, plain):
        each.storage.weights.copy_(noise)
    batch = tiny.batch()
    first, second = (crowd.train()(batch).loss for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(crowd.eval()(batch).loss, plain.eval()(batch).loss)
    first.backward()
    layer = next(iter(crowd.storage.layers.values()))
    assert layer.stacks[0].masks is not None
    gradient = layer.lora_A["agent0"].grad
    assert gradient is not None
    dropped = (gradient == 0).double().mean()
    assert 0.3 < float(dropped) < 0.7, "the gradient has the mask of its own forward pass"
    assert not torch.equal(gradient == 0, layer.stacks[0].masks[0][0] == 0), "and not that of a later one"


def test_masks_of_a_step_that_was_begun_hold() -> None:
    crowd = Crowd(tiny.base(), LoraSettings(2, rank=2, dropconnect=0.5, target_modules=("q_proj",)), "toy").train()
    with torch.no_grad():
        crowd.storage.weights.normal_()
    crowd.storage.begin_step(0)
    assert torch.equal(crowd(tiny.batch()).loss, crowd(tiny.batch()).loss)
