"""The files of a state: what they cannot hold, and what is not one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from ci_llm.checkpoints.state_files import (
    entries_of,
    files_of,
    from_bytes,
    index_name,
    read_safetensors,
    read_state,
    to_bytes,
)
from ci_llm.errors import CheckpointError, DamagedCheckpoint


class Shard(Tensor):
    """One process's part of a tensor, as DTensor and ShardedTensor are."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def read(files: dict[str, bytes], form: str = "tree", key: str = "a") -> Any:
    return read_state({key: form}, files)[key]


def bytes_of(state: Any) -> dict[str, bytes]:
    return {name: b"".join(image.parts) for name, image in files_of(entries_of(state)).items()}


def test_a_shard_is_refused_with_the_call_that_gives_the_whole_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"one shard of a distributed tensor.*full_tensor\(\)"):
        entries_of({"a": torch.zeros(2).as_subclass(Shard)})


def test_tensors_with_similar_addresses_are_kept_apart() -> None:
    state = {"a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1), "n": 1}, "__metadata__": torch.full((1,), 2.0)}}
    back = read(bytes_of(state))
    assert [back["b.c"].item(), back["b"]["c"].item(), back["__metadata__"].item()] == [1.0, 0.0, 2.0]


def test_a_tree_whose_tensors_lie_in_several_files_is_read_by_its_index() -> None:
    tree = {"a.json": json.dumps({"x": {"$tensor": "x"}, "y": [{"$tensor": "y"}, 3]}).encode()}
    shards = {
        "a-0.safetensors": bytes_of({"s": {"x": torch.ones(2)}})["s.safetensors"],
        "a-1.safetensors": bytes_of({"s": {"y": torch.zeros(1), "z": torch.zeros(9)}})["s.safetensors"],
    }
    index = {"weight_map": {"x": "a-0.safetensors", "y": "a-1.safetensors"}}
    back = read({**tree, **shards, index_name("a"): json.dumps(index).encode()})
    assert (back["x"].tolist(), back["y"][0].tolist(), back["y"][1]) == ([1.0, 1.0], [0.0], 3)
    with pytest.raises(DamagedCheckpoint, match="the index does not say where its tensors are") as damage:
        read({**tree, **shards, index_name("a"): b"{}"})
    assert damage.value.where == "key 'a'"


WITHOUT_X = bytes_of({"a": {"y": torch.ones(1)}})["a.safetensors"]


@pytest.mark.parametrize(
    ("form", "files", "told"),
    [
        ("pickle", {}, "unknown form 'pickle'"),
        ("plain", {}, "a.json"),
        ("plain", {"a.json": b"{"}, "Expecting"),
        ("tensors", {"a.safetensors": b"short"}, "header"),
        ("tree", {"a.json": b'{"$tensor": "x"}', "a.safetensors": WITHOUT_X}, "'x'"),
    ],
)
def test_files_that_are_not_a_manifest_are_damage(form: str, files: dict[str, bytes], told: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"'a' cannot be read: .*{told}"):
        read(files, form)


def test_a_header_that_promises_more_than_the_file_holds_is_an_error() -> None:
    data = bytes_of({"a": {"w": torch.ones(4)}})["a.safetensors"]
    assert read_safetensors(data)["w"].tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="not fully covered"):
        read_safetensors(data[:-4])


@pytest.mark.parametrize("value", [{"w": torch.ones(2)}, {"n": (1, 2)}, {"w": torch.ones(2), "n": [1]}, 3])
def test_a_message_is_restored_as_it_was_written(value: Any) -> None:
    back = from_bytes(to_bytes(value))
    assert repr(back) == repr(value)
