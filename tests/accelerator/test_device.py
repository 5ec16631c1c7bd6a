"""What a run takes of a GPU: kernels of attention, fp64, memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.conftest import Simulated
from tests.support import campaign

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TURING, HOPPER = ("7", "5"), ("9", "0")


def found_by(simulated: Simulated, program: str, *words: str, options: tuple[str, ...] = ()) -> Any:
    """What a program printed behind "found"."""
    ran = simulated(options=[*options, "--program", str(PROGRAMS / program), *words])
    return json.loads(ran.said.rpartition("\nfound ")[2].splitlines()[0])


@pytest.mark.parametrize("capability", [TURING, HOPPER])
def test_attention_never_takes_the_kernel_that_holds_all_scores_or_one_that_plans(
    simulated: Simulated, capability: tuple[str, str]
) -> None:
    """Neither with grouped heads nor with a window, in any dtype; fp64 has plain products alone."""
    found = found_by(simulated, "attention.py", options=("--capability", *capability))
    has_varlen = capability != TURING
    assert len(found) == (16 if has_varlen else 12)  # Turing has no bf16
    for case, taken in found.items():
        half = case.startswith(("bf16", "fp16"))
        way = "varlen" if half and has_varlen else "rows"
        fused = ["efficient"]
        if half and has_varlen:  # flash has no masks, which windows are
            fused = ["efficient", "flash"] if "window" in case else ["flash"]
        fallback = [] if case.startswith("fp64") else fused
        kernels = ["varlen"] if way == "varlen" else fallback
        assert taken == {"way": way, "kernels": kernels, "fallback": fallback}, case


def test_the_estimate_of_a_preset_is_what_the_preset_says(simulated: Simulated) -> None:
    """A trace takes a second for each layer: outside of a campaign of the smallest base alone."""
    told = {
        preset.name: float(said[1])
        for preset in sorted((ROOT / "configs").glob("*.yaml" if campaign.in_full else "qwen2.5_0.5b_gsm8k.yaml"))
        if (said := re.search(r"dry run estimates ([\d.]+) GB", preset.read_text()))
    }
    assert len(told) == campaign.size(1, 5)
    assert found_by(simulated, "estimates.py", *told) == pytest.approx(told, rel=0.1)


def test_only_sums_norms_and_comparisons_are_computed_in_fp64(simulated: Simulated) -> None:
    """A card for games computes fp64 at a 64th of its speed, and other makers' devices have none."""
    words = simulated.training("max_train_steps=2", "mixed_precision=bf16", "dropconnect_p=0.1")
    assert [place for place in found_by(simulated, "wide.py", *words) if "<" not in place] == [
        "agents/storage.py:clip",
        "crowd/scoring.py:_score_batch",
        "crowd/scoring.py:joined",
        "distributed/ballot.py:encode",
        "lora/attention.py:distance",
        "lora/passes.py:distance",
        "run/autotune.py:losses_and_gradients",
        "run/exactness.py:_bytes",
        "run/gradients.py:compute_gradients",
        "run/step/nonfinite.py:nonfinite_here",
        "run/step/step_metrics.py:add",
        "run/step/step_metrics.py:restart",
    ]


def test_a_pass_per_agent_starts_no_more_for_more_rows(simulated: Simulated) -> None:
    """`deterministic: true` takes it."""
    ran = simulated(options=["--program", str(PROGRAMS / "launches.py"), "2000", "each", "short"])
    started = {
        name: each["launches"]
        for name, each in json.loads(ran.said.partition("\nlaunches ")[2].splitlines()[0]).items()
    }
    assert started["2000/4"] == started["2000/8"] <= 9200  # counted: 9,166
