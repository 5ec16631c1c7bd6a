"""Sharded layers against whole ones, on two and four processes of gloo: the same bits, a part of the bytes.

Each trial runs in every process of a world; an assertion that fails there is a failed test here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from ci_llm.base.load import Base, fingerprint_of, load_base
from ci_llm.base.quantized import QuantizedLinear
from ci_llm.base.sharded import ShardedLayers, is_sharded
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.next_token import Decoding
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ModelError
from ci_llm.lora import products as lora
from ci_llm.lora.settings import LoraSettings
from tests.support.campaign import drawn, sampled
from tools.testbed import tiny
from tools.testbed.crews import enter
from tools.testbed.forkserver import ForkServer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "gpt_neox", "qwen3", "mistral", "gemma2", "gemma3", "bloom", "phi", "cohere")


def run(server: ForkServer, folder: Path, trial: Any, ranks: int = 2, **arguments: Any) -> None:
    codes = server.run(trial, folder / "log", ranks=ranks, **arguments)
    assert codes == [0] * ranks, (folder / "log").read_text()


def saved(family: str, folder: Path) -> Path:
    """A random base whose every parameter, norms and biases included, is away from its usual start."""
    tiny.base(family, torch.float32).save_pretrained(folder)
    for file in BASE_FOLDER.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def crowd_on(base: Base, targets: Any = "all-linear", layers: Any = "all") -> Crowd:
    targets = tuple(targets) if isinstance(targets, list) else targets  # as JSON has carried it
    settings = LoraSettings(num_agents=3, rank=4, alpha=8, target_modules=targets, layers=layers)
    crowd = Crowd(base.model, settings, base.name)
    weights = crowd.storage.weights
    weights.copy_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return crowd.train()


def both(name: str, dtype: str = "fp32", autocast: torch.dtype | None = None, **how: Any) -> tuple[Crowd, Crowd, Any]:
    """The crowd on a whole base, the same on a sharded one, and the layers of the latter."""
    layers, kind = ShardedLayers(CPU, autocast), how.pop("quantization", None)
    plain, sharded = load_base(name, dtype, CPU, kind), load_base(name, dtype, CPU, kind, layers)
    assert sharded.fingerprint == plain.fingerprint
    assert sharded.rounded_fingerprint == plain.rounded_fingerprint
    assert sharded.num_parameters == plain.num_parameters
    assert type(sharded.model).__name__ == type(plain.model).__name__
    assert not hasattr(sharded.model.config, "distributed_config")
    return crowd_on(plain, **how), crowd_on(sharded, **how), layers


def gradients(crowd: Crowd, autocast: torch.dtype | None = None) -> list[Tensor]:
    """[loss, gradients] of rows that differ between the processes."""
    crowd.storage.begin_step(0)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = crowd(tiny.batch((9 + dist.get_rank(), 17, 23, 1))).loss
    loss.backward()
    return [loss.detach(), crowd.storage.gradients.clone()]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert wanted[1].abs().sum(1).min() > 0


# Trials


def same_bits(name: str, dtype: str, checkpointing: bool = False, autocast: bool = False, **how: Any) -> int:
    """Loss, gradients, route and generated text, before and after an evaluation and passes that others do not make."""
    enter()
    mixed = torch.bfloat16 if autocast else None
    plain, sharded, layers = both(name, dtype, mixed, **how)
    with torch.autocast("cpu", dtype=mixed, enabled=autocast):
        assert sharded.base_model.choose_route() == plain.base_model.choose_route()
    if checkpointing:
        for crowd in (plain, sharded):
            crowd.gradient_checkpointing_enable()
    wanted = gradients(plain, mixed)
    assert_equal(gradients(sharded, mixed), wanted)
    prompts, decoding = [[5, 6, 7], [8, 9, 10, 11]][: 1 + dist.get_rank()], Decoding(max_new_tokens=3 + dist.get_rank())
    with torch.autocast("cpu", dtype=mixed, enabled=autocast):
        assert sharded.generate_ids(prompts, decoding) == plain.generate_ids(prompts, decoding)
    layers.follow()
    for _ in range(dist.get_rank()):
        gradients(sharded, mixed)
    layers.follow()
    assert_equal(gradients(sharded, mixed), wanted)
    layers.follow()
    assert fingerprint_of(sharded.model) == fingerprint_of(plain.model)
    dist.barrier()
    return 0


def share_of_bytes(name: str, quantization: str | None) -> int:
    """Of the layers' weights every process stores its part, between and after passes; all else is whole."""
    enter()
    plain, sharded, layers = both(name, quantization=quantization)
    gradients(sharded)
    layers.follow()
    parts: list[Any] = [each for each in sharded.model.parameters() if is_sharded(each)]
    assert len(parts) == len(sharded.storage.layers)
    assert sum(each.nbytes for each in parts) == sum(_stored(each.base_layer) for each in plain.storage.layers.values())
    assert sum(each.to_local().nbytes for each in parts) * dist.get_world_size() == sum(each.nbytes for each in parts)
    assert not any(is_sharded(each) for each in sharded.storage.rows)
    dist.barrier()
    return 0


def _stored(layer: nn.Module) -> int:
    weight: Any = layer.stored if isinstance(layer, QuantizedLinear) else layer.weight
    return int(weight.nbytes)


def gathered_in_the_dtype_of_products(name: str) -> int:
    """Under autocast the gathered weights are in bf16: no copy of them is kept until the backward pass."""
    enter()
    _, sharded, layers = both(name, autocast=torch.bfloat16)
    seen: set[torch.dtype] = set()
    forward = lora.FusedLinear.forward

    def look(ctx: Any, x: Tensor, cast: Tensor, dropped: Any, layer: Any, *rest: Any) -> Tensor:
        weight = layer.base_layer.weight
        seen.add(weight.dtype)
        assert isinstance(weight, nn.Parameter)  # the gathered one itself, whose memory is let go after its layer
        return forward(ctx, x, cast, dropped, layer, *rest)

    lora.FusedLinear.forward = staticmethod(look)  # type: ignore[method-assign]
    gradients(sharded, torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert {each.dtype for each in sharded.model.parameters() if is_sharded(each)} == {torch.float32}
    layers.follow()
    dist.barrier()
    return 0


def different_layers(name: str) -> int:
    """Processes that would gather different layers get an error, all of them, and no wrong numbers."""
    rank = enter()
    plain, sharded, layers = both(name)
    wanted = gradients(plain)
    if rank:  # follows before it has ever computed
        layers.follow()
    else:
        assert_equal(gradients(sharded), wanted)
        layers.follow()
    assert_equal(gradients(sharded), wanted)
    with pytest.raises(ModelError, match="one needs layer 0, another 1"):
        layers._layers[rank].unshard()
    layers.follow()
    assert_equal(gradients(sharded), wanted)
    layers.follow()
    dist.barrier()
    return 0


# Tests


@pytest.mark.parametrize("family", drawn(FAMILIES, 2))
def test_every_family_has_the_bits_of_whole_layers(family: str, server: ForkServer, tmp_path: Path) -> None:
    run(server, tmp_path, same_bits, name=str(saved(family, tmp_path / "base")), dtype="fp64")


def test_a_mixture_of_experts_has_the_bits_of_whole_layers(server: ForkServer, tmp_path: Path) -> None:
    run(server, tmp_path, same_bits, name=str(saved("mixtral", tmp_path / "base")), dtype="fp32")


HOW: list[dict[str, Any]] = [
    {"autocast": True, "checkpointing": True},
    {"targets": ["q_proj"], "autocast": True},
    {"quantization": "nf4", "checkpointing": True, "layers": "upper_half"},
    {"quantization": "int8", "autocast": True},
    {"dtype": "bf16"},
    {"quantization": "nf4", "targets": ["q_proj"]},
]


@pytest.mark.parametrize("how", sampled(HOW, HOW[:3:2]), ids=str)
def test_in_every_precision_and_form_of_storage_the_bits_are_the_same(
    how: dict[str, Any], server: ForkServer, tmp_path: Path
) -> None:
    run(server, tmp_path, same_bits, name=str(saved("llama", tmp_path / "base")), **{"dtype": "fp32", **how})


@pytest.mark.parametrize("kind", sampled(["nf4", "int8"], ["nf4"]))
def test_a_checkpoint_that_is_quantised_already_is_sharded(kind: Any, server: ForkServer, tmp_path: Path) -> None:
    dense = load_base(str(saved("llama", tmp_path / "base")), "fp32", "cpu", kind)
    dense.model.save_pretrained(tmp_path / "stored")
    dense.tokenizer.save_pretrained(tmp_path / "stored")
    run(server, tmp_path, same_bits, name=str(tmp_path / "stored"), dtype="fp32")


@pytest.mark.parametrize("quantization", sampled([None, "nf4"], ["nf4"]))
def test_four_processes_store_a_quarter_of_the_layers_each(
    quantization: str | None, server: ForkServer, tmp_path: Path
) -> None:
    run(server, tmp_path, share_of_bytes, ranks=4, name="embedded", quantization=quantization)


def test_autocast_keeps_no_copy_of_gathered_weights(server: ForkServer, tmp_path: Path) -> None:
    run(server, tmp_path, gathered_in_the_dtype_of_products, name="embedded")


def test_processes_that_need_different_layers_get_an_error(server: ForkServer, tmp_path: Path) -> None:
    run(server, tmp_path, different_layers, name="embedded")
