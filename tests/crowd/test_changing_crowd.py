"""A crowd that changes: removed agents free their storage, the others keep their bits, and clones are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.data.batches import Batch
from ci_llm.lora.layer import LoraSettings
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
    crowd.agents.begin_step(step)
    crowd.agents.begin_micro_step(step, 0, 0)
    for part in crowd.parts(rows):
        with part.reading():
            Objective()(crowd(part.rows), part.rows, step, part.agent).total.backward()
    crowd.agents.clip([0.5] * crowd.num_agents)
    for row in crowd.agents.rows:
        assert row.grad is not None
        row.data.sub_(row.grad)


def become(crowd: Crowd, entries: Sequence[dict[str, Any]], sources: Sequence[int]) -> None:
    crowd.replace_agents(LoraSettings(agents=tuple(entries)), sources, [f"agent{source}" for source in sources])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_agents_that_stay_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    together, rows = crowd_of([SMALL, LARGE, FEW_LAYERS], dtype), batch(ROWS)
    alone = [crowd_of([entry], dtype) for entry in (SMALL, FEW_LAYERS)]
    for crowd in (together, *alone):
        crowd.agents.pass_per_agent = True  # what gives an agent the bits that it has alone, on every processor
    for step in range(4):
        if step == 2:
            become(together, [SMALL, FEW_LAYERS], [0, 2])
        for crowd in (together, *alone):
            move(crowd, step, rows)
    for row, single in zip(together.agents.rows, alone, strict=True):
        assert torch.equal(row, single.agents.rows[0])


def test_a_removed_agent_takes_no_memory() -> None:
    bare, rows = base("llama", torch.float32), batch(ROWS)
    crowd = crowd_of([SMALL, LARGE, SMALL | {"seed": 4}], torch.float32)
    before = crowd.agents.weights.nbytes
    widths: list[int] = []
    next(iter(crowd.agents.layers.values())).register_forward_hook(lambda *args: widths.append(args[1][0].shape[0]))
    crowd(rows)
    become(crowd, [SMALL, SMALL | {"seed": 4}], [0, 2])
    crowd(rows)
    become(crowd, [SMALL], [0])
    crowd(rows)
    assert widths == [3, 2, 1]  # the base computes the rows of so many agents
    assert crowd.agents.weights.shape == (1, crowd.agents.sizes[0])  # the padding for the large one is gone
    assert crowd.agents.weights.nbytes * 3 * 8 == before
    assert sum(each.numel() for each in crowd.parameters() if each.requires_grad) == crowd.agents.sizes[0]
    assert sum(each.numel() for each in crowd.parameters()) == bare.num_parameters() + crowd.agents.sizes[0]


def test_a_clone_starts_as_its_original_and_differs_with_its_own_seed() -> None:
    crowd, rows = crowd_of([LARGE], torch.float32), batch(ROWS)
    move(crowd, 0, rows)
    become(crowd, [LARGE, LARGE, LARGE | {"seed": 9}], [0, 0, 0])
    one, twin, other = crowd.agents.rows
    assert torch.equal(one, twin)
    assert torch.equal(one, other)
    move(crowd, 1, rows)
    assert torch.equal(one, twin)
    assert not torch.equal(one, other)
