"""A student comes nearer to the crowd than the agent that it starts as; the control comes nearer to its own texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ci_llm import Crowd
from ci_llm.config import load_config
from ci_llm.crowd import distilling
from ci_llm.crowd.adapter_files import Adapter
from ci_llm.crowd.distilling import distil
from ci_llm.crowd.merging import Distillation
from ci_llm.crowd.pretrained import Pretrained, open_pretrained
from ci_llm.embedded import BASE_FOLDER
from tests.support.crowds import K, disturbed_crowd, save_crowd

CONFIG = load_config(None, ["dataset_name=embedded", "max_train_samples=4", "batch_size=4", "max_new_tokens_eval=32"])
HOW = Distillation(steps=30, learning_rate=5e-4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    return open_pretrained(save_crowd(disturbed_crowd(), tmp_path_factory.mktemp("saved") / "crowd"))


@pytest.fixture(scope="module")
def learned(saved: Pretrained) -> tuple[Adapter, Adapter, list[Any]]:
    """Student, control, and the rows that were learned from."""
    lessons: list[Any] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(distilling, "EMBEDDED_PROMPTS", 8)
    patch.setattr(distilling, "_lesson", lambda *args: lessons.append(whole := lesson(*args)) or whole)
    try:
        return *distil(saved, CONFIG, HOW), lessons
    finally:
        patch.undo()


lesson = distilling._lesson


def opened(adapter: Adapter) -> peft.PeftModel:
    """One adapter in plain PEFT."""
    config = peft.LoraConfig.from_peft_type(**adapter.config)
    model = peft.PeftModel(AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32), config)
    peft.set_peft_model_state_dict(model, dict(adapter.tensors))
    return model.eval()


@torch.no_grad()
def log_probs(model: peft.PeftModel, ids: list[int]) -> Tensor:
    """[T, V]"""
    return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_student_comes_nearer_to_the_crowd_and_the_control_to_its_texts(
    saved: Pretrained, learned: tuple[Adapter, Adapter, list[Any]]
) -> None:
    student, control, [whole] = learned
    adapters = saved.agents
    assert student.rank == control.rank == adapters[0].rank
    agents = [opened(adapter) for adapter in adapters]

    def distance(model: peft.PeftModel) -> float:
        """Mean KL(crowd || model) over the targets of the student's rows."""
        total = []
        for row in whole.student[:6]:
            ids, targets = row.input_ids.tolist(), torch.tensor(row.supervised[1:].tolist())
            crowd = torch.stack([log_probs(agent, ids) for agent in agents]).exp().mean(0)[:-1][targets]
            total.append((crowd * (crowd.log() - log_probs(model, ids)[:-1][targets])).sum(-1).mean())
        return float(torch.stack(total).mean())

    def nats(model: peft.PeftModel) -> float:
        """The mean NLL of the control's texts, in nats."""
        total = []
        for row in whole.control:
            ids, targets = row.input_ids.tolist(), torch.tensor(row.supervised[1:].tolist())
            wanted = torch.tensor(ids[1:])[:, None]
            total.append(-log_probs(model, ids)[:-1].gather(-1, wanted)[targets].mean())
        return float(torch.stack(total).mean())

    assert distance(opened(student)) < 0.8 * distance(agents[0])
    assert nats(opened(control)) < 0.8 * nats(agents[0])


@pytest.mark.slow
def test_distilling_leaves_base_and_generators_unchanged_and_repeats_exactly(
    saved: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distilling, "EMBEDDED_PROMPTS", 2)
    state = torch.get_rng_state()
    (one, _), (other, _) = (distil(saved, CONFIG, replace(HOW, steps=2)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())
    assert not [name for name, _ in saved.base.model.named_parameters() if "lora" in name]
    crowd = Crowd(saved.base.model, saved.settings, saved.base.name)
    assert crowd.num_agents == K
    crowd.detach()
