"""Agents on some layers of the base only: they are PEFT's `layers_to_transform`, and share what is below them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import peft
import pytest
import torch
from torch import Tensor, nn

from ci_llm.base.load import load_base
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoding import Decoding
from ci_llm.crowd.given_path import META
from ci_llm.crowd.importing import import_crowd
from ci_llm.crowd.merging import Adapter, Merge, merged
from ci_llm.data.batches import AgentBatches
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ModelError
from ci_llm.lora.layer import LoraSettings
from tests.crowd import test_own_rows, test_own_settings
from tests.crowd.test_own_rows import LONG, OTHER, SHORT, together
from tests.crowd.test_own_settings import LARGE, SMALL
from tests.crowd.test_saved_bytes import saved_bytes
from tests.support.peft_twins import in_twin, peft_loss, with_weights_of
from tools.testbed.tiny import base, batch

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS: Final = 4
PROJECTIONS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def crowd_on(model: Any, layers: Any = "upper_half", agents: int = 3, **settings: Any) -> Crowd:
    """With random weights, on a copy of the base."""
    wanted = LoraSettings(num_agents=agents, rank=4, alpha=8, layers=layers, **settings)
    crowd = Crowd(copy.deepcopy(model), wanted, "toy")
    crowd.choose_route()
    weights = crowd.agents.weights
    with torch.no_grad():
        weights.copy_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(7)) * 0.1)
    return crowd.train()


def gradients(crowd: Crowd) -> list[Tensor]:
    """[log-probabilities, gradients] of a pass in training."""
    torch.manual_seed(5)
    crowd.agents.begin_step(1)
    output = crowd(batch())
    output.loss.backward()
    return [output.log_probs.detach(), crowd.agents.gradients.clone()]


def copies_read(layers: Any) -> list[list[int]]:
    """For each layer the numbers of copies of the rows that it computes from now on."""
    read: list[list[int]] = [[] for _ in layers]

    def note(number: int) -> Any:
        return lambda _, inputs: read[number].append(inputs[0].shape[0])

    for number, layer in enumerate(layers):
        layer.input_layernorm.register_forward_pre_hook(note(number))
    return read


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layers", "numbers"), [("upper_half", [2, 3]), ((1, 3), [1, 3]), ((3,), [3]), ((0, 2), [0, 2])], ids=str
)
def test_loss_and_gradients_are_those_of_peft_in_these_layers(layers: Any, numbers: list[int], agents: int) -> None:
    model = base(layers=LAYERS)
    crowd, packed = crowd_on(model, layers, agents), batch()
    log_probs, found = gradients(crowd)
    assert found.abs().amax(1).min() > 0
    for k in range(agents):
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=PROJECTIONS, layers_to_transform=numbers, task_type="CAUSAL_LM"
        )
        wrapped = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
        twin = with_weights_of(wrapped, crowd, k)
        loss = peft_loss(twin, packed)
        loss.backward()
        assert -log_probs[k].mean().item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
        theirs = {name: each.grad for name, each in twin.named_parameters() if each.grad is not None}
        ours = {in_twin(name): crowd.agents.layers[module_of(name)] for name in crowd.agents.agent_tensors(k)}
        assert ours.keys() == theirs.keys()
        for name, layer in ours.items():
            own = getattr(layer, "lora_A" if ".lora_A." in name else "lora_B")[f"agent{k}"].grad
            assert (own - theirs[name]).norm() < 1e-12 * theirs[name].norm()


def module_of(tensor: str) -> str:
    return tensor.removeprefix("base_model.model.").rpartition(".lora_")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_neox", "gemma3", "phi", "bloom"))],
)
def test_the_bits_are_those_of_a_base_that_runs_for_every_agent(family: str) -> None:
    crowd = crowd_on(base(family), dropout=0.2, dropconnect=0.3)
    found = gradients(crowd)
    crowd.agents.trunk = ()
    for one, other in zip(found, gradients(crowd), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trunk_runs_once_for_all_agents_and_not_again_in_the_backward_pass(checkpointing: bool) -> None:
    crowd = crowd_on(base(layers=LAYERS), (2,))
    wanted = gradients(crowd)
    if checkpointing:
        crowd.gradient_checkpointing_enable()
    read = copies_read(crowd.model.model.layers)
    assert all(torch.equal(one, other) for one, other in zip(gradients(crowd), wanted, strict=True))
    passes = 1 + checkpointing
    assert read == [[1], [1], [3] * passes, [3] * passes]
    assert not crowd.model.model.layers[1]._forward_hooks


def test_an_error_in_a_pass_leaves_the_base_as_it_was() -> None:
    crowd = crowd_on(base(layers=LAYERS))
    broken: Any = crowd.model.model.layers[3]
    broken.forward = None
    with pytest.raises(TypeError, match="NoneType"):
        crowd(batch())
    assert crowd.agents.trunk[-1] is crowd.model.model.layers[1]
    assert not crowd.agents.trunk[-1]._forward_hooks


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_of_the_trunk_is_kept_for_the_backward_pass(autocast: bool) -> None:
    def kept(layers: int, adapted: tuple[int, ...]) -> int:
        model = base(dtype=torch.float32, layers=layers)
        return saved_bytes(Crowd(model, LoraSettings(3, rank=2, layers=adapted), "toy").train(), autocast=autocast)

    assert kept(6, (4, 5)) == kept(4, (2, 3)) == kept(3, (1, 2))
    assert kept(6, (4, 5)) < kept(6, (3, 5))


@pytest.mark.slow
def test_agents_on_the_first_layer_have_no_trunk() -> None:
    assert crowd_on(base(layers=LAYERS), "all").agents.trunk == ()
    assert crowd_on(base(layers=LAYERS), (0, 3)).agents.trunk == ()
    assert Crowd(base(), LoraSettings(target_modules=r".*\.1\.mlp\..*_proj"), "toy").agents.trunk


@pytest.mark.slow
def test_a_crowd_of_fewer_agents_has_the_trunk_of_the_old_one() -> None:
    crowd = crowd_on(base(layers=LAYERS))
    wanted = gradients(crowd)
    crowd.replace_agents(replace(crowd.settings, num_agents=2), [2, 0], ["agent2", "agent0"])
    read = copies_read(crowd.model.model.layers)
    for found, before in zip(gradients(crowd), wanted, strict=True):
        assert torch.equal(found, before[[2, 0]])
    assert read == [[1], [1], [2], [2]]


def test_a_module_outside_of_the_layers_may_come_before_them() -> None:
    model: Any = base()
    model.model.project_in = nn.Linear(4, 4)
    assert Crowd(copy.deepcopy(model), LoraSettings(target_modules=("project_in",)), "toy").agents.trunk == ()
    upper = Crowd(model, LoraSettings(layers=(1,)), "toy")
    assert not any("project_in" in name for name in upper.agents.layers)


@pytest.mark.parametrize(
    ("model", "layers", "targets", "message"),
    [
        (base, (1, 7), "all-linear", "LlamaForCausalLM has layers 0 to 1, and no layer 7"),
        (base, (-1,), "all-linear", "no layer -1"),
        (base, (0,), r".*\.1\.mlp\..*_proj", "has no adapter in these layers"),
    ],
)
def test_layers_that_cannot_carry_agents_are_refused(model: Any, layers: Any, targets: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Crowd(model(), LoraSettings(layers=layers, target_modules=targets), "toy")
    assert caught.value.where == f"agent_layers: {list(layers)}"


def test_a_base_without_a_list_of_layers_is_refused() -> None:
    model: Any = base()
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError, match="has no list of layers"):
        Crowd(copy.deepcopy(model), LoraSettings(layers="upper_half"), "toy")
    assert Crowd(model, LoraSettings(), "toy").agents.trunk == ()


# Agents with settings or rows of their own

UPPER: Final = {**SMALL, "layers": "upper_half", "seed": 8}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_an_agent_has_the_same_bits_alone_and_beside_agents_of_other_layers(dtype: torch.dtype) -> None:
    model = base("llama", dtype)
    (alone,) = test_own_settings.train(model, [UPPER])
    for place, company in ((1, [LARGE, UPPER]), (0, [UPPER, {**UPPER, "seed": 9}, {**LARGE, "layers": (1,)}])):
        assert not alone.differs_from(test_own_settings.train(model, company)[place])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_agents_with_rows_of_their_own_have_the_bits_that_they_have_alone(checkpointing: bool) -> None:
    model = base("llama", torch.float32)
    (alone,) = test_own_rows.train(model, [UPPER], together(LONG))
    entries = [{**UPPER, "seed": 9}, UPPER, {**LARGE, "layers": (1,)}]
    found = test_own_rows.train(model, entries, together(SHORT, LONG, OTHER), checkpointing=checkpointing)
    assert not test_own_rows.differences(alone, found[1])


@pytest.mark.slow
def test_rows_of_each_agents_own_go_through_the_trunk_without_a_gradient() -> None:
    crowd = crowd_on(base(layers=LAYERS))
    layers = crowd.model.model.layers
    read = copies_read(layers)
    tracked: list[bool] = []
    for layer in layers:
        layer.register_forward_hook(lambda *seen: tracked.append(seen[2].requires_grad))
    crowd(AgentBatches((SHORT[0], LONG[0], OTHER[0])))
    assert read == [[1]] * LAYERS
    assert tracked == [False, False, True, True]


# Answers and files


@pytest.mark.slow
def test_the_crowd_generates_the_texts_of_its_full_passes() -> None:
    """The cache of keys and values holds one entry of the trunk for all agents."""
    crowd = crowd_on(base(layers=LAYERS)).eval()
    prompts = [[5, 6, 7, 8], [9, 10]]
    found = crowd.generate_ids(prompts, Decoding(max_new_tokens=6, ends=frozenset()), include_agents=True)
    for prompt, answer in zip(prompts, found.crowd, strict=True):
        assert answer == greedy(crowd, prompt, [*range(3)])
    for k, answers in enumerate(found.agents):
        assert answers == [greedy(crowd, prompt, [k]) for prompt in prompts]


def greedy(crowd: Crowd, prompt: list[int], agents: list[int]) -> list[int]:
    """Six tokens by the mean probability of these agents, a full pass of the model for every agent and token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            each = []
            for k in agents:
                with crowd.active_agent(k) as model:
                    each.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].softmax(-1))
            ids.append(int(torch.stack(each).mean(0).argmax()))
    return ids[len(prompt) :]


def logits_of(crowd: Crowd, k: int) -> Tensor:
    with torch.no_grad(), crowd.eval().active_agent(k) as model:
        return model(input_ids=torch.arange(5, 17)[None], use_cache=False).logits  # type: ignore[no-any-return]


def logits_by_peft(folder: Path) -> Tensor:
    opened = peft.PeftModel.from_pretrained(load_base("embedded").model, folder).eval()
    with torch.no_grad():
        return opened(input_ids=torch.arange(5, 17)[None]).logits  # type: ignore[no-any-return]


def embedded(settings: LoraSettings) -> Crowd:
    loaded = load_base("embedded")
    crowd = Crowd(loaded.model, settings, loaded.name, loaded.tokenizer.pad_token_id)
    crowd.agents.weights.normal_(0, 0.06, generator=torch.Generator().manual_seed(3))
    return crowd


@pytest.mark.slow
def test_peft_and_from_pretrained_open_saved_agents(tmp_path: Path) -> None:
    own = ({"layers": "upper_half"}, {"layers": (1,), "target_modules": ("q_proj", "v_proj"), "seed": 5}, {})
    crowd = embedded(LoraSettings(rank=4, alpha=8, agents=own))
    last = len(crowd.model.model.layers)
    state = {**crowd.adapter_files(), META: crowd.meta(load_base("embedded").fingerprint)}
    write_checkpoint(tmp_path / "crowd", state, step=1)
    opened = Crowd.from_pretrained(tmp_path / "crowd", device="cpu")
    assert opened.settings == crowd.settings
    for k in range(3):
        torch.testing.assert_close(logits_of(crowd, k), logits_by_peft(tmp_path / f"crowd/agent{k}"))
        assert torch.equal(logits_of(opened, k), logits_of(crowd, k))
    written = [crowd.adapter_files()[f"agent{k}/adapter_config"] for k in range(3)]
    assert [each.get("layers_to_transform") for each in written] == [[*range(last // 2, last)], [1], None]
    assert [each.get("layers_pattern") for each in written] == ["layers", "layers", None]
    assert sorted(written[1]["target_modules"]) == ["q_proj", "v_proj"]


@pytest.mark.slow
def test_an_adapter_that_peft_trained_in_some_layers_becomes_an_agent(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, layers_to_transform=[1], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = load_base("embedded").model
    model.name_or_path = str(BASE_FOLDER)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    made = import_crowd([tmp_path / "adapter"], tmp_path / "crowd")
    assert (made.settings.layers, made.settings.target_modules) == ((1,), tuple(sorted(PROJECTIONS)))
    assert made.agents.trunk[-1] is made.model.model.layers[0]
    opened = Crowd.from_pretrained(tmp_path / "crowd", device="cpu")
    for crowd in (made, opened):
        torch.testing.assert_close(logits_of(crowd, 0), logits_by_peft(tmp_path / "adapter"))


@pytest.mark.slow
def test_a_merge_of_agents_in_other_layers_has_the_layers_of_all() -> None:
    """PEFT takes the module names of all adapters but only the layers of the first, so layers would be lost."""
    crowd = embedded(LoraSettings(rank=4, alpha=8, agents=({"layers": "upper_half"}, {"layers": (0,), "seed": 5})))
    files = crowd.adapter_files()
    agents = [Adapter(files[f"agent{k}/adapter_config"], files[f"agent{k}/adapter_model"]) for k in range(2)]
    one = merged(load_base("embedded").model, agents, Merge("cat"))
    assert {*one.modules} == {*crowd.agents.layers}
    upper, lower = (agent.tensors for agent in agents)
    for name in one.modules:
        place, weight = f"base_model.model.{name}", torch.zeros(())
        for tensors in (upper, lower):
            if f"{place}.lora_A.weight" in tensors:
                weight = weight + tensors[f"{place}.lora_B.weight"] @ tensors[f"{place}.lora_A.weight"]  # scale 2, mean
        found = one.tensors[f"{place}.lora_B.weight"] @ one.tensors[f"{place}.lora_A.weight"]
        torch.testing.assert_close(found, weight)
