"""Memory: how much is still free for this process, and whether an error means that it ran out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
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


# ---------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class _Controller:
    """How one version of control groups tells of memory."""

    mark: str  # of its line in /proc/self/cgroup
    mount: str
    limit: str
    used: str
    stat_prefix: str


_CONTROLLERS: Final = (
    _Controller("0::", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    _Controller(":memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes where tensors of this process would lie."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return min([(int(memory.available), int(memory.total)), *group_limits()])


def group_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """(free, limit) bytes of every control group around this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for controller in _CONTROLLERS:
        for line in lines:
            if controller.mark in line:
                top = root / controller.mount
                own = top / line.rpartition(":")[2].lstrip("/")
                for group in (own, *own.parents):
                    yield from _limit(group, controller)
                    if group == top:
                        break


def _limit(group: Path, controller: _Controller) -> Iterator[tuple[int, int]]:
    try:
        limit = (group / controller.limit).read_text().strip()
        used = int((group / controller.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # mounted elsewhere, as in some containers: then nothing is known of it
        return
    if limit.isdecimal():  # "max" is none
        cached = sum(int(stat.get(f"{controller.stat_prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        yield int(limit) - used + cached, int(limit)  # the kernel gives its cache of files back when asked
