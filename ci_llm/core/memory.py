"""The memory that this process may use: how much of it is free, and whether work ran out of it."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import psutil

from ci_llm.errors import OutOfMemory, first_line

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Messages of RuntimeErrors: of PyTorch on the CPU, C++, the libraries of CUDA and ROCm, and Metal. cuBLAS says that it
#: is not initialised when it finds no memory for its handle.
_MESSAGES: Final = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried to allocate|std::bad_alloc|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_ALLOC_FAILED|MPS backend out of memory"
    r"|HIP error: out of memory|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (\d+ )?'out of memory'"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception means that memory ran out."""
    import torch  # here, because the memory of this machine is asked before anything heavy is imported

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def unless_out_of_memory(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work` and None; or None and the allocator's message, if memory ran out.

    It returns outside of the `except` block: the traceback there holds every activation of the failed attempt.
    """
    try:
        return work(), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        complaint = first_line(error) if str(error) else "out of memory"
    return None, complaint


def halve_until_it_fits(
    what: str, work: Callable[[int], T], size: int, refusal: Callable[[str], OutOfMemory]
) -> tuple[T, int]:
    """The result of `work(size)`, repeated with half of the size as long as memory runs out; and the size that fits.

    Args:
        what: the work, for people.
        refusal: makes an error of the allocator's message, which is raised if a size of 1 does not fit.
    """
    while True:
        found, complaint = unless_out_of_memory(partial(work, size))
        if complaint is None:
            return cast(T, found), size
        release_cache()
        if size == 1:
            raise refusal(complaint)
        logger.warning(f"memory    {what} does not fit ({complaint}): {size} -> {size // 2} at a time")
        size //= 2


def release_cache() -> None:
    """Give memory back that nothing uses: what is referred to in circles, and what the cache of a GPU holds."""
    import torch

    gc.collect()  # first the objects, whose memory the cache of the GPU can then return
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


#: The two versions of control groups: the mark of a line in /proc/self/cgroup, the mount point, the files of limit and
#: use, and the prefix of the names in memory.stat.
_CONTROLLERS: Final = (
    ("0::", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    (":memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the memory of `device`."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for this process
        return int(free) + cached, int(total)
    return free_host_memory()


def free_host_memory() -> tuple[int, int]:
    """(free, total) bytes of the memory of this machine, within the limits of all control groups."""
    memory = psutil.virtual_memory()
    return min([(int(memory.available), int(memory.total)), *cgroup_limits()])


def cgroup_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """(free, limit) bytes of every control group of this process that has a limit.

    Args:
        root: the root of the filesystem; another one in tests.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a container may hide it
        return
    for mark, mount, *files in _CONTROLLERS:
        for line in lines:
            if mark in line:
                top = root / mount
                own = top / line.rpartition(":")[2].lstrip("/")
                for group in (own, *own.parents):
                    yield from _limit(group, *files)
                    if group == top:
                        break


def _limit(group: Path, limit_file: str, used_file: str, prefix: str) -> Iterator[tuple[int, int]]:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # mounted at another place, as in some containers: its limit is unknown
        return
    if limit.isdecimal():  # "max" means no limit
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        yield int(limit) - used + cached, int(limit)  # file cache counts as free
