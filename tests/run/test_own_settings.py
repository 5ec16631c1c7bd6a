"""Runs whose agents have settings of their own, alone and in company; killed and resumed: test_own_rows.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import campaign
from tests.support.agent_facts import facts_of
from tests.support.crowds import bits_in_company
from tools.testbed.trials import Cell, Trials, differences

pytestmark = pytest.mark.slow

SMALL: Final = "{name: small, seed: 1, lora_rank: 3, lora_alpha: 5, use_rslora: true, learning_rate: 1e-3}"
DROPPING: Final = "{name: dropping, seed: 2, lora_dropout: 0.2, dropconnect_p: 0.1, lr_scheduler_type: linear}"
FEW_LAYERS: Final = (
    "{name: few layers, seed: 3, lora_target_modules: [q_proj, v_proj], agent_layers: upper_half, max_grad_norm: 0.3,"
    " row_weights: bootstrap, weight_decay: 0.1, num_warmup_steps: 2}"
)
LARGE: Final = "{name: large, seed: 4, lora_rank: 8}"
MIXED: Final = (SMALL, DROPPING, FEW_LAYERS, LARGE)


def keys(*entries: str) -> dict[str, Any]:
    return {"agents": f"[{', '.join(entries)}]", "num_agents": len(entries)}


@pytest.fixture(scope="module")
def mixed(trials: Trials) -> Path:
    """The folder of an undisturbed run of all kinds."""
    return complete(trials, Cell(accumulation=2), *MIXED)


def complete(trials: Trials, cell: Cell, *entries: str) -> Path:
    folder = trials.new_folder()
    assert trials.train(cell, folder, **keys(*entries)) == [0] * cell.ranks, (folder / "log").read_text()
    return folder


@bits_in_company
@pytest.mark.parametrize("k", campaign.sampled(range(len(MIXED)), [1, 2]))
def test_an_agent_ends_as_it_would_alone(trials: Trials, mixed: Path, k: int) -> None:
    alone = facts_of(complete(trials, Cell(accumulation=2), MIXED[k]), "agent0")
    assert not differences(alone, facts_of(mixed, f"agent{k}"))
    for part in ("lora_B", "exp_avg_sq", "train/loss at 12", "train/grad_norm at 12", "eval/nll at 8"):
        assert any(part in name for name in alone), part


@pytest.mark.parametrize("k", [0, 1] if campaign.in_full else [1])
def test_three_processes_sum_an_agents_gradients_as_in_a_run_alone(trials: Trials, k: int) -> None:
    cell, agents = Cell(ranks=3), (SMALL, LARGE)
    company, alone = complete(trials, cell, *agents), complete(trials, cell, agents[k])
    assert not differences(facts_of(alone, "agent0"), facts_of(company, f"agent{k}"))


def test_a_resume_with_other_settings_for_an_agent_is_refused(trials: Trials, mixed: Path) -> None:
    other = keys(SMALL, DROPPING.replace("0.2", "0.3"), FEW_LAYERS, LARGE)
    assert trials.train(Cell(accumulation=2), mixed, max_train_steps=13, **other) == [2]
    assert "lora_dropout was [0.0, 0.2, 0.0, 0.0], is [0.0, 0.3, 0.0, 0.0]" in (mixed / "log").read_text()
    other = keys(SMALL, DROPPING, FEW_LAYERS.replace("upper_half", "[0]"), LARGE)
    assert trials.train(Cell(accumulation=2), mixed, max_train_steps=13, **other) == [2]
    changed = "agent_layers was ['all', 'all', 'upper_half', 'all'], is ['all', 'all', [0], 'all']"
    assert f"has another crowd: {changed}" in (mixed / "log").read_text()
