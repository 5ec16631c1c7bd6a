"""Learning-rate schedules by their names in Transformers, as pure functions of the step.

They have the bits of Transformers' own, which are methods of a scheduler around an optimizer, with a position to save.
Its module also imports all of PEFT, which with bitsandbytes takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

#: Where the schedules `with_min_lr` end, as a share of the peak.
SMALLEST: Final = 0.1
#: Where `polynomial` ends.
POLYNOMIAL_END: Final = 1e-7
#: Of `inverse_sqrt` without a warm-up.
TIMESCALE: Final = 10_000


def factor(kind: str, warmup: int, total: int) -> Callable[[int], float]:
    """The share of the peak that the learning rate has in 0-based step s <= `total`.

    Args:
        kind: a name in `SCHEDULES`.
        warmup: steps in which it rises to the peak.
        total: steps of the whole schedule.
    """
    return partial(SCHEDULES[kind], warmup=warmup, total=total)


def _rising(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _progress(step: int, warmup: int, total: int) -> float:
    """The share of what follows the warm-up that has passed."""
    return (step - warmup) / max(1, total - warmup)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _constant(step: int, *, warmup: int, total: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, *, warmup: int, total: int) -> float:
    return _rising(step, warmup) if step < warmup else 1.0


def _linear(step: int, *, warmup: int, total: int) -> float:
    return _rising(step, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, *, warmup: int, total: int) -> float:
    return _rising(step, warmup) if step < warmup else max(0.0, _half_cosine(_progress(step, warmup, total)))


def _cosine_with_restarts(step: int, *, warmup: int, total: int) -> float:
    """With one cycle, as by default: a cosine that is 0 at its end and not before."""
    return 0.0 if step >= max(total, warmup + 1) else _cosine(step, warmup=warmup, total=total)


def _cosine_with_min_lr(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return _rising(step, warmup)
    return _half_cosine(_progress(step, warmup, total)) * (1 - SMALLEST) + SMALLEST


def _cosine_warmup_with_min_lr(step: int, *, warmup: int, total: int) -> float:
    """One step ahead of the others: the first step has a learning rate above 0."""
    return _cosine_with_min_lr(step + 1, warmup=warmup, total=total) if step >= warmup else _rising(step + 1, warmup)


def _polynomial(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return _rising(step, warmup)
    return (1.0 - POLYNOMIAL_END) * (1 - _progress(step, warmup, total)) + POLYNOMIAL_END


def _inverse_sqrt(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return _rising(step, warmup)
    scale = warmup or TIMESCALE
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


def _warmup_stable_decay(step: int, *, warmup: int, total: int) -> float:
    """The last tenth decays."""
    decay = max(1, total // 10)
    falling = step - (total - decay)
    if step < warmup or falling < 0:
        return _constant_with_warmup(step, warmup=warmup, total=total)
    return max(0.0, _half_cosine(falling / decay)) if falling < decay else 0.0


SCHEDULES: Final[dict[str, Callable[..., float]]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
