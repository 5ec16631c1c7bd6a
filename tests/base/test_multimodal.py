"""The language model of a multimodal base is used: agents learn and answer on it, and the whole model opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPVisionConfig,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)

from ci_llm.base.load import auto_class, load_base
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.next_token import Decoding
from ci_llm.embedded import BASE_FOLDER
from ci_llm.lora.settings import LoraSettings
from tests.support.campaign import drawn
from tools.testbed.tiny import batch

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 576,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
QWEN = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
#: With more layers and weights than the language model has.
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN_VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen2_5_vl": Qwen2_5_VLConfig(text_config=QWEN, vision_config=QWEN_VISION),
    "qwen3_vl": Qwen3VLConfig(
        text_config=QWEN,
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "llava": LlavaConfig(
        text_config=LlamaConfig(**SIZES), vision_config=CLIPVisionConfig(**VISION, image_size=28, patch_size=14)
    ),
    "gemma3": Gemma3Config(
        text_config={**SIZES, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config=SiglipVisionConfig(**VISION, image_size=28, patch_size=14),
        mm_tokens_per_image=4,
    ),
}


@pytest.mark.parametrize("family", drawn(FAMILIES, 2))
def test_agents_on_the_text_part_are_those_of_peft_on_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(FAMILIES[family]).float()
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)

    crowd = Crowd(load_base(str(folder)).model, LoraSettings(num_agents=2, rank=4, alpha=8), str(folder))
    crowd.base_model.choose_route()
    assert all("language_model." in name for name in crowd.storage.layers)
    assert len(crowd.storage.layers) == 2 * 7
    crowd.storage.weights.copy_(
        torch.randn(crowd.storage.weights.shape, generator=torch.Generator().manual_seed(7)) * 0.1
    )
    rows = batch((9, 17, 23))
    crowd.train().storage.begin_step(0)
    output = crowd(rows)
    output.loss.backward()

    crowd.save_pretrained(tmp_path / "crowd")
    for k, name in enumerate(crowd.names):
        opened = auto_class(FAMILIES[family]).from_pretrained(folder, dtype=torch.float32)
        alone = peft.PeftModel.from_pretrained(opened, tmp_path / "crowd" / name, is_trainable=True).eval()
        loss = loss_of(alone, rows)
        loss.backward()
        assert -output.log_probs[k].mean().item() == pytest.approx(loss.item(), abs=1e-5)
        for layer, module in crowd.storage.layers.items():
            wanted = alone.get_parameter(f"base_model.model.{layer}.lora_B.default.weight").grad
            assert torch.allclose(module.lora_B[f"agent{k}"].grad, wanted, atol=1e-5)
        prompts = [[5, 9, 11], [7, 3, 8, 12, 30, 41, 6]]
        told = crowd.generate_ids(prompts, Decoding(max_new_tokens=4), include_agents=True)
        assert [found.agents[k] for found in told] == [continued(alone, prompt) for prompt in prompts]


def loss_of(model: Any, rows: Any) -> torch.Tensor:
    total = torch.zeros(())
    for row, (start, end) in enumerate(zip(rows.bounds, rows.bounds[1:], strict=False)):
        log_probs = model(input_ids=rows.input_ids[start:end][None], use_cache=False).logits[0].log_softmax(-1)
        mine = rows.target_rows == row
        total = total - log_probs[rows.predict_from[mine] - start, rows.targets[mine]].sum()
    return total / rows.num_targets


@torch.no_grad()
def continued(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(4):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
