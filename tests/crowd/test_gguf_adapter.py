"""An adapter as a GGUF file: added to the GGUF base as llama.cpp does it, it gives PEFT's probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from ci_llm.base.load import load_base
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.cli.main import main
from ci_llm.crowd.adapter_files import Adapter, require_convertible, write_gguf_adapter
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import META
from ci_llm.data.prompts import Prompter
from ci_llm.errors import ModelError
from ci_llm.lora.settings import LoraSettings
from tests.support.gguf_files import Kind, permuted, write_gguf
from tools.testbed.tiny import base as tiny_base

IDS = torch.arange(5, 69)[None]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = {
    "llama": LoraSettings(2, rank=4, alpha=12.0, target_modules=ALL),
    "qwen2": LoraSettings(2, rank=4, alpha=6.0, use_rslora=True, target_modules=ALL),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))


def saved_crowd(place: Path, architecture: str, kind: gguf.GGMLQuantizationType = Kind.Q8_0) -> Path:
    """A crowd of two random agents on a GGUF base in `place/base.gguf`, with the configuration of a run."""
    write_gguf(place / "base.gguf", architecture, kind)
    loaded = load_base(str(place / "base.gguf"))
    crowd = Crowd(loaded.model, SETTINGS[architecture], loaded.name, loaded.pad_id)
    crowd.prompter = Prompter(loaded.tokenizer)
    with torch.no_grad():
        crowd.storage.weights.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    config = f"model_name: {place / 'base.gguf'}\nnum_agents: 2\n".encode()
    state = {**crowd.adapter_files(), META: crowd.meta(loaded.fingerprint), "config.yaml": config}
    write_checkpoint(place / "crowd", state, step=3)
    return place / "crowd"


def numbers_of(path: Path) -> dict[str, np.ndarray]:
    return {one.name: np.array(gguf.dequantize(one.data, one.tensor_type)) for one in gguf.GGUFReader(path).tensors}


def text_of(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    assert field is not None
    return field.contents()


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permuted`."""
    order = permuted(np.arange(len(rows)), heads)
    return rows[np.argsort(order)]


def as_llama_cpp_computes(base: Path, adapter: Path, plain: str) -> PreTrainedModel:
    """The tensors of the GGUF base, each with alpha / rank times B A; then in the order of Transformers.

    Args:
        plain: the folder of the dequantised base, for the names and shapes of Transformers only.
    """
    reader = gguf.GGUFReader(adapter)
    assert (text_of(reader, "general.type"), text_of(reader, "adapter.type")) == ("adapter", "lora")
    architecture = text_of(gguf.GGUFReader(base), "general.architecture")
    assert text_of(reader, "general.architecture") == architecture
    alpha, lora, dense = text_of(reader, "adapter.lora.alpha"), numbers_of(adapter), numbers_of(base)
    assert isinstance(alpha, float)
    for name in [name for name in lora if name.endswith(".lora_a")]:
        lower, upper = lora.pop(name), lora.pop(name.replace("lora_a", "lora_b"))
        dense[name.removesuffix(".lora_a")] += alpha / lower.shape[0] * upper @ lower
    assert not lora
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[str(architecture)], model.config.num_hidden_layers)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None
            rows, kind = dense.pop(stored), stored.split(".")[-2]
            weight.copy_(
                torch.from_numpy(in_halves(rows, heads[kind]) if architecture == "llama" and kind in heads else rows)
            )
    assert not dense
    return model


def log_probabilities(model: Callable[..., object]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits.log_softmax(-1)  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "words"),
    [("llama", ["--agent", "1"]), ("llama", ["--merge", "svd"]), ("qwen2", ["--agent", "1"])],
    ids=["an agent on Llama", "a merge on Llama", "an agent on Qwen2"],
)
def test_on_the_file_s_own_tensors_it_gives_the_probabilities_of_peft(
    architecture: str, words: list[str], tmp_path: Path
) -> None:
    run = saved_crowd(tmp_path, architecture)
    assert main(["export", str(run), *words, "--no-score", "--to", str(tmp_path / "plain")]) == 0
    assert main(["export", str(run), *words, "--no-score", "--format", "gguf", "--to", str(tmp_path / "llama")]) == 0
    name = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())["base_model_name_or_path"]
    untouched = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    without = log_probabilities(untouched)
    agent = peft.PeftModel.from_pretrained(untouched, tmp_path / "plain").eval()
    ours = as_llama_cpp_computes(tmp_path / "base.gguf", tmp_path / "llama" / "adapter.gguf", name)
    assert (log_probabilities(ours) - log_probabilities(agent)).abs().max() < 1e-3
    assert (log_probabilities(agent) - without).abs().max() > 0.1, "else nothing is shown"


@pytest.mark.slow
def test_an_export_names_its_base_for_both_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, to = saved_crowd(tmp_path, "llama"), tmp_path / "llama"
    assert main(["export", str(run), "--agent", "0", "--no-score", "--format", "gguf", "--to", str(to)]) == 0
    said = capsys.readouterr().out
    assert (to / "Modelfile").read_text() == "FROM ./base.gguf\nADAPTER ./adapter.gguf\n"
    card = (to / "README.md").read_text()
    assert "llama-cli -m base.gguf --lora adapter.gguf" in card
    assert "ollama create crowd -f Modelfile" in card
    assert str(tmp_path) not in card
    assert "convert_hf_to_gguf" not in said + card
    assert sorted(path.name for path in to.iterdir()) == ["Modelfile", "README.md", "adapter.gguf"]


@pytest.mark.slow
def test_a_run_finds_its_base_where_the_cache_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved_crowd(tmp_path, "llama")
    before = Crowd.from_pretrained(run)
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "other"))
    (tmp_path / "cache").rename(tmp_path / "gone")
    again = Crowd.from_pretrained(run)
    assert again.base_model.base_name == before.base_model.base_name.replace("/cache/", "/other/")


@pytest.mark.parametrize(
    ("words", "what"),
    [([], "one adapter can be merged"), (["--agent", "0", "--into-base"], "--format gguf is of an adapter")],
    ids=["a crowd", "a model"],
)
def test_one_adapter_is_written_and_nothing_else(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "nowhere", "--format", "gguf", "--to", str(tmp_path / "to"), *words]) == 2
    assert what in capsys.readouterr().err


def test_a_layout_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt2'"):
        require_convertible(GPT2Config())
    config, tensors = tiny_base("llama", torch.float32).config, {}
    for half in "AB":
        tensors[f"base_model.model.model.layers.0.self_attn.rotary.lora_{half}.weight"] = torch.zeros(2, 2)
    with pytest.raises(ModelError, match=r"no tensor for model\.layers\.0\.self_attn\.rotary"):
        write_gguf_adapter(tmp_path / "one.gguf", Adapter({"lora_alpha": 1, "r": 2}, tensors), config)
    assert not (tmp_path / "one.gguf").exists()
