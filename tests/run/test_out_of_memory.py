"""Out of memory, real and injected: the step is repeated in smaller parts, and the run stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.core.memory import is_out_of_memory, unless_out_of_memory
from ci_llm.core.run_folder import read_failures
from ci_llm.core.run_status import read_status
from ci_llm.data.agent_rows import OrderedRows, TrainingRows
from ci_llm.data.batches import MicroBatch, Owned, pack
from ci_llm.data.order import Plan
from ci_llm.run.step.out_of_memory import in_parts
from tests.support.campaign import sampled, sampled_cases
from tests.support.faults import Fault, adapters, fired, metrics, said, samples, train, weights
from tools.testbed import tiny
from tools.testbed.forkserver import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]

ROWS = 16
BIG = {"num_agents": 3, "batch_size": ROWS, "global_batch_size": ROWS, "max_train_samples": 100}
BIG |= {"max_train_steps": 3, "model_dtype": "fp64", "model_name": "embedded"}
#: A third of what 16 rows in fp64 need: 0.1 GB for one agent, 0.3 GB for three.
SPARE_BYTES = {True: 33 << 20, False: 100 << 20}


@pytest.mark.parametrize(
    ("ranks", "pass_per_agent"),
    sampled_cases([(1, True), (1, False), (2, True), (2, False)], [(1, False), (2, True)]),
)
def test_a_step_for_which_the_kernel_refuses_memory_keeps_its_rows(
    ranks: int, pass_per_agent: bool, server: ForkServer, tmp_path: Path
) -> None:
    """From the second step on, the kernel refuses memory that the first step had, to the last process."""
    keys = BIG | {"global_batch_size": ROWS * ranks, "pass_per_agent": pass_per_agent}
    fault = Fault("short memory", steps=(1,), process=ranks - 1, amount=SPARE_BYTES[pass_per_agent], times=1)
    for name, faults in (("ample", []), ("short", [fault])):
        assert train(server, tmp_path / name, *faults, ranks=ranks, **keys) == [0] * ranks, said(tmp_path / name)
    assert fired(tmp_path / "short")[0] == ("short memory", 1, ranks - 1)
    told = said(tmp_path / "short")
    assert "memory    step 2 does not fit (" in told
    assert ("every agent takes a pass of its own from now on" in told) is not pass_per_agent
    if pass_per_agent:
        assert f"micro-batch {ROWS} -> {ROWS // 2} row(s), the effective batch of {ROWS * ranks} holds" in told
        assert read_status(tmp_path / "short" / "run").micro_batch_size in (1, 2, 4, 8)
    assert samples(tmp_path / "short") == samples(tmp_path / "ample")
    ample, short = (adapters(tmp_path / name, range(3)) for name in ("ample", "short"))
    assert {tensor.dtype for tensor in short.values()} == {torch.float64}
    torch.testing.assert_close(short, ample, rtol=0, atol=1e-6)


def test_all_processes_repeat_the_step_and_checkpoints_hold_the_smaller_batch(
    server: ForkServer, tmp_path: Path
) -> None:
    fault = Fault("out of memory", steps=(2,), process=1, amount=1)
    keys = {"max_train_steps": 6, "global_batch_size": 8, "save_steps": 4}
    assert train(server, tmp_path, fault, Fault("kill", steps=(5,), committed=4), ranks=2, **keys) == [-9, -9]
    told = said(tmp_path)
    assert "step 3 does not fit (on another process): micro-batch 4 -> 2 row(s), the effective batch of 8 holds" in told
    assert "step 3 does not fit (on another process): micro-batch 2 -> 1 row(s)" in told
    assert [one for one in fired(tmp_path) if one[0] == "out of memory"] == [("out of memory", 2, 1)] * 2
    assert train(server, tmp_path, ranks=2, **keys) == [0, 0], said(tmp_path)
    second = said(tmp_path).partition("step 4 of 6, verified")[2]
    assert "recovery: micro-batch of at most 1 row(s), the effective batch holds" in second
    assert "exactness: bitwise" in second
    assert metrics(tmp_path)[-1]["train/micro_batch_size"] == 1
    assert metrics(tmp_path)[-1]["tokens_per_s"] > 0


def test_with_one_row_left_layers_are_recomputed_and_then_the_attempt_ends(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("out of memory", steps=(2,), amount=0)
    assert train(server, tmp_path, fault, batch_size=2) == [1]
    assert len(fired(tmp_path)) == 3  # two rows, one row, one row with recomputed layers
    told, (failure,) = said(tmp_path), read_failures(tmp_path / "run", 1)
    assert "layers are recomputed in the backward pass from now on" in told
    assert (failure.reason, failure.step) == ("out_of_memory", 2)
    for advice in ("one row at a time", "Tried to allocate 2.00 GiB", "GB held", "max_seq_length=41", "num_agents=1"):
        assert advice in failure.message, failure.message
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason, status.micro_batch_size) == ("failed", "out_of_memory", 1)


@pytest.mark.parametrize("ranks", sampled([1, 2], [2]))
def test_an_evaluation_that_does_not_fit_is_done_in_smaller_batches(
    ranks: int, server: ForkServer, tmp_path: Path
) -> None:
    """This holds for evaluations during the run and at its end, and changes no bit of the training."""
    keys = {"eval_steps": 4, "eval_samples": 20, "generation_eval_samples": 6, "max_new_tokens_eval": 4}
    keys |= {"max_train_steps": 6}
    fault = Fault("out of memory in an evaluation", steps=(3, 5), process=ranks - 1, amount=2)
    for name, faults in (("ample", []), ("short", [fault])):
        assert train(server, tmp_path / name, *faults, ranks=ranks, **keys) == [0] * ranks, said(tmp_path / name)
    told = said(tmp_path / "short")
    rows = 16 if ranks == 1 else 10  # of four micro-batches; of all that one process has
    assert f"evaluation after step 4 does not fit ({'CUDA' if ranks == 1 else 'on another process'}" in told
    assert f"{rows} -> {rows // 2} at a time" in told
    results = [json.loads((tmp_path / name / "run" / "evaluation.json").read_text()) for name in ("ample", "short")]
    assert results[1]["n"] == results[0]["n"] == 6
    assert results[1]["exact_match"] == results[0]["exact_match"]
    assert results[1]["nll"]["agents"] == pytest.approx(results[0]["nll"]["agents"])
    assert weights(tmp_path / "short", range(3)) == weights(tmp_path / "ample", range(3))
    assert metrics(tmp_path / "short")[-1].keys() == metrics(tmp_path / "ample")[-1].keys()


@pytest.mark.parametrize("ranks", sampled([1, 2], [1]))
def test_after_a_kill_in_an_evaluation_the_next_attempt_evaluates_fewer_rows_at_a_time(
    ranks: int, server: ForkServer, tmp_path: Path
) -> None:
    """A kill leaves no message: status.json tells the next attempt that it was in an evaluation."""
    keys = {"eval_samples": 20, "generation_eval_samples": 6, "max_new_tokens_eval": 4, "max_train_steps": 6}
    assert train(server, tmp_path / "ample", ranks=ranks, **keys) == [0] * ranks, said(tmp_path / "ample")
    kill = Fault("kill in an evaluation", steps=(5, -1), amount=2)  # -1: the attempt trains no step
    sizes = [16, 8, 4] if ranks == 1 else [10, 5]
    for size in sizes:
        assert train(server, tmp_path / "killed", kill, ranks=ranks, **keys) == [-9] * ranks, said(tmp_path / "killed")
        status = json.loads((tmp_path / "killed" / "run" / "status.json").read_text())
        assert (status["status"], status["phase"]) == ("running", "evaluation")
        assert (status["evaluation_batch_size"], status["step"]) == (size, 6)
    assert train(server, tmp_path / "killed", kill, ranks=ranks, **keys) == [0] * ranks, said(tmp_path / "killed")
    assert "recovery: at most 2 row(s) are evaluated at a time, as memory was short" in said(tmp_path / "killed")
    status = read_status(tmp_path / "killed" / "run")
    assert (status.phase, status.evaluation_batch_size, status.micro_batch_size) == (None, 2, 4)
    results = [json.loads((tmp_path / name / "run" / "evaluation.json").read_text()) for name in ("ample", "killed")]
    assert results[1]["exact_match"] == results[0]["exact_match"]
    assert results[1]["nll"]["agents"] == pytest.approx(results[0]["nll"]["agents"])


def test_an_evaluation_of_one_row_that_does_not_fit_ends_the_attempt_with_advice(
    server: ForkServer, tmp_path: Path
) -> None:
    fault = Fault("out of memory in an evaluation", steps=(5,), amount=0)
    assert train(server, tmp_path, fault, max_train_steps=6) == [1]
    assert len(fired(tmp_path)) == 3  # all four rows, two, one
    (failure,) = read_failures(tmp_path / "run", 1)
    assert (failure.reason, failure.step) == ("out_of_memory", 6)
    for advice in ("an evaluation of one row at a time", "Tried to allocate 2.00 GiB", "max_seq_length=41"):
        assert advice in failure.message, failure.message
    assert train(server, tmp_path, max_train_steps=6) == [0], said(tmp_path)


def test_a_resumed_run_keeps_recomputing_layers(server: ForkServer, tmp_path: Path) -> None:
    fault = Fault("out of memory", steps=(2,), times=1)
    keys = {"batch_size": 1, "save_steps": 4, "max_train_steps": 6}
    assert train(server, tmp_path, fault, Fault("kill", steps=(5,), committed=4), **keys) == [-9]
    assert train(server, tmp_path, **keys) == [0], said(tmp_path)
    assert "recovery: layers are recomputed in the backward pass" in said(tmp_path)


def test_a_resumed_run_keeps_its_pass_per_agent(server: ForkServer, tmp_path: Path) -> None:
    """The run that was short of memory ends with the same bits whether or not it is resumed in between."""
    short = Fault("out of memory", steps=(2,), times=1)
    keys = {"pass_per_agent": False, "save_steps": 4, "max_train_steps": 6}
    assert train(server, tmp_path / "straight", short, **keys) == [0]
    assert train(server, tmp_path / "killed", short, Fault("kill", steps=(5,), committed=4), **keys) == [-9]
    assert train(server, tmp_path / "killed", **keys) == [0], said(tmp_path / "killed")
    assert "step 3 does not fit" in said(tmp_path / "killed")
    assert "recovery: every agent takes a pass of its own" in said(tmp_path / "killed")
    assert "exactness: bitwise" in said(tmp_path / "killed")
    assert weights(tmp_path / "killed", range(2)) == weights(tmp_path / "straight", range(2))


def test_parts_of_a_micro_batch_hold_its_rows_in_order() -> None:
    rows = [tiny.example(5 + number) for number in range(5)]
    packed = [pack([rows[number] for number in numbers], numbers) for numbers in ([3, 1, 4], [0, 2])]
    batches: list[MicroBatch] = [[Owned((0, 1), batch)] for batch in packed]
    ordered_rows = ordered(rows)
    assert in_parts(TrainingRows((ordered_rows, ordered_rows)), batches, 3) is batches
    parts = in_parts(TrainingRows((ordered_rows, ordered_rows)), batches, 2)
    assert [own.batch.sample_ids for part in parts for own in part] == [(3, 1), (4, 0), (2,)]
    ids = torch.cat([own.batch.input_ids for part in parts for own in part])
    assert torch.equal(ids, torch.cat([batch.input_ids for batch in packed]))


def ordered(rows: Any) -> OrderedRows:
    return OrderedRows(rows, Plan(len(rows), 5, seed=1))


def test_parts_with_rows_per_agent_hold_them_in_order() -> None:
    rows = [tiny.example(5 + number) for number in range(5)]
    packed = [pack([rows[number] for number in numbers], numbers) for numbers in ([3, 1, 4], [0, 2], [1])]
    batches: list[MicroBatch] = [[Owned((0,), packed[0]), Owned((1,), packed[2])], [Owned((0,), packed[1])]]
    training_rows = TrainingRows((ordered(rows), ordered(rows)))
    assert in_parts(training_rows, batches, 3) is batches
    parts = [{own.agents: own.batch.sample_ids for own in part} for part in in_parts(training_rows, batches, 2)]
    assert parts == [{(0,): (3, 1), (1,): (1,)}, {(0,): (4, 0)}, {(0,): (2,)}]


def test_the_cause_is_the_process_that_failed_first(server: ForkServer, tmp_path: Path) -> None:
    """Process 1 runs out of memory where it cannot vote; process 0 is then stopped, as launchers do."""
    faults = (
        Fault("out of memory in the optimizer", steps=(3,), process=1),
        Fault("terminated after another", steps=(4,), process=0),
    )
    codes = train(server, tmp_path, *faults, ranks=2, global_batch_size=8)
    assert codes[1] == 1
    assert {one[0] for one in fired(tmp_path)} == {fault.kind for fault in faults}
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason) == ("failed", "out_of_memory"), said(tmp_path)


# What an exception means


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_every_form_of_out_of_memory_is_recognised(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert is_out_of_memory(error)
    assert unless_out_of_memory(fail) == (None, str(error) or "out of memory")
