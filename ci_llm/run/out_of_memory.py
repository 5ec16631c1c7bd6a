"""Out of memory: one process tells the others by its ballot, and all do the same step again in smaller parts.

Halving the micro-batch doubles the accumulation: the rows of an optimizer step, and so the run, stay the same. At one
row the layers are recomputed in the backward pass, once; after that nothing is left to do inside the run. What was cut
is recovery state: it stays with the run over its checkpoints. An evaluation is begun again in smaller batches, which
changes nothing in the training.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import psutil
import torch

from ci_llm.core.memory import is_out_of_memory
from ci_llm.data.batches import Batch, pack
from ci_llm.errors import OutOfMemory
from ci_llm.run.context import Run

T = TypeVar("T")


def unless_out_of_memory(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `work` returns; or None, and what the allocator said.

    It comes back outside of the `except` block, whose traceback would hold every activation of the failed attempt.
    """
    try:
        return work(), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        complaint = str(error).splitlines()[0] if str(error) else "out of memory"
    return None, complaint


def in_parts(run: Run, micro_batches: list[Batch]) -> list[Batch]:
    """The same rows in the same order, by micro-batches as small as memory wants."""
    size = run.micro_batch_size
    if all(batch.num_rows <= size for batch in micro_batches):
        return micro_batches
    rows = [row for batch in micro_batches for row in batch.sample_ids]
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [pack([run.rows[row] for row in part], part) for part in parts]


def relieve(run: Run, complaint: str | None) -> None:
    """Make the next attempt at the same step need less, on every process alike.

    Args:
        complaint: what the allocator of this process said; None where another process ran out.

    Raises:
        OutOfMemory: nothing is left that could be made smaller.
    """
    _let_go(run.crowd.device)
    healing, size = run.state.healing, _rows_at_once(run)
    if size > 1:
        run.state = replace(run.state, healing=replace(healing, micro_batch_size=size // 2))
        hint = f"micro-batch {size} -> {size // 2} row(s), the effective batch of {run.state.effective_batch} holds"
    elif not (run.config.use_gradient_checkpointing or healing.recompute):
        run.state = replace(run.state, healing=replace(healing, recompute=True))
        run.crowd.gradient_checkpointing_enable()
        hint = "layers are recomputed in the backward pass from now on"
    else:
        raise _nothing_left(run, "one row at a time with recomputed layers", complaint)
    run.status.micro_batch_size = run.micro_batch_size
    run.log.say(f"memory    step {run.state.step + 1} does not fit ({complaint or 'on another process'}): {hint}")


def smaller_batch(run: Run, size: int, complaint: str | None) -> int:
    """The rows at a time with which an evaluation that needed too much is begun again, on every process alike.

    Raises:
        OutOfMemory: `size` was a single row.
    """
    _let_go(run.crowd.device)
    if size == 1:
        raise _nothing_left(run, "an evaluation of one row at a time", complaint)
    told = f"evaluation after step {run.state.step} does not fit ({complaint or 'on another process'})"
    run.log.say(f"memory    {told}: {size} -> {size // 2} row(s) at a time")
    return size // 2


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _rows_at_once(run: Run) -> int:
    """The rows of the largest micro-batch that any process had in this step, known to all without a word."""
    return min(run.micro_batch_size, -(-run.state.effective_batch // run.processes.count))


def _nothing_left(run: Run, what: str, complaint: str | None) -> OutOfMemory:
    config = run.config
    held = memory_held(run.crowd.device)
    tokens = f"rows of up to {config.max_seq_length} tokens x {config.num_agents} agents"
    return OutOfMemory(
        f"{what} does not fit: {complaint or 'another process ran out'}",
        where=f"after step {run.state.step}, {tokens}, base of {run.base.num_parameters:,} parameters; {held}",
        hint=f"max_seq_length={max(2, config.max_seq_length // 2)}, num_agents={max(1, config.num_agents // 2)},"
        " a smaller base, mixed_precision=bf16, or a machine with more memory",
    )


def memory_held(device: torch.device) -> str:
    """What this process holds and what its device has, for people."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{torch.cuda.memory_allocated(device) / 1e9:.2f} GB held, {free / 1e9:.2f} of {total / 1e9:.2f} GB free"
    resident, machine = psutil.Process().memory_info().rss, psutil.virtual_memory()
    free, total = machine.available, machine.total
    return f"{resident / 1e9:.2f} GB held, {free / 1e9:.2f} of {total / 1e9:.2f} GB free"
