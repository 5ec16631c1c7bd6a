"""Weights reordered for oneDNN: products have the bits of the plain weights, or the weight stays as it is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.next_token import Decoding, Request
from ci_llm.lora import onednn
from ci_llm.lora.onednn import ReorderedWeights
from ci_llm.lora.products import product
from tests.lora.test_adapters import crowd_of
from tests.support.campaign import sampled
from tools.testbed.events import DEADLINE_S
from tools.testbed.tiny import base

pytestmark = pytest.mark.usefixtures("one_thread")

#: Rows of products.
COUNTS = (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 48, 64, 100, 128, 256, 333)
EMULATIONS = ("ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ONEDNN_MAX_CPU_ISA=AVX2", "MKL_CBWR=COMPATIBLE")


def reordered(crowd: Crowd, dtype: torch.dtype = torch.float32) -> ReorderedWeights:
    return ReorderedWeights.of(crowd.storage.layers.values(), crowd.head, dtype)


@pytest.fixture(autouse=True)
def by_onednn_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: True)


def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN reorders this dtype here: bf16 by AVX-512 alone, which a variable may also switch off."""
    return onednn._reordered(torch.ones(16, 32, dtype=dtype), {}, by_onednn=True) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_product_has_the_bits_of_the_plain_weight(dtype: torch.dtype) -> None:
    crowd = crowd_of(base("qwen2", torch.float32))  # q, k and v have a bias
    found = reordered(crowd, dtype)
    assert len(found.weights) == (len(crowd.storage.layers) if reorders(dtype) else 0)
    assert found.head.weight.is_mkldnn == reorders(dtype)
    pairs: list[Any] = [(layer.base_layer, weight) for layer, weight in found.weights.items()]  # type: ignore[union-attr]
    pairs.append((crowd.head, found.head.weight))
    for plain, weight in pairs:
        rows = torch.randn(257, plain.weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        bias = None if plain.bias is None else plain.bias.to(dtype)
        for count in (4, 5, 16, 63, 257):
            both = [product(rows[:count], w, bias, by_onednn=True) for w in (plain.weight.to(dtype), weight)]
            assert torch.equal(*both)


def differing_products() -> str:
    """How many products of reordered weights there were on one thread, and how many had other bits than plain ones."""
    torch.set_num_threads(1)
    generator, compared, differing = torch.Generator().manual_seed(0), 0, 0
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((576, 576), (1536, 576), (576, 1536), (8192, 576), (48, 100), (33, 17)):
            weight = torch.randn(shape, generator=generator).to(dtype)
            of_it = onednn._reordered(weight, {}, by_onednn=True)
            rows = torch.randn(333, shape[1], generator=generator).to(dtype)
            for count in COUNTS if of_it is not None else ():
                plain, other = (product(rows[:count], each, by_onednn=True) for each in (weight, of_it))
                compared, differing = compared + 1, differing + (not torch.equal(plain, other))
    return f"{compared} {differing}"


@pytest.mark.slow
@pytest.mark.parametrize("emulation", sampled(EMULATIONS, EMULATIONS[1:2]))
def test_the_bits_are_those_of_the_plain_weight_on_other_processors(emulation: str) -> None:
    name, _, value = emulation.partition("=")
    code = "from tests.lora.test_onednn import differing_products; print(differing_products())"
    command, where = [sys.executable, "-c", code], {**os.environ, name: value}
    ended = subprocess.run(command, env=where, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    compared, differing = map(int, ended.stdout.split())
    assert compared >= 6 * len(COUNTS), "fp32 is reordered everywhere"
    assert differing == 0


def test_a_weight_whose_trial_differs_is_not_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = crowd_of(base("llama", torch.float32))

    def shifted(x: torch.Tensor, weight: torch.Tensor, *bias: Any, by_onednn: bool) -> torch.Tensor:
        found = product(x, weight, *bias, by_onednn=by_onednn)
        return found * (1 + 2**-23) if weight.is_mkldnn and weight.shape[0] > weight.shape[1] else found

    monkeypatch.setattr(onednn, "product", shifted)
    found = reordered(crowd)
    narrow = {layer for layer in crowd.storage.layers.values() if layer.out_features <= layer.in_features}
    assert 0 < len(narrow) < len(crowd.storage.layers)
    assert found.weights.keys() == narrow
    assert not found.head.weight.is_mkldnn


@pytest.mark.parametrize(
    ("dtype", "by_onednn", "free"),
    [(torch.float32, False, 2**40), (torch.float64, True, 2**40), (torch.float32, True, 9)],
)
def test_nothing_is_reordered_without_onednn_or_memory(
    dtype: torch.dtype, by_onednn: bool, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "onednn_is_faster", lambda: by_onednn)
    monkeypatch.setattr(onednn, "free_host_memory", lambda: (free, 2**41))
    found = reordered(crowd_of(base("llama", torch.float32)), dtype)
    assert found.by_onednn == found.head.by_onednn == by_onednn
    assert not found.weights
    assert found.head.weight.dtype == dtype
    assert not found.head.weight.is_mkldnn


class Sharded(nn.Parameter):
    """Stands for a DTensor, which needs several processes."""


def test_a_sharded_or_a_missing_weight_is_not_reordered() -> None:
    crowd = crowd_of(base("llama", torch.float32))
    one, other, *_ = crowd.storage.layers.values()
    for layer, kind, device in ((one, nn.Parameter, "meta"), (other, Sharded, "cpu")):
        plain: Any = layer.base_layer
        plain.weight = kind(plain.weight.data.to(device), requires_grad=False)
    assert reordered(crowd).weights.keys() == {*crowd.storage.layers.values()} - {one, other}


def test_a_crowd_reorders_once_and_again_after_its_base_has_changed() -> None:
    crowd = crowd_of(base("llama", torch.float32)).eval()
    first = crowd.base_model.reordered(torch.float32)
    assert crowd.base_model.reordered(torch.float32) is first
    layer = next(iter(crowd.storage.layers.values()))
    with torch.no_grad():
        layer.base_layer.weight.mul_(2)  # type: ignore[operator, union-attr]
    again = crowd.base_model.reordered(torch.float32)
    assert again is not first
    assert torch.equal(again.weights[layer].to_dense(), layer.base_layer.weight)  # type: ignore[arg-type, union-attr]
    assert crowd.base_model.reordered(torch.float64).dtype == torch.float64


def test_training_drops_what_was_reordered_and_a_copy_reorders_for_itself() -> None:
    crowd = crowd_of(base("llama", torch.float32)).eval()
    crowd.base_model.reordered(torch.float32)
    other = copy.deepcopy(crowd)
    texts = [written(each) for each in (crowd, other)]
    assert texts[0] == texts[1]
    assert other.base_model.reordered(torch.float32).weights.keys() == {*other.storage.layers.values()}
    crowd.train()
    assert crowd.base_model.reordered_weights is None


def written(crowd: Crowd) -> list[int]:
    writer, request = Decoder(crowd), Request([5, 6, 7], Decoding(4))
    writer.admit([request])
    while writer.open:
        writer.step()
    return request.tokens
