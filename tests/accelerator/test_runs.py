"""What else a GPU is used for: memory that runs out, layers in shards, the check, and the verbs after a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.accelerator.conftest import Simulated
from tests.accelerator.test_training import agents_in

pytestmark = pytest.mark.slow


def test_where_memory_runs_out_on_one_process_alone_all_take_smaller_parts(simulated: Simulated) -> None:
    keys = ["max_train_steps=1", "batch_size=16", "max_train_samples=32", "pass_per_agent=false", "eval_samples=1"]
    first, second = simulated.on_two(*simulated.training(*keys), options=["--memory-mb-of", "1", "5"])
    assert "step 1 does not fit (" in first.said
    assert second.trace["peak"] <= 5 << 20 < first.trace["peak"]
    first.require_order()
    second.require_order()


def test_layers_in_shards_give_the_bits_of_whole_ones(simulated: Simulated) -> None:
    for sharding in ("none", "layers"):
        keys = [
            "max_train_steps=2",
            f"base_sharding={sharding}",
            "pass_per_agent=false",
            f"output_dir=sharding_{sharding}",
        ]
        for ran in simulated.on_two(*simulated.training(*keys)):
            ran.require_order()
    whole, shards = (agents_in(simulated.folder / name) for name in ("sharding_none", "sharding_layers"))
    assert all(torch.equal(each, shards[name]) for name, each in whole.items())


def test_the_check_passes_on_a_gpu(simulated: Simulated) -> None:
    ran = simulated("check", "num_workers=0", "report_to=none", f"model_name={simulated.base}")
    assert "checks passed" in ran.said
    ran.require_order()


def test_every_verb_after_a_run_computes_on_the_gpu(simulated: Simulated) -> None:
    asked = ["generate", "run", "Ann has 5 hats.", "--max-new-tokens", "40"]
    ran = simulated(
        *simulated.training("max_train_steps=1"),
        *("then", "evaluate", "run", "--json"),
        *("then", *asked),
        *("then", *asked, "--aggregator", "majority"),
        *("then", "export", "run", "--merge", "svd", "--to", "merged"),
        *("then", "evaluate", "run", "--calibrate"),
        *("then", *asked, "--aggregator", "rerank"),
        *("then", "export", "run", "--agent", "agent1", "--to", "one"),
    )
    ran.require_order()
    assert Path(simulated.folder / "merged/adapter_model.safetensors").exists()
    for number in (2, 3, 4, 6, 7):
        assert ran.launches(f"{number}: start").total() > 100
    for number in (3, 4):
        waits = Counter(ran.waits(f"{number}: start"))
        # One for each token, those of the decoder's trial included.
        assert waits["crowd/next_token.py:choose"] == 40 + 3
        assert not [
            place
            for place in waits
            if place.startswith(("crowd/decoder.py:_step", "crowd/decoder.py:_hidden", "crowd/decoder.py:_on_dev"))
        ]
