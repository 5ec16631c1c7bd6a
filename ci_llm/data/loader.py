"""The loader of a run: PyTorch's own, over the micro-batches of every step, for Accelerate to prepare.

    loader, sampler = loader_of(training_rows, steps, num_processes, micro_batch_size)
    loader = accelerator.prepare(loader)                              # deals each process its micro-batches
    rest = accelerator.skip_first_batches(loader, sampler.before(step))  # after a resume

The sampler names places, and not rows: a place is a step, a micro-step and a process, in this order. Which rows stand
there is computed from the plan where they are read. So skipping costs no rows, nothing is remembered, and workers only
decide how early a micro-batch is made, never which one it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ci_llm.core.memory import unless_out_of_memory
from ci_llm.data.agent_rows import TrainingRows
from ci_llm.data.batches import MicroBatch, Owned, pack
from ci_llm.data.encoder import Example
from ci_llm.interrupts import ignore_signals, worker_context


class Place(NamedTuple):
    """The place of a micro-batch in a run."""

    step: int
    micro_step: int
    process: int


class StepSampler(BatchSampler):
    """The places of all micro-batches: step by step, micro-step by micro-step, one for every process.

    Of each `num_processes` items in a row, Accelerate gives item p to process p. A place may have no row.

    Attributes:
        batch_size, drop_last: what Accelerate asks of a sampler: sizes differ, and no item is without its peers.
    """

    batch_size: Any = None
    drop_last = True

    def __init__(self, training_rows: TrainingRows, steps: range, num_processes: int, micro_batch_size: int) -> None:
        self.steps, self._plans = steps, training_rows.plans
        self._num_processes, self._micro_batch_size = num_processes, micro_batch_size

    def micro_steps(self, step: int) -> int:
        """The micro-steps of a step: those of the process, and of the agent, that has the most rows."""
        rows = max(plan.num_rows_of(step) for plan in self._plans)
        return -(-rows // (self._num_processes * self._micro_batch_size))

    def before(self, step: int) -> int:
        """The number of micro-batches that each process has before a step."""
        return sum(map(self.micro_steps, range(self.steps.start, step)))

    def __len__(self) -> int:
        return self.before(self.steps.stop) * self._num_processes

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps:
            for micro_step in range(self.micro_steps(step)):
                for process in range(self._num_processes):
                    yield Place(step, micro_step, process)


@dataclass(frozen=True)
class Unpacked:
    """The rows of a micro-batch with their numbers, which are packed where they are placed on a device.

    Workers hand over arrays and not tensors: tensors would travel through shared memory, of which containers give
    64 MB, and one file descriptor each.

    Attributes:
        owned: for each `OrderedRows` with rows here its agents, the rows and their numbers.
    """

    owned: Sequence[tuple[tuple[int, ...], list[Example], list[int]]]

    def to(self, device: torch.device | str) -> MicroBatch:
        """The micro-batch on `device`; empty if it has no row.

        If memory runs out it stays on the host: the step places it again, and there a lack of memory is answered.
        """
        packed = [Owned(agents, pack(rows, numbers)) for agents, rows, numbers in self.owned]
        if torch.device(device).type == "cuda":
            packed = [Owned(agents, batch.pinned()) for agents, batch in packed]
        return unless_out_of_memory(lambda: [own.to(device) for own in packed])[0] or packed


class _Places(Dataset[Any]):
    """The rows of micro-batches by their places; what the loader's workers hold."""

    def __init__(self, training_rows: TrainingRows, num_processes: int, size: int) -> None:
        self._rows, self._num_processes, self._size = training_rows.different, num_processes, size

    def __getitems__(self, place: Place) -> list[Any]:
        found = []
        for agents, ordered in self._rows:
            if numbers := ordered.plan.dealt(*place, self._num_processes, self._size):
                found.append((agents, [ordered.rows[number] for number in numbers], numbers))
        return found


def loader_of(
    training_rows: TrainingRows, steps: range, num_processes: int, micro_batch_size: int, *, num_workers: int = 0
) -> tuple[DataLoader[Any], StepSampler]:
    """The loader of the micro-batches of these steps, and its sampler.

    Its workers ignore the signals that stop or save a run, and end with the pass over it. No random number is drawn
    from the global generators.
    """
    sampler = StepSampler(training_rows, steps, num_processes, micro_batch_size)
    loader: DataLoader[Any] = DataLoader(
        _Places(training_rows, num_processes, micro_batch_size),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=Unpacked,
        worker_init_fn=ignore_signals,
        multiprocessing_context=worker_context() if num_workers else None,
        generator=torch.Generator(),
    )
    return loader, sampler


@contextmanager
def any_number_of_workers() -> Iterator[None]:
    """Hide torch's warning of more workers than cores while a loader, and Accelerate's copies of it, are made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield
