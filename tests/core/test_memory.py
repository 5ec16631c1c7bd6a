"""Memory of a GPU, and errors that mean that it ran out."""

from __future__ import annotations

import pytest
import torch

from ci_llm.core.memory import free_memory


def test_memory_cached_by_torch_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run of the same process finds the memory of the one before in torch's cache."""
    told = {"mem_get_info": (10, 80), "memory_reserved": 70, "memory_allocated": 16}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda:0")) == (64, 80)
