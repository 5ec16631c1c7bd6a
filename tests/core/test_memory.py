"""Memory of a GPU, and errors that mean that it ran out."""

from __future__ import annotations

import pytest
import torch

from ci_llm.core.memory import free_memory, is_out_of_memory


def test_memory_cached_by_torch_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run of the same process finds the memory of the one before in torch's cache."""
    told = {"mem_get_info": (10, 80), "memory_reserved": 70, "memory_allocated": 16}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda:0")) == (64, 80)


@pytest.mark.parametrize(
    ("message", "ran_out"),
    [
        ("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'", True),
        ("Cuda failure 'out of memory'", True),
        ("Cuda failure 719 'unspecified launch failure'", False),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("HIP error: out of memory", True),
        ("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", True),
        ("shape mismatch", False),
    ],
)
def test_a_message_says_that_memory_ran_out(message: str, ran_out: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) is ran_out
