"""Agents with rows of their own, or with common ones: each has the bits that it has alone, and is what PEFT trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.errors import ModelError
from ci_llm.lora.settings import LoraSettings
from tests.crowd.test_own_settings import ATTENTION, DROPPING, EVERY_KIND, LARGE, MLP, SMALL
from tests.support.campaign import sampled
from tests.support.peft_twins import assert_weights_equal, exported_twin, peft_loss
from tests.support.trained_agents import crowd_of, differences, train
from tools.testbed.tiny import base, batch

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES: Final = sampled((torch.float32, torch.float64), (torch.float32,))
NAMES: Final = ("small", "large", "attention", "mlp", "dropping")
#: Rows of three steps; an agent without a row in a micro-step sits it out.
STEPS: Final = 3
SHORT: Final = (batch((7,)), batch((9, 5)), batch((6, 4, 3)))
LONG: Final = (batch((8, 15, 22)), batch((31,)), batch((12, 13)))
OTHER: Final = (batch((11, 10)), batch((3, 17)), batch((19,)))


def together(*rows: Sequence[Batch | None]) -> list[list[list[Batch | None]]]:
    """Steps of one micro-step each, from the rows of every agent."""
    return [[[own[step] for own in rows]] for step in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", sampled(EVERY_KIND, EVERY_KIND[::4]), ids=NAMES)
def test_an_agent_has_the_same_bits_alone_and_in_a_crowd(own: dict[str, Any], dtype: torch.dtype) -> None:
    model = base("llama", dtype)
    (alone,) = train(model, [own], together(LONG))
    others = [{**kind, "seed": 70 + n} for n, kind in enumerate(EVERY_KIND)]
    companies = {
        "three of its kind": (
            1,
            [own | {"seed": 90}, own, own | {"seed": 91}, own | {"seed": 92}],
            (SHORT, LONG, OTHER, LONG),
        ),
        "other kinds": (3, [*others[:3], own], (SHORT, OTHER, SHORT, LONG)),
        "eight": (0, [own, *others, *others[:2]], (LONG, SHORT, OTHER, OTHER, LONG, SHORT, LONG, SHORT)),
    }
    for name, (place, entries, rows) in companies.items():
        assert not differences(alone, train(model, entries, together(*rows))[place]), name
        common = train(model, entries, [[each] for each in LONG])[place]
        assert not differences(alone, common), f"{name}, on common rows"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_ragged_pass_for_all_trains_the_same_agents(checkpointing: bool) -> None:
    model = base("phi")  # its norms compute in fp64
    entries, rows = [{**kind, "seed": 70 + n} for n, kind in enumerate(EVERY_KIND[:3])], (LONG, SHORT, OTHER)
    how: dict[str, Any] = {"bootstrap": [False, True, False], "checkpointing": checkpointing}
    apart, at_once = (train(model, entries, together(*rows), **how, pass_per_agent=each) for each in (True, False))
    for one, other in zip(apart, at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sampled(["gpt2", "qwen2", "gpt_neox", "gemma3"], ["gpt2", "gemma3"]))
def test_the_same_holds_in_other_families(family: str, dtype: torch.dtype) -> None:
    model = base(family, dtype)
    for own in (SMALL, DROPPING):
        (alone,) = train(model, [own], together(SHORT))
        found = train(model, [LARGE, ATTENTION | {"target_modules": "all-linear"}, own], together(LONG, OTHER, SHORT))
        assert not differences(alone, found[2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_holds_on_the_padded_route(dtype: torch.dtype) -> None:
    model = base("bloom", dtype)
    for own in (SMALL, DROPPING):
        (alone,) = train(model, [own], together(SHORT), route="padded")
        assert not differences(alone, train(model, [LARGE, own], together(LONG, SHORT), route="padded")[1])


@pytest.mark.slow
def test_agents_may_have_other_numbers_of_micro_steps_and_very_few_tokens() -> None:
    for dtype in (torch.float32, torch.float64):
        model, few = base("llama", dtype), batch((2,), 1)
        mine = [[[few], [SHORT[0]]], [[few]], [[SHORT[2]], [few]]]
        theirs = [[LONG[0]], [LONG[1], LONG[2]], [OTHER[0], OTHER[1], OTHER[2]]]
        ragged = [
            [
                [own[at][0] if at < len(own) else None, other[at] if at < len(other) else None]
                for at in range(max(len(own), len(other)))
            ]
            for own, other in zip(mine, theirs, strict=True)
        ]
        found = train(model, [SMALL, DROPPING], ragged)
        assert not differences(train(model, [SMALL], mine)[0], found[0])
        assert not differences(train(model, [DROPPING], [[[own] for own in step] for step in theirs])[0], found[1])


@pytest.mark.slow
def test_row_weights_and_recomputed_layers_change_no_bit_of_it() -> None:
    model = base("llama", torch.float32)
    entries, rows = [DROPPING, SMALL, LARGE], (LONG, SHORT, OTHER)
    for k, own in enumerate(entries):
        draws = [k == 1, k == 1, k == 1][:1]
        (alone,) = train(model, [own], together(rows[k]), bootstrap=draws)
        for checkpointing in (False, True):
            found = train(model, entries, together(*rows), bootstrap=[False, True, False], checkpointing=checkpointing)
            assert not differences(alone, found[k]), (k, checkpointing)


@pytest.mark.slow
def test_three_optimizer_steps_equal_peft_on_rows_of_each_agents_own() -> None:
    model = base("phi")  # its norms compute in fp64, those of Llama in fp32
    entries = [SMALL, LARGE, ATTENTION, MLP | {"target_modules": ("fc1", "fc2")}]
    rows = (LONG, SHORT, OTHER, SHORT)
    found = train(model, entries, together(*rows))
    crowd = crowd_of(model, entries)
    for k, settings in enumerate(agent.settings for agent in crowd.agents):
        twin = exported_twin(model, crowd, k)
        trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        rate = 1e-2 / settings.rank
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=rate)
        for own in rows[k]:
            optimizer.zero_grad()
            peft_loss(twin, own).backward()
            torch.nn.utils.clip_grad_norm_(trained, 0.5 * settings.rank)
            optimizer.step()
        assert_weights_equal(found[k], twin, crowd, k, atol=1e-12)


def test_a_layer_that_reads_other_tokens_is_refused() -> None:
    crowd = Crowd(base(), LoraSettings(num_agents=2, rank=4), "toy")
    layer = next(iter(crowd.storage.layers.values()))
    with (
        crowd.storage.reading.of((0, 1), (3, 6)),
        pytest.raises(ModelError, match="reads 4 rows of 9 tokens"),
    ):
        layer(torch.zeros(1, 4, layer.in_features, dtype=torch.float64))
    assert crowd.storage.reading.sizes is None
