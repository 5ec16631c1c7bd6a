"""The digest of a layer repeats, differs where any operation computes other bits, and changes nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ci_llm.core import determinism
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import MicroBatch
from ci_llm.lora.settings import LoraSettings
from ci_llm.run import exactness as module
from ci_llm.run.exactness import fixed_batch, layer_digest
from tests.support.campaign import drawn
from tests.support.micro_steps import micro_step
from tools.testbed.tiny import FAMILIES, base

LENGTHS = (9, 17, 5)
#: Layers of these cannot be taken one at a time, or they cannot have agents.
NO_DECODERS = {"bert"}


def crowd_on(family: str = "llama", layers: int | None = 3, **settings: Any) -> Crowd:
    crowd = Crowd(base(family, torch.float32, layers=layers), LoraSettings(num_agents=2, rank=2, **settings), "toy")
    crowd.base_model.choose_route()
    return crowd


def trains(crowd: Crowd) -> Callable[[list[MicroBatch]], Any]:
    """As `compute_gradients` of the loop does it."""

    def train(batches: list[MicroBatch]) -> Any:
        crowd.train()
        crowd.storage.begin_step(-1)
        determinism.seed_everything("a key")
        loss = micro_step(crowd, NextToken(), batches[0], -1)
        return SimpleNamespace(sums=loss.task)

    return train


def digest_of(crowd: Crowd, lengths: tuple[int, ...] = LENGTHS, *, own_rows: bool = False) -> str:
    return layer_digest(crowd, fixed_batch(crowd, lengths, own_rows=own_rows), trains(crowd))


def everything(crowd: Crowd) -> dict[str, Any]:
    """Everything that taking a digest must not change."""
    storage = crowd.storage
    return {
        "weights": storage.weights.clone(),
        "gradients": storage.gradients.clone(),
        "grads": [each.grad for each in (*storage.rows, *crowd.parameters())],
        "modes": [each.training for each in crowd.modules()],
        "modules": [name for name, _ in crowd.named_modules()],
        "hooks": sum(len(each._forward_hooks) for each in crowd.modules()),
        "micro-step": storage.dropout.micro_step,
        "generators": determinism.capture(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def tensors_alive() -> int:
    # By type: `isinstance` reads `__class__`, and torch's deprecated objects warn about that.
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_taking_a_digest_changes_nothing(training: bool) -> None:
    crowd = crowd_on(dropout=0.1)
    crowd.train(training)
    digest_of(crowd)  # the masks of a step have their memory from the first one on
    gc.collect()
    before, tensors = everything(crowd), tensors_alive()
    digest_of(crowd)
    gc.collect()
    assert tensors_alive() <= tensors + sum(isinstance(each, Tensor) for each in before.values())
    assert_same(before, everything(crowd))


def test_the_digest_does_not_depend_on_agents_or_generators() -> None:
    crowd = crowd_on(dropout=0.1, dropconnect=0.1)
    found = digest_of(crowd)
    crowd.storage.weights.normal_()
    torch.rand(7)
    assert digest_of(crowd) == found


CHANGES: dict[str, Callable[[Crowd], object]] = {
    "the numbers of a product": lambda crowd: nudge(crowd.get_submodule("model.model.layers.0.mlp.up_proj.base_layer")),
    "the numbers of a norm": lambda crowd: nudge(crowd.get_submodule("model.model.layers.0.input_layernorm")),
    "the numbers of the head": lambda crowd: nudge(crowd.model.get_output_embeddings()),
}


@torch.no_grad()
def nudge(layer: Any) -> None:
    """The last bits of all numbers. Those of a single one may round away, which depends on the processor."""
    layer.weight.mul_(1 + 2**-20)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("change", CHANGES)
def test_another_rounding_of_any_operation_changes_the_digest(change: str) -> None:
    crowd = crowd_on()
    found = digest_of(crowd)
    CHANGES[change](crowd)
    assert digest_of(crowd) != found


def test_another_rounding_in_the_backward_pass_alone_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = crowd_on()
    found = digest_of(crowd)
    backward = module.Crowd.forward

    def forward(self: Crowd, batch: Any) -> Any:
        outputs = backward(self, batch)
        outputs[0].states.register_hook(lambda grad: grad * (1 + 2**-20))
        return outputs

    monkeypatch.setattr(Crowd, "forward", forward)
    assert digest_of(crowd) != found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("family", drawn([name for name in FAMILIES if name not in NO_DECODERS], 5, seed=1))
def test_one_layer_of_every_family_runs_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = crowd_on(family, layers=None)

    def refuse(_: Any) -> Any:
        raise AssertionError("the whole base is taken")

    monkeypatch.setattr(module, "text_model", refuse)
    assert digest_of(crowd) == digest_of(crowd)


def test_the_digest_runs_only_the_first_layer_that_agents_adapt() -> None:
    crowd = Crowd(base(dtype=torch.float32, layers=3), LoraSettings(num_agents=2, rank=2, layers=(1, 2)), "toy")
    passed: list[int] = []
    for number, layer in enumerate(crowd.model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: passed.append(number))
    digest_of(crowd)
    assert passed == [1]


def test_a_base_whose_layers_cannot_be_run_alone_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = crowd_on()
    before = everything(crowd)

    def refuse(_: Crowd) -> Any:
        raise IndexError("layer 1 is not there")

    monkeypatch.setattr(module, "one_layer", refuse)
    found = digest_of(crowd)
    assert_same(before, everything(crowd))
    nudge(crowd.get_submodule("model.model.layers.2.mlp.up_proj.base_layer"))
    assert digest_of(crowd) != found
