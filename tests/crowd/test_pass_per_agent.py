"""A pass per agent: an agent has the bits that it has alone, for every width, dtype, number of threads and place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch
from ci_llm.errors import BadInput
from ci_llm.lora.settings import LoraSettings
from tests.support.campaign import every_pair, sampled
from tests.support.micro_steps import micro_step
from tests.support.trained_agents import differences, train
from tools.testbed.tiny import VOCABULARY, base, batch

#: Three agents that share neither rank nor what is drawn for them; each stands in the place of its number.
AGENTS: Final[Sequence[dict[str, Any]]] = (
    {"seed": 5, "rank": 4, "dropout": 0.1},
    {"seed": 6, "rank": 8},
    {"seed": 7, "rank": 5, "dropconnect": 0.1},
)
#: Rows of three steps, for each agent; no number of tokens is a multiple of 4, 16 or 32.
MANY: Final = (
    (batch((31, 57, 45)), batch((101, 5)), batch((63,))),
    (batch((18, 101)), batch((333,)), batch((40, 41, 42))),
    (batch((90, 91)), batch((25,)), batch((77, 3, 7))),
)
FEW: Final = (
    (batch((2,), 1), batch((3, 2), 1), batch((7,), 1)),
    (batch((5,), 1), batch((2,), 1), batch((3,), 1)),
    (batch((3, 3), 1), batch((9,), 1), batch((2,), 1)),
)


@dataclass(frozen=True)
class Cell:
    """One combination of settings for which the bits must be equal."""

    dtype: torch.dtype
    threads: int
    width: int
    own_rows: bool
    few: bool
    place: int
    fast: bool

    def __str__(self) -> str:
        rows = ("few " if self.few else "many ") + ("rows of its own" if self.own_rows else "rows of all")
        how = "fast" if self.fast else "plain"
        return f"{str(self.dtype)[6:]}, {self.threads} threads, {how}, width {self.width}, {rows}, agent {self.place}"


CELLS: Final = [
    Cell(*corner)
    for corner in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64),
        (1, 2, 3),
        (128, 344, 768, 2048),
        (False, True),
        (False, True),
        (0, 1, 2),
        (False, True),
    )
]
#: Seconds of a cell of many rows at width 128, where a processor does not multiply bf16.
SECONDS: Final = {torch.float32: 0.1, torch.float64: 0.2, torch.bfloat16: 2.0}


def cost(cell: Cell) -> float:
    return SECONDS[cell.dtype] * (cell.width / 128) ** 2 / (20 if cell.few else 1)


#: Every two values meet among all that is cheap.
SAMPLE: Final = every_pair([cell for cell in CELLS if cost(cell) < 2])


@cache
def llama(width: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Two layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 5 // 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 8 * 2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=1)  # three cells in a row have the same crowd
def trained(crowd: Cell) -> list[dict[str, Tensor]]:
    rows = FEW if crowd.few else MANY
    steps = [[each] for each in (zip(*rows, strict=True) if crowd.own_rows else rows[0])]
    return train(llama(crowd.width, crowd.dtype), AGENTS, steps, fast=crowd.fast)


@pytest.mark.slow
@pytest.mark.parametrize("cell", sampled(CELLS, SAMPLE), ids=str)
def test_an_agent_has_the_bits_that_it_has_alone(cell: Cell) -> None:
    torch.set_num_threads(cell.threads)
    rows = (FEW if cell.few else MANY)[cell.place if cell.own_rows else 0]
    (alone,) = train(llama(cell.width, cell.dtype), [AGENTS[cell.place]], [[each] for each in rows], fast=cell.fast)
    assert differences(trained(replace(cell, place=0))[cell.place], alone) == []


@pytest.mark.slow
def test_the_losses_gradients_and_gap_are_those_of_one_pass() -> None:
    model, rows = base("phi"), MANY[0]
    together, apart = (
        train(model, AGENTS[1:2] * 2, [[each] for each in rows], pass_per_agent=own) for own in (False, True)
    )
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    gaps = []
    for each in (False, True):
        crowd = Crowd(copy.deepcopy(model), LoraSettings(num_agents=3, rank=4), "toy").train()
        crowd.storage.weights.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
        crowd.storage.pass_per_agent = each
        crowd.storage.begin_step(0)
        gaps.append(float(micro_step(crowd, NextToken(), rows[0], 0).diversity))
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-9)
    assert gaps[0] > 0


def test_agents_without_settings_of_their_own_draw_what_they_draw_alone() -> None:
    """The first agent of a crowd has the seed and the number of one that is alone."""
    kind = {"num_agents": 1, "rank": 4, "dropout": 0.3, "dropconnect": 0.2}
    found = []
    for count in (1, 3):
        crowd = Crowd(base(dtype=torch.float32), LoraSettings(**{**kind, "num_agents": count}), "toy").train()
        crowd.storage.pass_per_agent = True
        crowd.storage.begin_step(0)
        micro_step(crowd, NextToken(), MANY[0][0], 0)
        found.append(crowd.storage.gradients[0].clone())
    assert torch.equal(*found)
    assert found[0].any()


def test_states_without_gradients_are_those_that_an_agent_has_alone() -> None:
    model, rows = llama(344, torch.float32), MANY[0][0]
    crowd = Crowd(copy.deepcopy(model), LoraSettings(agents=tuple(AGENTS)), "toy").eval()
    crowd.storage.weights.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    crowd.storage.pass_per_agent = True
    with torch.no_grad():
        together = crowd.states(rows)
        for k, own in enumerate(AGENTS):
            alone = Crowd(copy.deepcopy(model), LoraSettings(agents=(own,)), "toy").eval()
            alone.agents[0].load_state_dict(crowd.agents[k].state_dict(), "here")
            assert torch.equal(alone.states(rows)[0], together[k])


def test_a_form_with_gradients_through_all_agents_is_refused() -> None:
    crowd = Crowd(base(), LoraSettings(num_agents=2, rank=4), "toy").train()
    crowd.storage.pass_per_agent = True
    with pytest.raises(BadInput, match="diversity swd has gradients through all agents"):
        micro_step(crowd, NextToken("swd", 0.1), MANY[0][0], 0)


def test_a_pass_that_fails_leaves_the_crowd_as_it_was() -> None:
    crowd = Crowd(base(), LoraSettings(num_agents=2, rank=4), "toy").train()
    crowd.storage.pass_per_agent = True
    rows: Batch = MANY[0][0]
    seen = []
    crowd.model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(crowd.storage.reading.agents))

    def fail() -> None:
        for part in crowd.passes_of(crowd.for_all(rows)):
            crowd(part)
            if len(seen) == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [(0,), (1,)]
    assert (crowd.storage.reading.agents, crowd._shared) == ((0, 1), None)
