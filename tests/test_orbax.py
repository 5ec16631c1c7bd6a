"""Orbax's names: its call and its documented loop work, and what is not there is refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ci_llm
import ci_llm.orbax as ocp
from ci_llm.errors import CheckpointError
from tools.testbed.events import DEADLINE_S


@pytest.mark.slow
def test_it_is_a_module_and_an_attribute_and_a_manager_loads_no_trainer() -> None:
    code = """
import sys
import ci_llm
import ci_llm.orbax as ocp
from ci_llm import orbax
assert orbax is ocp is ci_llm.orbax
assert issubclass(ocp.CheckpointManager, ci_llm.CheckpointManager)
heavy = {"transformers", "peft", "accelerate", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)


def loop(manager: ci_llm.CheckpointManager, num_steps: int, stop_after: int | None = None) -> list[int]:
    """The loop of Orbax's page; returns the steps that it saved."""
    state: Any = {"weight": torch.ones(3, dtype=torch.float64), "steps": 0}
    start, saved = 0, []
    if manager.latest_step() is not None:
        start = manager.latest_step() or 0
        state = manager.restore(start)
    for step in range(start, num_steps):
        state = {"weight": state["weight"] * 1.5 + 1, "steps": state["steps"] + 1}
        if manager.save(step, state):
            saved.append(step)
        if manager.reached_preemption(step) or step == stop_after:
            manager.wait_until_finished()
            break
    return saved


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: ocp.CheckpointManager(
            folder, ocp.PyTreeCheckpointer(), ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2)
        ),
        lambda folder: ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(4, 2)),
        lambda folder: ocp.CheckpointManager(folder, save_interval_steps=4, max_to_keep=2),
        lambda folder: ci_llm.CheckpointManager(folder, save_interval_steps=4, max_to_keep=2),
    ],
)
def test_the_loop_of_orbax_saves_what_is_due_and_resumes(
    call: Callable[[Path], ci_llm.CheckpointManager], tmp_path: Path
) -> None:
    with call(tmp_path) as manager:
        assert loop(manager, 100, stop_after=6) == [0, 4]
    with call(tmp_path) as manager:
        assert loop(manager, 9) == [8]
        assert manager.all_steps() == [4, 8]
        assert manager.restore(8)["steps"] == 10, "the restored step is repeated, as by Orbax"
        target = {"weight": torch.zeros(3, dtype=torch.float64), "steps": 0}
        assert manager.restore(8, target) is target
        assert target["steps"] == 10


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda at: ocp.CheckpointManagerOptions(step_prefix="ck", max_to_keep=1), "step_prefix of Orbax"),
        (lambda at: ocp.CheckpointManagerOptions(todelete_subdir="x", best_fn=len), "best_fn, todelete_subdir"),
        (lambda at: ocp.PyTreeCheckpointer(use_ocdbt=True), "use_ocdbt"),
        (lambda at: ocp.PyTreeCheckpointer(object()), "a object"),
        (lambda at: ocp.CheckpointManager(at, 100), "a int"),  # type: ignore[arg-type]
        (lambda at: ocp.CheckpointManager(at, None, {"max_to_keep": 3}), "a dict"),  # type: ignore[arg-type]
        (lambda at: ocp.CheckpointManager(at, item_names=("state",)), "item_names"),
        (lambda at: ocp.CheckpointManager(at).save(0, args={"x": 1}), "args"),
        (lambda at: ocp.CheckpointManager(at).save(0, {"x": 1}, save_kwargs={}), "save_kwargs"),
        (lambda at: ocp.CheckpointManager(at).save(0), "there is no state"),
        (lambda at: ocp.CheckpointManager(at).restore(0, args={"x": 1}), "args"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(call: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=told):
        call(tmp_path)


def test_a_name_of_orbax_that_is_not_here_says_where_to_look() -> None:
    with pytest.raises(AttributeError, match=r"SingleReplicaArrayHandler .* docs/coming_from.md"):
        _ = ocp.SingleReplicaArrayHandler
