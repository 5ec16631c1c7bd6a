"""The checks of a GPU's paths pass where these work and fail where they do not; the tests run them on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ci_llm.config import Config
from ci_llm.dry_run import gpu
from ci_llm.dry_run.context import CheckContext, Inapplicable
from ci_llm.dry_run.plan import CHECKS, Check, run_checks
from ci_llm.errors import CheckpointError, CiLlmError, ModelError
from ci_llm.lora import attention

CPU = torch.device("cpu")
GPU_CHECKS = {check.name: check.run for check in CHECKS if check.name.startswith("gpu ")}
PAGE = Path(__file__).parents[2] / "docs/commands.md"


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def context(device: torch.device, **config: Any) -> CheckContext:
    """As much of a context as these checks look at."""
    return cast("CheckContext", SimpleNamespace(processes=SimpleNamespace(device=device), config=Config(**config)))


@pytest.mark.slow
def test_every_path_passes_where_it_works(tmp_path: Path) -> None:
    assert "bf16 within" in gpu.autocast(CPU)
    assert "within" in gpu.attention(CPU)
    assert "bit for bit" in gpu.determinism(CPU, required=True)
    assert "bit for bit" in gpu.determinism(CPU, torch.bfloat16, required=True)
    assert "bit for bit" in gpu.copies(CPU)
    assert "bit for bit" in gpu.checkpoint(CPU, tmp_path / "checkpoints")
    assert "running out is noticed" in gpu.memory(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here; CUDA_VISIBLE_DEVICES= make test")
def test_without_a_gpu_each_check_says_that_nothing_was_checked() -> None:
    ours = [Check(name, (), run) for name, run in GPU_CHECKS.items()]
    for outcome in run_checks(ours, context(CPU), stopped=lambda: None):
        assert (outcome.verdict, outcome.lines) == ("inapplicable", ("no GPU here: not checked",))


def test_a_run_on_the_cpu_beside_a_gpu_checks_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Inapplicable, match="computes on the CPU"):
        gpu.on_gpu(gpu.copies)(context(CPU))


def test_where_no_determinism_is_wanted_none_is_proven() -> None:
    with pytest.raises(Inapplicable, match="deterministic is false"):
        gpu.determinism_of(context(torch.device("cuda"), deterministic=False))


@pytest.mark.slow
def test_a_half_precision_that_goes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gpu.Toy.gradients

    def wrong(toy: gpu.Toy, dtype: torch.dtype | None = None) -> torch.Tensor:
        return exact(toy, dtype) * (1.0 if dtype is None else 1.2)

    monkeypatch.setattr(gpu.Toy, "gradients", wrong)
    with pytest.raises(ModelError, match="gradients in bf16 differ from those in fp32"):
        gpu.autocast(CPU)


@pytest.mark.slow
def test_an_optimizer_that_moves_no_agent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: None)
    with pytest.raises(ModelError, match="not every agent has moved"):
        gpu.autocast(CPU)


@pytest.mark.slow
def test_a_kernel_that_looks_into_the_next_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "EXPLICIT_UP_TO", 0)  # every row takes the fused kernel, as on a GPU
    assert "within" in gpu.attention(CPU)
    fused = attention._fused

    def leaking(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> torch.Tensor:
        return fused(q, k, v, torch.zeros(q.shape[2], q.shape[2]), *rest)

    monkeypatch.setattr(attention, "_fused", leaking)
    with pytest.raises(ModelError, match=r"attention by rows in torch\.float32 differs"):
        gpu.attention(CPU)


@pytest.mark.slow
def test_other_bits_are_reported_or_fail_where_determinism_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter((0.0, 1e-7, 0.0, 1e-7))
    exact = gpu.Toy.gradients
    monkeypatch.setattr(gpu.Toy, "gradients", lambda toy, dtype: exact(toy, dtype) + next(noise))
    assert "state-exact here, and not bitwise" in gpu.determinism(CPU, required=False)
    with pytest.raises(ModelError, match="other bits the second time"):
        gpu.determinism(CPU, required=True)


def test_a_bus_that_changes_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(CiLlmError, match="come back changed from the device"):
        gpu.copies(CPU)


@pytest.mark.slow
def test_a_copy_that_comes_too_late_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.CheckpointManager, "restore", lambda *_, **__: None)  # the weights of the step after stay
    with pytest.raises(CheckpointError, match="7 of 7 tensors come back changed"):
        gpu.checkpoint(CPU, tmp_path / "checkpoints")


def test_running_out_of_memory_under_another_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_out_of_memory", lambda _: False)
    with pytest.raises(CiLlmError, match="running out of memory is not known as such"):
        gpu.memory(CPU)


def test_the_page_has_a_row_for_each_of_them() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| gpu ")]
    assert rows == ["gpu (six checks)", *GPU_CHECKS]
    assert len(GPU_CHECKS) == 6
