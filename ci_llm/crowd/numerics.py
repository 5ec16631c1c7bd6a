"""Whether two passes through a base agree, and what to say of a base that cannot be used."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.core.memory import is_out_of_memory
from ci_llm.errors import CiLlmError, ModelError


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number wanted."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def tolerance(*dtypes: torch.dtype) -> float:
    """Half the digits of the coarsest dtype: far above rounding, far below a wrong mask.

    Not under 1e-5: some families take their softmax in fp32 whatever the model's dtype is.
    """
    return max(1e-5, math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes)))


def describe_error(error: Exception) -> str:
    """The first line of what a base said; what is no answer about this base goes on as it is."""
    if isinstance(error, CiLlmError) or is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def unusable(model: PreTrainedModel, base_name: str, what: str) -> ModelError:
    """An error to raise: the base does, or cannot do, what the words say."""
    return ModelError(
        f"{type(model).__name__} {what}",
        where=f"model_name: {base_name}",
        hint="use a base of another family; Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and GPT-2 are known to work",
    )
