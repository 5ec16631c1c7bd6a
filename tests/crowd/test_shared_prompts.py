"""What the answers of a pair begin with is computed once, and losses and gradients are those of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import Preferences
from ci_llm.data.batches import Batch, pack, without_repeats
from ci_llm.data.units import Unit, unit_of
from ci_llm.lora import attention
from ci_llm.lora.attention import Segments, packed_attention
from ci_llm.lora.settings import LoraSettings
from ci_llm.objectives import objective_of
from tests.crowd import test_heads
from tests.crowd.test_preferences import K, crowd_of, example, step_of
from tests.support.micro_steps import owned

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVES: Final = ("dpo", "orpo", "simpo", "reward", "kto")


def drawn(count: int, seed: int) -> list[int]:
    return torch.randint(3, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pairs(learn_prompt: bool = False) -> list[Unit]:
    """Prompts of 3 (too few to share) to 19 tokens; some answers begin alike, and one is the beginning of the other."""
    found = []
    for n, (prompt, alike) in enumerate(((8, 0), (3, 1), (13, 3), (19, 2))):
        begin, own = drawn(prompt, n), drawn(alike, 10 + n)
        branches = [example(begin, own + drawn(3 + n, 20 + n)), example(begin, own + drawn(9 - 2 * n, 30 + n))]
        found.append(unit_of(branches, learn_prompt=learn_prompt))
    begin, own = drawn(11, 5), drawn(6, 15)
    return [*found, unit_of([example(begin, own), example(begin, own[:2])], learn_prompt=learn_prompt)]


def step(crowd: Crowd, name: str, units: Sequence[Unit], cuts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, gradients and metrics of a step in micro-batches that end at these units."""
    shares, kl = (len(units) / sum(unit.num_learned for unit in units),) * K, torch.full((K, 1), 0.1).double()
    objective = Preferences(objective_of(name, [Config(objective=name)] * K), crowd, nll_shares=shares, kl=kl)
    return step_of(crowd, objective, [pack(units[a:b], range(a, b)) for a, b in pairwise((0, *cuts))])


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("pass_per_agent", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_whole_rows(name: str, pass_per_agent: bool) -> None:
    heads = test_heads.crowd_of(1, torch.float64) if name == "reward" else crowd_of(torch.float64)
    heads.storage.pass_per_agent = pass_per_agent
    units = pairs(learn_prompt=name == "orpo")
    if name == "kto":  # its rows have one answer each, and nothing is shared
        units = [unit_of(unit.branches[:1], n % 2) for n, unit in enumerate(units)]
    wanted = step(heads, name, units, (5,))
    heads.base_model.shares_prompts = True
    for cuts in ((5,), (2, 5), (1, 2, 3, 4, 5)):
        found = step(heads, name, units, cuts)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert float(wanted[1].abs().max()) > 1e-3


def test_only_the_common_beginning_of_answers_is_computed_once() -> None:
    units = pairs()
    batch = pack(units, range(5))
    assert batch.shared == (0, 8, 0, 0, 0, 16, 0, 21, 0, 12)
    kept, places, bounds, before = without_repeats(batch)
    assert batch.num_tokens - len(kept) == sum(batch.shared) == batch.num_tokens - bounds[-1]
    assert torch.equal(batch.input_ids[kept][places], batch.input_ids)
    assert torch.equal(batch.position_ids[kept][places], batch.position_ids)
    assert before == (0, 1, 2, 0, 0, *(0, 1, 2) * 3)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("pass_per_agent", [False, True])
def test_agents_with_rows_of_their_own_share_as_well(pass_per_agent: bool) -> None:
    crowd, units = crowd_of(torch.float64), pairs()
    crowd.storage.pass_per_agent = pass_per_agent
    rows = owned((pack(units[:2], range(2)), pack(units[2:], range(3))))
    objective = Preferences(objective_of("dpo", [Config(objective="dpo")] * K), crowd)
    found = []
    for crowd.base_model.shares_prompts in (False, True):
        found.append(step_of(crowd, objective, [rows]))  # type: ignore[list-item]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_fewer_tokens_go_through_the_base() -> None:
    crowd, batch, seen = crowd_of(torch.float32), pack(pairs(), range(5)), list[int]()
    layer = next(iter(crowd.storage.layers.values()))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))
    with torch.no_grad():
        for crowd.base_model.shares_prompts in (False, True):
            crowd(batch)
        with crowd.base_model.plain():  # what is evaluated has the bits of a saved crowd
            crowd(batch)
    assert seen == [batch.num_tokens, batch.num_tokens - sum(batch.shared), batch.num_tokens]


# ------------------------------------------------------------------------------------------- attention alone

LENGTHS: Final = (30, 7, 18, 25, 340, 12)
BEFORE: Final = (0, 1, 2, 0, 0, 1)


def rows_by_kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_read: Tensor, *_: int, **how: Any) -> Tensor:
    """`varlen_attn` as it is documented: the last query of a row stands at its last key."""
    parts, left = [], how["window_size"][0]
    for (a, b), (c, d) in zip(pairwise(ends.tolist()), pairwise(ends_read.tolist()), strict=True):
        distance = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        seen = (distance >= 0) & ((distance <= left) | torch.tensor(left < 0))
        own = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        more = {"enable_gqa": how.get("enable_gqa", False), "scale": how["scale"]}
        parts.append(torch.nn.functional.scaled_dot_product_attention(*own, seen, **more).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 5, 33])
@pytest.mark.parametrize("way", ["rows", "units", "explicit", "softcap", "varlen"])
def test_a_branch_attends_to_its_prompt_and_to_itself(
    way: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.varlen, "varlen_attn", rows_by_kernel)
    monkeypatch.setattr(attention, "HALVES", (torch.float64,))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, sum(LENGTHS), 8, generator=draw).double() for heads in (4, 2, 2))
    more: dict[str, dict[str, Any]] = {"softcap": {"way": "rows", "softcap": 2.0}, "units": {"way": "rows"}}
    how = more.get(way, {"way": way})

    def attend(places: Tensor, bounds: Sequence[int], before: Sequence[int] = ()) -> Tensor:
        own = (x[:, :, places] for x in (q, k, v))
        segments = Segments(bounds, before, fast=way == "units")
        out, _ = packed_attention(torch.nn.Identity(), *own, None, sliding_window=window, segments=segments, **how)
        return out

    ends = [0, *accumulate(LENGTHS)]
    spans = [torch.arange(*span) for span in pairwise(ends)]
    found = attend(torch.arange(ends[-1]), ends, BEFORE).split(LENGTHS, dim=1)
    for row, back in enumerate(BEFORE):
        whole = torch.cat([*([spans[row - back]] if back else []), spans[row]])
        wanted = attend(whole, (0, len(whole)))[:, -LENGTHS[row] :]
        torch.testing.assert_close(found[row], wanted, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------- which bases do


def tiny(kind: str, **more: Any) -> Crowd:
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 200, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **more})).double()
    return Crowd(model, LoraSettings(num_agents=K, rank=4), kind)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 6}),
        ("gpt2", {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "eos_token_id": 2, "bos_token_id": 1}),
    ],
)
def test_families_with_windows_soft_caps_and_learned_positions_share(kind: str, more: dict[str, Any]) -> None:
    crowd = tiny(kind, **more)
    assert crowd.base_model.choose_route() is None
    assert crowd.base_model.share_prompts() is None
    crowd.train()
    found = []
    for crowd.base_model.shares_prompts in (False, True):
        found.append(step(crowd, "dpo", pairs(), (5,)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # their norms are in fp32


def without_prompts(self: Segments, parts: Sequence[Tensor]) -> list[Tensor]:
    prompts = (
        torch.zeros_like(parts[row - back]) if back else own[:, :, :0]
        for row, (back, own) in enumerate(zip(self.before, parts, strict=True))
    )
    return [torch.cat(each, 2) for each in zip(prompts, parts, strict=True)]


def refusing(self: Segments, parts: Sequence[Tensor]) -> list[Tensor]:
    if any(self.before):
        raise TypeError("no prompts here")
    return [*parts]


@pytest.mark.parametrize(
    ("broken", "why"), [(without_prompts, "changes states by"), (refusing, "TypeError: no prompts")]
)
def test_a_base_that_computes_something_else_keeps_whole_rows(
    broken: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = crowd_of(torch.float32)
    before = crowd.storage.weights.clone()
    monkeypatch.setattr(Segments, "with_prompts", broken)
    assert why in (crowd.base_model.share_prompts() or "")
    assert not crowd.base_model.shares_prompts
    assert torch.equal(crowd.storage.weights, before)
    monkeypatch.undo()
    crowd.base_model.route = "padded"
    assert crowd.base_model.share_prompts() == "rows are padded"
    crowd.base_model.route = "packed"
    assert crowd.base_model.share_prompts() is None
    assert crowd.base_model.shares_prompts


def test_padded_rows_are_computed_whole() -> None:
    crowd: Crowd = crowd_of(torch.float64)
    batch: Batch = pack(pairs(), range(5))
    with torch.no_grad():
        wanted = crowd(batch).log_probs
        crowd.base_model.shares_prompts, crowd.base_model.route = True, "padded"
        torch.testing.assert_close(crowd(batch).log_probs, wanted, rtol=0, atol=1e-6)
