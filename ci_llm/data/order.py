"""The order of the rows of an epoch as a pure function, and the rows of each step and process: nothing is remembered.

The rows of an epoch are shuffled by a keyed permutation of 0..n-1, so that the row at a position is a function of
(seed, epoch, position) alone: resuming at step 1,000,000 costs what step 0 costs, and there is no generator state to
save. Plain Python integers throughout: the same order on every platform and with every library version. A `Plan` says
which of them an optimizer step takes, and which of these each process takes in each micro-step.

The permutation is the generalized Feistel cipher with cycle walking of J. Black and P. Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002 (methods 2 and 3); its round function is the finalizer of SplitMix64 (G. Steele, D. Lea,
C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = 8  # even, so that the two sides end where they began


def _mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix(_mix(seed + _GOLDEN_GAMMA) + epoch)
    return tuple(_mix(state + number * _GOLDEN_GAMMA) for number in range(1, _ROUNDS + 1))


def _encipher(value: int, width: int, height: int, keys: tuple[int, ...]) -> int:
    """One pass of the Feistel network over 0..width*height-1, a bijection whatever the keys are."""
    right, left = divmod(value, width)
    for key in keys:
        left, right = right, (left + _mix(right ^ key)) % width
        width, height = height, width
    return right * width + left


def permute(position: int, num_rows: int, *, seed: int, epoch: int) -> int:
    """The row at `position` of the shuffled `epoch`; for a fixed (seed, epoch) a bijection of 0..num_rows-1.

    The network permutes the smallest near-square rectangle that holds `num_rows` cells; a value outside
    0..num_rows-1 is enciphered again until it is inside, which takes less than two passes on average.

    Raises:
        IndexError: the position is not in 0..num_rows-1.
    """
    if not 0 <= position < num_rows:
        raise IndexError(f"position {position} is outside 0..{num_rows - 1}")
    width = math.isqrt(num_rows - 1) + 1
    height = -(-num_rows // width)
    keys = _round_keys(seed, epoch)
    row = _encipher(position, width, height, keys)
    while row >= num_rows:
        row = _encipher(row, width, height, keys)
    return row


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

    def epoch(self, step: int) -> float:
        """Epochs done when `step` optimizer steps are done: 0.0 at the start, 1.0 after `steps_per_epoch`."""
        epochs, step_of_epoch = divmod(step, self.steps_per_epoch)
        return (epochs * self.num_rows + step_of_epoch * self.global_batch_size) / self.num_rows


def share(rows: Sequence[int], process_index: int, num_processes: int, micro_batch_size: int) -> list[list[int]]:
    """This process's micro-batches of one step: row i of the step belongs to process i % num_processes.

    Shares need not be equal: the last micro-batch may be short, and a process for which no row is left gets
    an empty list.
    """
    mine = list(rows[process_index::num_processes])
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]
