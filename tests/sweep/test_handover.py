"""Agents of several checkpoints become one state: everything of theirs goes with them, and nothing of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ci_llm.crowd.given_path import META
from ci_llm.errors import ForeignCheckpoint
from ci_llm.sweep.handover import gather_agents


def state(count: int, mark: int, moments: bool = True) -> dict[str, Any]:
    """A state whose every value names its agent: 100 x mark + number."""
    own = [100 * mark + k for k in range(count)]
    return {
        **{f"agent{k}/adapter": {"w": torch.tensor([value])} for k, value in enumerate(own)},
        **{f"agent{k}/tokenizer.json": b"the same for all" for k in range(count)},
        "optimizer": {f"agent{k}": {"m": torch.tensor([value])} for k, value in enumerate(own)} if moments else {},
        "train_state": {"step": 5, "agents": own, "recovery": {"in_a_row": mark}},
        META: {
            "agents": [],
            "lora": {"agents": [{"id": value} for value in own]},
            "parameters_per_agent": mark,
            "num_agents": count,
        },
        "config.yaml": f"{mark}".encode(),
    }


def written(folder: Path, step: int = 5, **how: Any) -> Checkpoint:
    write_checkpoint(folder, state(**how), step=step)
    return load_checkpoint(folder)


def test_agents_take_everything_of_their_own_along(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", count=3, mark=1), written(tmp_path / "b", count=11, mark=2)
    found = gather_agents([(one, 2), (other, 10), (one, 0)])
    assert [int(found[f"agent{k}/adapter"]["w"]) for k in range(3)] == [102, 210, 100]
    assert {key: int(value["m"]) for key, value in found["optimizer"].items()} == {
        "agent0": 102,
        "agent1": 210,
        "agent2": 100,
    }
    state, meta = found["train_state"], found[META]
    assert state["agents"] == [102, 210, 100]
    assert [each["id"] for each in meta["lora"]["agents"]] == [102, 210, 100]
    assert meta["parameters_per_agent"] == [1, 2, 1]  # one value for all of a checkpoint
    assert meta["agents"] == [], "an empty list stays empty"
    assert (state["step"], state["recovery"]["in_a_row"], found["config.yaml"]) == (5, 1, b"1")
    assert not [key for key in found if key.startswith("agent") and key.endswith("tokenizer.json")]
    written_again = write_checkpoint(tmp_path / "c", found, step=5)
    assert load_checkpoint(tmp_path / "c").manifest == written_again


def test_an_agent_without_an_entry_in_a_tree_has_none_afterwards(tmp_path: Path) -> None:
    """As an agent that no optimizer has moved yet."""
    moved, fresh = written(tmp_path / "a", count=2, mark=1), written(tmp_path / "b", count=2, mark=2, moments=False)
    assert [*gather_agents([(moved, 1), (fresh, 0)])["optimizer"]] == ["agent0"]


def test_settings_that_cannot_train_together_are_refused(tmp_path: Path) -> None:
    one, later = written(tmp_path / "a", count=2, mark=1), written(tmp_path / "b", step=6, count=2, mark=2)
    with pytest.raises(ForeignCheckpoint, match="agents of different steps cannot train together: 5, 6"):
        gather_agents([(one, 0), (later, 0)])
    with pytest.raises(ForeignCheckpoint, match="there is no agent7"):
        gather_agents([(one, 7)])
