"""Each mend of a GPU's path has a test, which fails in a copy of the project without the mend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.campaign]

ROOT: Final = Path(__file__).parents[2]
COPIED: Final = ("ci_llm", "tests", "tools", "benchmarks", "configs", "docs", "pyproject.toml", "README.md")
DEFECTS, DEVICE = "tests/accelerator/test_defects.py::", "tests/accelerator/test_device.py::"


@dataclass(frozen=True)
class Mend:
    """What is written in a file of `ci_llm`, what stands there without the mend, and the test that then fails."""

    file: str
    text: str
    without: str
    test: str


MENDS: Final = {
    "cuDNN plans for every length": Mend(
        "lora/attention.py",
        "with sdpa_kernel(FUSED) if q.is_cuda else nullcontext():",
        "with nullcontext():",
        f"{DEVICE}test_attention_never_takes_the_kernel_that_holds_all_scores_or_one_that_plans",
    ),
    "a call for every row": Mend(
        "lora/attention.py",
        '("varlen", "rows", "explicit") if dtype in HALVES else',
        '("rows", "explicit") if dtype in HALVES else',
        f"{DEFECTS}test_attention_is_one_call_per_layer_and_no_plan_is_built",
    ),
    "grouped heads without flash": Mend(
        "lora/attention.py",
        "        k, v = _repeated(k, v, q.shape[1])\n    with sdpa",
        "        pass\n    with sdpa",
        f"{DEVICE}test_attention_never_takes_the_kernel_that_holds_all_scores_or_one_that_plans",
    ),
    "chunks of a processor's cache": Mend(
        "lora/passes.py",
        "LOGITS_PER_CHUNK_OF_A_GPU = 8 * LOGITS_PER_CHUNK",
        "LOGITS_PER_CHUNK_OF_A_GPU = LOGITS_PER_CHUNK",
        "tests/accelerator/test_training.py::test_four_agents_on_24_layers_start_few_kernels_and_hardly_more_for_more_rows",
    ),
    "masks drawn on the CPU": Mend(
        "lora/adapters.py",
        'generator_for(agent.seed, "dropconnect", step, agent.index, device=row.device)\n'
        "                row.copy_(torch.empty(row.shape, device=row.device)",
        'generator_for(agent.seed, "dropconnect", step, agent.index)\n                row.copy_(torch.empty(row.shape)',
        f"{DEFECTS}test_masks_of_dropconnect_are_drawn_on_the_device",
    ),
    "a context on the first GPU": Mend(
        "checkpoints/async_saver.py",
        "with torch.cuda.device(device), torch.cuda.stream(stream):",
        "with torch.cuda.stream(stream):",
        f"{DEFECTS}test_a_save_makes_no_context_on_another_gpu",
    ),
    "Apple's and Intel's devices": Mend(
        "distributed/precision.py",
        'not in ("cuda", "cpu") and not is_cpu_wanted(os.environ)',
        'not in ("cuda", "cpu", "mps", "xpu") and not is_cpu_wanted(os.environ)',
        "tests/distributed/test_precision.py",
    ),
    "TF32 without its key": Mend(
        "run/setup.py",
        "torch.backends.cuda.matmul.allow_tf32 = config.tf32",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        f"{DEFECTS}test_fp32_is_multiplied_as_tf32_only_by_its_key",
    ),
    "gaps in memory": Mend(
        "distributed/processes.py",
        '"expandable_segments:True"',
        '"expandable_segments:False"',
        "tests/distributed/test_processes.py",
    ),
    "a sum without a bound": Mend(
        "distributed/processes.py",
        "    dist.all_reduce(tensor)\n    if not tensor.is_cuda:",
        "    dist.all_reduce(tensor)\n    if True:",
        "tests/distributed/test_processes.py::test_a_sum_on_gpus_that_never_ends_means_that_a_peer_is_gone",
    ),
    "a copy for each batch of an evaluation": Mend(
        "crowd/scoring.py",
        "torch.cat([torch.stack([part.right.double(), part.nll]) for part in listed], dim=2).cpu()",
        "torch.cat([torch.stack([part.right.double(), part.nll]).cpu() for part in listed], dim=2)",
        f"{DEFECTS}test_an_evaluation_waits_for_the_device_once",
    ),
    "the base by way of the host": Mend(
        "base/load.py",
        'how.setdefault("device_map", {"": device})',
        "pass",
        f"{DEFECTS}test_the_base_is_loaded_straight_to_the_device",
    ),
    "an emergency save behind the step": Mend(
        "run/end/emergency_save.py",
        "        with torch.cuda.stream(stream):\n            yield",
        "        yield",
        f"{DEFECTS}test_an_emergency_save_does_not_queue_behind_the_step_that_it_gives_up",
    ),
    "an unknown word for out of memory": Mend(
        "core/memory.py", "|HIPBLAS_STATUS_ALLOC_FAILED", "", "tests/core/test_memory.py"
    ),
    "the current device": Mend(
        "distributed/processes.py",
        "                torch.cuda.set_device(self.device)",
        "                pass",
        f"{DEFECTS}test_only_the_gpu_that_the_environment_names_gets_a_context",
    ),
}


@pytest.mark.parametrize("name", MENDS)
def test_without_its_mend_a_test_fails(name: str, tmp_path: Path) -> None:
    mend = MENDS[name]
    for each in COPIED:
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
        copy(ROOT / each, tmp_path / each)
    file = tmp_path / "ci_llm" / mend.file
    source = file.read_text()
    assert source.count(mend.text) == 1
    file.write_text(source.replace(mend.text, mend.without))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mend.test],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout[-4000:]
    assert " failed" in ended.stdout.splitlines()[-1], ended.stdout[-4000:]
