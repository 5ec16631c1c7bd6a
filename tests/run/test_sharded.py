"""Runs whose base is sharded over processes have the bits of runs without shards, and no process waits for ever.

Real processes, gloo, the real job, faults at named places of a pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.core.run_folder import read_failures
from ci_llm.core.run_status import read_status
from tests.run.test_objectives import write
from tests.support.campaign import sampled, sampled_cases, size
from tests.support.faults import Fault, adapters, fired, metrics, said, samples, train, weights
from tools.testbed.forkserver import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]

#: Inputs of adapted layers of the base: so many products in a forward pass, and as many in a backward pass.
PRODUCTS = size(8, 16)
#: 13 rows in steps of 8: processes run out of rows before the others do. Two evaluations, one that generates.
KEYS: dict[str, Any] = {
    "pass_per_agent": "true",  # auto differs between the two: every pass gathers the layers
    "max_train_samples": 13,
    "max_train_steps": 5,
    "global_batch_size": 8,
    "batch_size": 1,
    "eval_steps": 3,
    "eval_samples": 5,
    "generation_eval_samples": 3,
    "max_new_tokens_eval": 5,
}


def results(folder: Path) -> tuple[list[bytes], list[dict[str, float]], Any]:
    """All that a run computed: final adapters, losses and norms of every step, the evaluation."""
    numbers = [
        {key: value for key, value in line.items() if key.startswith("train/agent") or key == "train/task_loss"}
        for line in metrics(folder)
    ]
    return weights(folder, range(3)), numbers, json.loads((folder / "run" / "evaluation.json").read_text())


def compare(server: ForkServer, folder: Path, ranks: int, *faults: Fault, **keys: Any) -> str:
    """Train with and without shards; the results must be the same bits. Returns what the sharded run said."""
    for name in ("none", "layers"):
        codes = train(server, folder / name, *faults, ranks=ranks, **{**KEYS, **keys, "base_sharding": name})
        assert codes == [0] * ranks, said(folder / name)
    assert results(folder / "layers") == results(folder / "none")
    assert samples(folder / "layers") == samples(folder / "none")
    return said(folder / "layers")


WORLDS: list[tuple[int, dict[str, Any]]] = [
    (2, {"use_gradient_checkpointing": "true", "mixed_precision": "bf16", "pass_per_agent": "false"}),
    (4, {"lora_dropout": 0.1}),
    (2, {"model_dtype": "bf16", "diversity": "swd", "pass_per_agent": "false"}),
    (3, {"model_dtype": "fp64"}),
    (2, {"quantization": "nf4"}),
]


@pytest.mark.parametrize(("ranks", "keys"), sampled_cases(WORLDS, WORLDS[:1]), ids=str)
def test_a_sharded_run_has_the_bits_of_one_without_shards(
    ranks: int, keys: dict[str, Any], server: ForkServer, tmp_path: Path
) -> None:
    told = compare(server, tmp_path, ranks, **keys)
    assert f"layers sharded over {ranks} process(es)" in told


@pytest.mark.parametrize("quantization", sampled(["null", "nf4"], ["nf4"]))
def test_heads_on_a_sharded_base_have_the_bits_of_those_on_a_whole_one(
    quantization: str, server: ForkServer, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    keys = {"objective": "classification", "dataset_name": write(rows, "labelled"), "quantization": quantization}
    compare(server, tmp_path, 2, **keys, generation_eval_samples=0)
    record = json.loads((tmp_path / "layers/run/evaluation.json").read_text())
    assert (record["measured_by"], len(record["classes"]["accuracy"]["agents"])) == ("heads", 3)


#: A gather of the first layer, of the last one, between two passes, in the middle of the backward pass, and at its end.
PLACES = (1, PRODUCTS, PRODUCTS + 1, PRODUCTS + PRODUCTS // 2, 2 * PRODUCTS)


@pytest.mark.parametrize("place", sampled(PLACES, (PRODUCTS + PRODUCTS // 2,)))
def test_out_of_memory_anywhere_in_a_pass_is_repeated_in_smaller_parts_by_all(
    place: int, server: ForkServer, tmp_path: Path
) -> None:
    """In the second micro-step of process 1; the others are about to gather, or wait in a gather already."""
    fault = Fault("out of memory in a product", steps=(2,), process=1, amount=2 * PRODUCTS + place, times=1)
    told = compare(server, tmp_path, 2, fault, batch_size=2, eval_steps="null", generation_eval_samples=0)
    assert fired(tmp_path / "layers") == [("out of memory in a product", 2, 1)]
    assert "micro-batch 2 -> 1 row(s), the effective batch of 8 holds" in told


def test_without_memory_to_follow_the_others_the_attempt_ends_for_all(server: ForkServer, tmp_path: Path) -> None:
    """The supervisor knows the reason and launches it with a smaller micro-batch."""
    faults = (
        Fault("out of memory in a product", steps=(2,), process=1, amount=PRODUCTS // 2),
        Fault("out of memory while following", steps=(2,), process=1),
    )
    keys = {**KEYS, "eval_steps": "null", "base_sharding": "layers"}
    assert train(server, tmp_path, *faults, ranks=2, **keys) == [1, 1]
    assert [kind for kind, *_ in fired(tmp_path)] == [fault.kind for fault in faults]
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("failed", "out_of_memory"), said(tmp_path)


def test_out_of_memory_in_an_evaluation_is_repeated_in_smaller_parts_by_all(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("out of memory in an evaluation", steps=(2, 4), process=1, amount=1)
    told = compare(server, tmp_path, 2, fault, eval_samples=8)
    assert {step for _, step, _ in fired(tmp_path / "layers")} == {2}, "later evaluations take fewer rows at once"
    assert " at a time" in told


@pytest.mark.parametrize(("ranks", "then"), sampled_cases([(4, 2), (2, 2)], [(2, 2)]))
def test_when_a_process_is_killed_in_its_pass_the_others_end_and_the_run_resumes(
    ranks: int, then: int, server: ForkServer, tmp_path: Path
) -> None:
    """After step 4, in the backward pass; on another number of processes, and without shards, as on the same ones."""
    keys = {**KEYS, "save_steps": 4, "max_train_steps": 6, "eval_steps": "null", "model_dtype": "fp64"}
    fault = Fault("kill in a product", steps=(4,), process=1, amount=PRODUCTS + PRODUCTS // 2, committed=4)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(server, whole, ranks=then, **keys) == [0] * then, said(whole)
    codes = train(server, killed, fault, ranks=ranks, **keys, base_sharding="layers")
    assert codes == [-9 if rank == 1 else 1 for rank in range(ranks)], said(killed)
    assert {failure.reason for failure in read_failures(killed / "run", 1)} == {"peer_lost"}
    assert train(server, killed, ranks=then, **keys, base_sharding="layers") == [0] * then, said(killed)
    assert "step 4 of 6, verified" in said(killed)
    assert rows_of_steps(killed) == rows_of_steps(whole)
    if ranks == then:
        assert "exactness: bitwise" in said(killed)
        assert weights(killed, range(3)) == weights(whole, range(3))
    else:
        assert "sample-exact (processes 4 -> 2" in said(killed)
        torch.testing.assert_close(adapters(killed, range(3)), adapters(whole, range(3)), rtol=0, atol=1e-6)


def rows_of_steps(folder: Path) -> dict[int, list[int]]:
    """The rows of every optimizer step, over all processes."""
    steps: dict[int, list[int]] = {}
    for (step, _), rows in samples(folder).items():
        steps[step] = sorted([*steps.get(step, []), *rows])
    return steps
