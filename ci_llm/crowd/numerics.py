"""Whether two passes through a base agree, and the error for a base that cannot be used."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ci_llm.core.memory import is_out_of_memory
from ci_llm.errors import CiLlmError, ModelError


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest absolute difference, divided by the largest absolute value of `wanted`; NaN if one holds NaN."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def tolerance(*dtypes: torch.dtype) -> float:
    """The largest `distance` that counts as equal: half the digits of the coarsest dtype.

    It lies far above rounding and far below the effect of a wrong mask. It is at least 1e-5, because some families
    compute their softmax in fp32 in any dtype.
    """
    return max(1e-5, math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes)))


def dtypes_of(model: PreTrainedModel, logits: Tensor) -> list[torch.dtype]:
    """The dtypes in which the logits were computed, that of autocast included, if it is on."""
    kind = logits.device.type
    autocast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    return [logits.dtype, model.dtype, *autocast]


def describe_error(error: Exception) -> str:
    """Type and first line of an error that a base raised.

    Raises:
        Exception: `error` itself, if it says nothing about the base: an error of this package, or out of memory.
    """
    if isinstance(error, CiLlmError) or is_out_of_memory(error):
        raise error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def unusable_base(model: PreTrainedModel, base_name: str, what: str) -> ModelError:
    """The error to raise for a base that cannot be used; `what` follows the name of its class."""
    return ModelError(
        f"{type(model).__name__} {what}",
        where=f"model_name: {base_name}",
        hint="use a base of another family; Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and GPT-2 are known to work",
    )
