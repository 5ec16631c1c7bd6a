"""The worker processes of a DataLoader, kept alive through the signals that are meant for the run alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from typing import Any

from ci_llm.interrupts import ignore_signals, termination_blocked


def shield_workers(*loaders: Any) -> None:
    """Let the workers of loaders ignore the signals of the run, from their next pass on.

    A terminal, `timeout` and SLURM signal them too; a worker that ends at once takes the run with it, unsaved.

    Args:
        loaders: of torch, or as Accelerate has prepared them; their own `worker_init_fn` still runs. Anything else that
            yields batches has no workers that are known, and stays as it is.
    """
    for loader in loaders:
        inner = getattr(loader, "base_dataloader", loader)
        init = getattr(inner, "worker_init_fn", None)
        is_shielded = isinstance(init, partial) and init.func is _begin_shielded
        if hasattr(inner, "worker_init_fn") and not is_shielded:
            inner.worker_init_fn = partial(_begin_shielded, init)
            if getattr(inner, "num_workers", 0) > 0 and hasattr(inner, "multiprocessing_context"):
                inner.multiprocessing_context = worker_context(inner.multiprocessing_context)


def worker_context(given: BaseContext | None = None) -> BaseContext | None:
    """The context in which workers start that call `ignore_signals`; another one only where they are forked.

    A forked worker has threads before it calls anything of its own: torch starts its pool again.
    """
    if given is None:  # asked without fixing it: a program may still set another one
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        return _WorkerContext() if method == "fork" else None
    return _WorkerContext() if type(given) is ForkContext else given


class _Worker(ForkProcess):
    def start(self) -> None:
        """Fork while termination is blocked, which the worker inherits."""
        with termination_blocked():
            super().start()


class _WorkerContext(ForkContext):
    Process = _Worker


def _begin_shielded(init: Callable[[int], object] | None, worker: int) -> None:
    ignore_signals(worker)
    if init is not None:
        init(worker)
