"""K agents in one fused pass equal K PEFT models trained alone: losses and gradients; targets, masks, storage."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import AutoConfig, AutoModelForCausalLM

from ci_llm.base import targets
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.errors import ForeignCheckpoint, ModelError
from ci_llm.lora.products import FusedLinear, LowRank, Stack
from ci_llm.lora.reading import Casts
from ci_llm.lora.settings import LoraSettings
from tests.support.campaign import sampled
from tests.support.peft_twins import peft_loss, with_weights_of
from tools.testbed.tiny import base, batch

K = 3
# Gemma 2, Bloom and Mamba compute in fp32 in places, whatever the dtype is; routing adds its own rounding in fp32.
COARSE = {"gemma2": 1e-6, "bloom": 1e-6, "mixtral": 1e-5, "gpt_oss": 1e-5, "phimoe": 1e-5, "mamba": 1e-6}


def crowd_of(model: Any, **settings: Any) -> Crowd:
    crowd = Crowd(model, LoraSettings(**{"num_agents": K, "rank": 4, "alpha": 8, **settings}), base_name="toy")
    crowd.base_model.choose_route()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        crowd.storage.weights.copy_(torch.randn(crowd.storage.weights.shape, generator=generator) * 0.1)
    return crowd


def peft_twin(model: Any, crowd: Crowd, agent: int) -> Any:
    """The same agent as a PEFT model on a copy of the base, configured by the settings and by nothing that we write."""
    targets = sorted({name.rpartition(".")[2] for name in crowd.storage.layers})
    settings = crowd.settings
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        use_rslora=settings.use_rslora,
    )
    return with_weights_of(
        peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False), crowd, agent
    )


def gradient_error(crowd: Crowd, twin: Any, agent: int) -> float:
    """|ours - theirs| / |theirs| over all of one agent's gradient."""
    grads = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    off = norm = 0.0
    for name, module in crowd.storage.layers.items():
        for kind in ("lora_A", "lora_B"):
            wanted = grads[f"base_model.model.{name}.{kind}.default.weight"]
            found = getattr(module, kind)[f"agent{agent}"].grad
            off, norm = off + float((found - wanted).square().sum()), norm + float(wanted.square().sum())
    return (off / norm) ** 0.5


#: Families whose like is in `make test`.
SPARE = {"qwen3", "gpt_neox", "phi", "gpt2", "mistral", "gemma3", "granite", "cohere", "gpt_oss", "phimoe"}
PACKED = ["llama", "qwen2", "qwen3", "gpt_neox", "phi", "gpt2", "mistral", "gemma2", "gemma3", "granite", "cohere"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("family", "dtype", "route"),
    [
        pytest.param(*case, marks=[pytest.mark.campaign] if case[0] in SPARE else [])
        for case in [
            *[(f, torch.float64, "packed") for f in PACKED],
            ("bloom", torch.float64, "padded"),
            ("mixtral", torch.float32, "packed"),
            ("gpt_oss", torch.float32, "padded"),
            ("mamba", torch.float64, "padded"),
            ("phimoe", torch.float32, "packed"),
            *[(f, torch.float32, "packed") for f in ("llama", "qwen2", "gpt_neox")],
        ]
    ],
)
def test_loss_and_gradients_equal_peft(family: str, dtype: torch.dtype, route: str) -> None:
    model = base(family, dtype)
    crowd = crowd_of(copy.deepcopy(model))
    assert crowd.base_model.route == route
    compare_with_peft(crowd, model, batch(), COARSE.get(family, 1e-6 if dtype == torch.float32 else 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("family", sampled(["llama", "qwen2", "gpt_neox"], ["qwen2"]))
def test_the_padded_route_equals_peft(family: str) -> None:
    model = base(family)
    crowd = crowd_of(copy.deepcopy(model))
    crowd.base_model.route = "padded"
    compare_with_peft(crowd, model, batch(), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changed", "route"),
    [
        ("phimoe", {"num_local_experts": 4}, "padded"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "padded"),
        ("qwen2_moe", {"use_sliding_window": False}, "packed"),
        ("mistral", {}, "packed"),
        ("qwen2", {"max_window_layers": 1}, "packed"),
        ("qwen2", {"max_window_layers": 2}, "packed"),
        ("qwen2", {"use_sliding_window": False}, "packed"),
    ],
)
def test_a_window_longer_than_the_rows_of_the_trial_is_not_lost(
    family: str, changed: dict[str, Any], route: str
) -> None:
    """Some families apply the window only by their mask, which the packed route does not make."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "bos_token_id": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
    window = {"sliding_window": 70, "use_sliding_window": True, "num_experts": 4, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(family, **{**sizes, **window, **changed})
    torch.manual_seed(0)
    crowd = crowd_of(AutoModelForCausalLM.from_config(config).float())
    assert crowd.base_model.route == route
    long = batch((100, 5))
    with torch.no_grad(), crowd.eval().base_model.active_agent(1) as model:
        wanted = model(input_ids=long.input_ids[None, :100], use_cache=False).logits[0]
    with torch.no_grad():
        torch.testing.assert_close(crowd.head.logits(crowd.states(long))[1, :100], wanted, rtol=1e-4, atol=1e-4)


def compare_with_peft(crowd: Crowd, model: Any, packed: Batch, tolerance: float) -> None:
    crowd.train()
    crowd.storage.begin_step(0)
    output = crowd(packed)
    output.loss.backward()
    for agent in range(K):
        twin = peft_twin(model, crowd, agent)
        loss = peft_loss(twin, packed)
        loss.backward()
        assert -output.log_probs[agent].mean().item() == pytest.approx(loss.item(), rel=tolerance, abs=tolerance)
        assert gradient_error(crowd, twin, agent) < tolerance


def test_load_agent_refuses_other_names_and_shapes() -> None:
    crowd = crowd_of(base())
    tensors = {n: t.clone() for n, t in crowd.agents[1].state_dict().items()}
    crowd.agents[0].load_state_dict(tensors, "here")
    assert torch.equal(crowd.storage.weights[0], crowd.storage.weights[1])
    tensors.popitem()
    with pytest.raises(ForeignCheckpoint, match="1 tensors differ"):
        crowd.agents[0].load_state_dict(tensors, "here")


def test_agents_live_in_one_storage_also_after_moving() -> None:
    crowd = crowd_of(base()).to(torch.float32)
    crowd.storage.begin_step(0)
    crowd(batch()).loss.backward()
    storage = crowd.storage.weights.untyped_storage().data_ptr()
    trainable = [p for p in crowd.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == crowd.storage.weights.numel()
    assert {p.untyped_storage().data_ptr() for p in trainable} == {storage}
    assert {p.grad.untyped_storage().data_ptr() for p in trainable} == {
        crowd.storage.gradients.untyped_storage().data_ptr()
    }
    assert crowd.storage.gradients.abs().sum(1).min() > 0


def test_an_agent_without_gradient_keeps_its_bits() -> None:
    crowd = crowd_of(base())
    optimizer = torch.optim.AdamW([{"params": [row]} for row in crowd.storage.rows], lr=0.1, fused=True)
    crowd.storage.begin_step(0)
    crowd(batch()).loss.backward()
    crowd.storage.gradients[1, 5] = float("nan")
    before = crowd.storage.weights.clone()
    norms = crowd.storage.clip([1e-3] * K)
    assert norms.isfinite().tolist() == [k != 1 for k in range(len(norms))]
    crowd.storage.leave_out([1])
    clipped = crowd.storage.gradients.norm(dim=1)
    assert clipped[0].item() == pytest.approx(1e-3, rel=1e-2)
    optimizer.step()
    assert torch.equal(crowd.storage.weights[1], before[1])
    assert not torch.equal(crowd.storage.weights[0], before[0])


def test_an_agent_starts_the_same_whatever_k_is() -> None:
    few = Crowd(base(), LoraSettings(num_agents=2, rank=4), "toy").storage.weights
    many = Crowd(base(), LoraSettings(num_agents=5, rank=4), "toy").storage.weights
    assert torch.equal(few, many[:2])
    assert not torch.equal(many[0], many[1])
    same = Crowd(base(), LoraSettings(num_agents=2, rank=4, initialize_adapters_rand=False), "toy").storage.weights
    assert torch.equal(same[0], same[1])


@pytest.mark.slow
@pytest.mark.parametrize("agent", [None, 1])
def test_without_gradients_a_layer_gives_the_same_numbers_past_autograd(
    agent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, rows = crowd_of(base()).eval(), batch()
    with crowd.base_model.read_by(agent):
        wanted = crowd.states(rows)
        assert wanted.requires_grad
        monkeypatch.setattr(FusedLinear, "apply", None)
        with torch.no_grad():
            assert torch.equal(crowd.states(rows), wanted)


def test_the_stack_of_one_agent_follows_its_weights() -> None:
    crowd, rows, found = crowd_of(base()).eval(), batch(), []
    for _ in range(2):
        with crowd.base_model.read_by(1), torch.no_grad():
            found.append(crowd.states(rows))
        crowd.storage.restack()
        crowd.storage.weights.zero_()
    assert not torch.equal(*found)


def test_dropconnect_masks_belong_to_step_and_agent_and_reach_the_gradient() -> None:
    def gradient(step: int) -> Tensor:
        crowd = crowd_of(base(), dropconnect=0.5).train()
        crowd.storage.begin_step(step)
        crowd(batch()).loss.backward()
        return crowd.storage.gradients.clone()

    first = gradient(3)
    dropped = first == 0
    assert 0.4 < dropped.double().mean() < 0.6
    assert torch.equal(first, gradient(3))
    assert not torch.equal(dropped, gradient(4) == 0)
    assert not torch.equal(dropped[0], dropped[1])


def test_dropout_is_independent_per_agent_and_off_in_evaluation() -> None:
    crowd = crowd_of(base(), dropout=0.5)
    crowd.storage.weights[:] = crowd.storage.weights[:1].clone()
    crowd.train()
    noisy = crowd(batch()).log_probs
    assert not torch.equal(noisy[0], noisy[1])
    crowd.eval()
    quiet = crowd(batch()).log_probs
    torch.testing.assert_close(quiet[0], quiet[1], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_own_functions_pass_gradcheck(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = random(2, 3, 5), random(2, 4, 3)
    masks = ((random(2, 3, 5) > 0).double() * 2, (random(2, 4, 3) > 0).double() * 2) if masked else None
    parameters = [t.requires_grad_() for t in (*a.unbind(0), *b.unbind(0))]
    layer = SimpleNamespace(base_layer=SimpleNamespace(weight=random(4, 5), bias=random(4)), by_onednn=False)
    x, dropped = random(12, 5).requires_grad_(), random(12, 5).requires_grad_()
    both, first, second = slice(0, 12), slice(0, 6), slice(6, 12)

    def fused(x: Tensor, *p: Tensor) -> Tensor:
        return FusedLinear.apply(x, x.detach(), None, layer, [(stack_of(p), both)], *p)

    def fused_dropped(x: Tensor, z: Tensor, *p: Tensor) -> Tensor:
        return FusedLinear.apply(x, x.detach(), z, layer, [(stack_of(p, drops=True), both)], *p)

    def fused_of_two_kinds(x: Tensor, z: Tensor, *p: Tensor) -> Tensor:
        """Agent 0 without dropout, agent 1 with it; they have other scalings."""
        other = replace(stack_of((p[1], p[3]), drops=True), first=1, end=2, scaling=0.3)
        owned = [(stack_of((p[0], p[2])), first), (other, second)]
        return FusedLinear.apply(x, x.detach(), z[6:], layer, owned, p[0], p[2], p[1], p[3])

    def low_rank(x: Tensor, *p: Tensor) -> Tensor:
        return LowRank.apply(x.view(2, 6, 5), stack_of(p), *p)

    def stack_of(p: tuple[Tensor, ...], *, drops: bool = False) -> Stack:
        n = len(p) // 2
        a, b = torch.stack(p[:n]).detach(), torch.stack(p[n:]).detach()
        own = masks and (masks[0][:n], masks[1][:n])
        return Stack(0, n, 0.7, drops, a, b, Casts(), None, own)

    assert torch.autograd.gradcheck(fused, (x, *parameters))
    assert torch.autograd.gradcheck(fused_dropped, (x, dropped, *parameters))
    assert torch.autograd.gradcheck(fused_of_two_kinds, (x, dropped, *parameters))
    assert torch.autograd.gradcheck(low_rank, (x, *parameters))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bf16_autocast_keeps_gradients_in_fp32_and_near_the_exact_ones(family: str) -> None:
    crowd = crowd_of(base(family, torch.float32)).train()
    crowd.storage.begin_step(0)
    crowd(batch()).loss.backward()
    exact = crowd.storage.gradients.clone()
    crowd.storage.begin_step(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = crowd(batch()).loss
    loss.backward()
    assert crowd.storage.gradients.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(exact, crowd.storage.gradients, dim=1)
    assert similarity.min() > 0.99


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("nowhere",), "matches nothing"), (("self_attn",), "cannot carry"), ("lm_head", "cannot carry")],
)
def test_target_modules_that_fit_no_layer_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Crowd(base(), LoraSettings(target_modules=targets), "toy")
    assert "q_proj" in str(caught.value)


def test_target_modules_that_the_base_lacks_are_named() -> None:
    names = ("q_proj", "v_porj", "fc1", "mlp.up_proj")
    crowd = Crowd(base(), LoraSettings(target_modules=names), "toy")
    assert len(crowd.storage.layers) == 4
    said = "this model has no v_porj (did you mean v_proj?), no fc1; no agent adapts it"
    for model in (base(), crowd.model):
        assert targets.absent_targets(model, names) == said
        assert targets.absent_targets(model, ("q_proj", "v_proj")) == targets.absent_targets(model, "all-linear") == ""


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_deep_copy_learns_as_the_crowd_does(checkpointing: bool) -> None:
    crowd = crowd_of(base(), target_modules=("q_proj", "down_proj")).train()
    if checkpointing:
        crowd.gradient_checkpointing_enable()
    average = AveragedModel(crowd)
    begun, copied = crowd.storage.weights.clone(), copy.deepcopy(crowd)
    for each in (crowd, copied):
        optimizer = torch.optim.SGD(each.storage.rows, lr=0.5)
        for step in range(2):
            each.storage.begin_step(step)
            each(batch()).loss.backward()
            optimizer.step()
        if each is crowd:
            assert torch.equal(copied.storage.weights, begun)
    assert torch.equal(copied.storage.weights, crowd.storage.weights)
    assert torch.equal(copied(batch()).log_probs, crowd(batch()).log_probs)
    average.update_parameters(crowd)  # the first one copies
    assert torch.equal(average.module.storage.weights, crowd.storage.weights)
    assert torch.equal(average(batch()).log_probs, crowd(batch()).log_probs)


def test_target_modules_as_in_peft() -> None:
    everything = Crowd(base(), LoraSettings(), "toy").storage.layers
    assert len(everything) == 14
    assert not any("lm_head" in name for name in everything)
    assert len(Crowd(base(), LoraSettings(target_modules=("q_proj", "v_proj")), "toy").storage.layers) == 4
    assert len(Crowd(base(), LoraSettings(target_modules=r".*\.1\.mlp\..*_proj"), "toy").storage.layers) == 3


@pytest.mark.slow
def test_a_non_causal_base_is_refused() -> None:
    with pytest.raises(ModelError, match="not a causal language model"):
        Crowd(base("bert", torch.float32), LoraSettings(), "toy").base_model.choose_route()


def test_a_base_with_a_weight_that_is_not_finite_is_refused() -> None:
    model = base()
    next(model.parameters()).data[:, 0] = torch.nan
    with pytest.raises(ModelError, match="gives NaN for logits: some of its weights are not finite"):
        Crowd(model, LoraSettings(), "toy").base_model.choose_route()


def test_layers_whose_weight_the_base_reads_itself_carry_no_agents() -> None:
    model = base("mamba")
    crowd = Crowd(copy.deepcopy(model), LoraSettings(rank=4, alpha=8), "toy")
    assert sorted(crowd.storage.layers) == [f"backbone.layers.{n}.mixer.in_proj" for n in range(2)]
    opened = peft.LoraConfig(**crowd.adapter_files()["agent0/adapter_config"])  # its all-linear would match more
    peft.get_peft_model(model, opened)
    with pytest.raises(ModelError, match="dt_proj, which cannot carry an adapter"):
        Crowd(base("mamba"), LoraSettings(target_modules=("in_proj", "dt_proj")), "toy")


def test_a_base_without_a_layer_for_agents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "linear_layers", lambda _: {})
    with pytest.raises(ModelError, match="no layer that could carry an adapter"):
        Crowd(base(), LoraSettings(), "toy")


def test_a_weight_that_is_read_past_its_agents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds this in families whose source code does not show the read."""
    monkeypatch.setattr(targets, "_passed_by", lambda *_: False)
    crowd = Crowd(base("mamba"), LoraSettings(), "toy")
    with pytest.raises(ModelError, match=r"reads the weight of backbone\.layers\.0\.mixer\.dt_proj itself"):
        crowd.base_model.choose_route()
