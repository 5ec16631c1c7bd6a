"""Merges of K adapters: what each computes, against plain matrices and against PEFT, whose traps are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from ci_llm.crowd.adapter_files import Adapter
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.merging import METHODS, merge_into_base, merge_of, merged
from ci_llm.errors import BadInput
from ci_llm.lora.settings import LoraSettings
from tools.testbed.tiny import base

K, R = 3, 4
TARGETS = ("q_proj", "k_proj", "down_proj")


def agents_on(model: Any, *, scale: float = 0.1, seed: int = 7, alike: bool = False, **settings: Any) -> list[Adapter]:
    """K agents with random weights; the base is without them afterwards."""
    chosen = {"rank": R, "alpha": 10.0, "target_modules": TARGETS, "use_rslora": True, **settings}
    crowd = Crowd(model, LoraSettings(K, **chosen), "toy")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        crowd.storage.weights.copy_(torch.randn(crowd.storage.weights.shape, generator=generator) * scale)
        if alike:
            crowd.storage.weights[1:] = crowd.storage.weights[0]
    files = crowd.adapter_files()
    crowd.detach()
    names = [f"agent{k}" for k in range(K)]
    tensors = [{n: t.clone() for n, t in files[f"{name}/adapter_model"].items()} for name in names]
    return [Adapter(files[f"{name}/adapter_config"], own) for name, own in zip(names, tensors, strict=True)]


def deltas(adapter: Adapter) -> dict[str, Tensor]:
    """What the adapter adds to the weight of each module."""
    config, names = adapter.config, adapter.modules
    scale = config["lora_alpha"] / (adapter.rank**0.5 if config["use_rslora"] else adapter.rank)
    pairs = ([adapter.tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "BA"] for name in names)
    return {name: scale * b @ a for name, (b, a) in zip(names, pairs, strict=True)}


def mean_of(agents: Sequence[Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    each = [deltas(agent) for agent in agents]
    return {name: sum(w * one[name] for w, one in zip(weights, each, strict=True)) for name in each[0]}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], delta, rtol=tolerance, atol=tolerance)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("use_rslora", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("weights", [None, (1, 2, 5)], ids=["alike", "weighted"])
def test_cat_is_exactly_the_mean_of_the_products(dtype: Any, tolerance: float, use_rslora: bool, weights: Any) -> None:
    model = base(dtype=dtype)
    agents = agents_on(model, use_rslora=use_rslora)
    found = merged(model, agents, merge_of("cat", weights))
    assert (found.rank, found.config["lora_alpha"], found.config["use_rslora"]) == (K * R, K * R, False)
    shares = [w / sum(weights) for w in weights] if weights else [1 / K] * K
    assert_same(deltas(found), mean_of(agents, shares), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_svd_is_the_nearest_of_its_rank_as_pefts_is(family: str) -> None:
    model = base(family)
    targets = ("c_attn",) if family == "gpt2" else TARGETS
    agents = agents_on(model, target_modules=targets)
    exact = mean_of(agents, [1 / K] * K)
    for rank in (None, 2, 7):
        found = merged(model, agents, merge_of("svd", rank=rank))
        assert found.rank == (rank or R)
        for name, delta in deltas(found).items():
            u, s, vh = torch.linalg.svd(exact[name])
            wanted = u[:, : found.rank] * s[: found.rank] @ vh[: found.rank]
            torch.testing.assert_close(delta, wanted, rtol=1e-10, atol=1e-12)
    assert_same(deltas(merged(model, agents, merge_of("svd", rank=K * R))), exact, 1e-12)


@pytest.mark.slow
def test_agents_of_different_ranks_and_modules() -> None:
    model = base()
    one, other = (
        agents_on(model)[0],
        agents_on(model, rank=2, target_modules=("q_proj", "up_proj"), use_rslora=False)[1],
    )
    wanted = {name: delta / 2 for name, delta in deltas(one).items()}
    for name, delta in deltas(other).items():
        wanted[name] = wanted.get(name, 0) + delta / 2
    found = merged(model, [one, other], merge_of("cat"))
    assert found.rank == R + 2
    assert_same(deltas(found), wanted, 1e-12)
    assert_same(deltas(merged(model, [one, other], merge_of("svd", rank=R + 2))), wanted, 1e-12)
    with pytest.raises(BadInput, match="differ in rank or modules"):
        merged(model, [one, other], merge_of("mean"))


def test_merge_mean_averages_a_and_b() -> None:
    model = base()
    agents = agents_on(model)
    found = deltas(merged(model, agents, merge_of("mean", (1, 1, 2))))
    shares = (0.25, 0.25, 0.5)
    scale = 10.0 / R**0.5
    for name, delta in found.items():
        ends = (f"base_model.model.{name}.lora_{side}.weight" for side in "BA")
        b, a = (sum(w * agent.tensors[end] for w, agent in zip(shares, agents, strict=True)) for end in ends)
        torch.testing.assert_close(delta, scale * b @ a)


@pytest.mark.parametrize(("name", "combination"), [("cat", "cat"), ("mean", "linear")])
def test_merged_factors_equal_those_of_peft(name: str, combination: str) -> None:
    model = base()
    agents = agents_on(model, use_rslora=False)
    found = merged(model, agents, merge_of(name))
    peft_model: Any = PeftModel(model, LoraConfig.from_peft_type(**agents[0].config), adapter_name="agent0")
    for k, agent in enumerate(agents):
        if k:
            peft_model.add_adapter(f"agent{k}", LoraConfig.from_peft_type(**agent.config))
        set_peft_model_state_dict(peft_model, dict(agent.tensors), adapter_name=f"agent{k}")
    weight = 1 / K if name == "cat" else 1 / K**2  # PEFT puts the root of a weight on each factor
    names = [f"agent{k}" for k in range(K)]
    peft_model.add_weighted_adapter(names, [weight] * K, "merged", combination_type=combination)
    wanted = get_peft_model_state_dict(peft_model, adapter_name="merged", save_embedding_layers=False)
    # PEFT rounds the weights of `linear` to fp32, even for fp64 adapters.
    assert_same({**found.tensors}, wanted, 1e-15 if name == "cat" else 1e-6)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", METHODS)
def test_every_merge_of_equal_agents_is_that_agent(name: str) -> None:
    """PEFT's own weights of 1/K make `linear` K times too large."""
    model = base()
    agents = agents_on(model, alike=True)
    assert_same(deltas(merged(model, agents, merge_of(name))), deltas(agents[0]), 1e-6)


def test_a_crowd_gives_its_base_back_with_the_same_bits() -> None:
    model = base()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        crowd = Crowd(model, LoraSettings(2, rank=2, target_modules=TARGETS), "toy")
        assert crowd.detach() is model
        assert torch.equal(model(input_ids=ids).logits, before)


def test_agents_are_merged_into_the_base() -> None:
    model = base()
    agents = agents_on(model)
    weights = {name: model.get_submodule(name).weight.clone() for name in agents[0].modules}
    whole = merge_into_base(model, merged(model, agents, merge_of("cat")))
    for name, delta in mean_of(agents, [1 / K] * K).items():
        torch.testing.assert_close(whole.get_submodule(name).weight, weights[name] + delta, rtol=1e-12, atol=1e-12)
