"""The rows of an optimizer step, and those that each process takes of them in each micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ci_llm.data.order import permute


@dataclass(frozen=True)
class Plan:
    """Which dataset rows each optimizer step trains on, whatever the processes and micro-batches are.

    Every epoch holds each row exactly once; its last step takes the rows that are left.

    Attributes:
        num_rows: rows of the data set, at least 1.
        global_batch_size: rows per optimizer step, at least 1; a step never reaches into the next epoch.
        seed: seed of the order; each epoch has an order of its own.
    """

    num_rows: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.global_batch_size < 1:
            raise ValueError(f"a plan needs rows and a batch size of at least 1: {self}")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.global_batch_size)

    def rows(self, step: int) -> list[int]:
        """Dataset rows of the 0-based optimizer step `step`, in the order in which they are dealt out.

        Each costs a permutation: `num_rows_of` counts them, and `dealt` finds those of one micro-batch, for less.
        """
        epoch, positions = self._positions(step)
        return self._at(positions, epoch)

    def num_rows_of(self, step: int) -> int:
        """The number of rows that the 0-based step takes."""
        return len(self._positions(step)[1])

    def dealt(self, step: int, micro_step: int, process: int, num_processes: int, size: int) -> list[int]:
        """The rows of one micro-batch of a process, see `share`; empty where no row is left.

        Only these are found, so a process does the same work however many there are.
        """
        epoch, positions = self._positions(step)
        parts = share(positions, process, num_processes, size)
        return self._at(parts[micro_step], epoch) if micro_step < len(parts) else []

    def _positions(self, step: int) -> tuple[int, range]:
        """(epoch of the step, its positions in the shuffled epoch)."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        return epoch, range(start, min(start + self.global_batch_size, self.num_rows))

    def _at(self, positions: Sequence[int], epoch: int) -> list[int]:
        return [permute(at, self.num_rows, seed=self.seed, epoch=epoch) for at in positions]

    def samples_seen(self, step: int) -> int:
        """Rows trained on, all processes together, when `step` optimizer steps are done."""
        epochs, step_of_epoch = divmod(step, self.steps_per_epoch)
        return epochs * self.num_rows + step_of_epoch * self.global_batch_size

    def epoch(self, step: int) -> float:
        """Epochs done when `step` optimizer steps are done: 0.0 at the start, 1.0 after `steps_per_epoch`."""
        return self.samples_seen(step) / self.num_rows


def share(rows: Sequence[int], process_index: int, num_processes: int, micro_batch_size: int) -> list[list[int]]:
    """This process's micro-batches of one step: row i of the step belongs to process i % num_processes.

    Shares need not be equal: the last micro-batch may be short, and a process for which no row is left gets
    an empty list.
    """
    mine = list(rows[process_index::num_processes])
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]
