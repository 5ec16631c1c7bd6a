"""What a reading of the paths of a GPU found wrong: one test for each, which fails without its mend."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.accelerator.conftest import Ran, Simulated

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def ran(simulated_in: Simulated) -> Ran:
    """A run on the second of two GPUs, as the environment says."""
    simulated_in.environment["ACCELERATE_TORCH_DEVICE"] = "cuda:1"
    keys = ["max_train_steps=2", "save_steps=1", "dropconnect_p=0.1", "eval_samples=6", "batch_size=1"]
    return simulated_in.train(*keys, "mixed_precision=bf16", options=["--devices", "2"])


def test_only_the_gpu_that_the_environment_names_gets_a_context(ran: Ran) -> None:
    assert ran.trace["contexts"] == [1]
    assert ran.trace["current"] == 1


def test_masks_of_dropconnect_are_drawn_on_the_device(ran: Ran) -> None:
    copied = [place for phase, kind, place, _ in ran.trace["copies"] if phase == "step 2" and kind.startswith("h2d")]
    assert not [place for place in copied if "draw_masks" in place]
    assert ran.launches("step 2")["aten::bernoulli_"] == 2  # one per agent


def test_an_evaluation_waits_for_the_device_once(ran: Ran) -> None:
    scored = [place for place in ran.waits("after step 2") if place.startswith("crowd/scoring.py")]
    assert scored == ["crowd/scoring.py:joined"] * 2  # agents and crowd, and the base alone


def test_the_base_is_loaded_straight_to_the_device(ran: Ran) -> None:
    moved = Counter(place for _, kind, place, _ in ran.trace["copies"] if kind.startswith("h2d"))
    assert "base/load.py:load_base by transformers/modeling_utils.py" not in moved  # where `model.to` is
    assert [place for place in moved if place.endswith("by transformers/core_model_loading.py")]


def test_attention_is_one_call_per_layer_and_no_plan_is_built(ran: Ran) -> None:
    assert {kernel for kernel, dtype in ran.kernels() if dtype == "torch.bfloat16"} == {"varlen"}
    assert ran.launches("step 2")["attention forward"] == 2  # layers


def test_a_save_makes_no_context_on_another_gpu(simulated: Simulated) -> None:
    found = simulated.on_two(*simulated.training("max_train_steps=2", "checkpoint_backend=distributed", "save_steps=1"))
    assert [ran.trace["contexts"] for ran in found] == [[0], [1]]


def test_an_emergency_save_does_not_queue_behind_the_step_that_it_gives_up(simulated: Simulated) -> None:
    ran = simulated(options=["--devices", "2", "--program", str(PROGRAMS / "emergency.py")])
    ran.require_order()
    assert ran.trace["contexts"] == [1]
