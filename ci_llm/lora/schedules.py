"""Learning-rate schedules.

A schedule is a pure function of the step, with the name and the bits of Transformers' own. Transformers' schedules are
methods of a scheduler around an optimizer, with a position to save. Their module also imports all of PEFT, which takes
seconds with bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

#: Where the schedules `with_min_lr` end, as a share of the peak.
SMALLEST: Final = 0.1
#: Where `polynomial` ends.
POLYNOMIAL_END: Final = 1e-7
#: The steps of `inverse_sqrt` in place of a missing warm-up.
TIMESCALE: Final = 10_000


def factor(kind: str, warmup: int, total: int) -> Callable[[int], float]:
    """A function from the 0-based step, at most `total`, to the learning rate as a share of its peak.

    Args:
        kind: a name in `SCHEDULES`.
        warmup: the steps in which the rate rises to the peak.
        total: the steps of the whole schedule.
    """
    after_warmup = SCHEDULES[kind]
    ahead = int(kind == "cosine_warmup_with_min_lr")  # so that its first step has a learning rate above 0

    def share(step: int) -> float:
        if step < warmup and kind != "constant":
            return (step + ahead) / max(1, warmup)
        return after_warmup(step + ahead, warmup, total)

    return share


def _progress(step: int, warmup: int, total: int) -> float:
    """The share of the steps after the warm-up that have passed."""
    return (step - warmup) / max(1, total - warmup)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int) -> float:
    return max(0.0, _half_cosine(_progress(step, warmup, total)))


def _cosine_with_restarts(step: int, warmup: int, total: int) -> float:
    """A cosine of one cycle, Transformers' default, which is exactly 0 at its end."""
    return 0.0 if step >= max(total, warmup + 1) else _cosine(step, warmup, total)


def _cosine_with_min_lr(step: int, warmup: int, total: int) -> float:
    return _half_cosine(_progress(step, warmup, total)) * (1 - SMALLEST) + SMALLEST


def _polynomial(step: int, warmup: int, total: int) -> float:
    return (1.0 - POLYNOMIAL_END) * (1 - _progress(step, warmup, total)) + POLYNOMIAL_END


def _inverse_sqrt(step: int, warmup: int, total: int) -> float:
    scale = warmup or TIMESCALE
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def _warmup_stable_decay(step: int, warmup: int, total: int) -> float:
    """A constant rate that decays in the last tenth of the steps."""
    decay = max(1, total // 10)
    falling = step - (total - decay)
    if falling < 0:
        return 1.0
    return max(0.0, _half_cosine(falling / decay)) if falling < decay else 0.0


#: By name, the share of the peak after the warm-up, as a function of step, warm-up and total.
SCHEDULES: Final[dict[str, Callable[[int, int, int], float]]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
