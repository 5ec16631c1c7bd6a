"""Worker processes of anyone's DataLoader outlive the signals that are meant for the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ci_llm.interrupts import ignore_signals


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


def _begin_shielded(init: Callable[[int], object] | None, worker: int) -> None:
    ignore_signals(worker)
    if init is not None:
        init(worker)
