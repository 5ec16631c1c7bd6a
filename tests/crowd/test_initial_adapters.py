"""Agents start from PEFT adapters; adapters that do not fit, and agents that would stay equal, are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from ci_llm.config import Config, load_config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import load_initial_adapters, require_distinct_agents
from ci_llm.crowd.objective import NextToken
from ci_llm.errors import CiLlmError, ForeignCheckpoint, ModelError
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.start.agent_settings import lora_settings
from tools.testbed.tiny import base, batch

TARGETS = ("q_proj", "v_proj")


def save_adapter(model: Any, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A PEFT adapter with random weights, saved by PEFT."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "init_lora_weights": False}
    config = peft.LoraConfig(**{**settings, **changes})
    wrapped = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
    wrapped.save_pretrained(folder)
    return wrapped


def crowd(agents: int = 2, **settings: Any) -> Crowd:
    chosen = {"rank": 4, "alpha": 8, "target_modules": TARGETS, **settings}
    return Crowd(base(), LoraSettings(num_agents=agents, **chosen), "toy")


def test_one_adapter_for_every_agent_gives_its_logits(tmp_path: Path) -> None:
    adapter = save_adapter(base(), tmp_path)
    made = crowd()
    assert "every agent" in load_initial_adapters(made, tmp_path)
    assert made.meta("print")["common_start"], "so the mean of their weights is an agent"
    ids = torch.arange(3, 12)[None]
    wanted = adapter.eval()(input_ids=ids).logits
    for k in range(2):
        with made.eval().base_model.active_agent(k) as model:
            torch.testing.assert_close(model(input_ids=ids).logits, wanted)


def test_one_adapter_for_each_agent(tmp_path: Path) -> None:
    for k in range(2):
        save_adapter(base(), tmp_path / f"agent{k}", seed=k)
    made = crowd()
    assert "each agent" in load_initial_adapters(made, tmp_path)
    assert not made.meta("print")["common_start"]
    assert not torch.equal(made.storage.weights[0], made.storage.weights[1])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: crowd(agents=3), ModelError, "2 adapters are here, and num_agents is 3"),
        (lambda: crowd(alpha=16), ModelError, "lora_alpha is 8 there and 16 here"),
        (lambda: crowd(rank=2), ForeignCheckpoint, "differ in name or shape"),
        (lambda: crowd(target_modules=("q_proj",)), ForeignCheckpoint, "differ in name or shape"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(made: Any, error: type[CiLlmError], message: str, tmp_path: Path) -> None:
    for k in range(2):
        save_adapter(base(), tmp_path / f"agent{k}", seed=k)
    with pytest.raises(error, match=message):
        load_initial_adapters(made(), tmp_path)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_pattern": {"q_proj": 32}}, r"alpha_pattern: \{'q_proj': 32\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa, which changes the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: olora, which changes the base"),
        ({"trainable_token_indices": [3]}, r"also has \S+embed_tokens\.token_adapter\.trainable_tokens_delta\n"),
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    """The first three adapters have the names and shapes of plain LoRA, and differ only in their settings."""
    save_adapter(base(dtype=torch.float32), tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_initial_adapters(crowd(), tmp_path)


def trained(made: Crowd, diversity: str = "none") -> Crowd:
    """After three steps."""
    objective = NextToken(diversity, 0.5)
    optimizer = torch.optim.AdamW([{"params": [row]} for row in made.storage.rows], lr=1e-2)
    torch.manual_seed(0)
    made.train()
    for step in range(3):
        made.storage.begin_step(step)
        rows = batch()
        objective(made(rows), step).total.backward()
        optimizer.step()
    return made


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("diversity", ["none", "swd"])
def test_agents_that_start_equal_stay_equal_and_are_refused(diversity: str) -> None:
    made = crowd(initialize_adapters_rand=False)
    with pytest.raises(ModelError, match="2 of 2 agents begin with the same weights"):
        require_distinct_agents(made, "here")
    one, other = trained(made, diversity).storage.weights
    assert torch.equal(one, other)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("masks", ["dropout", "dropconnect"])
def test_agents_with_equal_starts_and_their_own_masks_are_accepted(masks: str, tmp_path: Path) -> None:
    save_adapter(base(), tmp_path)
    made = crowd(**{masks: 0.2})
    load_initial_adapters(made, tmp_path)
    require_distinct_agents(made, "here")
    one, other = trained(made).storage.weights
    assert not torch.equal(one, other)


def test_the_folder_of_a_run_is_refused_with_the_place_of_its_adapters(tmp_path: Path) -> None:
    save_adapter(base(), tmp_path / "final_checkpoint" / "agent0")
    with pytest.raises(ModelError, match="there is no adapter here") as caught:
        load_initial_adapters(crowd(), tmp_path)
    assert caught.value.hint == f"this is the folder of a run: give {tmp_path / 'final_checkpoint'}"


def test_auto_takes_the_shape_of_the_adapters(tmp_path: Path) -> None:
    save_adapter(base(), tmp_path / "one", r=8, lora_alpha=16, use_rslora=True, layers_to_transform=[1])
    for keys in ({}, {"lora_rank": "auto", "lora_alpha": "auto"}):
        config = Config(model_name="own/base", init_from=str(tmp_path / "one"), num_agents=2, **keys)
        shape = (
            config.lora_rank,
            config.lora_alpha,
            config.use_rslora,
            config.lora_target_modules,
            config.agent_layers,
        )
        assert shape == (8, 16, True, TARGETS, (1,))
        assert any("lora_rank 8" in line and "init_from" in line for line in config.told_auto())
        made = Crowd(base(), lora_settings(config), "toy")
        assert "every agent" in load_initial_adapters(made, tmp_path / "one")
        (tmp_path / "kept.yaml").write_text(config.dump())
        assert load_config(tmp_path / "kept.yaml") == config, "as it was chosen"
