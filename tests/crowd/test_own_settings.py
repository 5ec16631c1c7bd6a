"""Agents with settings of their own: a sick one changes no other, and each is the adapter that PEFT would train."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken, bootstrap_weights
from ci_llm.data.batches import Batch, pack
from ci_llm.lora.settings import LoraSettings
from tests.support.trained_agents import differences, train
from tools.testbed.tiny import base, batch

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: Final = {"rank": 3, "alpha": 5, "use_rslora": True, "seed": 1}  # a scaling that no product keeps exact
LARGE: Final = {"rank": 16, "alpha": 16, "seed": 2}
ATTENTION: Final = {"rank": 4, "target_modules": ("q_proj", "v_proj"), "seed": 3}
MLP: Final = {"rank": 4, "target_modules": ("up_proj", "down_proj"), "seed": 4}
DROPPING: Final = {"rank": 4, "dropout": 0.3, "dropconnect": 0.2, "seed": 5}
EVERY_KIND: Final = (SMALL, LARGE, ATTENTION, MLP, DROPPING)
ROWS: Final = [[batch((8 + n, 15, 22 - 2 * n))] for n in range(3)]

# In company


@pytest.mark.slow
def test_a_nonfinite_agent_changes_no_bit_of_another() -> None:
    model = base("llama", torch.float32)
    (alone,) = train(model, [SMALL], ROWS)
    entries = [LARGE, SMALL, ATTENTION]
    found = train(model, entries, ROWS, sick=0)
    assert not differences(alone, found[1])
    assert found[0]["loss 0"].isnan()


# Equal to PEFT


@pytest.mark.slow
def test_each_agent_is_exported_with_its_own_rank_and_targets(tmp_path: Path) -> None:
    model = base(dtype=torch.float32)
    crowd = Crowd(copy.deepcopy(model), LoraSettings(agents=(SMALL, ATTENTION, LARGE)), "toy").eval()
    crowd.base_model.choose_route()
    with torch.no_grad():
        for k, row in enumerate(crowd.storage.rows):
            row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(k)) * 0.1)
        ours = crowd.head.logits(crowd.states(packed := batch((12,))))
    crowd.save_pretrained(tmp_path / "crowd")
    for k, settings in enumerate(agent.settings for agent in crowd.agents):
        folder = tmp_path / f"crowd/agent{k}"
        config = peft.LoraConfig.from_pretrained(folder)
        assert (config.r, config.lora_alpha, config.use_rslora) == (settings.rank, settings.alpha, settings.use_rslora)
        tensors = load_file(folder / "adapter_model.safetensors")
        assert all(settings.rank in tensor.shape for tensor in tensors.values())
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
        with torch.no_grad():
            theirs = opened(input_ids=packed.input_ids[None]).logits[0]
            with crowd.base_model.active_agent(k) as alone:
                here = alone(input_ids=packed.input_ids[None]).logits[0]
        torch.testing.assert_close(ours[k], theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(here, theirs, rtol=1e-5, atol=1e-5)


# The storage


def test_an_agent_with_its_own_seed_starts_as_the_first_agent_of_that_seed() -> None:
    alone = Crowd(base(), LoraSettings(num_agents=1, rank=4, seed=7), "toy").storage.weights[0]
    among = Crowd(base(), LoraSettings(rank=4, agents=({}, {"seed": 7})), "toy").storage.weights
    common = Crowd(base(), LoraSettings(num_agents=2, rank=4), "toy").storage.weights
    assert torch.equal(alone, among[1])
    assert torch.equal(common[0], among[0])


def test_activation_checkpointing_draws_the_same_dropout_again() -> None:
    def gradient(checkpointing: bool) -> Tensor:
        crowd = Crowd(base(), LoraSettings(agents=(DROPPING, SMALL)), "toy").train()
        with torch.no_grad():
            crowd.storage.weights.copy_(
                torch.randn(crowd.storage.weights.shape, generator=torch.Generator().manual_seed(0))
            )
        if checkpointing:
            crowd.gradient_checkpointing_enable()
        crowd.storage.begin_step(1)
        crowd.storage.begin_micro_step(1, 0, 0)
        crowd(batch()).loss.backward()
        return crowd.storage.gradients

    assert torch.equal(gradient(False), gradient(True))


# Row weights


def test_bootstrap_weights_are_exponential_and_belong_to_agent_and_row() -> None:
    weights = bootstrap_weights([(1, 0), None, (1, 1)], range(4000))
    assert torch.equal(weights[1], torch.ones(4000, dtype=torch.float64))
    for drawn in (weights[0], weights[2]):
        assert drawn.min() >= 0
        assert drawn.mean().item() == pytest.approx(1.0, abs=0.06)
        assert (drawn > 1).double().mean().item() == pytest.approx(math.exp(-1), abs=0.03)
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(weights[:, [7, 3]], bootstrap_weights([(1, 0), None, (1, 1)], [7, 3]))


def test_row_weights_scale_the_gradient_of_their_agent_alone() -> None:
    model, packed = base(), batch((9, 17))

    def gradients(objective: NextToken, rows: Batch) -> Tensor:
        crowd = Crowd(copy.deepcopy(model), LoraSettings(num_agents=2, rank=4), "toy").train()
        crowd.storage.begin_step(0)
        loss = objective(crowd(rows), 0)
        assert torch.equal(loss.task, NextToken()(crowd(rows), 0).task)
        loss.total.backward()
        return crowd.storage.gradients

    found = gradients(NextToken(bootstrap=(None, (5, 0))), packed)
    assert torch.equal(found[0], gradients(NextToken(), packed)[0])
    parts = [gradients(NextToken(), batch_of_one(packed, row))[1] for row in range(2)]
    weights = bootstrap_weights([(5, 0)], packed.sample_ids)[0]
    wanted = weights[0] * parts[0] + weights[1] * parts[1]
    assert (found[1] - wanted).norm() < 1e-6 * wanted.norm()  # Llama's norms compute in fp32


def batch_of_one(packed: Batch, row: int) -> Batch:
    start, end = packed.bounds[row : row + 2]
    supervised = torch.zeros(end - start, dtype=torch.bool)
    supervised[packed.predict_from[packed.target_rows == row] + 1 - start] = True
    return pack(
        [SimpleNamespace(input_ids=packed.input_ids[start:end].numpy(), supervised=supervised.numpy())],
        [packed.sample_ids[row]],
    )
