"""Bytes that a pass keeps for the backward pass: counted, so that the figures are the same on every machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci_llm.crowd.crowd import Crowd
from ci_llm.lora.settings import LoraSettings
from tools.testbed.tiny import base, batch

K, RANK = 3, 2


def crowd_of(layers: int, dtype: torch.dtype = torch.float32) -> Crowd:
    model = base(dtype=torch.float32, layers=layers).to(dtype)
    return Crowd(model, LoraSettings(num_agents=K, rank=RANK), "toy").train()


def saved_bytes(crowd: Crowd, *, autocast: bool = False) -> int:
    """The bytes of all storages that one pass saves, without those of the base and the agents."""
    owned = {p.untyped_storage()._cdata for p in [*crowd.parameters(), *crowd.buffers()]}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            found[storage._cdata] = tensor
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = crowd(batch()).loss
    total = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    loss.backward()
    return total


def per_layer(dtype: torch.dtype = torch.float32, *, checkpointing: bool = False, autocast: bool = False) -> float:
    """The bytes of one more layer, per token and agent."""
    totals = []
    for layers in (2, 4):
        crowd = crowd_of(layers, dtype)
        if checkpointing:
            crowd.gradient_checkpointing_enable()
        totals.append(saved_bytes(crowd, autocast=autocast))
    return (totals[1] - totals[0]) / 2 / batch().num_tokens / K


#: Bytes per layer, token and agent, at hidden width 32 and feed-forward width 48.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("dtype", "autocast", "checkpointing", "kept"),
    [
        (torch.float32, False, False, 2144),
        (torch.float32, True, False, 1241.12),
        (torch.bfloat16, True, False, 1241.12),
        (torch.bfloat16, False, False, 1241.12),
        (torch.float32, False, True, 128),  # the input of the layer: 32 numbers
        (torch.float32, True, True, 128),
        (torch.bfloat16, True, True, 64),
    ],
)
def test_what_a_layer_keeps_for_the_backward_pass(
    dtype: torch.dtype, autocast: bool, checkpointing: bool, kept: float
) -> None:
    assert per_layer(dtype, checkpointing=checkpointing, autocast=autocast) == pytest.approx(kept)


def test_autocast_keeps_no_copy_of_the_base() -> None:
    crowd = crowd_of(2)
    weights = {tuple(p.shape) for p in crowd.model.parameters() if p.dim() == 2 and not p.requires_grad}
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            kept.append(tuple(tensor.shape))
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", torch.bfloat16):
        crowd(batch())
    assert kept
    assert not weights & {*kept}
