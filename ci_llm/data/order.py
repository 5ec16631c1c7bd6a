"""The order of the rows of an epoch as a pure function: it is computed, and nothing is remembered.

The rows of an epoch are shuffled by a keyed permutation of 0..n-1, so that the row at a position is a function of
(seed, epoch, position) alone: resuming at step 1,000,000 costs what step 0 costs, and there is no generator state to
save. Plain Python integers throughout: the same order on every platform and with every library version.

The permutation is the generalized Feistel cipher with cycle walking of J. Black and P. Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002 (methods 2 and 3); its round function is the finalizer of SplitMix64 (G. Steele, D. Lea,
C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
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
