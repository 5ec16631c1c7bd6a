"""A crowd that changes: removed agents free their storage, and the others keep their bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch
from ci_llm.lora.settings import LoraSettings
from tests.support.micro_steps import micro_step
from tools.testbed.tiny import base, batch

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: Final = {"rank": 2, "seed": 1}
LARGE: Final = {"rank": 16, "seed": 2, "dropconnect": 0.2}
FEW_LAYERS: Final = {"rank": 4, "target_modules": ("q_proj", "v_proj"), "seed": 3, "dropout": 0.3}
ROWS: Final = (8, 15, 22)


def crowd_of(entries: Sequence[dict[str, Any]], dtype: torch.dtype) -> Crowd:
    crowd = Crowd(base("llama", dtype), LoraSettings(agents=tuple(entries)), "toy")
    return crowd.train()


def move(crowd: Crowd, step: int, rows: Batch) -> None:
    """A step of plain gradient descent, clipped."""
    crowd.storage.begin_step(step)
    micro_step(crowd, NextToken(), rows, step)
    crowd.storage.clip([0.5] * crowd.num_agents)
    for row in crowd.storage.rows:
        assert row.grad is not None
        row.data.sub_(row.grad)


def keep(crowd: Crowd, entries: Sequence[dict[str, Any]], kept: Sequence[int]) -> None:
    crowd.keep_agents(LoraSettings(agents=tuple(entries)), kept, [f"agent{place}" for place in kept])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_agents_that_stay_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    together, rows = crowd_of([SMALL, LARGE, FEW_LAYERS], dtype), batch(ROWS)
    alone = [crowd_of([entry], dtype) for entry in (SMALL, FEW_LAYERS)]
    for crowd in (together, *alone):
        crowd.storage.pass_per_agent = True  # what gives an agent the bits that it has alone, on every processor
    for step in range(4):
        if step == 2:
            keep(together, [SMALL, FEW_LAYERS], [0, 2])
        for crowd in (together, *alone):
            move(crowd, step, rows)
    for row, single in zip(together.storage.rows, alone, strict=True):
        assert torch.equal(row, single.storage.rows[0])


def test_a_removed_agent_takes_no_memory() -> None:
    bare, rows = base("llama", torch.float32), batch(ROWS)
    crowd = crowd_of([SMALL, LARGE, SMALL | {"seed": 4}], torch.float32)
    before = crowd.storage.weights.nbytes
    widths: list[int] = []
    next(iter(crowd.storage.layers.values())).register_forward_hook(lambda *args: widths.append(args[1][0].shape[0]))
    crowd(rows)
    keep(crowd, [SMALL, SMALL | {"seed": 4}], [0, 2])
    crowd(rows)
    keep(crowd, [SMALL], [0])
    crowd(rows)
    assert widths == [3, 2, 1]  # the base computes the rows of so many agents
    assert crowd.storage.weights.shape == (1, crowd.storage.sizes[0])  # the padding for the large one is gone
    assert crowd.storage.weights.nbytes * 3 * 8 == before
    assert sum(each.numel() for each in crowd.parameters() if each.requires_grad) == crowd.storage.sizes[0]
    assert sum(each.numel() for each in crowd.parameters()) == bare.num_parameters() + crowd.storage.sizes[0]
