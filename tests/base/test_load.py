"""A base is loaded completely or not at all, and its fingerprint covers every bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from ci_llm.base.load import fingerprint_of, load_architecture, load_base
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ModelError
from tools.testbed.tiny import base

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded base, for the tests to damage."""
    return Path(shutil.copytree(BASE_FOLDER, tmp_path / "base"))


def _torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


def _without_a_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[LAYER]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[LAYER] = tensors[LAYER][:, :8].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _no_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def _odd_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_torn, "cannot be loaded: Error while deserializing header"),
        (_no_pickle, "cannot be loaded: Weights only load failed"),
        (_odd_config, "cannot be loaded: Validation error for field 'hidden_size'"),
        (_without_a_layer, f"1 weights of the base are missing or of another shape, the first is {LAYER}"),
        (_of_another_shape, f"1 weights of the base are missing or of another shape, the first is {LAYER}"),
    ],
)
def test_a_base_that_is_not_whole_is_refused(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load_base(str(folder))
    assert message in caught.value.what
    assert caught.value.where == f"model_name: {folder}"


@pytest.mark.parametrize("inside", ["", "agent0"])
def test_adapters_that_are_given_as_the_base_are_named(inside: str, tmp_path: Path) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    (tmp_path / inside / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        load_base(str(tmp_path))
    assert caught.value.what == "these are adapters and not a base"
    assert f"init_from={tmp_path}" in str(caught.value.hint)


def test_a_base_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Transformers makes an empty one of these families, which reads every text as nothing."""
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_base(str(tmp_path))
    assert "the base has no tokenizer" in caught.value.what
    assert caught.value.where == f"model_name: {tmp_path}"


@pytest.mark.parametrize("name", ["/nowhere/model", "./models/mine", "../mine/x", "~/mine", "runs/one/model"])
def test_a_missing_folder_is_reported_as_missing(name: str) -> None:
    """The hub's library would say that a repo id must use alphanumeric characters."""
    for open_it in (load_base, load_architecture):
        with pytest.raises(ModelError) as caught:
            open_it(name)
        assert caught.value.what == "there is no such folder"
        assert str(Path(name).absolute()) in str(caught.value.where)


def test_a_family_that_answers_otherwise_than_it_is_trained_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("moshi").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Moshi's cache forgets"):
        load_architecture(str(tmp_path))


def test_a_fingerprint_covers_every_bit_and_parameters_of_any_shape() -> None:
    model = base(dtype=torch.float32)
    model.register_parameter("temperature", torch.nn.Parameter(torch.tensor(1.0)))
    before = fingerprint_of(model)
    with torch.no_grad():
        model.temperature.view(torch.int32).bitwise_xor_(1)
    assert fingerprint_of(model) != before
