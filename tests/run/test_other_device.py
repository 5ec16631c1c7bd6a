"""A run resumes on another device: where the moments lie, and a base in another precision, which is not bitwise."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci_llm.base import load
from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.core import determinism
from ci_llm.distributed import precision
from ci_llm.distributed.precision import Speed
from ci_llm.embedded import BASE_FOLDER
from ci_llm.run.exactness import restore_generators, surroundings
from ci_llm.run.optimizer import placed
from ci_llm.run.step.state import TrainState
from ci_llm.run.trainer import set_determinism
from tests.support.small_run import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_as_they_were")]


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A base whose own precision is bf16, as most are."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, steps: int, *words: str) -> int:
    return main(["train", *WORDS, f"max_train_steps={steps}", f"model_name={model}", f"output_dir={folder}", *words])


def train_as_on_a_gpu(folder: Path, model: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Trains with the precision of a GPU: the one function that asks the device is replaced."""

    def dtype(model_dtype: str | None, _: torch.device) -> torch.dtype | str:
        return load.DTYPES[model_dtype] if model_dtype else "auto"

    with monkeypatch.context() as gpu:
        gpu.setattr(load, "_dtype", dtype)
        return train(folder, model, steps)


def test_a_run_resumes_from_a_gpu_on_a_cpu_and_back_and_on_no_other_base(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train_as_on_a_gpu(run, half, 2, monkeypatch) == 0
    assert "torch.bfloat16" in capsys.readouterr().out
    assert train(run, half, 4) == 0
    said = capsys.readouterr().out
    assert "torch.float32" in said
    assert "resume    step 2 of 4" in said
    assert "exactness: sample-exact (precision of the base bf16 -> fp32" in said
    assert train(run, half, 6, "model_dtype=bf16") == 2
    assert "model_dtype was None, is bf16" in capsys.readouterr().err
    assert train_as_on_a_gpu(run, half, 6, monkeypatch) == 0
    assert "precision of the base fp32 -> bf16" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16)
    with torch.no_grad():
        next(model.parameters())[5, 5] += 0.25
    model.save_pretrained(half)
    assert train(run, half, 8) == 2
    assert "has another crowd: weights of the base" in capsys.readouterr().err


def test_a_run_keeps_the_precision_that_auto_chose_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_here(steps: int, *words: str, fast: bool) -> int:
        with monkeypatch.context() as machine:
            machine.setattr(precision, "speed_of_bf16", lambda: Speed(fast, "said by the test"))
            return main(["train", *WORDS, f"max_train_steps={steps}", f"output_dir={tmp_path / 'run'}", *words])

    auto = ("mixed_precision=auto", "model_dtype=auto")
    assert train_here(2, *auto, fast=True) == 0
    said = capsys.readouterr().out
    assert "precision mixed_precision=bf16, model_dtype=bf16: said by the test" in said
    assert "torch.bfloat16" in said
    assert "ten times" not in said
    saved = (tmp_path / "run/checkpoint_step_2/config.yaml").read_text()
    assert 'mixed_precision: "bf16"' in saved
    assert train_here(4, *auto, fast=False) == 0
    said = capsys.readouterr().out
    assert re.search('auto .* mixed_precision "bf16", model_dtype "bf16".*: as this run began', said)
    assert "warning: precision bf16 takes about ten times as long as fp32 here" in said
    assert said.count("is faster") == 1
    assert "exactness: bitwise" in said
    assert train_here(6, "mixed_precision=no", "model_dtype=auto", fast=False) == 2
    assert "mixed_precision was bf16, is no" in capsys.readouterr().err


def test_the_same_values_have_the_same_rounded_fingerprint_in_every_precision(half: Path) -> None:
    wide, narrow = load.load_base(str(half), "fp32"), load.load_base(str(half), "bf16")
    assert wide.fingerprint != narrow.fingerprint
    assert wide.rounded_fingerprint == narrow.rounded_fingerprint
    assert wide.rounded_fingerprint != load.load_base("embedded").fingerprint


def test_generators_of_missing_gpus_are_named_and_the_others_are_restored() -> None:
    state = determinism.capture()
    state["cuda"] = {f"{i}": torch.zeros(16, dtype=torch.uint8) for i in range(1 + torch.cuda.device_count())}
    wanted = torch.rand(3)
    hindrance = determinism.restore(state)
    assert hindrance is not None
    assert hindrance.startswith("CUDA generators")
    assert torch.equal(torch.rand(3), wanted)
    assert determinism.restore(determinism.capture()) is None


@pytest.mark.parametrize(("processes", "handed_on"), [(2, True), (1, False), (3, False)])
def test_generators_are_restored_on_as_many_processes_and_seeded_on_others(processes: int, handed_on: bool) -> None:
    """A callback that draws between the steps draws the same numbers in every repetition of the resume."""
    kept = determinism.capture()
    draw = lambda: [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: E731
    saved = {}
    for index in range(2):
        determinism.seed_everything("process", index)
        saved[f"process{index}"] = determinism.capture()
    wanted = draw()  # of process 1
    at = SimpleNamespace(process_index=processes - 1, num_processes=processes)
    run: Any = SimpleNamespace(processes=at, config=Config(seed=3), state=TrainState(step=5))
    drawn = []
    for before in range(2):
        determinism.seed_everything("whatever it was before", before)
        assert restore_generators(run, saved, same_processes=processes == len(saved)) == []
        drawn.append(draw())
    determinism.restore(kept)
    assert drawn[0] == drawn[1]
    assert (drawn[0] == wanted) == handed_on


@pytest.mark.parametrize(("mode", "is_sure"), [(False, False), ("auto", False), (True, True)])
def test_a_gpu_is_deterministic_only_where_anything_else_is_an_error(mode: bool | str, is_sure: bool) -> None:
    """With `auto`, attention keeps its other backward pass and warns once."""
    run: Any = SimpleNamespace(
        crowd=SimpleNamespace(
            device=torch.device("cuda:0"),
            storage=SimpleNamespace(pass_per_agent=False),
            base_model=SimpleNamespace(shares_prompts=False),
        ),
        processes=SimpleNamespace(num_processes=1),
        micro_batch_size=1,
    )
    attempt: Any = SimpleNamespace(bits={})
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        set_determinism(Config(deterministic=mode))
        found = surroundings(run, attempt)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert found["deterministic"] == is_sure


@pytest.mark.parametrize("fused", [True, False])
def test_a_plain_adamw_reads_its_step_on_the_cpu(fused: bool) -> None:
    """On a GPU it would wait for the device in every step; `meta` stands for the GPU."""
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weights], fused=fused)
    weights.grad = torch.ones(3)
    optimizer.step()
    moments = placed(optimizer.state[weights], weights.to("meta"), optimizer)
    assert {name: tensor.device.type for name, tensor in moments.items()} == {
        "step": "meta" if fused else "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    assert moments["step"].dtype == torch.float32
