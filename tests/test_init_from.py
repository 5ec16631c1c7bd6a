"""Agents that start from PEFT adapters, and what does not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from ci_llm.crowd.init_from import start_from
from ci_llm.crowd.lora import LoraSettings
from ci_llm.crowd.model import Crowd
from ci_llm.errors import CiLlmError, ForeignCheckpoint, ModelError
from tests.tiny import base

TARGETS = ("q_proj", "v_proj")


def save_adapter(model: Any, folder: Path, seed: int = 0) -> Any:
    """A PEFT adapter with random weights, saved by PEFT."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
    wrapped.save_pretrained(folder)
    return wrapped


def crowd(agents: int = 2, **settings: Any) -> Crowd:
    chosen = {"rank": 4, "alpha": 8, "target_modules": TARGETS, **settings}
    return Crowd(base(), LoraSettings(num_agents=agents, **chosen), "toy")


def test_one_adapter_for_every_agent_gives_its_logits(tmp_path: Path) -> None:
    adapter = save_adapter(base(), tmp_path)
    made = crowd()
    assert "every agent" in start_from(made, tmp_path)
    ids = torch.arange(3, 12)[None]
    wanted = adapter.eval()(input_ids=ids).logits
    for k in range(2):
        with made.eval().solo(k) as model:
            torch.testing.assert_close(model(input_ids=ids).logits, wanted)


def test_one_adapter_for_each_agent(tmp_path: Path) -> None:
    for k in range(2):
        save_adapter(base(), tmp_path / f"agent{k}", seed=k)
    made = crowd()
    assert "each agent" in start_from(made, tmp_path)
    assert not torch.equal(made.agents.weights[0], made.agents.weights[1])


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: crowd(agents=3), ModelError, "2 adapters are here, and num_agents is 3"),
        (lambda: crowd(alpha=16), ModelError, "lora_alpha is 8 there and 16 here"),
        (lambda: crowd(rank=2), ForeignCheckpoint, "differ in name or shape"),
        (lambda: crowd(target_modules=("q_proj",)), ForeignCheckpoint, "differ in name or shape"),
    ],
)
def test_what_does_not_fit_is_refused(made: Any, error: type[CiLlmError], message: str, tmp_path: Path) -> None:
    for k in range(2):
        save_adapter(base(), tmp_path / f"agent{k}", seed=k)
    with pytest.raises(error, match=message):
        start_from(made(), tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no PEFT adapter here"):
        start_from(crowd(), tmp_path)
