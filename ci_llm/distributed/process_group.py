"""The process group of a run: its processes meet at one address, once, and join a group of its own for every run."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Final

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from ci_llm.cluster.launch import Launch
from ci_llm.errors import LaunchError, PeerLost

# A process that dies closes its connections, which the others notice at once. This bounds the wait for a machine that
# went silent, and for the main process while it works alone (`Processes.main_first`).
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
_RUNS: Final = itertools.count()  # of this process


def join(launch: Launch, backend: str) -> None:
    """Join under names of this run alone: what an earlier run of these processes has left in the store stays apart."""
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    store = PrefixStore(f"ci_llm run {next(_RUNS)}", _meeting_point(*place))
    index, count = launch.process_index, launch.num_processes
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=COLLECTIVE_TIMEOUT)


@cache
def _meeting_point(_address: str, _port: str) -> Store:
    """The store where the environment says. It is kept for the next run: a peer may be there first and need it."""
    store: Store = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))[0]
    return store


@contextmanager
def rendezvous_errors(launch: Launch) -> Iterator[None]:
    """Processes that cannot meet are a LaunchError with the way."""
    address, port = (launch.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        socket.getaddrinfo(address, port)  # fails at once; torch would try an unknown name for half an hour
        yield
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"the {launch.num_processes} processes cannot meet: {str(error).splitlines()[0]}",
            where=f"{address}:{port}",
            hint="export a free MASTER_PORT, and a MASTER_ADDR that every machine can reach",
        ) from error


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peer_errors() -> Iterator[None]:
    """An error of a collective in the block means that a process is gone: a PeerLost."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise no narrower class for a broken connection
        raise PeerLost(
            "a process of this run is gone or silent",
            where=str(error).splitlines()[0],
            hint="attempts/<n>/process_<i>.json has its reason; the run resumes from its last checkpoint",
        ) from error
