"""A base in 4 or 8 bits: the loss and gradients of its dequantised twin and of PEFT, its bytes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ci_llm.base.load import fingerprint_of, load_base
from ci_llm.base.quantized import QuantizedLinear
from ci_llm.base.targets import Layers
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.errors import ConfigError, ModelError
from ci_llm.lora.settings import LoraSettings
from tests.support.peft_twins import peft_loss, with_weights_of
from tools.testbed.tiny import FAMILIES, batch
from tools.testbed.tiny import base as toy

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")

KINDS = ("nf4", "int8")
SETTINGS = LoraSettings(num_agents=3, rank=4, alpha=8)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose layers are much larger than its embedding."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    from transformers import AutoTokenizer

    from ci_llm.embedded import BASE_FOLDER

    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    return folder


def crowd_on(folder: Path, kind: Any, settings: LoraSettings = SETTINGS) -> Crowd:
    base = load_base(str(folder), "fp32", "cpu", kind)
    crowd = Crowd(base.model, settings, str(folder))
    generator = torch.Generator().manual_seed(1)
    crowd.storage.weights.copy_(torch.randn(crowd.storage.weights.shape, generator=generator) * 0.05)
    return crowd.train()


def gradients(crowd: Crowd, packed: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    crowd.storage.begin_step(0)
    loss = crowd(packed).loss
    loss.backward()
    return loss.detach(), crowd.storage.gradients.clone()


def dense_twin(folder: Path, crowd: Crowd) -> Crowd:
    """A crowd with the same agents on a plain base whose weights are the dequantised ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in crowd.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            model.get_submodule(name.removesuffix(".base_layer")).weight.data = layer.weight.clone()
    twin = Crowd(model, crowd.settings, str(folder))
    twin.storage.weights.copy_(crowd.storage.weights)
    return twin.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "layers"),
    [("all-linear", "all"), (("q_proj",), "all"), ("all-linear", "upper_half")],
    ids=["all", "q_proj", "upper half"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_dequantised_base_to_the_bit(
    folder: Path, kind: str, targets: str | tuple[str, ...], layers: Layers
) -> None:
    """An evaluation in between makes bitsandbytes' own 4-bit layers pack their weights for inference."""
    settings = LoraSettings(num_agents=3, rank=4, alpha=8, target_modules=targets, layers=layers)
    crowd, packed = crowd_on(folder, kind, settings), batch()
    wanted = gradients(dense_twin(folder, crowd), packed)
    assert wanted[1].abs().amax(1).min() > 0
    for _ in range(2):
        for found, expected in zip(gradients(crowd, packed), wanted, strict=True):
            assert torch.equal(found, expected)
        with torch.no_grad():
            crowd.eval()(packed)
            with crowd.base_model.active_agent(0) as model:
                model(input_ids=packed.input_ids[None, :5], use_cache=True)
        crowd.train()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft_on_the_same_quantised_base(folder: Path, kind: str) -> None:
    crowd, packed = crowd_on(folder, kind), batch()
    loss, found = gradients(crowd, packed)
    total = 0.0
    for k in range(SETTINGS.num_agents):
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=kind == "nf4",
                load_in_8bit=kind == "int8",
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            ),
        )
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        twin = with_weights_of(peft.get_peft_model(model, config), crowd, k)
        own = peft_loss(twin, packed)
        own.backward()
        total += own.item()
        ours = {
            f"base_model.model.{n}.{kind}.default.weight": getattr(m, kind)[f"agent{k}"].grad
            for n, m in crowd.storage.layers.items()
            for kind in ("lora_A", "lora_B")
        }
        theirs = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        off = sum(float((ours[n] - theirs[n]).square().sum()) for n in ours) ** 0.5
        norm = sum(float(t.square().sum()) for t in theirs.values()) ** 0.5
        # int8 of bitsandbytes also rounds the activations; its own gradient is that of the dequantised weight.
        assert off / norm < (1e-5 if kind == "nf4" else 0.05)
    assert total == pytest.approx(float(loss), rel=1e-5 if kind == "nf4" else 1e-2)
    assert found.isfinite().all()


@pytest.mark.slow
def test_the_fingerprint_is_that_of_the_checkpoint_and_the_way_it_is_stored(folder: Path) -> None:
    prints = {kind: load_base(str(folder), "fp32", "cpu", kind).fingerprint for kind in (None, *KINDS)}
    assert len({*prints.values()}) == 3
    assert load_base(str(folder), "fp32", "cpu", "nf4").fingerprint == prints["nf4"]
    assert load_base(str(folder), "bf16", "cpu", "nf4").fingerprint != prints["nf4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_quantised_already_is_recognised(folder: Path, kind: Any, tmp_path: Path) -> None:
    first = load_base(str(folder), "fp32", "cpu", kind)
    first.model.save_pretrained(tmp_path / "stored")
    first.tokenizer.save_pretrained(tmp_path / "stored")
    packed = batch()
    wanted = gradients(crowd_on(folder, kind), packed)
    for found, expected in zip(gradients(crowd_on(tmp_path / "stored", None), packed), wanted, strict=True):
        assert torch.equal(found, expected)
    other = "int8" if kind == "nf4" else "nf4"
    with pytest.raises(ConfigError, match=f"quantised already, as {kind}"):
        load_base(str(tmp_path / "stored"), "fp32", "cpu", other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_crowd_generates_the_texts_of_the_dequantised_one(folder: Path, kind: str) -> None:
    crowd = crowd_on(folder, kind)
    from ci_llm.crowd.next_token import Decoding

    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    decoding = Decoding(max_new_tokens=8)
    assert crowd.generate_ids(prompts, decoding) == dense_twin(folder, crowd).generate_ids(prompts, decoding)


def test_a_quantised_crowd_moves_and_keeps_its_precision(folder: Path) -> None:
    crowd = crowd_on(folder, "nf4")
    crowd.to("cpu")
    with pytest.raises(ModelError, match="keeps its precision"):
        crowd.to(torch.float64)


# What would train wrongly is refused.


class OtherWeight(nn.Parameter):
    """Stands for the tensor subclasses of other libraries, whose products have gradients of their own."""


def test_a_base_with_weights_of_another_library_is_refused() -> None:
    model = toy("llama", torch.float32)
    model.model.layers[0].mlp.up_proj.weight = OtherWeight(model.model.layers[0].mlp.up_proj.weight.data)
    with pytest.raises(ModelError, match=r"up_proj is stored as OtherWeight.*wrong gradients"):
        Crowd(model, SETTINGS, "toy")


def test_a_quantised_base_with_agents_has_the_fingerprint_that_it_was_loaded_with(folder: Path) -> None:
    base = load_base(str(folder), "fp32", "cpu", "nf4")
    Crowd(base.model, SETTINGS, str(folder))
    assert fingerprint_of(base.model) == base.fingerprint
