"""The process group of a run: its processes meet at one address, once, and join a new group for every run."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from ci_llm.cluster.launch import Launch, has_rounds, names_of_round
from ci_llm.core.memory import is_out_of_memory
from ci_llm.errors import LaunchError, PeerLost, first_line
from ci_llm.interrupts import Interrupts

# A process that dies closes its connections, which the others notice at once. This bounds the wait for a machine that
# went silent, and for the main process while it works alone (`Processes.main_process_first`).
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
#: The longest that an all-reduce of gradients may take on GPUs. All processes have just voted, so that all begin it.
REDUCE_BOUND_S: Final = 60.0
_REDUCE_LOOK_S: Final = 1e-4
#: A process that is asked to stop waits so long for the others that it has not met yet.
MEETING_GRACE_S: Final = 5.0
_LOOK_S: Final = 0.1
_RUNS: Final = itertools.count()  # of this process


def join(launch: Launch, backend: str) -> None:
    """Join under names of this run alone: what an earlier run of these processes has left in the store stays apart."""
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    store = PrefixStore(f"{names_of_round()}ci_llm run {next(_RUNS)}", _meeting_point(*place))
    index, count = launch.process_index, launch.num_processes
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=COLLECTIVE_TIMEOUT)


@cache
def _meeting_point(_address: str, _port: str) -> Store:
    """The store where the environment says. It is kept for the next run: a peer may be there first and need it."""
    store: Store = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))[0]
    return store


@contextmanager
def rendezvous_errors(launch: Launch) -> Iterator[None]:
    """Processes that cannot meet are a LaunchError with the way; not so an error of this process's own device."""
    address, port = (launch.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        socket.getaddrinfo(address, port)  # fails at once; torch would try an unknown name for half an hour
        yield
    except (RuntimeError, OSError) as error:
        if _is_of_own_device(error):
            raise
        raise LaunchError(
            f"the {launch.num_processes} processes cannot meet: {first_line(error)}",
            where=f"{address}:{port}",
            hint="export a free MASTER_PORT, and a MASTER_ADDR that every machine can reach",
        ) from error


@contextmanager
def ends_if_stopped(interrupts: Interrupts) -> Iterator[None]:
    """In an elastic round, a request to stop ends this process if the block, in which processes meet, outlasts it.

    A peer that has died will never come, and torch waits for it in calls that no signal interrupts, until the agent
    kills. Nothing is lost, because before they have met, processes have nothing to save.
    """
    if not has_rounds():
        yield
        return
    met = threading.Event()

    def watch() -> None:
        while not met.is_set():
            if interrupts.wait(_LOOK_S) and not met.wait(MEETING_GRACE_S):
                os.write(sys.stderr.fileno(), b"asked to stop, and the other processes have not come: leaving\n")
                os._exit(1)

    watcher = threading.Thread(target=watch, name="ci_llm meeting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        met.set()
        watcher.join()


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peer_errors() -> Iterator[None]:
    """An error of a collective in the block means that a process is gone: a PeerLost.

    Not so an error of this process's own device: the first collective after it is where CUDA reports it.
    """
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise no narrower class for a broken connection
        if _is_of_own_device(error):
            raise
        raise PeerLost(
            "a process of this run is gone or silent",
            where=first_line(error),
            hint="attempts/<n>/process_<i>.json has its reason; the run resumes from its last checkpoint",
        ) from error


def reduce_within_bound(tensor: Tensor) -> None:
    """Add a tensor over all processes, in place, and return when it is done or a peer is gone.

    gloo tells of a dead peer at once. On a GPU the call returns before anything is added, and a kernel without its
    peer never ends. The optimizer must not move by such a gradient, so the host looks until the kernel has ended.

    Raises:
        RuntimeError: a peer is gone, or silent for `REDUCE_BOUND_S`.
    """
    dist.all_reduce(tensor)
    if not tensor.is_cuda:
        return
    done, until = torch.cuda.current_stream(tensor.device).record_event(), time.monotonic() + REDUCE_BOUND_S
    while not done.query():
        if time.monotonic() > until:
            raise RuntimeError(f"the sum of {tensor.numel():,} gradients has not ended within {REDUCE_BOUND_S:g} s")
        time.sleep(_REDUCE_LOOK_S)


def _is_of_own_device(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or is_out_of_memory(error)
