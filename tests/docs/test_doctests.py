"""Every public name has an example in its docstring, and each example does what it says."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import ci_llm
from tests.support.crowds import disturbed_crowd, save_crowd

HEAVY = {"LightningCheckpoints", "TrainerCheckpoints", "train", "Sweep"}  # they load much, or train
SMALL: dict[str, Any] = {
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_steps": 2,
    "eval_samples": 4,
    "generation_eval_samples": 0,
    "num_workers": 0,
    "report_to": "none",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small crowd, saved once for all examples."""
    return save_crowd(disturbed_crowd(), tmp_path_factory.mktemp("crowd") / "checkpoint_step_7")


@pytest.fixture
def names(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples find, beside the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    found = {"ci_llm": ci_llm, "torch": torch, "folder": tmp_path, "run": run, "small": SMALL}
    yield found
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in HEAVY)) for name in ci_llm.__all__]
)
def test_the_example_of_a_public_name_does_what_it_says(name: str, names: dict[str, Any]) -> None:
    if name == "register_hooks":
        names |= {"accelerator": Accelerator(cpu=True), "crowd": disturbed_crowd()}
    if name == "LightningCheckpoints":
        import lightning

        quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
        names |= {"lightning": lightning, "small_trainer": quiet}
    public = getattr(ci_llm, name)
    text = public.__doc__ or ""
    if not isinstance(public, ModuleType):
        assert "Raises:" in text or name in NEVER_FAIL, f"{name} does not say what it raises"
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert example.examples, f"the docstring of {name} has no example"
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


#: Names whose call fails in no way of their own.
NEVER_FAIL = {"CiLlmError", "CheckpointManager", "StatefulSampler", "TrainerCheckpoints", "latest_state"} | {
    "seed_everything"
}
