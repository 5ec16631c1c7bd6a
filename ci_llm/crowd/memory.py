"""Out of memory, or a bug: what allocators say that have no exception of their own."""

from __future__ import annotations

import re
from typing import Final

import torch

#: PyTorch's on the CPU, C++, CUDA's libraries, Metal.
_WORDS: Final = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried to allocate|std::bad_alloc|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|MPS backend out of memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, and not a bug."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
