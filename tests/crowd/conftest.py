"""A crowd that answers in words, for all that leave it as it was, and norms that compute in fp64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from ci_llm import Crowd


@pytest.fixture(scope="session")
def crowd() -> Crowd:
    """Three agents on the embedded base."""
    from tests.support.crowds import disturbed_crowd  # with torch, which most files do without

    return disturbed_crowd()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of Llama compute in the dtype of their input; in fp32 a difference of 1e-16 would become 1e-8."""
    import torch

    def forward(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaRMSNorm.forward", forward)
