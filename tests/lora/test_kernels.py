"""Fast kernels: each gives what plain code gives, in losses, gradients and where numbers are extreme."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ci_llm.crowd.crowd import Crowd
from ci_llm.lora import kernels, onednn, passes
from ci_llm.lora.kernels import PARTS, Rotation, SwiGlu, fast_chunk, is_fast, rotate
from ci_llm.lora.products import FusedLinear
from ci_llm.lora.settings import LoraSettings
from tests.support.campaign import drawn
from tests.support.crowds import bits_in_company
from tests.support.micro_steps import owned
from tools.testbed.tiny import base, batch

MODULES = dict.fromkeys(("norms", "rotation", "gate"))
#: How many modules of two layers each part takes, in a family.
TAKEN = {
    "llama": (5, 2, 2, 10),
    "qwen3": (9, 2, 2, 10),  # it norms queries and keys as well
    "mixtral": (5, 2, 0, 6),  # its gates are in its experts
    "gemma2": (9, 2, 0, 10),  # it gates by another function
    "gpt2": (0, 0, 0, 0),
}
#: Norms of Gemma weigh by 1 + w, which the trial of a run finds: tests/run/test_kernel_trials.py.
FITTING = [
    (family, part)
    for part in PARTS
    for family in TAKEN
    if part not in ("precision", "products", "attention") and (family, part) != ("gemma2", "norms")
]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def crowd_of(model: Any, parts: tuple[str, ...] = (), **settings: Any) -> Crowd:
    crowd = Crowd(model, LoraSettings(**{"num_agents": 3, "rank": 4, **settings}), "toy").train()
    with torch.no_grad():
        crowd.storage.weights.copy_(random(*crowd.storage.weights.shape) * 0.1)
    crowd.base_model.compute_fast(parts)
    return crowd


def learned(crowd: Crowd, rows: Any = None, agent: int | None = None) -> tuple[Tensor, Tensor]:
    """Loss and gradients of a step."""
    crowd.storage.begin_step(0)
    crowd.storage.begin_micro_step(0, 0, 0)
    torch.manual_seed(0)
    with crowd.base_model.read_by(agent):
        loss = sum(output.loss for output in crowd(crowd.for_all(batch()) if rows is None else rows))
        loss.backward()
    return loss.detach(), crowd.storage.gradients.clone()


def test_gates_and_rotations_pass_gradcheck() -> None:
    gate, up = random(2, 3, 5).requires_grad_(), random(2, 5, 3).mT.requires_grad_()
    assert torch.autograd.gradcheck(SwiGlu.apply, (gate, up))
    x, cos, sin = random(2, 7, 3, 4).transpose(1, 2).requires_grad_(), random(2, 1, 7, 4), random(1, 1, 7, 4)
    assert torch.autograd.gradcheck(lambda x: Rotation.apply(x, cos, sin), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_rotations_are_those_of_llama(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.requires_grad_(False).copy_(random(48).abs())
    fast, tolerance = copy.deepcopy(norm), {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    fast.forward = kernels._norm.__get__(fast)
    x, grad = random(3, 5, 48, dtype=dtype) * 3, random(3, 5, 48, dtype=dtype)
    torch.testing.assert_close(*(_with_gradient(each, x, grad) for each in (fast, norm)), **tolerance)
    q, k = random(2, 7, 4, 8, dtype=dtype).transpose(1, 2), random(2, 7, 2, 8, dtype=dtype).transpose(1, 2)
    cos, sin = random(1, 7, 4).repeat(1, 1, 2).to(dtype), random(1, 7, 4).sin().repeat(1, 1, 2).to(dtype)
    tolerance = tolerance or {"rtol": 2e-2, "atol": 2e-2}
    for own in (q, k):
        grad = random(*own.shape, dtype=dtype)
        found = _with_gradient(lambda x: rotate(x, k, cos, sin)[0], own, grad)
        wanted = _with_gradient(lambda x: apply_rotary_pos_emb(x, k, cos, sin)[0], own, grad)
        torch.testing.assert_close(found, wanted, **tolerance)


def _with_gradient(compute: Any, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = compute(x)
    (found,) = torch.autograd.grad(y, x, grad)
    return y.detach(), found


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_fast_head_has_the_gradient_of_its_log_probabilities(softcap: float | None) -> None:
    head = passes.Head(random(11, 6), random(11), 0.7, softcap)
    states, targets = random(2, 5, 6).requires_grad_(), torch.tensor([3, 0, 10, 3, 7])
    assert torch.autograd.gradcheck(lambda x: passes.target_log_probs(x, targets, head, fast_chunk), (states,))
    found, wanted = (passes.target_log_probs(states, targets, head, each) for each in (fast_chunk, passes.plain_chunk))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_fast_head_says_how_improbable_a_target_is_beyond_the_smallest_probability() -> None:
    head = passes.Head(torch.tensor([[400.0], [0.0], [-500.0]]), None)
    found = passes.target_log_probs(torch.ones(1, 3, 1), torch.tensor([0, 1, 2]), head, fast_chunk)
    assert found[0].tolist() == [0.0, -400.0, -900.0]


def test_the_fast_head_keeps_the_small_slope_of_a_sure_target_in_16_bits() -> None:
    """The target's probability, 0.9991, rounds to 1 in 16 bits."""
    weight = torch.tensor([[7.0, 1.0], [0.0, 0.5], [0.0, -0.5]])
    states = torch.tensor([[[1.1, 0.0]]])
    slopes = []
    for dtype in (torch.float64, torch.bfloat16):
        own = states.to(dtype).requires_grad_()
        passes.target_log_probs(
            own, torch.tensor([0]), passes.Head(weight.to(dtype), None), fast_chunk
        ).sum().backward()
        slopes.append(own.grad.double())  # type: ignore[union-attr]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0.05, atol=0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("family", "part"), drawn(FITTING, 9))
def test_a_family_learns_the_same_by_the_parts_that_fit_it(family: str, part: str) -> None:
    model = base(family, torch.float32)
    plain, fast = crowd_of(copy.deepcopy(model)), crowd_of(model, (part,))
    joined = sum(layer.joined is not None for layer in fast.storage.layers.values())
    taken = [sum(is_fast(m, forward) for m in model.modules()) for forward in kernels._FORWARDS.values()]
    wanted = [n if name == part else 0 for name, n in zip((*MODULES, "joined"), TAKEN[family], strict=True)]
    assert [*taken, joined] == wanted
    found, same = learned(fast), learned(plain)
    torch.testing.assert_close(found, same, rtol=1e-4, atol=1e-5)
    rounds_otherwise = part == "head" or (any(wanted) and part != "gate")
    assert torch.equal(found[1], same[1]) is not rounds_otherwise


class ByOneDnn(TorchDispatchMode):
    """Counts the products that oneDNN computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parts", [("products",), ("products", "joined")])
def test_frozen_weights_teach_the_same_by_onednn(parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "onednn_is_faster", lambda: True)
    fast, plain = (crowd_of(base("qwen2", torch.float32), own) for own in (parts, ()))  # q, k and v have a bias
    with ByOneDnn() as asked:
        found = learned(fast)
    torch.testing.assert_close(found, learned(plain), rtol=1e-4, atol=1e-5)
    assert asked.count == 14 + 11  # both ways through two layers, but not back through the first q, k and v
    with ByOneDnn() as asked, torch.no_grad():
        fast(batch())
    assert asked.count == 0  # an evaluation keeps its bits


def test_onednn_is_taken_by_kind_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, units, wanted in (("AMD EPYC", "AVX512", True), ("AMD EPYC", "AVX2", False), ("Intel", "AVX512", False)):
        monkeypatch.setattr(onednn, "processor", lambda name=name: name)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda units=units: units)
        assert onednn.onednn_is_faster.__wrapped__() is wanted


def test_nothing_of_it_is_left_where_it_is_given_back() -> None:
    crowd = crowd_of(base(dtype=torch.float32))
    before = learned(crowd)
    crowd.base_model.compute_fast(PARTS)
    assert not torch.equal(learned(crowd)[1], before[1])
    assert not any("forward" in vars(module) for module in crowd[0].modules())
    assert any("forward" in vars(module) for module in crowd.model.modules())
    crowd.base_model.compute_fast(())
    assert torch.equal(learned(crowd)[1], before[1])
    crowd.base_model.compute_fast(PARTS)
    assert not any("forward" in vars(module) for module in crowd.detach().modules())


def test_a_deep_copy_computes_fast_with_its_own_numbers() -> None:
    crowd = crowd_of(base(dtype=torch.float32), PARTS)
    twin, before = copy.deepcopy(crowd), learned(crowd)
    torch.testing.assert_close(learned(twin), before, rtol=0, atol=0)
    with torch.no_grad():
        for norm in (m for m in crowd.model.modules() if isinstance(m, LlamaRMSNorm)):
            norm.weight.zero_()
        crowd.storage.weights.zero_()
    torch.testing.assert_close(learned(twin), before, rtol=0, atol=0)


def test_recomputed_layers_give_the_same_gradients_by_fast_kernels() -> None:
    found = []
    for recomputed in (False, True):
        crowd = crowd_of(base(dtype=torch.float32), PARTS, dropconnect=0.3)
        if recomputed:
            crowd.gradient_checkpointing_enable()
        found.append(learned(crowd)[1])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("settings", "own_rows"),
    [({"dropout": 0.2}, False), ({"agents": ({"rank": 2}, {"rank": 3}, {"rank": 2})}, False), ({}, True)],
    ids=["dropout", "shapes", "rows of its own"],
)
def test_layers_that_cannot_be_joined_compute_alone(settings: dict[str, Any], own_rows: bool) -> None:
    rows = owned((batch((5, 8)), batch((4,)), batch((3, 6)))) if own_rows else None
    found = [learned(crowd_of(base(dtype=torch.float32), parts, **settings), rows) for parts in ((), ("joined",))]
    assert torch.equal(found[0][1], found[1][1])


def test_a_pass_that_was_given_up_is_forgotten_by_the_next_step() -> None:
    crowd = crowd_of(base(dtype=torch.float32), ("joined",))
    layer = next(layer for name, layer in crowd.storage.layers.items() if name.endswith("gate_proj"))
    crowd.storage.begin_step(0)
    layer(torch.ones(crowd.num_agents, 2, layer.in_features))
    joined: Any = layer.joined
    assert joined._left, "the other layer has not taken its part"
    crowd.storage.begin_step(0)
    assert not joined._left
    assert joined._input is None


def test_joined_layers_add_to_the_storage_past_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, calls = crowd_of(base(dtype=torch.float32), ("joined",), dropconnect=0.2), []
    apply = FusedLinear.apply
    monkeypatch.setattr(FusedLinear, "apply", lambda *given: (calls.append(1), apply(*given))[1])
    _, found = learned(crowd)
    assert len(calls) == 4  # o_proj and down_proj of two layers
    assert found.any(dim=1).all()
    crowd.storage.take_gradients_away()  # as in a loop that does not begin its steps
    crowd(batch()).loss.backward()
    assert len(calls) == 4 + 14
    assert all(each.grad is not None for layer in crowd.storage.layers.values() for each in layer.lora_A.values())


@pytest.mark.parametrize("agent", [None, 1])
def test_without_gradients_joined_layers_give_the_numbers_of_each(agent: int | None) -> None:
    found = []
    for parts in ((), ("joined",)):
        crowd = crowd_of(base(dtype=torch.float32), parts)
        crowd.storage.begin_step(0)
        with torch.no_grad(), crowd.base_model.read_by(agent):
            found.append(crowd.states(batch()))
    assert torch.equal(*found)


def test_a_base_in_16_bits_computes_by_itself_what_it_computes_under_autocast() -> None:
    found = []
    for parts in ((), ("precision",)):
        crowd = crowd_of(base(dtype=torch.float32).bfloat16(), parts)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(learned(crowd))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@bits_in_company
def test_an_agent_joins_the_layers_that_it_adapts_whatever_others_adapt() -> None:
    """An agent that adapts q and v has, in a run alone, no adapter at k."""
    model, few = base(dtype=torch.float32), {"seed": 3, "rank": 2, "target_modules": ("q_proj", "v_proj")}
    found = []
    for agents in ((few,), ({"seed": 4}, few)):
        crowd = Crowd(copy.deepcopy(model), LoraSettings(agents=agents), "toy").train()
        crowd.base_model.compute_fast(PARTS)
        crowd.storage.pass_per_agent = True
        row = crowd.storage.rows[-1]
        row.data.copy_(random(*row.shape) * 0.1)
        crowd.storage.begin_step(0)
        for part in crowd.passes_of(crowd.for_all(batch())):
            crowd(part)[0].loss.backward()
        found.append(crowd.storage.gradients[-1, : len(row)].clone())
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [6, 24, 32, 64, 128])
def test_a_rotation_of_16_bits_in_one_piece_has_the_bits_of_one_in_halves(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cos, sin = (random(1, 1, 37, width, dtype=dtype) for _ in range(2))
    given, grad = random(2, 37, 3, width, dtype=dtype).transpose(1, 2), random(2, 3, 37, width, dtype=dtype)
    found = []
    for slow in (True, False):
        monkeypatch.setattr(kernels, "_is_slow_in_halves", lambda x, slow=slow: slow)
        x = given.clone().requires_grad_()
        out = Rotation.apply(x, cos, sin)
        found.append((out.detach(), torch.autograd.grad(out, x, grad)[0]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
